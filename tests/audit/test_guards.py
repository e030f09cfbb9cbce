"""Guards have a direction: what runs in the audited release is judged, what does not run is not reported."""

from __future__ import annotations

from textwrap import dedent

import pytest

from vllm_graft.audit.report import audit
from vllm_graft.audit.uses import read
from vllm_graft.audit.uses.guards import _Evaluator

BASE = """
class Engine:
    def step(self): ...
    def user(self): ...
    def run(self): self.step(), self.user()
def gone(): ...
def kept(): ...
"""
NEXT = """
class Engine:
    def user(self): ...
    def run(self): self.user()
def kept(): ...
"""


@pytest.fixture
def found(make, held, tmp_path):
    """found(package text) -> code and level of each finding, from 0.28.0, which has all names, to 0.32.0."""

    def run(text, **modules):
        folder = tmp_path / "plug"
        folder.mkdir(exist_ok=True)
        for name, source in {"__init__": "", "main": text, **modules}.items():
            (folder / f"{name}.py").write_text(dedent(source).lstrip("\n"), encoding="utf-8")
        base, new = held("source", make("0.28.0", m=BASE), make("0.32.0", m=NEXT))
        return [(one.code, one.level) for one in audit([read(folder)], base, [new]).findings]

    return run


RUNS_ON_032 = [
    "vllm.__version__ == '0.32.0'",
    "vllm.__version__ >= '0.30'",
    "vllm.__version__.startswith('0.32')",
    "vllm.__version__ in ('0.31.0', '0.32.0')",
    "not vllm.__version__ < '0.30'",
    "vllm.__version_tuple__ >= (0, 30)",
    "tuple(map(int, vllm.__version__.split('.')[:2])) >= (0, 30)",
    "tuple(int(x) for x in vllm.__version__.split('.')) > (0, 30, 0)",
    "Version(vllm.__version__) >= Version('0.30')",
    "version.parse(vllm.__version__).release >= (0, 30)",
    "Version(vllm.__version__).minor > 30",
    "Version('0.30') <= Version(vllm.__version__) < Version('0.33')",
    "Version(metadata.version('vllm')) > Version('0.31.0')",
    "INSTALLED >= Version('0.30')",
    "vllm_version_is('0.32.0')",
    "not vllm_version_is('0.28.0')",
    "vllm_version_at_least('0.30')",
    "own_version_is('0.32.0')",
    "own_minimum('0.31')",
    "own_minimum(least='0.31')",
    "IS_NEW",
    "not IS_OLD",
    "plug.other.IS_NEW",
    "hasattr(m, 'kept')",
    "not hasattr(m, 'gone')",
    "getattr(m, 'gone', None) is None",
    "find_spec('vllm.m') and not hasattr(m.Engine, 'step')",
    "not HAS_GONE",
    "optional is None",
    "(major, minor) >= (0, 30)",
    "int(second) > 30 and last == '0'",
    "RELEASE >= (0, 30)",
    "PARTS[1] == '32'",
    "SpecifierSet('>=0.30').contains(vllm.__version__)",
    "vllm.__version__ in SpecifierSet('>=0.30,<0.33')",
    "Version(metadata.distribution('vllm').version) >= Version('0.30')",
    "version.parse(pkg_resources.get_distribution('vllm').version) >= version.parse('0.30')",
    "Version(FOUND) >= Version('0.30')",
    "HAVE_VLLM",
]

HEAD = """
import vllm, os
import vllm.m as m
import plug.other
from importlib import metadata
from importlib.util import find_spec
from functools import cache
import pkg_resources
from packaging import version
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from elsewhere import vllm_version_is, vllm_version_at_least

INSTALLED = Version(vllm.__version__)

@cache
def own_version_is(target):
    '''Compare, with a variable that may stand in for the version.'''
    if os.environ.get("VLLM_VERSION") is not None:
        installed = os.environ["VLLM_VERSION"]
    else:
        import vllm
        installed = vllm.__version__
    try:
        return Version(installed) == Version(target)
    except ValueError as e:
        raise RuntimeError from e

def own_minimum(least="0.1"):
    return version.parse(metadata.version("vllm")) >= version.parse(least)

IS_NEW = own_minimum("0.31")
IS_OLD = vllm_version_is("0.28.0")
try:
    from vllm.m import gone as optional
    HAS_GONE = True
except ImportError:
    optional = None
    HAS_GONE = False
major, minor = map(int, vllm.__version__.split(".")[:2])
first, second, *_, last = vllm.__version__.split(".")
RELEASE = Version(vllm.__version__).release
PARTS = vllm.__version__.split(".")[:2]
try:
    import vllm
    FOUND = vllm.__version__
    HAVE_VLLM = True
except ImportError:
    FOUND = "0.0.0"
    HAVE_VLLM = False
"""
OTHER = "import vllm\nIS_NEW = vllm.__version__ >= '0.30'\n"
INFO = ("P201", "info")
"""The optional import of the head."""


