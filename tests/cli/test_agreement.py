"""``plan``, ``audit``, ``lock``, ``doctor`` and the start say the same of one patch on one release.

Patches are generated: every mark and form on names of every kind, and on names that are not there. The start's side is
the engine that a start uses, on the imported module, in a child process.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from vllm_graft.audit.releases.release_finder import ReleaseFinder
from vllm_graft.audit.releases.source_release import SourceRelease
from vllm_graft.audit.report import audit
from vllm_graft.audit.uses import read
from vllm_graft.audit.verdicts import find_shape
from vllm_graft.cli import main
from vllm_graft.sources.origins import Tree
from vllm_graft.testing import zygote
from vllm_graft.testing.packages import lay_out, python_path

DRIVER = Path(__file__).with_name("agreement_driver.py")

UPSTREAM = """
import abc, contextlib, enum, functools
LIMIT = 5
NAMES = ["a"]

def function(x): ...
async def coroutine(x): ...
def generator(x): yield x
@functools.cache
def cached(x): ...
@contextlib.contextmanager
def managed(x): yield x
@contextlib.asynccontextmanager
async def managed_async(x): yield x

class State(enum.IntEnum):
    WAITING = 1
    def label(self, x): ...

class Base(abc.ABC):
    def inherited(self, x): ...
    @property
    def above(self): ...

class Thing(Base):
    SIZE = 5
    declared: int
    def __init__(self): ...
    def method(self, x): ...
    def second(self, x): ...
    async def coroutine(self, x): ...
    def generator(self, x): yield x
    @classmethod
    def of_class(cls, x): ...
    @staticmethod
    def static(x): ...
    @property
    def shown(self): ...
    @functools.lru_cache(2)
    def cached(self): ...
    class Inner:
        def method(self, x): ...
"""

NEXT = (
    UPSTREAM.replace("    def second(self, x): ...\n", "    def third(self, x): ...\n")
    .replace("    def method(self, x): ...\n    def third", "    @staticmethod\n    def method(x): ...\n    def third")
    .replace("    @classmethod\n    def of_class(cls, x)", "    def of_class(self, x)")
    .replace("async def coroutine(x)", "def coroutine(x)")
    .replace("class Base(abc.ABC):\n    def inherited(self, x): ...\n", "class Base(abc.ABC):\n")
)

ENVS = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    VLLM_PORT: int = 5
    VLLM_HOST: str | None = None
environment_variables = {"VLLM_PORT": lambda: 5, "VLLM_HOST": lambda: None}
def __getattr__(name):
    if name in environment_variables:
        return environment_variables[name]()
    raise AttributeError(name)
"""

RELEASES = {
    "0.90.0": {"made": UPSTREAM, "envs": ENVS, "left": "class Old:\n    def f(self): ...\n"},
    "0.91.0": {"made": NEXT, "envs": ENVS},
}

RANGES = ["", ">=0.26,<0.91", ">=0.91", "==0.90.0", "!=0.91.*"]

BODIES = {
    ("wrap", "function"): "@wrap\n    def {name}({self}call, *a, **k):\n        return call(*a, **k)",
    ("wrap", "coroutine"): "@wrap\n    async def {name}({self}call, *a, **k):\n        return await call(*a, **k)",
    ("wrap", "generator"): "@wrap\n    def {name}({self}call, *a, **k):\n        yield from call(*a, **k)",
    ("wrap", "classmethod"): "@wrap\n    @classmethod\n    def {name}(cls, call, *a):\n        return call(*a)",
    ("wrap", "staticmethod"): "@wrap\n    @staticmethod\n    def {name}(call, *a):\n        return call(*a)",
    ("wrap", "property"): "@wrap\n    @property\n    def {name}(self, call):\n        return call()",
    ("replace", "function"): "@replace\n    def {name}({self}*a, **k):\n        return 0",
    ("replace", "staticmethod"): "@replace\n    @staticmethod\n    def {name}(*a, **k):\n        return 0",
    ("replace", "generator"): "@replace\n    def {name}({self}*a, **k):\n        yield 0",
    ("replace", "value"): "{name} = replace(7)",
    ("", "function"): "def {name}({self}*a, **k):\n        return 0",
    ("", "value"): "{name} = 7",
    ("add", "function"): "@add\n    def {name}({self}*a, **k):\n        return 0",
    ("add", "value"): "{name} = add(7)",
}

