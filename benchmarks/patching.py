"""What patches cost: a patched call against the same change made by hand, torch.compile, and fifty patches at start.

    python benchmarks/patching.py

Calls are measured in nanoseconds of CPU time, the best of many rounds in which all variants take turns. Every variant
is compiled from text of its own, because two that share a code object share the interpreter's caches too. Hits are
counted in a memory-mapped file, as in a server. wrapt and torch are measured where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_graft.ledger import Cells
from vllm_graft.patching import Engine, Tally, VLLMPatch, replace, wrap

LAYER_NS = 500
REPLACEMENT_NS = 5  # what two measurements of one and the same function may differ by
START_MS = 20.0
CALLS = 5_000
ROUNDS = 80
CHILDREN = 15
PATCHES = 50

Loop = Callable[[int], None]


@dataclass(frozen=True)
class Form:
    """One way in which a method is written and called; what the author of a wrapper writes is the same everywhere."""

    title: str
    called: str = "number"
    takes: str = "value"
    passes: str = "value"
    upstream: str = "value, b=0, *, c=0, d=0"
    define: str = "def"
    result: str = ""
    inherited: bool = False


FORMS = [
    Form("a method whose wrapper names its parameters: f(value)"),
    Form("a wrapper that takes *args, **kwargs: f(value)", takes="*args, **kwargs", passes="*args, **kwargs"),
    Form(
        "a wrapper that takes *args, **kwargs: f(value, 2, c=3, d=4)",
        called="number, 2, c=3, d=4",
        takes="*args, **kwargs",
        passes="*args, **kwargs",
    ),
    Form("a coroutine method: await f(value)", define="async def", result="await "),
    Form("an inherited method, wrapped in the subclass: f(value)", inherited=True),
]


def made(source: str, **given: object) -> dict[str, object]:
    """What a text defines, with code objects of its own."""
    scope = {"__name__": "benchmark", **given}
    exec(textwrap.dedent(source), scope)
    return scope


def upstream(form: Form) -> type:
    scope = made(f"""
        class Base:
            {form.define} f(self, {form.upstream}): return value
        class Target(Base): pass
        """)
    return scope["Target" if form.inherited else "Base"]


def by_hand(form: Form, target: type, number: int) -> None:
    own = "f" in vars(target)
    beneath = f"original(self, {form.passes})" if own else f"super(target, self).f({form.passes})"
    made(
        f"""
        def over(original):
            {form.define} f(self, {form.takes}): return {form.result}{beneath}
            target.f = f
        over(target.f)
        """,
        target=target,
    )


def by_call(form: Form, target: type, number: int) -> type:
    return patch(target, number, f"{form.define} f(self, call, {form.takes}): return {form.result}call({form.passes})")


def by_name(form: Form, target: type, number: int) -> type:
    body = f"{form.define} f(self, {form.takes}): return {form.result}self._original_f({form.passes})"
    return patch(target, number, body)


def patch(target: type, number: int, body: str) -> type:
    scope = made(
        f"""
        class Patch(VLLMPatch[target], name="patch{number}"):
            @wrap
            {body}
        """,
        target=target,
        VLLMPatch=VLLMPatch,
        wrap=wrap,
    )
    return scope["Patch"]


def by_wrapt(form: Form, target: type, number: int) -> None:
    import wrapt

    scope = made(f"{form.define} over(wrapped, instance, args, kwargs): return {form.result}wrapped(*args, **kwargs)")
    wrapt.wrap_function_wrapper(target, "f", scope["over"])


def loop(form: Form, target: type) -> Loop:
    """Many calls on an instance, looked up each time as callers do."""
    scope = made(
        f"""
        {form.define} loop(count):
            for number in range(count): {form.result}target.f({form.called})
        def run(count):
            try: loop(count).send(None)
            except StopIteration: pass
        """,
        target=target(),
    )
    return scope["run" if form.result else "loop"]


def best(loops: dict[str, Loop]) -> dict[str, float]:
    """CPU nanoseconds per call, the best round of each."""
    found = dict.fromkeys(loops, float("inf"))
    for _ in range(ROUNDS):
        for name, run in loops.items():
            before = time.thread_time_ns()
            run(CALLS)
            found[name] = min(found[name], (time.thread_time_ns() - before) / CALLS)
    return found


def calls(tally: Tally, form: Form) -> bool:
    """Print what wrapping costs in one form; whether every layer stays within its limit."""
    writers = {"call": by_call, "self._original_f": by_name}
    if importlib.util.find_spec("wrapt"):
        writers["wrapt"] = by_wrapt
    loops = {"unpatched": loop(form, upstream(form))}
    for layers in (1, 3):
        for name, write in {"by hand": by_hand, **writers}.items():
            target = upstream(form)
            for number in range(layers):
                written = write(form, target, number)
                if written is not None:
                    Engine(tally).apply([written])
            loops[f"{name} x{layers}"] = loop(form, target)
    found = best(loops)
    print(f"\n{form.title}\n{'':26}{'ns':>8}{'ratio':>8}{'above by hand':>16}")
    within = True
    for name, ns in found.items():
        layers = int(name[-1]) if name != "unpatched" else 0
        line = f"{name:26}{ns:8.0f}{ns / found['unpatched']:8.2f}"
        if layers and not name.startswith("by hand"):
            above = ns - found[f"by hand x{layers}"]
            line += f"{above:+16.0f}"
            if not name.startswith("wrapt"):
                within &= above <= layers * LAYER_NS
                line += f"   {'within' if above <= layers * LAYER_NS else 'OVER'} {layers * LAYER_NS}"
        print(line)
    return within


def replacing(tally: Tally) -> bool:
    """Print what replacing costs; whether it is what a setattr by hand costs."""
    body = "def f(self, value, b=0, *, c=0, d=0): return b"
    hand, ours = upstream(FORMS[0]), upstream(FORMS[0])
    hand.f = made(body)["f"]
    text = f"class Patch(VLLMPatch[target], name='replacing'):\n    @replace\n    {body}"
    written = made(text, target=ours, VLLMPatch=VLLMPatch, replace=replace)["Patch"]
    Engine(tally).apply([written])
    ours().f(1)
    plain = not vars(ours)["f"].__closure__  # a layer is a closure
    loops = {"unpatched": upstream(FORMS[0]), "setattr by hand": hand, "replace": ours}
    found = best({name: loop(FORMS[0], target) for name, target in loops.items()})
    above = found["replace"] - found["setattr by hand"]
    print(f"\na replaced method, after its first call: f(value)\n{'':26}{'ns':>8}{'ratio':>8}{'above by hand':>16}")
    for name, ns in found.items():
        print(f"{name:26}{ns:8.1f}{ns / found['unpatched']:8.2f}" + (f"{above:+16.1f}" if name == "replace" else ""))
    print(f"what stands on the class is {'the plain function itself' if plain else 'NOT the plain function'}")
    return plain and above <= REPLACEMENT_NS


def compiled(tally: Tally) -> bool:
    """Print what a patched ``forward`` returns before and after torch.compile; whether ours agree."""
    print("\ntorch.compile of a module whose forward, x * 2, is wrapped to add 10; x = 1")
    if not importlib.util.find_spec("torch"):
        print("torch is not installed")
        return True
    import torch

    bodies = {
        "call": "def forward(self, call, x): return call(x) + 10",
        "self._original_forward": "def forward(self, x): return self._original_forward(x) + 10",
        "wrapt": "def over(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs) + 10",
    }
    print(f"{'':26}{'eager':>8}{'compiled':>16}")
    right = {}
    for name, body in bodies.items():
        tiny = made("class Tiny(Module):\n    def forward(self, x): return x * 2", Module=torch.nn.Module)["Tiny"]
        if name != "wrapt":
            Engine(tally).apply([patch(tiny, 0, body)])
        elif importlib.util.find_spec("wrapt"):
            import wrapt

            wrapt.wrap_function_wrapper(tiny, "forward", made(body)["over"])
        else:
            continue
        outer = torch.nn.Sequential(tiny())
        eager, traced = (run(torch.ones(1)).item() for run in (outer, torch.compile(outer, backend="eager")))
        right[name] = eager == traced == 12
        print(f"{name:26}{eager:8.1f}{traced:16.1f}   {'right' if right[name] else 'WRONG'}")
    right.pop("wrapt", None)
    return all(right.values())


CHILD = """
import importlib, json, sys, time
for name in sys.argv[1:]:
    importlib.import_module(name)