@pytest.mark.parametrize("test", RUNS_ON_032)
def test_a_branch_that_runs_in_the_audited_release_is_judged(found, test):
    """The other branch is not reported."""
    first = f"{HEAD}\nif {test}:\n    from vllm.m import Engine, gone\nelse:\n    from vllm.m import kept\n"
    assert set(found(first, other=OTHER)) == {("P201", "error"), INFO}
    second = f"{HEAD}\nif {test}:\n    from vllm.m import kept\nelse:\n    from vllm.m import Engine, gone\n"
    assert set(found(second, other=OTHER)) == {INFO}


@pytest.mark.parametrize(
    "test",
    [
        "vllm_version_odd()",
        "hasattr(vllm.m.Engine(), 'gone')",
        "vllm_version_is(x)",
        "vllm.__version__[:2] in SpecifierSet('>=0.30')",
        "SpecifierSet('>=0.30').contains(vllm.__version__[:2])",
    ],
)
def test_a_test_that_cannot_be_worked_out_leaves_it_open(found, test):
    assert found(f"import os, vllm\nif {test}:\n    from vllm.m import gone\n") == [("P201", "info")]


@pytest.mark.parametrize(
    "test",
    [
        "torch.__version__ > '2'",
        "sys.version_info > (3, 11)",
        "enabled",
        "envs.VLLM_X",
        "config.model_version >= 2",
        "api_version_at_least('1.0')",
        "elsewhere.plugin_version_is('0.28.0')",
        "vllm_ascend.__version__ > '0.30'",
    ],
)
def test_a_test_of_something_else_is_no_guard(found, test):
    """Versions of other things than vLLM among them."""
    head = """
import os, sys, torch, vllm_ascend
from packaging.version import Version
from x import config, elsewhere
def api_version_at_least(v):
    return Version(os.environ.get("PLUGIN_API", "1.5")) >= Version(v)
"""
    assert found(f"{head}if {test}:\n    from vllm.m import gone\n") == [("P201", "error")]


def test_an_own_helper_that_cannot_be_worked_out_is_not_guessed_by_its_name(found):
    head = "import vllm\ndef vllm_version_at_least(v):\n    return compare(vllm.__version__, v)\n"
    assert found(f"{head}if vllm_version_at_least('1.0'):\n    from vllm.m import gone\n") == [("P201", "info")]


@pytest.mark.parametrize(
    "head",
    [
        "import vllm\nV = vllm.__version__\n",
        "from importlib.metadata import version\nV = version('vllm')\n",
        "import vllm as engine\nV = engine.__version__\n",
    ],
)
def test_a_helper_is_a_guard_by_what_its_names_stand_for(found, head):
    helper = "from packaging.version import Version\ndef is_old():\n    return Version(V) < Version('0.30')\n"
    assert found(f"{head}{helper}if is_old():\n    from vllm.m import gone\n") == []


@pytest.mark.parametrize(
    "handler",
    [
        "raise",
        "raise RuntimeError('no') from None",
        "sys.exit('no')",
        "import sys\n    sys.exit('no')",
        "exit(1)",
        "give_up()",
        "def fail(): raise SystemExit(1)\n    fail()",
        "log.error('no')\n    raise",
        "if log:\n        raise\n    else:\n        sys.exit(1)",
    ],
)
@pytest.mark.parametrize("caught", ["ImportError", "Exception", "(ImportError, KeyError)"])
def test_a_handler_that_raises_or_exits_provides_for_nothing(found, caught, handler):
    head = "import sys\ndef give_up():\n    log()\n    raise SystemExit(1)\n"
    text = f"{head}try:\n    from vllm.m import gone\nexcept {caught}:\n    {handler}\n"
    assert found(text) == [("P201", "error")]


def test_the_first_handler_that_catches_it_counts(found):
    text = "try:\n    from vllm.m import gone\nexcept ImportError:\n    raise\nexcept Exception:\n    pass\n"
    assert found(text) == [("P201", "error")]


def test_an_import_error_is_no_attribute_error(found):
    """``module.name`` raises AttributeError, which ``except ImportError`` lets through."""
    text = "import vllm.m as m\ntry:\n    f = m.gone\nexcept {}:\n    f = None\n"
    assert found(text.format("ImportError")) == [("P201", "error")]
    assert found(text.format("AttributeError")) == [("P201", "info")]


