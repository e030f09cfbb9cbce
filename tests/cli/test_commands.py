"""The commands that start nothing: their output, their JSON and their exit status."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from vllm_graft.cli import COMMANDS, main
from vllm_graft.cli.serve import check_set_up, with_default_model
from vllm_graft.errors import ConfigError
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.record import Record, Stall
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.plan.catalogue import SHIPPED, load
from vllm_graft.points import POINTS
from vllm_graft.testing.packages import lay_out


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GRAFT_CONFIG", "VLLM_CUSTOM_PATCHES", "VLLM_PLUGINS", "GRAFT_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    """--help exits 0 and says what the command is for."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert command in capsys.readouterr().out


def test_without_a_command_they_are_listed(capsys: pytest.CaptureFixture[str]):
    """Each with its one-line help, as ``--help`` has it; and exit status 0."""
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command} " in shown


def test_the_package_runs_as_a_program():
    """``python -m vllm_graft`` is the command."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_graft", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("vllm-graft ")


def test_output_that_is_closed_or_lacks_a_letter_is_no_traceback(tmp_path: Path):
    """A daemon may have none, and a terminal may be older than Unicode."""
    Path("graft.toml").write_text('[defaults]\nstats = ["request-log"]\n')
    command = [sys.executable, "-m", "vllm_graft", "plan", "--model", "modèle…"]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert r"for mod\xe8le\u2026" in shown.stdout
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    assert subprocess.run(closed, stderr=subprocess.PIPE, check=False).stderr == b""


def test_output_that_finds_no_space_is_one_line():
    """Such as a file on a full disk, whether it is met at once or when what is left is written."""
    for command in (["points"], ["points", "--json"]):
        with open("/dev/full", "wb") as full:
            words = [sys.executable, "-m", "vllm_graft", *command]
            done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        full_disk = "the output cannot be written: [Errno 28] No space left on device. Next: free space on its disk"
        assert (done.returncode, done.stderr) == (2, f"vllm-graft: {full_disk}\n")


def test_items_lists_what_ships_and_what_is_installed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With point, package, options and keys, as a table and as JSON; one that cannot be imported is a finding."""
    sink = (
        "from vllm_graft import StatSink\nclass Sink(StatSink):\n    '''Keep figures.'''\n    options = {'path': 'x'}\n"
        "class Mute(StatSink): ...\n"
    )
    entries = {
        "my-sink": "listed_items:Sink",
        "mute": "listed_items:Mute",
        "gone": "listed_items:Gone",
        "stray": "decimal:Decimal",
    }
    lay_out(tmp_path / "site", "acme-graft", {"vllm_graft.plugins": entries}, {"listed_items": sink})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert main(["items"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^my-sink +stats +acme-graft +path = \"x\" +-$", shown, re.MULTILINE)
    assert re.search(r"^xtc +sampler +vllm-graft .*xtc_probability, xtc_threshold$", shown, re.MULTILINE)
    assert "P010 error: item gone: the item 'gone' of acme-graft cannot be imported from listed_items:Gone" in shown
    assert "P010 error: item stray: decimal:Decimal of acme-graft fulfils no contract" in shown
    assert main(["items", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["items"]}
    assert set(rows) == {*SHIPPED, "my-sink", "mute"}
    assert rows["mute"]["summary"] == "", "the contract's own words are not the item's"
    assert (rows["my-sink"]["summary"], rows["my-sink"]["options"]) == ("Keep figures.", {"path": "x"})
    assert [key["name"] for key in rows["xtc"]["keys"]] == ["xtc_probability", "xtc_threshold"]
    assert [key["name"] for key in rows["sink-window"]["keys"]] == ["kv_window"]
    assert rows["xtc"]["summary"].endswith("."), "a whole sentence, though it takes several lines"
    assert len(document["findings"]) == 2


def test_one_item_in_full(capsys: pytest.CaptureFixture[str]):
    assert main(["items", "priority-fairness"]) == 0
    assert "named under `scheduler` in graft.toml" in capsys.readouterr().out
    assert main(["items", "priority-fairnes"]) == 2
    assert "there is no item 'priority-fairnes' (did you mean 'priority-fairness'?)" in capsys.readouterr().err


def test_points_names_contracts_that_are_there(capsys: pytest.CaptureFixture[str]):
    """Those of vllm-graft can be imported; a point that is not bound has none."""
    for point in POINTS:
        assert bool(point.contracts) <= bool(point.bound)
        for contract in point.contracts:
            if contract.startswith("vllm_graft"):
                load(contract, point.name, "vllm-graft")
    assert main(["points"]) == 0
    shown = capsys.readouterr().out
    assert "Truncation" in shown
    assert re.search(r"^io-processor +io_processor +not bound yet ", shown, re.MULTILINE)


def test_points_prints_the_table(capsys: pytest.CaptureFixture[str]):
    """As a table, as JSON, and one row in full."""
    assert main(["points"]) == 0
    assert "50 us per batch" in capsys.readouterr().out
    assert main(["points", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [point.name for point in POINTS]
    assert set(rows[0]) >= {"contracts", "called", "inputs", "outputs", "budget_us", "registered", "roles", "bound"}
    assert main(["points", "stats"]) == 0
    assert "StatSink" in capsys.readouterr().out


def test_an_unknown_point_is_an_error_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    """Exit status 2, one paragraph."""
    assert main(["points", "stat"]) == 2
    assert "there is no point 'stat' (did you mean 'stats'?). Next: run `vllm-graft points`" in capsys.readouterr().err


def test_one_bad_item_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A class that declares nonsense, and a module that ends the process, are named; a plan with it is refused."""
    items = """
from vllm_graft import SamplingStrategy, StatSink
class Keys(SamplingStrategy):
    keys = 5
    def open(self, slot, params): return True
    def step(self, logits, rows): ...
class Options(StatSink):
    options = {"x": {1, 2}}
    def finished(self, requests, batch): ...
"""
    entries = {"keys": "nonsense_items:Keys", "options": "nonsense_items:Options", "exits": "exiting_item:X"}
    modules = {"nonsense_items": items, "exiting_item": "import sys\nsys.exit(4)\n"}
    lay_out(tmp_path / "site", "acme-graft", {"vllm_graft.plugins": entries}, modules)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for form in ([], ["--json"]):
        assert main(["items", *form]) == 1
        shown = capsys.readouterr().out
        assert "request-log" in shown
        assert all(f"item {name}" in shown for name in entries)
    Path("graft.toml").write_text('[defaults]\nstats = ["exits"]\n')
    assert main(["plan", "--model", "m"]) == 2
    assert "'exits' of acme-graft cannot be imported from exiting_item:X: SystemExit: 4" in capsys.readouterr().err
    (tmp_path / "site" / "exiting_item.py").write_text("raise KeyboardInterrupt('on its own')\n")
    assert main(["plan", "--model", "m"]) == 2
    assert "exiting_item:X: KeyboardInterrupt: on its own" in capsys.readouterr().err


def test_a_patch_that_is_tried_stands_on_those_beneath_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Reading cannot judge the property, so the patch is applied in a process, over the one that adds what it wraps."""
    upstream = "class Thing:\n    @property\n    def shown(self): return 1\n"
    patches = """
from vllm_graft import VLLMPatch, add, wrap
class Adds(VLLMPatch["trial_upstream:Thing"], name="adds"):
    @add
    def more(self): return 1
class Outer:
    class Wraps(VLLMPatch["trial_upstream:Thing"], name="wraps"):
        @wrap
        def more(self, call): return call()
        @property
        def shown(self): return self._original_shown
"""
    entries = {"adds": "trial_patches:Adds", "wraps": "trial_patches:Outer.Wraps"}
    modules = {"trial_upstream": upstream, "trial_patches": patches}
    lay_out(tmp_path / "site", "acme-graft", {"vllm_graft.plugins": entries}, modules)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for names, status in (("adds,wraps", 0), ("wraps", 1)):
        monkeypatch.setenv("VLLM_CUSTOM_PATCHES", names)
        assert main(["plan", "--model", "m"]) == status, capsys.readouterr().out
    assert "there is no 'more' to wrap" in capsys.readouterr().out


def test_plan_shows_what_would_be_active_where_and_from_where(capsys: pytest.CaptureFixture[str]):
    """A dry run."""
    Path("graft.toml").write_text(
        '[defaults]\npatches = ["stat-logger-guard"]\n[[profile]]\nmodel = "*8B*"\nendpoint = false\n'
    )
    assert main(["plan", "--model", "org/Llama-8B"]) == 0
    shown = capsys.readouterr().out
    assert "stat-logger-guard" in shown
    assert "graft.toml:2" in shown
    assert "endpoint = false (graft.toml:5)" in shown
    assert main(["plan", "--model", "org/Llama-8B", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["items"][0]["roles"] == ["frontend"]
    assert found["items"][0]["origin"] == "graft.toml:2"
    assert found["findings"] == []


def test_plan_without_configuration_says_so(capsys: pytest.CaptureFixture[str]):
    """Nothing planned is no error."""
    assert main(["plan", "--model", "m"]) == 0
    assert "nothing is planned for m: vLLM would run unmodified" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "variables", "why"),
    [
        (None, {}, "there is no graft.toml in HERE, and none of GRAFT_CONFIG, VLLM_CUSTOM_PATCHES and --additional-co"),
        (
            '[[profile]]\nmodel = "*70B*"\npatches = ["stat-logger-guard"]\n',
            {},
            "[defaults] names nothing, and m, other matches no profile that does (*70B* at graft.toml:1)",
        ),
        (
            '[defaults]\npatches = ["stat-logger-guard"]\n',
            {"VLLM_CUSTOM_PATCHES": ""},
            "VLLM_CUSTOM_PATCHES is set but empty, which disables the patches in graft.toml: stat-logger-guard",
        ),
        ("[defaults]\nendpoint = false\n", {}, "graft.toml names no item"),
    ],
)
def test_plan_says_why_nothing_is_planned(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    variables: dict[str, str],
    why: str,
):
    """For a person and as a finding in JSON; it is no error."""
    if text is not None:
        Path("graft.toml").write_text(text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = ["plan", "--model", "m", "--served-model-name", "other"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert f"P004 info: plan: is empty: {why.replace('HERE', str(Path.cwd()))}" in shown
    assert main([*words, "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["code"] == "P004"


def test_plan_says_what_turns_it_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """By intent it is a warning; by an allow-list that forgot us an error."""
    Path("graft.toml").write_text('[defaults]\npatches = ["stat-logger-guard"]\n')
    monkeypatch.setenv("GRAFT_DISABLE", "1")
    assert main(["plan", "--model", "m"]) == 0
    assert "P011 warning: GRAFT_DISABLE: is set: vLLM runs unmodified" in capsys.readouterr().out
    assert main(["status"]) == 0
    assert "P011 warning: GRAFT_DISABLE: is set" in capsys.readouterr().out
    monkeypatch.delenv("GRAFT_DISABLE")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert main(["plan", "--model", "m"]) == 1
    assert "P011 error: VLLM_PLUGINS: VLLM_PLUGINS='other' does not list graft" in capsys.readouterr().out


def test_plan_finds_a_patch_that_the_installed_vllm_is_too_new_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """What would stop the start shows in the dry run, with exit status 1; and so does an untested vLLM."""
    monkeypatch.setattr("vllm_graft.versions._version_on_disk", lambda: "0.99.0")
    monkeypatch.setattr("vllm_graft.versions.vllm_version", lambda: "0.99.0")
    monkeypatch.setattr("vllm_graft.cli.plan.vllm_version", lambda: "0.99.0")
    monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "stat-logger-guard")
    assert main(["plan", "--model", "m"]) == 1
    shown = capsys.readouterr().out
    assert "P002 warning: vLLM: 0.99.0 is outside the tested range 0.26.0 to 0.33 (exclusive)" in shown
    assert "P003 error: patch stat-logger-guard: it is written for vLLM >=0.26,<0.33, but 0.99.0 is installed" in shown


@pytest.mark.parametrize(
    ("target", "body", "said"),
    [
        (
            "vllm.v1.core.sched.scheduler:Scheduler",
            "@wrap\n    def schedul(self, call): return call()",
            "there is no 'schedul' to",
        ),
        ("vllm.v1.core.sched.scheduler:Scheduler", "@add\n    def schedule(self): ...", "it adds 'schedule', but the"),
        (
            "vllm.core.scheduler:Scheduler",
            "@wrap\n    def schedule(self, call): return call()",
            "there is no module 'core'",
        ),
        (
            "vllm.v1.core.sched.scheduler:Scheduler",
            "@wrap\n    async def schedule(self, call): return call()",
            "is a plain function",
        ),
        (
            "vllm.v1.core.sched.scheduler:Scheduler",
            "@wrap\n    def schedule(self, call): return call()",
            "cannot take what vLLM",
        ),
        (
            "vllm.v1.core.sched.scheduler:Scheduler",
            "@wrap\n    def schedule(self, call, *a, **k): return call(*a, **k)",
            "",
        ),
    ],
)
def test_plan_says_what_a_start_would_refuse(
    target: str,
    body: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """By reading, with exit status 1; vLLM is not imported for it."""
    head = "from vllm_graft import VLLMPatch, add, wrap\n"
    text = f'{head}class Made(VLLMPatch["{target}"], name="made"):\n    {body}\n'
    lay_out(tmp_path / "site", "made", {"vllm_graft.plugins": {"made": "made_up_patch:Made"}}, {"made_up_patch": text})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "made_up_patch", raising=False)
    monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "made")
    assert main(["plan", "--model", "m"]) == bool(said)
    shown = capsys.readouterr().out
    assert ("P003 error: patch made" in shown) == bool(said)
    assert said in shown


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            "@replace\n    def schedule(self, *a, **k): ...",
            "@replace\n    def schedule(self, *a, **k): ...",
            "replaces already",
        ),
        (
            "@add\n    def brand_new(self): ...",
            "@add\n    def brand_new(self): ...",
            "it adds 'brand_new', which patch 'one'",
        ),
        (
            "@wrap\n    def schedule(self, call, *a, **k): return call(*a, **k)",
            "@wrap\n    def schedule(self, call, *a, **k): return call(*a, **k)",
            "",
        ),
        (
            "@replace\n    def schedule(self, *a, **k): ...",
            "@wrap\n    def schedule(self, call, *a, **k): return call(*a, **k)",
            "",
        ),
    ],
)
@pytest.mark.parametrize("more", ["", ', conflicts=["one"]', ', processes=["worker"]'])
def test_plan_says_which_patches_a_start_would_not_take_together(
    first: str,
    second: str,
    said: str,
    more: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Two that define one name and two that exclude each other; those of different processes never meet."""
    target = "vllm.v1.core.sched.scheduler:Scheduler"
    text = (
        "from vllm_graft import VLLMPatch, add, replace, wrap\n"
        f'class One(VLLMPatch["{target}"], name="one", processes=["engine"]):\n    {first}\n'
        f'class Two(VLLMPatch["{target}"], name="two"{more}):\n    {second}\n'
    )
    entries = {"one": "two_made_up_patches:One", "two": "two_made_up_patches:Two"}
    lay_out(tmp_path / "site", "made", {"vllm_graft.plugins": entries}, {"two_made_up_patches": text})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "two_made_up_patches", raising=False)
    monkeypatch.setenv("VLLM_CUSTOM_PATCHES", "one,two")
    if "conflicts" in more:
        said = "declares a conflict with patch 'one'"
    elif "processes" in more:
        said = ""
    assert main(["plan", "--model", "m"]) == bool(said)
    shown = capsys.readouterr().out
    assert ("P003 error: patch two" in shown) == bool(said)
    assert said in shown


def test_plan_warns_of_a_folder_that_this_machine_lacks(capsys: pytest.CaptureFixture[str]):
    """A start here would be refused; the machine that serves may have it."""
    text = '[defaults]\nstats = ["request-log"]\n[options.request-log]\npath = "{}/x.jsonl"\n'
    Path("graft.toml").write_text(text.format("no/such/folder"))
    assert main(["plan", "--model", "m"]) == 0
    shown = capsys.readouterr().out
    assert "P012 warning: stats request-log: would not start on this machine: its option 'path' names a" in shown
    assert "[graft.toml:4]" in shown
    Path("graft.toml").write_text(text.format("."))
    assert main(["plan", "--model", "m"]) == 0
    assert "P012" not in capsys.readouterr().out


@pytest.mark.parametrize("failure", [RuntimeError("on purpose"), SystemExit(0)])
def test_plan_survives_an_item_that_cannot_judge_the_machine(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """The plan is shown all the same, with a warning that names the item."""
    from vllm_graft.plugins.stats.request_log import RequestLog

    def fail(options: dict[str, object]) -> None:
        raise failure

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RequestLog, "check_machine", staticmethod(fail))
    Path("graft.toml").write_text('[defaults]\nstats = ["request-log"]\n')
    assert main(["plan", "--model", "m"]) == 0
    shown = capsys.readouterr().out
    assert "request-log" in shown
    assert "P012 warning: stats request-log: cannot say what this machine lacks: " in shown
    assert f"check_machine raised {type(failure).__name__}: " in shown


def test_plan_says_that_all_is_for_other_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Not that there is no file, which is there and names a patch."""
    from vllm_graft.plugins.patches.stat_logger_guard import StatLoggerGuard

    other = dataclasses.replace(StatLoggerGuard.declaration, models=("*70B*",))
    monkeypatch.setattr(StatLoggerGuard, "declaration", other)
    Path("graft.toml").write_text('[defaults]\npatches = ["stat-logger-guard"]\n')
    assert main(["plan", "--model", "m"]) == 0
    shown = capsys.readouterr().out
    assert "P004 info: plan: is empty: what is named is for other models" in shown
    assert "there is no graft.toml" not in shown


def test_plan_warns_of_a_request_log_that_is_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """A start would refuse it; an empty path is refused with its line."""
    monkeypatch.chdir(tmp_path)
    text = '[defaults]\nstats = ["request-log"]\n[options.request-log]\npath = "{}"\n'
    Path("graft.toml").write_text(text.format(tmp_path))
    assert main(["plan", "--model", "m"]) == 0
    assert "P012 warning: stats request-log: would not start on this machine: its option 'path' names a" in (
        capsys.readouterr().out
    )
    Path("graft.toml").write_text(text.format(""))
    assert main(["plan", "--model", "m"]) == 2
    assert "graft.toml:4: the option 'path' of 'request-log' must not be empty" in capsys.readouterr().err


def test_a_mistake_is_one_paragraph_and_status_2(capsys: pytest.CaptureFixture[str]):
    """No traceback for the user's own mistakes."""
    Path("graft.toml").write_text('[defaults]\npatches = ["nothing-like-it"]\n')
    assert main(["plan", "--model", "m"]) == 2
    assert capsys.readouterr().err.startswith("vllm-graft: graft.toml:2: there is no item 'nothing-like-it'")
    for text in ("{", "[" * 50_000):
        assert main(["plan", "--model", "m", "--additional-config", text]) == 2
        assert "--additional-config: is not JSON" in capsys.readouterr().err


def test_an_unknown_argument_is_refused_except_by_serve(capsys: pytest.CaptureFixture[str]):
    """Only serve hands arguments on."""
    with pytest.raises(SystemExit) as caught:
        main(["status", "--nonsense"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err


def test_status_without_a_server_says_where_it_looked(capsys: pytest.CaptureFixture[str]):
    """Nothing to see is no error."""
    assert main(["status"]) == 0
    assert "no server with a plan runs here" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_status_is_1_when_something_planned_is_missing(capsys: pytest.CaptureFixture[str]):
    """For scripts and probes."""
    plan = Plan((PlanItem("patch", "guard", "m:C", "p", ("engine",)),), model="m")
    ledger = Ledger()
    ledger.begin_run("run", plan)
    ledger.open(Record.of_this_process("run", plan.hash, "m", ["engine"], "0.32.0", "V1"))
    assert main(["status"]) == 1
    shown = capsys.readouterr().out
    assert f"{os.getpid()}" in shown
    assert "S001 error: patch guard: is planned but not active" in shown
    assert main(["status", "--json"]) == 1
    (server,) = json.loads(capsys.readouterr().out)
    assert server["findings"][0]["code"] == "S001"


def test_status_of_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str]):
    """The address and the next step."""
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9/graft/status: no answer" in capsys.readouterr().err
    # A variable of a script that is not set: this machine's records must not pass for that server's.
    assert main(["status", "--url", ""]) == 2


def test_status_of_a_folder_that_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A mistake in the variable is not the same as no server."""
    monkeypatch.setenv("GRAFT_STATE_DIR", "/dev/null")
    assert main(["status"]) == 2
    assert "GRAFT_STATE_DIR: the folder /dev/null/vllm-graft-" in capsys.readouterr().err
    monkeypatch.setenv("GRAFT_STATE_DIR", "/no/such/folder")
    assert main(["status"]) == 0


@pytest.mark.parametrize(
    ("listed", "complaint"),
    [
        ("other", "does not list graft"),
        ("other, graft", "lists graft with blanks around it"),
        ("", "does not list graft"),
    ],
)
def test_serve_refuses_a_plugin_list_that_leaves_us_out(listed: str, complaint: str, monkeypatch: pytest.MonkeyPatch):
    """vLLM would run without us and nothing of ours could say so."""
    monkeypatch.setenv("VLLM_PLUGINS", listed)
    with pytest.raises(ConfigError, match=complaint):
        check_set_up()
    monkeypatch.setenv("VLLM_PLUGINS", "other,graft")
    check_set_up()
    monkeypatch.setenv("VLLM_PLUGINS", listed)
    monkeypatch.setenv("GRAFT_DISABLE", "1")
    check_set_up()


def test_serve_adds_the_embedded_model_only_where_none_is_named(monkeypatch: pytest.MonkeyPatch):
    """And never overrides what was given."""
    monkeypatch.setattr("vllm_graft.cli.serve.embedded_model", lambda: Path("/m"))
    assert with_default_model(["org/model", "--port", "1"]) == ["org/model", "--port", "1"]
    assert with_default_model(["--model=org/model"]) == ["--model=org/model"]
    assert with_default_model(["--config", "c.yaml"]) == ["--config", "c.yaml"]
    made = with_default_model(["--dtype", "bfloat16"])
    assert made[:3] == ["/m", "--dtype", "bfloat16"]
    assert made.count("--dtype") == 1
    assert "--max-model-len" in made
    assert made[-1] == "--enforce-eager"


@pytest.mark.parametrize(
    "word", ["--enforce-eager", "--no-enforce-eager", "--compilation_config.mode=3", "-cc.mode=3", "-O2"]
)
def test_the_embedded_model_is_compiled_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, word: str):
    """Compiling takes minutes on a small machine."""
    monkeypatch.setattr("vllm_graft.cli.serve.embedded_model", lambda: Path("/m"))
    made = with_default_model([word])
    assert made.count("--enforce-eager") == [word].count("--enforce-eager")


class Terminal(io.StringIO):
    """An output that says whether it is a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_an_interrupt_is_said(monkeypatch, capsys):
    """A plugin's module may raise it as well as the user."""

    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_graft.cli.points.run", interrupt)
    assert main(["points"]) == 130
    assert capsys.readouterr().err == "vllm-graft: interrupted\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_watching_clears_the_screen_of_a_terminal_only(terminal: bool, monkeypatch: pytest.MonkeyPatch):
    """What goes into a pipe or a file is text."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    output = Terminal(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(time, "sleep", interrupt)
    assert main(["status", "--watch"]) == 130
    assert output.getvalue().startswith("\x1b[2J\x1b[H") == terminal
    assert ("\x1b" in output.getvalue()) == terminal


def test_the_words_of_others_do_not_reach_the_terminal_as_orders(capsys: pytest.CaptureFixture[str]):
    """Names, reasons and errors are a plugin's or a client's: escapes and line ends in them are shown."""
    odd = "red \x1b[31m\nS001 error: forged \ud800"
    ledger = Ledger()
    plan = Plan((PlanItem("stats", "sink", "m:C", "p", ("frontend",)),), model=odd)
    ledger.begin_run("run", plan)
    ledger.set_item("stats", "sink", "quarantined", odd)
    ledger.open(Record.of_this_process("run", plan.hash, odd, ["frontend"], odd, "V1"))
    assert ledger.record is not None
    ledger.record.name, ledger.record.last_error = odd, odd
    ledger.record.stalls = [Stall(odd, time.time(), odd, odd)]
    ledger.hook("sink", odd, 50.0).count(1)
    ledger.save()
    main(["status"])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert not any(line.startswith("S001") for line in shown.splitlines())
    assert shown.count("forged") >= 7


def test_the_hooks_of_an_item_are_named_with_their_cost(capsys: pytest.CaptureFixture[str]):
    """An author with several methods must see which of them is slow."""
    ledger = Ledger()
    plan = Plan((PlanItem("scheduler", "fair", "m:C", "p", ("frontend",)),), model="m")
    ledger.begin_run("run", plan)
    ledger.set_item("scheduler", "fair", "applied")
    ledger.open(Record.of_this_process("run", plan.hash, "m", ["frontend"], "0.32.0", "V1"))
    for name, took in (("push", 10_000), ("pop", 900_000)):
        ledger.hook("fair", name, 1000.0).count(took)
    assert main(["status"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "fair: applied, 2 calls (push 1 p99 10 us of 1000, pop 1 p99 900 us of 1000)" in shown


def test_status_of_something_else_that_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Not a traceback."""
    for answer in ("null", "{}", '{"plan": {}, "processes": [1], "findings": []}'):
        monkeypatch.setattr(urllib.request, "urlopen", lambda *_, text=answer, **__: io.StringIO(text))
        assert main(["status", "--url", "http://127.0.0.1:9"]) == 2
        assert "the answer is not a status document of vllm-graft" in capsys.readouterr().err


@pytest.mark.parametrize(
    "document",
    [
        {"plan": {}, "processes": [], "findings": []},
        {"plan": {"hash": "x"}, "model": "m", "processes": [{}], "findings": []},
        {"plan": {"hash": "x"}, "model": "m", "processes": [], "findings": [{}]},
        {"plan": {"hash": "x"}, "model": "m", "processes": [], "findings": [], "queues": [1]},
        {"plan": {"hash": "x"}, "model": "m", "processes": [], "findings": []},
    ],
)
@pytest.mark.parametrize("json_too", [False, True])
def test_status_of_a_server_that_says_too_little(
    document: dict[str, object], json_too: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A sentence, not a traceback."""
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.StringIO(json.dumps(document)))
    assert main(["status", "--url", "http://127.0.0.1:9", *(["--json"] if json_too else [])]) == 2
    assert "the answer is an incomplete status document" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan", "0", "inf", "1e300", "often"])
def test_status_watches_at_times_that_come(seconds: str, capsys: pytest.CaptureFixture[str]):
    """What cannot be slept for is refused before anything is printed."""
    with pytest.raises(SystemExit) as ended:
        main(["status", "--watch", seconds])
    assert ended.value.code == 2
    assert "is not a number of seconds above 0" in capsys.readouterr().err
