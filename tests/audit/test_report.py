"""A package held against releases: rows, steps, findings and diffs."""

from __future__ import annotations

import pytest

from vllm_graft.audit.copies import copies
from vllm_graft.audit.report import audit, modules_of, with_diffs
from vllm_graft.audit.uses import read

UPSTREAM = """
class Engine:
    def __init__(self):
        self.queue = []
    def step(self, batch):
        return batch
    def user(self):
        self.step(1)
        self.drain()
    def drain(self):
        return self.queue
def helper(a):
    return a
"""


@pytest.fixture
def judged(make, held, tmp_path):
    """judged(package, *releases) -> the report; each release is the text of vllm.m, the first is the base."""

    def run(package, *texts, steps=False):
        file = tmp_path / "plugin.py"
        file.write_text(package, encoding="utf-8")
        made = [make(f"0.{number}.0", m=text) for number, text in enumerate(texts, 1)]
        base, *against = held("source", *made)
        return audit([read(file)], base, against, steps=steps)

    return run


def codes(report):
    return [(finding.code, finding.level) for finding in report.findings]


PATCH = "from vllm.m import Engine\ndef mine(self, batch):\n    return 0\nEngine.step = mine\n"


def test_an_unchanged_release_has_nothing_to_report(judged):
    report = judged(PATCH, UPSTREAM, UPSTREAM)
    assert {cell.verdict.state for row in report.rows for cell in row.cells} == {"same"}
    assert report.findings == ()


def test_a_replaced_method_whose_code_changed_is_a_warning(judged):
    changed = UPSTREAM.replace("return batch", "return list(batch)")
    report = judged(PATCH, UPSTREAM, changed)
    assert codes(report) == [("P203", "warning")]
    assert report.findings[0].where.endswith("plugin.py:4")
    assert "from 0.1.0 to 0.2.0" in report.findings[0].what


def test_a_wrap_of_changed_code_is_information(judged):
    wrap = PATCH.replace("def", "orig = Engine.step\ndef").replace("return 0", "return orig(self, batch)")
    changed = UPSTREAM.replace("return batch", "return list(batch)")
    assert codes(judged(wrap, UPSTREAM, changed)) == [("P203", "info")]


def test_an_override_that_cannot_take_a_new_parameter_is_an_error(judged):
    grown = UPSTREAM.replace("def step(self, batch)", "def step(self, batch, throttle=False)")
    one = "from vllm.m import Engine\nclass Mine(Engine):\n    def step(self, batch):\n        return 0\n"
    assert codes(judged(one, UPSTREAM, grown)) == [("P209", "info")], "vLLM calls it as before"
    grown += "def drive(engine: Engine):\n    engine.step([], throttle=True)\n"
    assert codes(judged(one, UPSTREAM, grown)) == [("P209", "error")]
    takes = one.replace("self, batch", "self, batch, **more")
    assert codes(judged(takes, UPSTREAM, grown)) == [("P209", "info")]


def test_a_broken_signature_is_an_error_unless_the_code_takes_anything(judged):
    broken = UPSTREAM.replace("def step(self, batch)", "def step(self, batch, now)")
    assert codes(judged(PATCH, UPSTREAM, broken)) == [("P202", "error")]
    anything = PATCH.replace("self, batch", "self, *args, **kwargs")
    assert codes(judged(anything, UPSTREAM, broken)) == [("P202", "info")]


@pytest.mark.parametrize(
    ("was", "now", "mine", "level"),
    [
        ("batch, *, old=1, kept=2", "batch, *, kept=2", "self, batch, *, old=1, kept=2, more=3", "info"),
        ("batch, *, old=1, kept=2", "batch, *, kept=2", "self, batch, *, old, kept=2", "error"),
        ("batch, old=1", "batch", "self, batch, old=1", "info"),
        ("first, second", "second, first", "self, first, second", "error"),
        ("batch, old=1", "batch, *, new", "self, batch, old=1", "error"),
        ("batch, old=1", "batch, *, new", "self, batch, old=1, **more", "info"),
    ],
)
def test_an_override_that_takes_more_than_upstream_asks_for_still_fits(judged, was, now, mine, level):
    texts = [UPSTREAM.replace("def step(self, batch)", f"def step(self, {each})") for each in (was, now)]
    package = f"from vllm.m import Engine\nclass Mine(Engine):\n    def step({mine}):\n        return 0\n"
    assert codes(judged(package, *texts)) == [("P202", level)]