def test_a_handler_runs_where_the_attempt_has_failed(found):
    """So what it imports in its turn has to be there; where the attempt succeeds it is not looked at."""
    text = "try:\n    from vllm.m import {}\nexcept ImportError:\n    from vllm.n import other\n"
    assert found(text.format("gone")) == [("P213", "error"), ("P201", "info")]
    assert found(text.format("kept")) == []


def test_code_after_a_handler_that_leaves_needs_the_attempt_to_succeed(found):
    text = """
        def f():
            try:
                from vllm.m import gone
            except ImportError:
                return
            from vllm.n import x
    """
    assert found(text) == [("P201", "info")]


SILENT = [
    "if hasattr(m.Engine, 'step'):\n    m.Engine.step = mine",
    "if hasattr(m.Engine, 'step'):\n    m.Engine.step = mine\nelse:\n    log.warning('no step')",
    "def go():\n    if not hasattr(m.Engine, 'step'):\n        return\n    m.Engine.step = mine",
    "try:\n    m.Engine.step = mine\nexcept AttributeError:\n    pass",
    "try:\n    original = m.Engine.step\n    m.Engine.step = mine\nexcept Exception as e:\n    logger.warning('%s', e)",
    "original = getattr(m.Engine, 'step', None)\nif original is not None:\n    m.Engine.step = mine",
    "import contextlib\nwith contextlib.suppress(AttributeError):\n    m.Engine.step = mine",
]


@pytest.mark.parametrize("text", SILENT)
def test_a_patch_that_stops_applying_without_a_word_is_an_error(found, text):
    report = found(f"import vllm.m as m\ndef mine(self): return 9\n{text}\n")
    assert ("P221", "error") in report
    assert {level for code, level in report if code != "P221"} <= {"info"}


NOT_LOST = [
    "if vllm.__version__ < '0.30':\n    m.Engine.step = mine",
    "if hasattr(m.Engine, 'step'):\n    m.Engine.step = mine\nelse:\n    m.Engine.user = mine",
    "if not hasattr(m.Engine, 'user'):\n    m.Engine.user = mine",
    "def go():\n    if hasattr(m, 'kept'):\n        m.Engine.user = mine\n        return\n    m.Engine.step = mine",
]


@pytest.mark.parametrize("text", NOT_LOST)
def test_a_patch_that_is_not_for_the_release_or_has_another_place_is_none(found, text):
    assert found(f"import vllm\nimport vllm.m as m\ndef mine(self): return 9\n{text}\n") == []


@pytest.mark.parametrize(
    "test",
    [
        "not hasattr(m.kept, '_mine')",
        "not getattr(m.kept, '_mine', False)",
        "getattr(m.Engine.user, '__wrapped__', None) is None",
        "not hasattr(m.Engine, '_mine')",
    ],
)
def test_the_mark_of_a_patch_is_not_there_before_it(found, test):
    head = "import vllm.m as m\ndef mine(self): return 9\n"
    assert found(f"{head}if {test}:\n    from vllm.m import gone\n") == [("P201", "error")]
    assert found(f"{head}def go():\n    if not ({test}):\n        return\n    m.gone = mine\n") == [("P201", "error")]


POLYFILLS = [
    "if not hasattr(m.Engine, 'step'):\n    m.Engine.step = mine",
    "try:\n    m.Engine.step\nexcept AttributeError:\n    m.Engine.step = mine",
    "if not hasattr(m, 'gone'):\n    m.gone = mine\nfrom vllm.m import gone",
    "if not hasattr(m.Engine, 'step'):\n    m.Engine.step = mine\nclass E(m.Engine):\n    f = lambda self: self.step()",
    "import sys\ntry:\n    import vllm.old\nexcept ImportError:\n    sys.modules['vllm.old'] = mine",
    "import sys\nif not find_spec('vllm.old'):\n    sys.modules['vllm.old'] = mine\nfrom vllm.old import thing",
]


@pytest.mark.parametrize("text", POLYFILLS)
def test_a_name_that_is_set_where_it_is_missing_is_none_that_is_lost(make, held, tmp_path, text):
    base, new = held("source", make("0.28.0", m=BASE, old="thing = 1"), make("0.32.0", m=NEXT))
    file = tmp_path / "plugin.py"
    head = "import vllm.m as m\nfrom importlib.util import find_spec\ndef mine(self): return 9\n"
    file.write_text(f"{head}{text}\n", encoding="utf-8")
    assert [one for one in audit([read(file)], base, [new]).findings if one.level != "info"] == []


