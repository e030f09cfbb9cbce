"""The measurement of the audit: what it collects from a package, and how findings are set against it."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from truth.collect import Never, Package
from truth.compare import Finding, Result, compare, speaks_of
from truth.corpus import CORPUS, Entry
from truth.decided import Decided
from truth.guards import Evaluator
from truth.oracle import fits, signature_of
from truth.verdicts import BROKEN, FINE

CODE = """\
from typing import TYPE_CHECKING
from vllm import LLM, SamplingParams as Params
from vllm.v1.core.sched.scheduler import Scheduler
import vllm.envs as envs
if TYPE_CHECKING:
    from vllm.config import VllmConfig
try:
    from vllm.old import helper
except ImportError:
    from vllm.new import helper

class Mine(Scheduler):
    def schedule(self, throttle=False):
        self.kv.free(1)
        self.tidy(1, now=True)
        return super().schedule(throttle)
    @classmethod
    def make(cls):
        return cls.build(1), cls.limit

class Own:
    def run(self):
        return self.anything

def build(vllm_config: "VllmConfig", other):
    Params(1, n=2)
    other.whatever()
    LLM = 3
    LLM()
    return helper(*other), envs.VLLM_PORT, vllm_config.cache_config.block_size
"""


@pytest.fixture
def uses(tmp_path):
    folder = tmp_path / "plug-1.0"
    (folder / "plug").mkdir(parents=True)
    (folder / "plug" / "__init__.py").write_text("from vllm.entrypoints.llm import LLM\n")
    (folder / "plug" / "code.py").write_text(CODE)
    (folder / "plug" / "more.py").write_text("from plug import LLM\nfrom .code import Mine\nLLM(model=1)\n")
    return Package(folder).uses()


def test_each_kind_of_use_is_collected(uses):
    found = {(use.kind, use.name) for use in uses}
    assert {
        ("import", "vllm.SamplingParams"),
        ("call", "vllm.SamplingParams"),
        ("call", "vllm.entrypoints.llm.LLM"),
        ("read", "vllm.envs.VLLM_PORT"),
        ("abstract", "Mine"),
        ("override", "Mine.schedule"),
        ("super call", "super().schedule"),
        ("self call", "self.tidy"),
        ("self read", "self.kv"),
        ("self read", "cls.build"),
        ("field", "vllm_config.cache_config.block_size"),
    } <= found


def test_what_is_not_certain_is_left_out(uses):
    """A name bound to something else as well, an object of no known class, a class that derives from nothing."""
    names = Counter(use.name for use in uses if use.kind != "import")
    assert names["vllm.LLM"] == 0
    assert not [name for name in names if "whatever" in name or "anything" in name]


def test_alternatives_and_guards_are_kept(uses):
    (helper,) = (use for use in uses if use.kind == "call" and "helper" in use.name)
    assert [ref.dotted for ref in helper.refs] == ["vllm.old.helper", "vllm.new.helper"]
    (config,) = (use for use in uses if use.name == "vllm.config.VllmConfig")
    assert any(isinstance(guard, Never) for guard in config.guards)


@pytest.mark.parametrize(
    ("call", "fit"),
    [("f(1)", True), ("f(1, 2)", False), ("f()", False), ("f(1, c=2)", True), ("f(1, d=2)", False), ("f(*x)", True)],
)
def test_calls_are_bound_as_python_binds_them(call, fit):
    from truth.collect import shape_of

    arguments = ast.parse("def f(a, *, c=None): pass").body[0].args
    assert fits(signature_of(arguments), shape_of(ast.parse(call).body[0].value), 0) is fit


def finding(name, line=3, way="import", code="P201", what="it is gone"):
    row = {"code": code, "level": "error", "subject": f"{way} {name}", "what": what, "where": f"plug/a.py:{line}"}
    return Finding.parse(row)


def test_a_finding_speaks_of_a_use_of_the_same_name_or_of_what_is_inside_it():
    use = Decided("import", "plug/a.py", 3, 3, "vllm.a.B", BROKEN, "", names=("vllm.a.B",))
    assert speaks_of(finding("vllm.a:B", line=9), use)
    assert speaks_of(finding("vllm.a"), use)
    assert not speaks_of(finding("vllm.a:Bigger"), use)
    assert not speaks_of(finding("vllm.a:B.method", line=9), use)


class NoVllm:
    """Stands for what running vLLM says."""

    def status(self, module, path):
        return FINE


def test_recall_and_precision_are_counted():
    """One that is reported, one that is missed, and a finding about what works."""
    found = [
        Decided("import", "plug/a.py", 3, 3, "vllm.a.B", BROKEN, "gone", names=("vllm.a.B",)),
        Decided("import", "plug/a.py", 4, 4, "vllm.a.C", BROKEN, "gone", names=("vllm.a.C",)),
        Decided("import", "plug/a.py", 5, 5, "vllm.a.D", FINE, "", names=("vllm.a.D",)),
    ]
    findings = [finding("vllm.a:B"), finding("vllm.a:D", line=5), finding("vllm.a:Unknown", line=7)]
    result = compare(Result("plug", False), Entry("plug", "1"), found, findings, NoVllm())
    assert (result.broken.total(), result.reported.total()) == (2, 1)
    assert result.levels["error"] == Counter(right=1, wrong=1, undecided=1)
    assert [line.split()[0] for line in result.misses] == ["plug/a.py:4"]
    assert "vllm.a:D" in result.false_alarms[0]


def test_a_missing_field_is_not_decided_by_the_object_that_lacks_it():
    """That ``self.model_config`` can be read says nothing of ``self.model_config.gone``."""
    read = Decided("self read", "plug/a.py", 3, 3, "self.model_config", FINE, "", member="model_config")
    gone = finding("vllm.config:VllmConfig.model_config.gone", way="read", code="P217")
    result = compare(Result("plug", False), Entry("plug", "1"), [read], [gone], NoVllm())
    assert result.levels["error"] == Counter(undecided=1)


def test_the_corpus_is_pinned_and_some_of_it_is_held_out():
    assert len(CORPUS) >= 10
    assert all(entry.version for entry in CORPUS)
    assert sum(entry.held_out for entry in CORPUS) == 12


class Nothing:
    """Stands for a vLLM that is not asked."""

    def status(self, ref):
        raise AssertionError(ref)

    live = status


def test_a_file_that_is_imported_only_behind_a_false_test_does_not_run(tmp_path):
    """Nor does one that only such a file imports; one that nobody imports may be named by others."""
    folder = tmp_path / "plug-1.0"
    (folder / "plug").mkdir(parents=True)
    files = {
        "__init__": "import sys\nif sys.version_info < (3,):\n    from . import old\nfrom . import new\n",
        "old": "from plug import older\n",
        "older": "from plug import old\n",
        "new": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from plug import alone\n",
        "alone": "",
    }
    for name, text in files.items():
        (folder / "plug" / f"{name}.py").write_text(text)
    package = Package(folder)
    package.uses()
    runs = Evaluator(Nothing()).modules_run(package)
    assert {name for name, answer in runs.items() if answer is False} == {"plug.old", "plug.older"}


def made_package(tmp_path, **files):
    folder = tmp_path / "plug-1.0"
    (folder / "plug").mkdir(parents=True)
    for name, text in files.items():
        (folder / "plug" / f"{name}.py").write_text(text)
    package = Package(folder)
    package.uses()
    return package


def test_a_name_that_the_package_puts_on_vllm_is_its_own(tmp_path):
    package = made_package(
        tmp_path,
        __init__="",
        one="from vllm import envs\nenvs.FLAG = 1\nprint(envs.FLAG)\n",
        two="from vllm import envs\nkept = envs.OLD\nenvs.OLD = 1\n",
        three="from vllm import envs\nclass Mine(Patch[envs]):\n    ADDED = None\n",
    )
    assert [package.adds(f"vllm.envs.{name}") for name in ("FLAG", "OLD", "ADDED", "NONE")] == [
        True, False, True, False,
    ]  # fmt: skip


def test_methods_that_are_put_on_other_classes_are_noted(tmp_path):
    text = "class Own:\n    def a(self): ...\n    def b(self): ...\nTarget.a = Own.a\n"
    assert made_package(tmp_path, __init__=text).borrowed == {("Own", "a")}


def test_a_test_that_imports_a_file_does_not_make_it_run(tmp_path):
    package = made_package(tmp_path, __init__="", inner="", test_inner="from plug import inner\n")
    assert "plug.inner" not in package.importers


def test_a_finding_on_a_call_is_not_decided_by_a_mention(tmp_path):
    finding = Finding("P215", "error", "call", "vllm.m:f", "the call fails", "p/a.py", 3)
    read = Decided("read", "p/a.py", 3, 3, "vllm.m.f", FINE, "", ("vllm.m.f",))
    result = compare(Result("p", False), Entry("p", "1"), [read], [finding], None)
    assert result.levels["error"] == Counter(undecided=1)