def test_a_name_that_is_gone_is_an_error_unless_the_code_provides_for_it(judged):
    gone = UPSTREAM.replace("def helper(a):\n    return a", "")
    assert codes(judged("from vllm.m import helper\n", UPSTREAM, gone)) == [("P201", "error")]
    guarded = "try:\n    from vllm.m import helper\nexcept ImportError:\n    helper = None\n"
    assert codes(judged(guarded, UPSTREAM, gone)) == [("P201", "info")]


def test_a_patch_of_what_nothing_calls_any_more_is_an_error(judged):
    silent = UPSTREAM.replace("self.step(1)", "pass")
    assert codes(judged(PATCH, UPSTREAM, silent)) == [("P208", "error")]


def test_code_that_upstream_has_taken_over_is_no_longer_needed(judged):
    taken = UPSTREAM.replace("return batch", "return 0")
    assert codes(judged(PATCH, UPSTREAM, taken)) == [("P204", "warning")]


DECLARED = """
from vllm_graft import VLLMPatch, wrap
class P(VLLMPatch["vllm.m:Engine"], name="p", vllm="{range}", remove_when="{when}"):
    @wrap
    def step(self, call, batch):
        return call(batch)
"""


def test_a_patch_past_its_end_is_no_longer_needed(judged):
    report = judged(DECLARED.format(range="", when="vLLM 0.2 is the oldest"), UPSTREAM, UPSTREAM)
    assert codes(report) == [("P204", "warning")]
    assert codes(judged(DECLARED.format(range="", when="vLLM 0.3 is the oldest"), UPSTREAM, UPSTREAM)) == []


def test_a_reason_that_names_no_version_never_ends(judged):
    assert codes(judged(DECLARED.format(range="", when="#4711 is merged"), UPSTREAM, UPSTREAM)) == []


def test_a_patch_is_judged_beyond_its_range_and_a_start_refuses_it(judged):
    """What became of its target says whether the range can be widened."""
    closed = DECLARED.format(range="<0.2", when="")
    assert codes(judged(closed, UPSTREAM, "")) == [("P201", "error"), ("P222", "error")]
    (finding,) = judged(closed, UPSTREAM, UPSTREAM).findings
    assert (finding.code, finding.level, finding.subject) == ("P222", "error", "patch p")
    assert "it is for vLLM <0.2, so a start with 0.2.0 refuses it" in finding.what
    assert codes(judged(DECLARED.format(range="<0.3", when=""), UPSTREAM, UPSTREAM)) == []


MARKED = """
from vllm_graft import VLLMPatch, add, replace, wrap
class P(VLLMPatch["vllm.m:Engine"], name="p"):
    @{mark}
    def {name}(self, {call}):
        return 0
"""


@pytest.mark.parametrize(
    ("mark", "name", "call", "codes_found"),
    [
        ("wrap", "stepp", "call", [("P213", "error")]),
        ("replace", "stepp", "x", [("P213", "error")]),
        ("add", "step", "batch", [("P212", "error")]),
        ("add", "stepp", "x", []),
        ("wrap", "step", "call, *args, **kwargs", []),
        ("wrap", "step", "call", [("P222", "error")]),
        ('wrap(vllm="<0.1")', "step", "call, *args, **kwargs", [("P222", "error")]),
        ("replace\n    @staticmethod", "step", "x", [("P222", "error")]),
        ("wrap", "__eq__", "call", []),
    ],
)
def test_what_a_start_refuses_is_an_error(judged, mark, name, call, codes_found):
    """Though neither release differs."""
    assert codes(judged(MARKED.format(mark=mark, name=name, call=call), UPSTREAM, UPSTREAM)) == codes_found


def test_a_name_that_a_class_of_another_package_may_have_is_left_to_the_start(judged):
    foreign = f"import torch\n{UPSTREAM.replace('class Engine:', 'class Engine(torch.nn.Module):')}"
    assert codes(judged(MARKED.format(mark="wrap", name="cuda", call="call"), foreign, foreign)) == []


def test_an_attribute_that_the_code_reads_and_that_vanished_is_an_error(judged):
    reads = PATCH.replace("return 0", "return self.queue")
    renamed = UPSTREAM.replace("self.queue", "self.waiting")
    found = judged(reads, UPSTREAM, renamed).findings
    assert [(finding.code, finding.level) for finding in found] == [("P210", "error")]
    assert "self.queue" in found[0].what
    assert found[0].where.endswith("plugin.py:3")