before, times = set(sys.modules), [time.process_time()]
from vllm_graft.patching import Engine, VLLMPatch, wrap
times.append(time.process_time())
import made_up_patches
times.append(time.process_time())
states = Engine().apply(made_up_patches.ALL)
times.append(time.process_time())
assert {state.state for state in states} == {"armed"}, states
spent = [1000 * (after - before) for before, after in zip(times, times[1:])]
print(json.dumps([spent, sorted(set(sys.modules) - before)]))
"""

PATCH = """
class Patch{number}(
    VLLMPatch["vllm.made_up{number}:Target"], name="patch-{number}", vllm=">=0.26,<0.33", why="to measure"
):
    @wrap
    def f(self, call, value):
        return call(value)

    @wrap
    def g(self, *args, **kwargs):
        return self._original_g(*args, **kwargs)
"""


def starting() -> bool:
    """Print what fifty patches of modules not imported yet add to a fresh process; whether that is little."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_patches(folder)
        loaded = child(folder, [])[1]  # this one compiles, too
        standard = [module for module in loaded if module.partition(".")[0] in sys.stdlib_module_names]
        rounds = [(child(folder, [])[0], child(folder, standard)[0]) for _ in range(CHILDREN)]
    bare, ready = (min(times, key=sum) for times in zip(*rounds, strict=True))
    print(f"\n{PATCHES} patches, {2 * PATCHES} hooks, on modules not imported yet: CPU ms in a fresh process")
    print(f"{'':32}{'bare':>8}{'in vLLM':>10}")
    titles = ("importing vllm_graft.patching", "declaring", "arming (Engine.apply)", "together")
    for title, *pair in zip(titles, [*bare, sum(bare)], [*ready, sum(ready)], strict=True):
        print(f"{title:32}{pair[0]:8.1f}{pair[1]:10.1f}")
    print(f"in vLLM: with the {len(standard)} modules of the standard library that vLLM has loaded before any plugin")
    within = sum(bare) <= START_MS, sum(ready) <= START_MS
    print(f"{START_MS:.0f} ms: bare {'within' if within[0] else 'OVER'}, in vLLM {'within' if within[1] else 'OVER'}")
    return within[1]