def test_imports_from_a_module_that_is_replaced_are_still_judged(make, held, tmp_path):
    """The replacement takes effect when its code runs; an import before that is of vLLM's own module."""
    base, new = held("source", make("0.28.0", m=BASE, old="thing = 1"), make("0.32.0", m=NEXT))
    file = tmp_path / "plugin.py"
    text = "import sys, types\nfrom vllm.old import thing\ndef register():\n    sys.modules['vllm.old'] = types\n"
    file.write_text(text, encoding="utf-8")
    found = audit([read(file)], base, [new]).findings
    assert ("P201", "error", "import vllm.old:thing") in [(one.code, one.level, one.subject) for one in found]


def test_an_import_below_the_replacement_of_its_module_is_the_packages_own(make, held, tmp_path):
    base, new = held("source", make("0.28.0", m=BASE, old="thing = 1"), make("0.32.0", m=NEXT))
    file = tmp_path / "plugin.py"
    file.write_text(
        "import sys, types\nsys.modules['vllm.old'] = types\nfrom vllm.old import thing\n", encoding="utf-8"
    )
    found = audit([read(file)], base, [new]).findings
    assert "import vllm.old:thing" not in [one.subject for one in found]


@pytest.mark.parametrize("test", ["False", "0", "None"])
def test_code_that_never_runs_is_not_reported(found, test):
    assert found(f"if {test}:\n    from vllm.m import gone\n") == []
    assert found(f"if {test}:\n    pass\nelse:\n    from vllm.m import gone\n") == [("P201", "error")]


ALTERNATIVES = [
    "try:\n    from vllm.m import Engine as E\nexcept ImportError:\n    from vllm.old import Engine as E\nx = E.user",
    "try:\n    from vllm.old import Engine as E\nexcept ImportError:\n    from vllm.m import Engine as E\nE.user(1)",
    "try:\n    from vllm import m\nexcept ImportError:\n    from vllm import old as m\nx = m.Engine.user",
    "try:\n    from vllm.old import Engine as E\nexcept ImportError:\n    class E:\n        user = 1\nx = E.user",
]


@pytest.mark.parametrize("text", ALTERNATIVES)
def test_an_attribute_of_one_of_two_classes_is_looked_up_in_the_one_that_is_there(make, held, tmp_path, text):
    base, new = held("source", make("0.28.0", m=BASE, old=BASE), make("0.32.0", m=NEXT))
    file = tmp_path / "plugin.py"

    def errors(package):
        file.write_text(f"{package}\n", encoding="utf-8")
        return [one.code for one in audit([read(file)], base, [new]).findings if one.level != "info"]

    assert errors(text) == []
    if "class E" not in text:
        assert errors(text.replace("user", "step")) == ["P201"]


def test_what_an_inner_handler_catches_does_not_fail_the_outer_attempt(found):
    text = """
    try:
        import vllm
        try:
            from vllm.m import gone
        except ImportError:
            gone = None
        if vllm.__version__ < "0.30":
            from vllm.m import gone as other
        HAVE = True
    except ImportError:
        HAVE = False
    if HAVE:
        import vllm.nowhere
    """
    assert ("P213", "error") in found(text)
    assert ("P213", "error") not in found(text.replace("if HAVE", "if not HAVE"))


@pytest.mark.parametrize(("name", "there"), [("gone", False), ("kept", True)])
def test_a_flag_that_is_set_where_failures_are_suppressed(found, name, there):
    head = f"import contextlib\nHAS = False\nwith contextlib.suppress(ImportError):\n    from vllm.m import {name}\n"
    assert (("P213", "error") in found(f"{head}    HAS = True\nif HAS:\n    import vllm.nowhere\n")) is there
    text = "import contextlib\ntry:\n    import os, vllm\n    with contextlib.suppress(ImportError):\n"
    text += f"        from vllm.m import {name}\n    HAVE = True\n"
    text += "except ImportError:\n    HAVE = False\nif HAVE:\n    import vllm.nowhere\n"
    assert "P213" in [code for code, _ in found(text)]


def test_a_helper_that_tries_an_import(found):
    head = "def has():\n    try:\n        from vllm.m import {}\n        return True\n"
    head += "    except ImportError:\n        return False\n"
    text = f"{head}if has():\n    import vllm.nowhere\n"
    assert ("P213", "error") not in found(text.format("gone"))
    assert ("P213", "error") in found(text.format("kept"))