def test_a_keyword_that_the_original_no_longer_takes_is_an_error(judged):
    passes = "from vllm.m import Engine\nclass Mine(Engine):\n"
    passes += "    def step(self, *a, **k):\n        return super().step(batch=1)\n"
    renamed = UPSTREAM.replace("batch", "work")
    assert ("P211", "error") in codes(judged(passes, UPSTREAM, renamed))


def test_a_method_that_upstream_grows_under_a_subclass_is_a_warning(judged):
    mine = "from vllm.m import Engine\nclass Mine(Engine):\n    def flush(self):\n        return 0\n"
    grown = UPSTREAM.replace("    def drain", "    def flush(self): ...\n    def drain")
    assert codes(judged(mine, UPSTREAM, grown)) == [("P212", "warning")]
    assert not any(row.use.way == "override" for row in judged(mine, UPSTREAM, UPSTREAM).rows)


def test_steps_compare_each_release_with_the_one_before(judged):
    changed = UPSTREAM.replace("return batch", "return list(batch)")
    report = judged(PATCH, UPSTREAM, changed, changed, steps=True)
    row = next(row for row in report.rows if row.use.way == "replace")
    assert [(cell.since, cell.release, cell.verdict.state) for cell in row.cells] == [
        ("0.1.0", "0.2.0", "body"),
        ("0.2.0", "0.3.0", "same"),
    ]
    assert codes(report) == [("P203", "warning")]
    assert "from 0.1.0 to 0.3.0" in report.findings[0].what


def test_a_changed_cell_gets_upstreams_diff(judged):
    changed = UPSTREAM.replace("return batch", "return list(batch)")
    texts = {"0.1.0": "def step(self, batch):\n    return batch\n", "0.2.0": "def step(self, batch):\n    return 1\n"}
    report = with_diffs(judged(PATCH, UPSTREAM, changed), lambda version, module, name: texts[version])
    (diff,) = [cell.diff for row in report.rows for cell in row.cells if cell.diff]
    assert "-    return batch" in diff
    assert "+++ vLLM 0.2.0" in diff


def test_a_file_that_cannot_be_read_is_reported_with_the_rest(make, held, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("from vllm.m import helper\n")
    (tmp_path / "p" / "bad.py").write_text("import vllm\ndef (:\n")
    base, new = held("source", make("0.1.0", m=UPSTREAM), make("0.2.0", m=UPSTREAM))
    report = audit([read(tmp_path / "p")], base, [new])
    assert codes(report) == [("P220", "error")]
    assert len(report.rows) == 1


def test_a_patch_of_a_name_that_vllm_never_had_is_an_error(judged):
    misspelt = PATCH.replace("Engine.step", "Engin.step").replace("import Engine", "import Engin")
    assert ("P213", "error") in codes(judged(misspelt, UPSTREAM, UPSTREAM))


LONG = "def step(self, batch):\n" + "".join(f"    x{n} = batch + {n}\n" for n in range(12)) + "    return x1\n"


def test_a_copied_function_is_told_with_its_release(judged):
    mine = LONG.replace("x3 = batch + 3", "x3 = batch + 33")
    package = f"from vllm.m import Engine\n{mine}Engine.step = step\n"
    report = judged(package, UPSTREAM, UPSTREAM)
    texts = {"0.1.0": LONG, "0.2.0": LONG.replace("x7 = batch + 7", "x7 = other(batch)").replace("x9", "y9")}
    ((row, origin, finding),) = copies(report, ["0.1.0", "0.2.0"], lambda version, *name: texts[version])
    assert (row.use.way, origin.release) == ("replace", "0.1.0")
    assert (finding.code, finding.level) == ("P214", "warning")
    assert "--from 0.1.0 --to 0.2.0" in finding.fix
    assert "1 of its 14 lines are its own, 1 of upstream's is left out" in finding.what


def test_code_of_its_own_is_no_copy(judged):
    package = f"from vllm.m import Engine\n{LONG}Engine.step = step\n"
    other = "def step(self, batch):\n" + "".join(f"    self.do_{n}(batch)\n" for n in range(12))
    assert list(copies(judged(package, UPSTREAM, UPSTREAM), ["0.1.0"], lambda *name: other)) == []


def test_a_module_imported_by_name_is_judged_as_one_imported_whole(judged):
    """``from vllm import m`` and ``import vllm.m`` give the same names, findings and diffs."""
    reads = "def mine(self, batch):\n    return self.queue\nm.Engine.step = mine\n"
    changed = UPSTREAM.replace("queue", "waiting").replace("return batch", "return list(batch)")
    reports = [judged(f"{how}\n{reads}", UPSTREAM, changed) for how in ("from vllm import m", "import vllm.m as m")]
    assert [[(row.use.name, row.cells) for row in report.rows] for report in reports[:1]] == [
        [(row.use.name, row.cells) for row in report.rows] for report in reports[1:]
    ]
    assert [codes(report) for report in reports] == [[("P210", "error"), ("P203", "warning")]] * 2
    asked = []
    with_diffs(reports[0], lambda *name: asked.append(name))
    assert ("0.1.0", "vllm.m", "Engine.step") in asked


def test_all_modules_that_a_name_may_lie_in_are_asked_for_together(tmp_path):
    (tmp_path / "plugin.py").write_text("from vllm.v1 import engine\nengine.core.step = 1\n")
    assert "vllm.v1.engine.core" in modules_of([read(tmp_path / "plugin.py")])


def test_what_code_in_another_file_leans_on_is_told_with_that_file(make, held, tmp_path):
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "__init__.py").write_text("from vllm.m import Engine\nfrom .code import mine\nEngine.step = mine\n")
    (plugin / "code.py").write_text("\n\n\n\ndef mine(self, batch):\n    return self.queue\n")
    texts = (UPSTREAM, UPSTREAM.replace("queue", "waiting"))
    base, new = held("source", *(make(f"0.{number}.0", m=text) for number, text in enumerate(texts)))
    (found,) = [one for one in audit([read(plugin)], base, [new]).findings if one.code == "P210"]
    assert found.where == "plugin/code.py:6"