def write_patches(folder: Path) -> None:
    """A package that says it is vLLM, and patches of it."""
    (folder / "vllm").mkdir()
    (folder / "vllm/__init__.py").touch()
    (folder / "vllm/_version.py").write_text("__version__ = version = '0.32.0'\n")
    for number in range(PATCHES):
        (folder / f"vllm/made_up{number}.py").write_text("class Target:\n    def f(self, value): return value\n")
    source = "from vllm_graft.patching import VLLMPatch, wrap\n"
    source += "".join(PATCH.format(number=number) for number in range(PATCHES))
    source += f"ALL = [{', '.join(f'Patch{number}' for number in range(PATCHES))}]\n"
    (folder / "made_up_patches.py").write_text(source)


def child(folder: Path, before: list[str]) -> tuple[list[float], list[str]]:
    """The milliseconds of each part in a process that has imported ``before``, and what it imported itself."""
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    # Installed packages have been compiled.
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", CHILD, *before]
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True).stdout)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        cells = Cells(Path(folder) / "1.cells")
        if not importlib.util.find_spec("wrapt"):
            print("wrapt is not installed, and left out: pip install wrapt")
        within = [replacing(cells), *(calls(cells, form) for form in FORMS), compiled(cells), starting()]
    return int(not all(within))


if __name__ == "__main__":
    raise SystemExit(main())