HEAD = "from vllm_graft import VLLMPatch, add, replace, wrap\n"

LEFT_TO_THE_START = re.compile(
    r"functools\.cache|is a value on the target|a value in the patch|"
    r"without Python code|a field of|pydantic|captured|Triton|compiled operation"
)
"""What the audit cannot see in a catalogue of names, kinds and signatures: ``plan`` and the start tell."""


FUNCTION_KIND: Final = re.compile(r"is a \w+( \w+)? function on the target")
"""Refusals of a hook that is a generator where upstream has a plain function, and the like."""

CAPTURED: Final = re.compile(r"an Enum|a field of|captured|pydantic")
"""Refusals that the start finds first where there are two reasons."""


def patch(number: int, target: str, name: str, mark: str, form: str, releases: str = "") -> str:
    of_class = ":" in target
    body = BODIES[mark, form].format(name=name, self="self, " if of_class else "")
    said = f', vllm="{releases}"' if releases else ""
    return f'\nclass P{number}(VLLMPatch["{target}"], name="p{number}"{said}):\n    {body}\n'


def generated(places: dict[str, list[str]], ranges: list[str]) -> str:
    """A module with a patch for each place, mark and form, the ranges going round."""
    text, number = HEAD, 0
    for target, names in places.items():
        for name in names:
            for mark, form in BODIES:
                of_module = ":" not in target and form in ("classmethod", "staticmethod", "property")
                if of_module or (name.startswith("__") and form == "value"):
                    continue
                text += patch(number, target, name, mark, form, ranges[number % len(ranges)])
                number += 1
    return text


def told(module: str, *folders: Path) -> dict[str, dict]:
    """What reading and the engine say of each patch, from a child process."""
    environ = {**os.environ, "PYTHONPATH": python_path(*folders), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(DRIVER), module]
    done = zygote.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    return json.loads(results[0].removeprefix("RESULT "))


def audited(file: Path, release) -> set[str]:
    """The patches that the audit has an error for, in one release compared with itself."""
    report = audit([read(file)], release, [release])
    owners = {use.where: use.patch.name for use in report.packages[0].uses if use.patch is not None}
    errors = [finding for finding in report.findings if finding.level == "error"]
    return {
        finding.subject.removeprefix("patch ") if finding.subject.startswith("patch ") else owners[finding.where]
        for finding in errors
    }


def decorated(file: Path, release) -> set[str]:
    """The patches of functions that a decorator may make another kind of function of, such as ``functools.cache``."""
    uses = [use for use in read(file).uses if use.patch is not None]
    shapes = {use.patch.name: find_shape(release, use) for use in uses}
    return {name for name, shape in shapes.items() if shape is not None and shape.function is None}