def test_a_name_put_on_a_class_or_module_that_has_none_such_is_added(judged):
    """A marker, a helper: nothing to report, until upstream has the name itself."""
    package = "import vllm.m as m\nm.Engine.my_helper = lambda self: 1\nm._PATCHED = True\n"
    report = judged(package, UPSTREAM, UPSTREAM)
    assert report.findings == ()
    assert [row.use.way for row in report.rows] == ["import"]
    grown = UPSTREAM.replace("    def drain", "    def my_helper(self): ...\n    def drain")
    assert codes(judged(package, UPSTREAM, grown)) == [("P212", "warning")]


def test_a_name_that_the_package_itself_adds_is_not_missed_where_it_is_read(judged):
    """By an assignment, or in the class of a patch framework of another package."""
    assigned = "import vllm.m as m\nm._STATE = None\ndef f():\n    return m._STATE.size\n"
    patched = """
from other.patching import OtherPatch as VLLMPatch
from vllm import m
class State(VLLMPatch[m]):
    _STATE = None
class Runner(VLLMPatch[m.Engine]):
    _orig_step = m.Engine.step
def size():
    from vllm.m import _STATE
    return m._STATE.size
"""
    for package in (assigned, patched):
        assert judged(package, UPSTREAM, UPSTREAM).findings == ()
    assert codes(judged("from vllm.m import _STATE\n", UPSTREAM, UPSTREAM)) == [("P213", "error")]


def test_an_original_that_is_kept_under_another_name_is_not_misspelt(judged):
    names = ("_orig_drain", "_drain", "drain_v2", "drain2", "drain_new")
    keeps = "m.Engine._original_step = m.Engine.step\n"
    keeps += "".join(f"m.Engine.{name} = m.Engine.drain\n" for name in names)
    assert judged(f"import vllm.m as m\n{keeps}", UPSTREAM, UPSTREAM).findings == ()


def test_a_comparison_with_a_value_is_no_copy_of_it(judged):
    """``request.status = ...`` after ``if request.status == Status.X`` changes an object, and not vLLM."""
    text = "from vllm.m import Status\ndef f(r):\n    if r.status == Status.OLD:\n        r.status = Status.NEW\n"
    status = "class Status:\n    OLD = 1\n    NEW = 2\n"
    report = judged(text, status, status.replace("    OLD = 1\n", ""))
    assert [row.use.way for row in report.rows if row.use.changes_vllm] == []


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("m.Engine.stepp = f", "'step'"), ("m.helpr = f", "'helper'"), ("m.Engine.drainn = f", "'drain'")],
)
def test_a_name_that_is_nearly_one_of_vllms_is_a_warning(judged, wrong, right):
    """An assignment to a misspelt name succeeds and has no effect."""
    (finding,) = judged(f"import vllm.m as m\ndef f(*a): ...\n{wrong}\n", UPSTREAM, UPSTREAM).findings
    assert (finding.code, finding.level) == ("P213", "warning")
    assert right in finding.what