def test_a_module_that_is_imported_for_some_releases_only_is_judged_in_these(found):
    """``if vllm_version_is(...): from . import patch_old``."""
    main = "from plug.tools import vllm_version_is\nif vllm_version_is('{}'):\n    from plug import patch\n"
    patch = "from vllm.m import Engine, gone\ndef mine(self): return 9\nEngine.step = mine\n"
    tools = "import vllm\ndef vllm_version_is(target):\n    return vllm.__version__ == target\n"
    assert found(main.format("0.28.0"), patch=patch, tools=tools) == []
    assert found(main.format("0.32.0"), patch=patch, tools=tools) == [("P201", "error")] * 2


def test_code_that_is_not_for_the_base_is_held_against_the_newer_release_alone(make, held, tmp_path):
    """Its signature in the base is none that the code was written for."""
    base, new = held("source", make("0.28.0", m="def f(a): ..."), make("0.32.0", m="def f(b, c): ..."))
    text = "import vllm\nif vllm.__version__ >= '0.30':\n    from vllm.m import f\nelse:\n    from vllm.m import f\n"
    (tmp_path / "plugin.py").write_text(text)
    assert audit([read(tmp_path / "plugin.py")], base, [new]).findings == ()


def test_an_attribute_that_is_read_for_older_releases_only_is_not_missed(make, held, tmp_path):
    was, now = "class C:\n    def __init__(self): self.{0} = 1\n    def f(self): ...\n    def g(self): self.f()\n", "y"
    base, new = held("source", make("0.28.0", m=was.format("x")), make("0.32.0", m=was.format(now)))
    text = "import vllm\nfrom vllm.m import C\ndef mine(self):\n    if {}:\n        return self.x\nC.f = mine\n"
    for test, codes in (("vllm.__version__ < '0.30'", []), ("vllm.__version__ > '0.30'", ["P210"]), ("a", ["P210"])):
        (tmp_path / "plugin.py").write_text(text.format(test))
        report = audit([read(tmp_path / "plugin.py")], base, [new])
        assert [one.code for one in report.findings if one.level == "error"] == codes


def test_a_flag_that_depends_on_itself_is_left_open(found):
    flag = "old = None\nif not old and vllm.__version__:\n    old = True\n"
    text = f"import vllm\n{flag}if old:\n    from vllm.m import gone\n"
    assert [code for code, _ in found(text)] == ["P201"]


@pytest.mark.parametrize(
    "errors",
    [
        "ERRORS = (ImportError, AttributeError)\n{}except ERRORS:\n    gone = None\n",
        "ERRORS = ImportError\n{}except ERRORS:\n    gone = None\n",
        "class Known:\n    ERRORS = (ImportError,)\n{}except Known.ERRORS:\n    gone = None\n",
    ],
)
def test_a_variable_with_the_exceptions_that_are_caught(found, errors):
    attempt = "try:\n    from vllm.m import gone\n"
    assert ("P201", "error") not in found(errors.format(attempt))
    assert ("P201", "error") in found(errors.replace("ImportError", "KeyError").format(attempt))


def test_an_outcome_that_is_kept_on_the_object(found):
    text = """
    import vllm.m as m
    class Mine:
        def __init__(self):
            self.has_gone = hasattr(m, "gone")
        def run(self):
            if self.has_gone:
                m.gone()
        def leave(self):
            if not self.has_gone:
                return
            m.gone()
    class Below(Mine):
        def more(self):
            return m.gone() if self.has_gone else None
    """
    assert found(text) == []
    assert ("P201", "error") in found(text.replace("if self.has_gone:", "if not self.has_gone:"))
    of_object = text.replace('hasattr(m, "gone")', 'hasattr(self.config, "gone")')
    assert found(of_object).count(("P201", "error")) == 1, "what an object has says nothing of the release"
    later = "def reset(self):\n            self.has_gone = ask()\n        def run"
    changed = text.replace("def run", later)
    assert found(changed) != [], "what is stored later may be anything"


def test_a_variable_that_is_computed_from_itself_again_and_again(found, monkeypatch):
    """Each of its values refers to all of them, and each is evaluated once: not every chain from one to another."""
    evaluated = []
    value = _Evaluator.value

    def count(self, node, frame):
        evaluated.append(node)
        assert len(evaluated) < 50_000
        return value(self, node, frame)

    monkeypatch.setattr(_Evaluator, "value", count)
    steps = "".join(f"    if x:\n        x = getattr(x, 'a{place}', x)\n" for place in range(8))
    assert found(f"import vllm\nfrom vllm import m\ndef f(x):\n{steps}    if x:\n        m.gone()\n")