def disagreements(
    found: dict[str, dict], errors: set[str], wrapped: set[str], open_: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Where two of them differ.

    ``wrapped`` are patches of functions with unknown decorators, ``open_`` those of classes that may inherit names from
    other packages.
    """
    for name, one in found.items():
        # The nearest names, in brackets, are found in other lists, and defaults are shown as they are written.
        plan, start = (re.split(r" \(|\. The hook is", one[who])[0] for who in ("plan", "start"))
        if one["sure"] and plan != start and not (plan and CAPTURED.search(start)):
            yield f"{name}: plan says {one['plan']!r}, the start {one['start']!r}"
        left = LEFT_TO_THE_START.search(one["start"]) or (name in open_ and one["start"].startswith("there is no"))
        left = left or (name in wrapped and FUNCTION_KIND.search(one["start"]))
        if (name in errors) != bool(one["start"]) and not left:
            yield f"{name}: the audit has {'an error' if name in errors else 'none'}, the start says {one['start']!r}"


@pytest.mark.parametrize("release", RELEASES)
def test_all_four_agree_over_releases_that_differ(release, tmp_path, monkeypatch, capsys):
    members = [
        name
        for name in re.findall(r"def (\w+)|class (\w+)", UPSTREAM.partition("class Thing")[2])
        for name in name
        if name
    ]
    places = {
        "vllm.made:Thing": [*dict.fromkeys(members), "third", "inherited", "above", "SIZE", "nothing"],
        "vllm.made:Thing.Inner": ["method", "nothing"],
        "vllm.made:State": ["WAITING", "label", "nothing"],
        "vllm.made": [
            *("function", "coroutine", "generator", "cached", "managed", "managed_async"),
            *("LIMIT", "NAMES", "Thing", "nothing"),
        ],
        "vllm.envs": ["VLLM_PORT", "VLLM_HOST", "NOTHING", "environment_variables"],
        "vllm.made:Thingy": ["method"],
        "vllm.made:function": ["method"],
        "vllm.left:Old": ["f", "nothing"],
    }
    text = generated(places, RANGES)
    vllm = tmp_path / release / "vllm"
    vllm.mkdir(parents=True)
    (vllm / "__init__.py").write_text("")
    (vllm / "_version.py").write_text(f'__version__ = "{release}"\n')
    for module, source in RELEASES[release].items():
        (vllm / f"{module}.py").write_text(source)
    count = text.count("\nclass ")
    points = {f"p{number}": f"generated_patches:P{number}" for number in range(count)}
    lay_out(tmp_path / "site", "generated", {"vllm_graft.plugins": points}, {"generated_patches": text})

    found = told("generated_patches", tmp_path / "site", tmp_path / release)
    assert len(found) == count > 250
    assert 0.2 < sum(bool(one["start"]) for one in found.values()) / count < 0.99
    assert sum(one["sure"] for one in found.values()) / count > 0.75
    file, audited_release = tmp_path / "site" / "generated_patches.py", SourceRelease(Tree(tmp_path / release))
    wrapped = decorated(file, audited_release)
    assert "\n".join(disagreements(found, audited(file, audited_release), wrapped)) == ""
    kinds = {name for name, one in found.items() if FUNCTION_KIND.search(one["start"])}
    assert len(kinds - wrapped) > 5

    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "generated_patches", raising=False)
    main(["lock", *points, "--against", str(tmp_path / release), "--check", "--json"])
    rows = json.loads(capsys.readouterr().out)
    bad = {row["patch"] for row in rows if row["state"] in ("not found", "refused", "out of range")}
    assert {
        name: one["start"] for name, one in found.items() if one["sure"] and (name in bad) != bool(one["start"])
    } == {}


LAZY = """
import sys, types
class Late:
    def f(self, x): ...
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("Load"):
            return Late
        raise AttributeError(name)
sys.modules[__name__] = Lazy(__name__)
"""


def test_a_module_that_puts_another_object_in_its_place_is_left_to_the_start(tmp_path):
    """As ``transformers`` does: reading does not refuse what it cannot see there."""
    body = "class P(VLLMPatch['lazy_package:Loaded'], name='p'):\n    @wrap\n    def f(self, call, x): return call(x)\n"
    (tmp_path / "lazy_package.py").write_text(LAZY)
    (tmp_path / "lazy_patches.py").write_text(HEAD + body)
    assert told("lazy_patches", tmp_path) == {"p": {"plan": "", "sure": False, "start": ""}}


REAL = [
    "vllm.v1.core.sched.scheduler:Scheduler",
    "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "vllm.v1.engine.core:EngineCore",
    "vllm.v1.engine.async_llm:AsyncLLM",
    "vllm.v1.request:Request",
    "vllm.v1.request:RequestStatus",
    "vllm.v1.metrics.loggers:StatLoggerManager",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
    "vllm.v1.worker.worker_base:WorkerBase",
    "vllm.sampling_params:SamplingParams",
    "vllm.config:CacheConfig",
    "vllm.platforms.interface:Platform",
    "vllm.model_executor.models.llama:LlamaForCausalLM",
    "vllm.plugins",
    "vllm.v1.utils",
    "vllm.v1.core.sched.utils",
]


UNTOLD = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {"_freeze_gc"},
    "vllm.platforms.interface:Platform": {"_enum", "device_name", "device_type", "dispatch_key"},
}
"""Names of which the catalogue knows less than the start: one is assigned ``staticmethod(function)``, the others are
annotated without a value, so that they are no attributes yet."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_agree_over_the_installed_vllm(tmp_path):
    """Names of real classes and modules of every kind, each with every mark and form."""
    places = {
        target: [*(name for name in _names(target) if name not in UNTOLD.get(target, ())), "nothing_like_it", "schedul"]
        for target in REAL
    }
    places |= {"vllm.core.scheduler:Scheduler": ["schedule"], "vllm.v1.request:Requst": ["is_finished"]}
    (tmp_path / "generated_patches.py").write_text(generated(places, ["", "", ">=0.26,<0.31"]))
    found = told("generated_patches", tmp_path)
    assert len(found) > 1000
    release = ReleaseFinder(offline=True).release("installed")
    errors = audited(tmp_path / "generated_patches.py", release)
    owners = {
        use.patch.name: (use.module, use.qualname.rpartition(".")[0])
        for use in read(tmp_path / "generated_patches.py").uses
        if use.patch
    }
    open_ = frozenset(name for name, (module, cls) in owners.items() if cls and release.outside(module, cls))
    wrapped = decorated(tmp_path / "generated_patches.py", release)
    assert "\n".join(disagreements(found, errors, wrapped, open_)) == ""
    assert sum(one["sure"] for one in found.values()) / len(found) > 0.75


def _names(target: str) -> list[str]:
    """Some names of each kind of a class or module of the installed vLLM, found by reading."""
    from vllm_graft.sources.finder import Finder
    from vllm_graft.sources.origins import Installed

    module, _, qualname = target.partition(":")
    finder = Finder(Installed())
    place = finder.walk.find(module, qualname) if qualname else None
    scope = place[0].module.class_scope(place[0].cls) if place is not None else finder.module(module).scope
    by_kind: dict[str, list[str]] = {}
    for name, nodes in scope.items():
        if not isinstance(nodes[-1], ast.Import | ast.ImportFrom):
            found = finder.find(module, f"{qualname}.{name}".strip("."))
            by_kind.setdefault(f"{found.kind}{type(nodes[-1]).__name__}", []).append(name)
    return [name for names in by_kind.values() for name in names[:3]]


STARTS = {
    "fits": ("vllm.v1.core.sched.scheduler:Scheduler", "wrap", "schedule"),
    "misspelt": ("vllm.v1.core.sched.scheduler:Scheduler", "wrap", "schedul"),
    "added": ("vllm.v1.core.sched.scheduler:Scheduler", "add", "schedule"),
    "gone": ("vllm.core.scheduler:Scheduler", "wrap", "schedule"),
    "captured": ("vllm.config:CacheConfig", "replace", "block_size"),
}
"""Patches that each tool is asked of; the last one only a trial can judge."""

PAIRS = """
class Front(VLLMPatch["vllm.v1.request:Request"], name="front", processes=["frontend"]):
    @add
    def who(self): return "front end"

class Core(VLLMPatch["vllm.v1.request:Request"], name="core", processes=["engine"]):
    @add
    def who(self): return "engine core"

class Work(VLLMPatch["vllm.v1.request:Request"], name="work", processes=["worker"]):
    @add
    def who(self): return "worker"

class Over(VLLMPatch["vllm.v1.request:Request"], name="over", processes=["frontend"]):
    @wrap
    def who(self, call): return "around " + call()

class Beyond(VLLMPatch["vllm.v1.request:Request"], name="beyond"):
    @wrap
    def who(self, call): return "around " + call()
"""

START = """
from vllm import LLM, SamplingParams
from vllm.v1.request import Request
llm = LLM(MODEL, dtype="float32", enforce_eager=True, max_model_len=256)
print("TOKENS", len(llm.generate("a", SamplingParams(max_tokens=3))[0].outputs[0].token_ids))
print("WHO", Request.who(None) if hasattr(Request, "who") else "nobody")
"""


@pytest.fixture(scope="module")
def starts(tmp_path_factory) -> Path:
    """A folder with a package that offers a patch for each outcome."""
    folder = tmp_path_factory.mktemp("starts")
    text = HEAD + PAIRS
    for number, (target, mark, name) in enumerate(STARTS.values()):
        text += patch(number, target, name, mark, "value" if mark == "replace" else "function")
    points = {f"p{number}": f"patches_of_a_start:P{number}" for number in range(len(STARTS))}
    points |= {name.lower(): f"patches_of_a_start:{name}" for name in re.findall(r"^class (\w+)", PAIRS, re.MULTILINE)}
    lay_out(folder, "starts", {"vllm_graft.plugins": points}, {"patches_of_a_start": text})
    return folder


def findings_of(command: str, folder: Path, names: str) -> list[dict[str, str]]:
    """The findings of a command about planned patches."""
    environ = {**os.environ, "PYTHONPATH": python_path(folder), "VLLM_CUSTOM_PATCHES": names}
    words = [sys.executable, "-m", "vllm_graft", command, "--model", "org/model", "--json"]
    done = zygote.run(words, env=environ, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    found = [row for row in json.loads(done.stdout)["findings"] if row["subject"].startswith("patch ")]
    assert done.returncode == any(row["level"] == "error" for row in found), done.stdout
    return found


@pytest.mark.parametrize("outcome", STARTS)
def test_doctor_and_plan_say_the_same_in_the_same_words(outcome, starts):
    name = f"p{list(STARTS).index(outcome)}"
    planned = findings_of("plan", starts, name)
    assert bool(planned) == (outcome != "fits")
    assert findings_of("doctor", starts, name) == planned


@pytest.mark.parametrize("outcome", STARTS)
def test_a_real_start_agrees_with_plan_and_doctor(outcome, starts, graft):
    """vLLM's LLM on the simulated device: it generates with the patch, or is refused in the words of the tools."""
    name = f"p{list(STARTS).index(outcome)}"
    graft.simulate()
    graft.env |= {"PYTHONPATH": python_path(starts), "VLLM_CUSTOM_PATCHES": name}
    done = graft.script(START)
    said = findings_of("doctor", starts, name)
    if outcome == "fits":
        assert (done.returncode, said) == (0, []), done.stderr[-3000:]
        assert "TOKENS 3" in done.stdout
    else:
        assert done.returncode != 0
        assert "TOKENS" not in done.stdout
        (finding,) = said
        assert finding["what"] in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("names", "levels", "who"),
    [
        ("core,front", [], "front end"),
        ("front,over,core", [], "around front end"),
        ("front,beyond", ["error"], ""),
        ("core,work", ["warning"], ""),
    ],
)
def test_a_real_start_agrees_on_patches_of_one_target_in_other_processes(names, levels, who, starts, graft):
    """In a forked engine, which has the front end's patches at first; its worker shares the process of engine core."""
    said = findings_of("plan", starts, names)
    assert [row["level"] for row in said] == levels
    assert findings_of("doctor", starts, names) == said
    graft.simulate()
    graft.env |= {"PYTHONPATH": python_path(starts), "VLLM_CUSTOM_PATCHES": names}
    graft.env["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    done = graft.script(START)
    if who:
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"WHO {who}\n" in done.stdout
    else:
        assert done.returncode != 0
        assert said[0]["what"].partition(";")[0] in done.stderr, done.stderr[-3000:]
