"""What patches cost: a patched call against the same change made by hand, torch.compile, and fifty patches at start.

    python benchmarks/patching.py

Calls are measured in nanoseconds of CPU time, the best of many rounds in which all variants take turns. Every variant
is compiled from text of its own, because two that share a code object share the interpreter's caches too. Hits are
counted in a memory-mapped file, as in a server. torch and wrapt (``pip install vllm-graft[bench]``) are measured
where they are installed.
"""

from __future__ import annotations

import importlib.util
import itertools
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
from typing import Any

from vllm_graft.ledger import Cells
from vllm_graft.patching import Engine, VLLMPatch, replace, wrap

LAYER_NS = 500
REPLACEMENT_NS = 5  # what two measurements of one and the same function may differ by
START_MS = 20.0
CALLS = 5_000
ROUNDS = 80
CHILDREN = 15
PATCHES = 50

FOLDER = tempfile.TemporaryDirectory()
ENGINE = Engine(Cells(Path(FOLDER.name) / "1.cells"))
NUMBERS = itertools.count()

Loop = Callable[[int], None]


@dataclass(frozen=True)
class Form:
    """One way in which a method is written, wrapped and called."""

    title: str
    called: str = "number"
    takes: str = "value"
    define: str = "def"
    result: str = ""
    inherited: bool = False


PACKED = "*args, **kwargs"
FORMS = [
    Form("a wrapper that names its parameters: f(value)"),
    Form("a wrapper that takes *args, **kwargs: f(value)", takes=PACKED),
    Form("a wrapper that takes *args, **kwargs: f(value, 2, c=3, d=4)", takes=PACKED, called="number, 2, c=3, d=4"),
    Form("a coroutine method: await f(value)", define="async def", result="await "),
    Form("an inherited method, wrapped in the subclass: f(value)", inherited=True),
]


def made(source: str, **given: object) -> dict[str, object]:
    """What a text defines, with code objects of its own."""
    scope = {"__name__": "benchmark", "VLLMPatch": VLLMPatch, "wrap": wrap, "replace": replace, **given}
    exec(textwrap.dedent(source), scope)
    return scope


def upstream(form: Form) -> type:
    # A hook that names its parameters must name all of upstream's, or the engine refuses it.
    parameters = "value, b=0, *, c=0, d=0" if form.takes == PACKED else form.takes
    scope = made(f"""
        class Base:
            {form.define} f(self, {parameters}): return value
        class Target(Base): pass
        """)
    return scope["Target" if form.inherited else "Base"]


def by_hand(form: Form, target: type, layers: int) -> None:
    for _ in range(layers):
        beneath = "original(self, " if "f" in vars(target) else "super(target, self).f("
        source = f"""
            def over(original):
                {form.define} f(self, {form.takes}): return {form.result}{beneath}{form.takes})
                return f
            """
        target.f = made(source, target=target)["over"](target.f)


def by_call(form: Form, target: type, layers: int) -> None:
    apply(target, f"{form.define} f(self, call, {form.takes}): return {form.result}call({form.takes})", layers)


def by_name(form: Form, target: type, layers: int) -> None:
    apply(target, f"{form.define} f(self, {form.takes}): return {form.result}self._original_f({form.takes})", layers)


def by_wrapt(form: Form, target: type, layers: int) -> None:
    import wrapt

    for _ in range(layers):
        body = f"{form.define} over(wrapped, instance, args, kwargs): return {form.result}wrapped({PACKED})"
        wrapt.wrap_function_wrapper(target, "f", made(body)["over"])


def apply(target: type, body: str, layers: int = 1, mark: str = "wrap") -> None:
    """Patch a class with a method of this text, as many times as is said."""
    source = f"class Patch(VLLMPatch[target], name=name):\n    @{mark}\n    {body}"
    ENGINE.apply([made(source, target=target, name=f"patch-{next(NUMBERS)}")["Patch"] for _ in range(layers)])


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


HEADING = f"{'':26}{'ns':>8}{'ratio':>8}{'above by hand':>16}"


def best(loops: dict[Any, Loop]) -> dict[Any, float]:
    """CPU nanoseconds per call, the best round of each."""
    found = dict.fromkeys(loops, float("inf"))
    for _ in range(ROUNDS):
        for name, run in loops.items():
            before = time.thread_time_ns()
            run(CALLS)
            found[name] = min(found[name], (time.thread_time_ns() - before) / CALLS)
    return found


def wrapping(form: Form) -> bool:
    """Print what wrapping costs in one form; whether every layer stays within its limit."""
    writers = {"by hand": by_hand, "call": by_call, "self._original_f": by_name}
    if importlib.util.find_spec("wrapt"):
        writers["wrapt"] = by_wrapt
    loops = {("unpatched", 0): loop(form, upstream(form))}
    for layers, name in itertools.product((1, 3), writers):
        target = upstream(form)
        writers[name](form, target, layers)
        loops[name, layers] = loop(form, target)
    found = best(loops)
    print(f"\n{form.title}\n{HEADING}")
    within = True
    for (name, layers), ns in found.items():
        line = f"{name + (f' x{layers}' if layers else ''):26}{ns:8.0f}{ns / found['unpatched', 0]:8.2f}"
        if name not in ("unpatched", "by hand"):
            above = ns - found["by hand", layers]
            line += f"{above:+16.0f}"
        if name in ("call", "self._original_f"):
            within &= above <= layers * LAYER_NS
            line += f"   {'within' if above <= layers * LAYER_NS else 'OVER'} {layers * LAYER_NS}"
        print(line)
    return within


def replacing() -> bool:
    """Print what replacing costs; whether it is what a setattr by hand costs."""
    body = "def f(self, value, b=0, *, c=0, d=0): return b"
    hand, ours = upstream(FORMS[0]), upstream(FORMS[0])
    hand.f = made(body)["f"]
    apply(ours, body, mark="replace")
    ours().f(1)
    plain = not vars(ours)["f"].__closure__  # a layer is a closure
    loops = {"unpatched": upstream(FORMS[0]), "setattr by hand": hand, "replace": ours}
    found = best({name: loop(FORMS[0], target) for name, target in loops.items()})
    above = found["replace"] - found["setattr by hand"]
    print(f"\na replaced method, after its first call: f(value)\n{HEADING}")
    for name, ns in found.items():
        print(f"{name:26}{ns:8.1f}{ns / found['unpatched']:8.2f}" + (f"{above:+16.1f}" if name == "replace" else ""))
    print(f"what stands on the class is {'the plain function itself' if plain else 'NOT the plain function'}")
    return plain and above <= REPLACEMENT_NS


def compiled() -> bool:
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
            apply(tiny, body)
        elif importlib.util.find_spec("wrapt"):
            importlib.import_module("wrapt").wrap_function_wrapper(tiny, "forward", made(body)["over"])
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
    rows = (
        ("importing vllm_graft.patching", bare[0], ready[0]),
        ("declaring", bare[1], ready[1]),
        ("arming (Engine.apply)", bare[2], ready[2]),
        ("registration: declaring, arming", sum(bare[1:]), sum(ready[1:])),
        ("all three", sum(bare), sum(ready)),
    )
    for title, *pair in rows:
        print(f"{title:32}{pair[0]:8.1f}{pair[1]:10.1f}")
    print(f"in vLLM: with the {len(standard)} modules of the standard library that vLLM has loaded before any plugin")
    within = sum(bare[1:]) <= START_MS, sum(ready[1:]) <= START_MS
    verdicts = ["within" if one else "OVER" for one in within]
    print(f"registration, {START_MS:.0f} ms: bare {verdicts[0]}, in vLLM {verdicts[1]}")
    return all(within)


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
    if not importlib.util.find_spec("wrapt"):
        print("wrapt is not installed, and left out")
    return int(not all([replacing(), *(wrapping(form) for form in FORMS), compiled(), starting()]))


if __name__ == "__main__":
    raise SystemExit(main())
