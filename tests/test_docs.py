"""The documentation says what the code does: help texts, codes, keys, variables, examples, messages and links."""

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

import vllm_graft
from vllm_graft import contracts
from vllm_graft.bindings.sampling.guarded import GuardedSampler
from vllm_graft.bindings.sampling.pipeline import SamplerPipeline
from vllm_graft.bindings.sampling.requests import SamplerKeys, describe_samplers, list_samplers
from vllm_graft.bindings.sampling.step import HostStep, Tokens
from vllm_graft.cli import COMMANDS, main
from vllm_graft.cli.serve import check_set_up
from vllm_graft.cli.status import render, render_queues
from vllm_graft.contracts import BatchRecord, ExpertLoad, Key, RequestRecord, ServedModel
from vllm_graft.contracts.request_keys import read_keys
from vllm_graft.contracts.sampling import OptInSampler
from vllm_graft.errors import GraftError
from vllm_graft.ledger import LabelStatistics, Ledger, QueueSnapshot, missing, runs, status_document
from vllm_graft.ledger.folder import home_in, state_folder
from vllm_graft.ledger.record import ItemStateName, Record
from vllm_graft.patching import Engine, VLLMPatch
from vllm_graft.plan import Plan, PlanItem, PlanRequest, Run, export_plan, inherited_plan, inherited_run, resolve
from vllm_graft.plan.catalogue import SHIPPED, load
from vllm_graft.plan.layers import read_file
from vllm_graft.points import POINTS, keys
from vllm_graft.server.callers import Callers
from vllm_graft.server.metrics import QueueLines, item_families
from vllm_graft.simulator.devices import DEVICES
from vllm_graft.simulator.devices import __file__ as DEVICES_FILE
from vllm_graft.simulator.workload.requests import generate
from vllm_graft.testing import Session, assert_active, assert_called, lay_out
from vllm_graft.versions import vllm_root

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

CODE = re.compile(r"[A-Z]\d{3}")
VARIABLE = re.compile(r"GRAFT_[A-Z0-9_]*[A-Z0-9]")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and where it begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str, *pages: Path) -> list[Block]:
    """Every block of a language, in the order of the pages."""
    return [block for page in pages or PAGES for block in _blocks(page) if block.language == language]


def _blocks(page: Path) -> Iterator[Block]:
    begin, language, inside = 0, "", []
    for number, row in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if not row.startswith("```"):
            inside.append(row)
        elif begin:
            yield Block(page, begin, language, "\n".join(inside) + "\n")
            begin = 0
        else:
            begin, language, inside = number, row[3:].strip(), []


def page(name: str) -> str:
    """The text of one page."""
    return (DOCS / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return next(part for part in parts if part.splitlines()[0] == heading)


def each(found: list[Block]) -> dict[str, object]:
    """Arguments that make a test per block, named after its place."""
    return {"argvalues": found, "ids": [str(block) for block in found]}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working directory, records of our own, and none of our variables."""
    for name in ("CONFIG", "PLAN", "RUN", "DISABLE", "SIMULATE"):
        monkeypatch.delenv(f"GRAFT_{name}", raising=False)
    for name in ("VLLM_CUSTOM_PATCHES", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRAFT_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, for packages that are laid out."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


class TestCommands:
    @pytest.mark.parametrize("command", ["", *COMMANDS])
    def test_the_help_is_quoted_word_for_word(
        self, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit):
            main([command, "--help"] if command else ["--help"])
        shown = capsys.readouterr().out.rstrip()
        where = (
            section(page("reference/commands.md"), command)
            if command
            else page("reference/commands.md").partition("\n## ")[0]
        )
        assert f"```text\n{shown}\n```" in where

    @pytest.mark.parametrize("command", COMMANDS)
    def test_each_has_an_example(self, command: str):
        assert re.search(rf"^\$ .*vllm-graft {command}", section(page("reference/commands.md"), command), re.MULTILINE)

    def test_no_other_is_described(self):
        assert re.findall(r"^## (.+)$", page("reference/commands.md"), re.MULTILINE) == list(COMMANDS)

    @pytest.mark.parametrize("words", [("points", "stats"), ("items", "xtc")])
    def test_the_output_of_an_example_is_real(
        self, words: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("COLUMNS", "100")
        main(words)
        example = f"```console\n$ vllm-graft {' '.join(words)}\n{capsys.readouterr().out}```"
        assert example in section(page("reference/commands.md"), words[0])


class TestFindings:
    def test_every_code_in_the_sources_has_a_heading_and_the_other_way_round(self):
        emitted = {
            node.value
            for path in SOURCES
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
        }
        described = re.findall(r"^## (.+)$", page("reference/findings.md"), re.MULTILINE)
        assert sorted(emitted - set(DEVICES)) == sorted(described)

    def test_each_says_what_happened_and_what_to_do(self):
        for heading in re.findall(r"^## (.+)$", page("reference/findings.md"), re.MULTILINE):
            text = section(page("reference/findings.md"), heading)
            assert re.search(r"Level (error|warning|info)", text), heading
            assert "\n> " in text, heading
            assert "**What to do.**" in text, heading

    def test_the_quotes_are_in_the_sources(self):
        for quote in re.findall(r"^> (.+)$", page("reference/findings.md"), re.MULTILINE):
            if reason := re.sub(r"^is \w+: …?", "", quote):
                assert_in_sources(reason)

    @pytest.mark.parametrize("state", get_args(ItemStateName))
    def test_every_state_of_an_item_gives_the_finding_that_the_pages_say(self, state: str):
        """The state's row links to the code; the code's quote and level are those of the finding."""
        (linked,) = re.findall(
            rf"^\| `{state}` \|.*\| (.*)\|$", section(page("how-to/status.md"), "States"), re.MULTILINE
        )
        plan = Plan((PlanItem("patch", "p", "m:C", "p", ("engine",)),))
        item = {"name": "p", "state": state, "reason": "because"}
        row = {
            "roles": ["engine"],
            "items": [item],
            "life": "running",
            "name": "n",
            "pid": 1,
            "host": "h",
            "plan": plan.hash,
        }
        found = missing([row], plan)
        assert [finding.code for finding in found] == CODE.findall(linked.partition("]")[0])
        for finding in found:
            text = section(page("reference/findings.md"), finding.code)
            assert f"\n> is {state}: " in text
            assert f"Level {finding.level}" in text

    def test_codes_that_pages_mention_exist(self):
        described = set(re.findall(r"^## (.+)$", page("reference/findings.md"), re.MULTILINE))
        for path in PAGES:
            mentioned = set(re.findall(r"\b[SPDA]\d{3}\b", path.read_text(encoding="utf-8"))) - set(DEVICES)
            assert set(mentioned) <= described, path


class TestPlatformTable:
    def test_every_method_it_names_exists(self):
        text = section(page("reference/simulator.md"), "As an example of a platform plugin")
        rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
        named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        assert len(named) > 25
        files = ("platform.py", "worker.py")
        home = Path(DEVICES_FILE).parent
        sources = "".join((home / name).read_text(encoding="utf-8") for name in files)
        assert not [name for name in named if not re.search(rf"    (def {name}\(|{name} = )", sources)]


class TestBlocks:
    @pytest.mark.parametrize("block", **each(blocks("toml")))
    def test_toml_parses_and_has_only_keys_we_know(self, block: Block, tmp_path: Path):
        """A block is a package's pyproject.toml, a workload, callers or a graft.toml; a wrong one is a text block."""
        loaded = tomllib.loads(block.text)
        if "project" in loaded:
            return
        if "tool" in loaded:
            assert loaded["tool"]["pytest"]["ini_options"] == {"graft_zygote": True}
            return
        if "caller" in tomllib.loads(block.text):
            (tmp_path / "callers.toml").write_text(block.text, encoding="utf-8")
            assert Callers.read(tmp_path / "callers.toml").by_key
            return
        if "workload" in tomllib.loads(block.text):
            assert len(generate(block.text)) > 1
            return
        file = tmp_path / "graft.toml"
        file.write_text(block.text, encoding="utf-8")
        read_file(file)

    @pytest.mark.parametrize("block", **each(blocks("python")))
    def test_python_compiles(self, block: Block):
        compile(block.text, str(block), "exec")

    @pytest.mark.parametrize("block", **each([block for block in blocks("python") if "\nassert " in block.text]))
    def test_python_with_assertions_holds(self, block: Block):
        exec(compile(block.text, str(block), "exec"), {"__name__": "example"})

    @pytest.mark.parametrize("block", **each(blocks("json")))
    def test_json_parses(self, block: Block):
        json.loads(block.text)


class TestExamples:
    def test_plan_prints_what_the_page_shows(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("COLUMNS", "120")
        for name in ("vllm_graft.versions.vllm_version", "vllm_graft.cli.plan.vllm_version"):
            monkeypatch.setattr(name, lambda: "0.32.0")
        # The machine of the page has the folder of its log.
        monkeypatch.setattr("os.access", lambda path, mode: True)
        configuration = DOCS / "reference/configuration.md"
        Path("graft.toml").write_text(blocks("toml", configuration)[1].text, encoding="utf-8")
        command, _, shown = blocks("console", configuration)[0].text.partition("\n")
        assert main(command.removeprefix("$ vllm-graft ").split()) == 0
        assert capsys.readouterr().out == shown

    def test_the_table_of_status_is_that_of_its_json(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("COLUMNS", "120")
        servers = json.loads(blocks("json", DOCS / "how-to/status.md")[0].text)
        table = blocks("console", DOCS / "how-to/status.md")[0].text
        assert table == f"$ vllm-graft status\n{render(servers)}\n$ echo $?\n0\n"

    def test_the_last_error_is_below_the_table(self):
        """As the page says."""
        servers = json.loads(blocks("json", DOCS / "how-to/status.md")[0].text)
        servers[0]["processes"][0]["last_error"] = "ValueError: broken"
        table, line = render(servers), "last error in"
        assert f"{line} {servers[0]['processes'][0]['name']}" in table
        assert "below the tables" in page("how-to/status.md")

    def test_the_json_of_status_has_the_keys_there_are(self):
        plan = Plan((PlanItem("stats", "sink", "m:C", "p", ("frontend",)),), model="m")
        ledger = Ledger()
        ledger.begin_run("run", plan)
        ledger.set_item("stats", "sink", "applied")
        ledger.open(Record.of_this_process("run", plan.hash, "m", ["frontend"], "0.32.0", "V1"))
        ledger.hook("sink", "finished", 50.0)
        real, shown = runs()[0].as_dict(), json.loads(blocks("json", DOCS / "how-to/status.md")[0].text)[0]
        for path in ([], ["plan"], ["plan", "items", 0], ["processes", 0]):
            assert set(_at(real, path)) == set(_at(shown, path)), path
        item = ["processes", 0, "items", 0]
        assert set(_at(real, item)) == set(_at(shown, item))
        assert set(_at(real, [*item, "hooks", "finished"])) == set(next(iter(_at(shown, [*item, "hooks"]).values())))

    def test_the_table_of_queues_is_that_of_its_json(self, monkeypatch: pytest.MonkeyPatch):
        """And its keys are those there are."""
        monkeypatch.setenv("COLUMNS", "160")
        rows = json.loads(blocks("json", DOCS / "how-to/status.md")[1].text)
        assert f"{render_queues(rows)}\n" in [block.text for block in blocks("text", DOCS / "how-to/status.md")]
        real = QueueSnapshot(1, 0, "item", 0.0, (LabelStatistics("tenant", "acme"),)).as_dicts()
        assert [set(row) for row in rows] == [set(real[0])] * 2

    def test_the_metrics_of_the_page_are_those_there_are(self):
        found = QueueLines().families([QueueSnapshot(1, 0, "item", 0.0, (LabelStatistics("tenant", "acme"),))])
        text = (DOCS / "reference/schedulers.md").read_text(encoding="utf-8")
        assert set(re.findall(r"vllm_graft_queue_\w+(?=`)", text)) == {family.name for family in found}
        text = (DOCS / "how-to/status.md").read_text(encoding="utf-8")
        assert set(re.findall(r"vllm_graft_\w+(?=`)", text)) == {family.name for family in item_families([], Plan())}

    def test_the_route_answers_with_the_same_keys(self):
        shown = json.loads(blocks("json", DOCS / "how-to/status.md")[0].text)[0]
        assert set(status_document("run", Plan(), [], [])) == set(shown)

    def test_the_sink_of_the_page_works_as_a_package(self, site: Path):
        package(site, "reference/stats.md", "stats")
        plan = planned("reference/stats.md")
        (item,) = plan.items
        assert (item.name, item.package, item.options["limit_s"]) == ("slow-requests", "acme-graft", 2.5)
        sink = load(item.target, item.name, item.package)({**item.options, "path": "slow.txt"})
        requests = [RequestRecord(name, "stop", 1, 7, 0, 0.0, 0.0, 0.0, took) for name, took in (("a", 1), ("b", 3))]
        sink.finished(requests, BatchRecord(0, 14, 0, None, None, None))
        sink.close()
        assert Path("slow.txt").read_text(encoding="utf-8") == "b 3.0 s, 7 tokens\n"

    def test_the_balancer_of_the_page_works_as_a_package(self, site: Path):
        package(site, "reference/expert-balancing.md", "balancers")
        plan = planned("reference/expert-balancing.md")
        (item,) = plan.items
        assert (item.name, item.package, item.options["below"]) == ("only-if-uneven", "acme-graft", 0.8)
        balancer = load(item.target, item.name, item.package)(item.options)
        present, stock = np.array([[0, 1, 2, 3]]), np.array([[0, 3, 1, 2]])
        for heavy, expected in ((1.0, present), (9.0, stock)):
            experts = ExpertLoad(np.array([[heavy, heavy, 1.0, 1.0]]), present, 1, 1, 2, stock.copy)
            assert (balancer.place(experts) == expected).all()

    def test_the_figures_of_balancers_are_those_of_the_record(self):
        rows = json.loads((ROOT / "benchmarks/balancing.json").read_text())["rows"]
        text = page("reference/expert-balancing.md")
        assert len(rows) == 36
        for row in rows:
            assert f"{row['before']:.3f} → {row['after']:.3f}, {row['moved']:.1f} %" in text, row

    def test_the_patch_of_the_page_works_as_a_package(self, site: Path, monkeypatch: pytest.MonkeyPatch):
        """On a scheduler that stands in for vLLM's, because importing vLLM takes seconds."""
        (site / "stand_in.py").write_text("class Scheduler:\n    def schedule(self, n):\n        return n + 1\n")
        target = "vllm.v1.core.sched.scheduler:Scheduler"
        package(site, "reference/patches.md", "patches", lambda text: text.replace(target, "stand_in:Scheduler"))
        (item,) = planned("reference/patches.md").items
        assert (item.name, item.package, item.roles) == ("slow-schedule", "acme-graft", ("engine",))
        engine, patch = Engine(), load(item.target, item.name, item.package)
        engine.apply([patch])
        scheduler = importlib.import_module("stand_in").Scheduler()
        assert scheduler.schedule(1) == 2
        assert [hook.hits for hook in engine.report()] == [1]
        engine.revert(patch)

    @pytest.mark.parametrize("block", **each([block for block in blocks("python") if 'VLLMPatch["' in block.text]))
    def test_patches_name_what_the_installed_vllm_has(self, block: Block):
        """Looked up in vLLM's source files: nothing of it is imported."""
        if vllm_root() is None:
            pytest.skip("vLLM is not installed")
        scope: dict[str, object] = {"__name__": "example"}
        exec(compile(block.text, str(block), "exec"), scope)
        for patch in scope.values():
            if isinstance(patch, type) and issubclass(patch, VLLMPatch) and patch is not VLLMPatch:
                target = patch.declaration.target
                names = _names_in(target.module, target.qualname)
                hooks = {hook.attribute for hook in patch.declaration.hooks if hook.kind != "add"}
                assert hooks <= names, target


def _at(document: object, path: list[str | int]) -> dict[str, object]:
    for part in path:
        document = document[part]  # type: ignore[index]
    assert isinstance(document, dict)
    return document


def _names_in(module: str, qualname: str) -> set[str]:
    root = vllm_root()
    assert root is not None
    base = root.parent.joinpath(*module.split("."))
    file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    found: ast.Module | ast.ClassDef = ast.parse(file.read_text(encoding="utf-8"))
    for part in filter(None, qualname.split(".")):
        found = next(node for node in found.body if isinstance(node, ast.ClassDef) and node.name == part)
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def package(site: Path, name: str, module: str, change=lambda text: text) -> None:
    """Lay out the package that a page describes: its first python block, and the entry points of its pyproject."""
    project = next(found for block in blocks("toml", DOCS / name) if "project" in (found := tomllib.loads(block.text)))[
        "project"
    ]
    lay_out(site, project["name"], project["entry-points"])
    home = site / "acme_graft"
    home.mkdir()
    (home / "__init__.py").write_text("")
    (home / f"{module}.py").write_text(change(blocks("python", DOCS / name)[0].text), encoding="utf-8")
    for loaded in ("acme_graft", f"acme_graft.{module}"):
        sys.modules.pop(loaded, None)


def planned(name: str) -> Plan:
    """The plan of a page's first graft.toml."""
    text = next(block.text for block in blocks("toml", DOCS / name) if "project" not in tomllib.loads(block.text))
    Path("graft.toml").write_text(text, encoding="utf-8")
    return resolve(PlanRequest("org/Model-8B"))


def _under_an_unbound_point(name: str) -> str:
    """An empty text once every point is bound; the row can go then."""
    unbound = [(key, point.is_list) for key, point in keys().items() if not point.bound]
    return "".join(f"[defaults]\n{key} = {[name] if many else name!r}\n" for key, many in unbound[:1])


IN_FILE = {
    "the file is not TOML": "[defaults\n",
    "a table that does not exist": "[default]\n",
    "a key that does not exist": '[defaults]\npatchs = ["stat-logger-guard"]\n',
    "`patches` and the like are not lists of names": '[defaults]\npatches = "stat-logger-guard"\n',
    "`scheduler` and the like are not one name": '[defaults]\nscheduler = ["fair"]\n',
    "another `on_failure`": '[defaults]\non_failure = "ignore"\n',
    "another `endpoint`": '[defaults]\nendpoint = "no"\n',
    "another `callers`": "[defaults]\ncallers = 1\n",
    "another `unknown_keys`": '[defaults]\nunknown_keys = "ignore"\n',
    "another `other_keys`": '[defaults]\nother_keys = "tenant"\n',
    "a value where a table belongs": "defaults = 1\n",
    "one bracket around `profile`": '[profile]\nmodel = "*"\n',
    "a profile without `model`": '[[profile]]\nstats = ["request-log"]\n',
    "two matching profiles disagree": (
        '[[profile]]\nmodel = "*8B*"\non_failure = "warn"\n[[profile]]\nmodel = "org/*"\non_failure = "stop"\n'
    ),
    "an item that does not exist": '[defaults]\npatches = ["stat-loger-guard"]\n',
    "an item under the key of another point": '[defaults]\nstats = ["stat-logger-guard"]\n',
    "a point that is not bound yet": _under_an_unbound_point("request-log"),
    "an item that cannot be imported": '[defaults]\nstats = ["gone"]\n',
    "an item that is no class": '[defaults]\nstats = ["no-class"]\n',
    "an option that does not exist": '[defaults]\nstats = ["request-log"]\n[options.request-log]\npaht = "x"\n',
    "an option of another type": '[defaults]\nstats = ["request-log"]\n[options.request-log]\nqueue = "many"\n',
    "an option with a value that cannot work": (
        '[defaults]\nstats = ["request-log"]\n[options.request-log]\nqueue = 0\n'
    ),
    "a file of `callers` that is not there": '[defaults]\ncallers = "nobody.toml"\n',
    "an option that is a list of numbers": "[options.request-log]\nqueue = [1, 2]\n",
    "a sampler's option that cannot be": '[defaults]\nsamplers = ["dry"]\n[options.dry]\ndefaults = {dry_bse = 2}\n',
    "a class that lacks a method": '[defaults]\nsamplers = ["half"]\n',
    "two samplers with one key": '[defaults]\nsamplers = ["dry", "dry-too"]\n',
    "options of an item that does not exist": "[options.request-lag]\nqueue = 1\n",
}


FAULTY = """
from vllm_graft import Key, SamplingStrategy

LIMIT = 3

class Half(SamplingStrategy):
    keys = (Key("half", "bool", False, switch=True),)
    def open(self, slot, params): ...

class DryToo(Half):
    keys = (Key("dry_base"),)
    def step(self, logits, rows): ...
"""


def _configured(name: str, value: str) -> None:
    os.environ[name] = value
    resolve(PlanRequest("org/Model-8B"))


def _taken(site: Path) -> None:
    home_in(site).write_text("", encoding="utf-8")
    _folder(site, create=False)


def _folder(path: Path, *, create: bool) -> None:
    os.environ["GRAFT_STATE_DIR"] = str(path)
    state_folder(create=create)


def _damaged(name: str) -> None:
    os.environ[name] = "{}x"
    inherited_plan()
    inherited_run()


def _listed(value: str) -> None:
    os.environ["VLLM_PLUGINS"] = value
    check_set_up()


def _long_plan() -> None:
    export_plan(Plan((PlanItem("stats", "s", "m:C", "p", ("frontend",), {"path": "x" * 200_000}),)), Run("1-ab", 1))


def _rival(site: Path) -> None:
    lay_out(site, "rival-graft", {"vllm_graft.plugins": {"request-log": "rival:Sink"}})
    resolve(PlanRequest("m", additional_config={"graft": {"stats": ["request-log"]}}))


def _given(graft: object) -> None:
    resolve(PlanRequest("m", additional_config={"graft": graft}))


IN_ENVIRONMENT = {
    "`GRAFT_CONFIG` names no file": lambda site: _configured("GRAFT_CONFIG", "/etc/graft.toml.old"),
    "`VLLM_CUSTOM_PATCHES` names no item": lambda site: _configured("VLLM_CUSTOM_PATCHES", "stat-logger-gard"),
    "`--additional-config`: `graft` is no table": lambda site: _given(["request-log"]),
    "`--additional-config`: a key that does not exist": lambda site: _given({"patchs": []}),
    "`--additional-config`: a value of another type": lambda site: _given({"stats": "request-log"}),
    "two packages offer one name": _rival,
    "the plan is too long to be carried": lambda site: _long_plan(),
    "`GRAFT_PLAN` was not set by vllm-graft": lambda site: _damaged("GRAFT_PLAN"),
    "`GRAFT_RUN` was not set by vllm-graft": lambda site: _damaged("GRAFT_RUN"),
    "`GRAFT_STATE_DIR` cannot be made": lambda site: _folder(site / "file" / "below", create=True),
    "the folder in `GRAFT_STATE_DIR` is another user's": lambda site: _taken(site),
    "`VLLM_PLUGINS` leaves `graft` out (`vllm-graft serve`)": lambda site: _listed("other"),
    "`VLLM_PLUGINS` has blanks (`vllm-graft serve`)": lambda site: _listed("other, graft"),
}


class TestMessages:
    """The tables of mistakes: every message in them is one that the mistake gives."""

    @pytest.mark.parametrize("mistake", IN_FILE)
    def test_a_mistake_in_the_file_gives_the_message(self, mistake: str, site: Path):
        names = {"gone": "Gone", "no-class": "LIMIT", "half": "Half", "dry-too": "DryToo"}
        entries = {name: f"acme_graft:{value}" for name, value in names.items()}
        lay_out(site, "acme-graft", {"vllm_graft.plugins": entries}, {"acme_graft": FAULTY})
        sys.modules.pop("acme_graft", None)
        if not IN_FILE[mistake]:
            pytest.skip("nothing in this version can be mistaken like that")
        Path("graft.toml").write_text(IN_FILE[mistake], encoding="utf-8")
        with pytest.raises(GraftError) as caught:
            resolve(PlanRequest("org/Model-8B"))
        assert_documented("mistakes", mistake, str(caught.value))

    @pytest.mark.parametrize("mistake", IN_ENVIRONMENT)
    def test_a_mistake_in_the_environment_gives_the_message(
        self, mistake: str, site: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(os, "environ", os.environ.copy())
        (site / "file").write_text("")
        with pytest.raises(GraftError) as caught:
            IN_ENVIRONMENT[mistake](site)
        assert_documented("arguments", mistake, str(caught.value).replace(str(site), "/srv"))

    def test_the_tables_have_no_other_rows(self):
        assert [row[0] for row in rows_of("reference/configuration.md", "mistakes")] == list(IN_FILE)
        assert [row[0] for row in rows_of("reference/configuration.md", "arguments")] == list(IN_ENVIRONMENT)

    @pytest.mark.parametrize(
        ("name", "table"), [("reference/configuration.md", "start"), ("reference/patches.md", "refusals")]
    )
    def test_other_messages_are_in_the_sources(self, name: str, table: str):
        rows = rows_of(name, table)
        assert len(rows) > 5
        for row in rows:
            quoted = [message for cell in row for message in re.findall(r"``(.+?)``", cell)]
            assert quoted, row
            for message in quoted:
                assert_in_sources(message)


def rows_of(name: str, table: str) -> list[list[str]]:
    """The cells of a table that stands between two comments."""
    text = re.search(rf"<!-- {table} -->\n(.*?)<!-- /{table} -->", page(name), re.DOTALL)
    assert text is not None, table
    rows = [row for row in text[1].splitlines() if row]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def assert_documented(table: str, mistake: str, message: str) -> None:
    """The table has this row, and its message is this one; ``…`` stands for anything."""
    shown = next((row[1] for row in rows_of("reference/configuration.md", table) if row[0] == mistake), None)
    assert shown is not None, (
        f"docs/reference/configuration.md has no row {mistake!r}; it would be: | {mistake} | ``{message}`` |"
    )
    pattern = ".*".join(re.escape(part) for part in shown.strip("`").split("…"))
    assert re.fullmatch(pattern, message, re.DOTALL), f"{message!r} is documented as {shown!r}"


def assert_in_sources(quote: str) -> None:
    """What stands between the ``…`` of a quote stands, in this order, in one string of the sources."""
    parts = [part.strip() for part in quote.split("…") if len(part.strip()) > 2]
    assert parts, quote
    pattern = re.compile(".*".join(re.escape(part) for part in parts), re.DOTALL)
    assert any(pattern.search(text) for text in STRINGS), f"no message of the sources reads {quote!r}"


def _strings() -> Iterator[str]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else " … " for part in node.values)


STRINGS = sorted(set(_strings()))


class TestNames:
    @pytest.mark.parametrize("module", [vllm_graft, contracts], ids=lambda module: module.__name__)
    def test_every_public_name_has_a_docstring_of_its_own(self, module: object):
        for name in module.__all__:  # type: ignore[attr-defined]
            value = getattr(module, name)
            if name.startswith("__"):
                continue
            own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
            assert (own or "").strip(), name
            # A dataclass without a docstring is given its signature as one.
            assert not value.__doc__.startswith(f"{name}("), name

    def test_every_method_of_a_contract_has_a_docstring(self):
        for name in contracts.__all__:
            contract = getattr(contracts, name)
            for method, value in vars(contract).items() if isinstance(contract, type) else ():
                if inspect.isfunction(value) and not method.startswith("_"):
                    assert value.__doc__, f"{name}.{method}"

    def test_every_variable_is_documented_and_no_other(self):
        used = {name for path in SOURCES for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
        described = {name for path in DOCS.rglob("*.md") for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
        assert used == described

    def test_every_variable_is_in_the_table_of_the_configuration(self):
        """One page has them all."""
        used = {name for path in SOURCES for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
        assert used <= set(VARIABLE.findall(section(page("reference/configuration.md"), "Variables")))

    def test_every_key_is_in_the_table_of_the_configuration(self):
        rows = re.findall(
            r"^\| `(\w+)` \| (.+?) \| (\S*) ?\|$", section(page("reference/configuration.md"), "Keys"), re.MULTILINE
        )
        expected = [
            (key, "a list of names" if point.is_list else "one name", point.name) for key, point in keys().items()
        ]
        assert rows[: len(expected)] == expected
        assert [row[0] for row in rows[len(expected) :]] == [
            "on_failure",
            "endpoint",
            "callers",
            "unknown_keys",
            "other_keys",
        ]

    @pytest.mark.parametrize("item", SHIPPED)
    def test_every_item_that_ships_has_a_heading(self, item: str):
        headings = [line for path in DOCS.rglob("*.md") for line in path.read_text(encoding="utf-8").splitlines()]
        assert f"## {item}" in headings

    def test_every_keyword_of_a_patch_is_in_its_table(self):
        rows = re.findall(r"^\| `(\w+)=` \|", section(page("reference/patches.md"), "The keywords"), re.MULTILINE)
        parameters = inspect.signature(VLLMPatch.__init_subclass__).parameters.values()
        assert sorted(rows) == sorted(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)

    def test_every_contract_of_a_point_is_in_its_table_with_its_methods(self):
        """Names in bold are those that the base class leaves to the author."""
        text = section(page("reference/contracts.md"), "What you implement")
        rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| ([\w-]+) \| (.+?) \|", text, re.MULTILINE)}
        named = [(name.rpartition(":")[2], point.name) for point in POINTS for name in point.contracts]
        assert {(name, row[0]) for name, row in rows.items()} == {pair for pair in named if pair[1] != "platform"}
        for name, (_, methods) in rows.items():
            if name == "VLLMPatch":
                continue
            contract = getattr(contracts, name)
            own = {method for method, value in vars(contract).items() if inspect.isfunction(value) and method[0] != "_"}
            assert own - {"step"} <= set(re.findall(r"`(\w+)`", methods))
            for method in re.findall(r"`(\w+)`", methods):
                required = "raise NotImplementedError" in inspect.getsource(getattr(contract, method))
                assert required == (f"**`{method}`**" in methods), f"{name}.{method}"

    def test_what_a_contract_is_given_is_public(self):
        text = section(page("reference/contracts.md"), "What you are given")
        named = {
            name for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }
        assert len(named) > 12
        assert named <= set(contracts.__all__)

    def test_the_budgets_are_those_of_the_points(self):
        rows = re.findall(
            r"^\| (\w+) \| ([\d.]+) (ms|µs) per", section(page("reference/contracts.md"), "Budgets"), re.M
        )
        shown = {name: float(number) * {"ms": 1000, "µs": 1}[unit] for name, number, unit in rows}
        bound = {point.name: point.budget_us for point in POINTS if point.name in shown}
        assert len(shown) == 5
        assert shown == bound

    @pytest.mark.parametrize("record", [RequestRecord, BatchRecord])
    def test_every_field_of_a_record_is_in_its_table(self, record: type):
        _, _, text = page("reference/stats.md").partition(f"### {record.__name__}\n")
        cells = re.findall(r"^\| (`.+?) \|", text.partition("\n#")[0], re.MULTILINE)
        assert [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] == [one.name for one in fields(record)]

    @pytest.mark.parametrize("item", SHIPPED)
    def test_every_option_of_an_item_that_ships_is_in_its_table(self, item: str):
        text = next(path for path in DOCS.rglob("*.md") if f"\n## {item}\n" in path.read_text(encoding="utf-8"))
        rows = re.findall(r"^\| `(\w+)` \| `?(.+?)`? \|", section(text.read_text(encoding="utf-8"), item), re.MULTILINE)
        options = getattr(load(SHIPPED[item], item, "vllm-graft"), "options", {})
        rows = [(name, shown.lower() if shown in ("True", "False") else shown) for name, shown in rows]
        expected = [(name, _in_toml(default)) for name, default in options.items()]
        # What every sampler has is on the page of all samplers, and may be left out.
        assert [row for row in rows if row[0] not in OptInSampler.options] == [
            row for row in expected if row[0] not in OptInSampler.options
        ]
        assert set(rows) <= set(expected)

    def test_the_options_of_every_sampler_are_in_their_table(self):
        text = section(page("reference/samplers.md"), "Options of every sampler")
        rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text, re.MULTILINE)
        assert rows == [(name, _in_toml(default)) for name, default in OptInSampler.options.items()]

    def test_every_method_of_a_session_is_in_its_table(self, tmp_path: Path):
        rows = re.findall(r"^\| `(\w+)(\(?)", section(page("how-to/testing.md"), "Session"), re.MULTILINE)
        methods = [name for name, value in vars(Session).items() if callable(value) and not name.startswith("_")]
        assert sorted(name for name, bracket in rows if bracket) == sorted(methods)
        assert all(hasattr(Session(tmp_path), name) for name, _ in rows)

    def test_our_places_in_vllm_are_listed(self):
        from vllm_graft.boot.doors import CORE_PATCHES

        patches = [patch.declaration for patch in CORE_PATCHES]
        places = [f"`{patch.target}.{hook.attribute}`" for patch in patches for hook in patch.hooks]
        text = section(page("explanation/how-it-works.md"), "Our own places in vLLM")
        assert re.findall(r"^\| (`vllm.+?`) \|", text, re.MULTILINE) == places

    def test_the_patches_of_the_sampler_point_are_listed(self):
        from vllm_graft.bindings.sampling.patches import SAMPLER_PATCHES

        hooks = [
            (patch.declaration.target, hook.attribute) for patch in SAMPLER_PATCHES for hook in patch.declaration.hooks
        ]
        text = section(page("explanation/how-it-works.md"), "The patches of the sampler point")
        listed = re.findall(r"^\| (`vllm.+?`) \|", text, re.MULTILINE)
        assert listed == [f"`{target}.{attribute}`" for target, attribute in hooks]

    def test_the_modules_that_it_names_are_there(self):
        named = set(re.findall(r"`((?:[a-z_]+/)+\w+\.py)`", page("explanation/how-it-works.md")))
        assert len(named) > 20
        assert [name for name in sorted(named) if not (ROOT / "src/vllm_graft" / name).is_file()] == []

    def test_each_flow_names_at_most_eight_modules(self):
        """A reader can hold so many; a flow that needs more is too long to tell."""
        flows = [
            part for part in section(page("explanation/how-it-works.md"), "Three flows").split("\n\n") if "**" in part
        ]
        assert len(flows) == 3
        for flow in flows:
            named = re.findall(r"`([\w/]+\.py)`", flow)
            assert 4 <= len(set(named)) <= 8, named

    def test_the_changelog_knows_this_version_and_every_command(self):
        text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        assert f"## [{vllm_graft.__version__}]" in text
        for command in COMMANDS:
            assert f"`{command}`" in text


SAMPLERS = ("dry", "no-repeat-ngram", "top-n-sigma", "xtc")
OWN = DOCS / "how-to" / "write-a-sampler.md"


class TestSamplers:
    """The pages of the samplers: keys, messages, and a tutorial whose code runs."""

    @pytest.mark.parametrize("name", SAMPLERS)
    def test_every_key_is_in_the_table_of_its_page(self, name: str):
        rows = re.findall(r"^\| (`.+) \|$", section(page(f"reference/samplers/{name}.md"), "Keys"), re.MULTILINE)
        found = [[cell.strip() for cell in row.split("|")][:5] for row in rows]
        assert found == [_key_row(key) for key in sampler(name).request_keys()]

    @pytest.mark.parametrize("name", SAMPLERS)
    def test_the_example_of_a_page_is_a_good_request(self, name: str):
        (block,) = blocks("json", DOCS / "reference" / "samplers" / f"{name}.md")
        request = json.loads(block.text)
        kind = sampler(name)
        found = read_keys(kind.request_keys(), {**request, **request.get("vllm_xargs", {})})
        kind.check(found)
        assert kind.is_requested(found)

    def test_every_one_that_ships_is_in_the_table_with_its_stage(self):
        text = section(page("reference/samplers.md"), "What ships")
        rows = re.findall(r"^\| `([\w-]+)` \| .+? \| (`.+?`) \| (\w+) \|", text, re.MULTILINE)
        shipped = [name for name, target in SHIPPED.items() if ".plugins.samplers." in target]
        assert sorted(name for name, _, _ in rows) == sorted(shipped)
        for name, main_keys, stage in rows:
            kind = sampler(name)
            assert {key.strip("` ") for key in main_keys.split(",")} <= {key.name for key in kind.request_keys()}
            assert stage == getattr(kind, "stage", "picks")

    def test_a_bad_request_gets_the_message(self):
        catalogue = SamplerKeys(list_samplers(_samplers("dry", "xtc"), None))
        rows = rows_of("reference/samplers.md", "bad requests")
        assert len(rows) == 7
        for row in rows:
            request = re.match(r"`(.+?)`", row[0])
            assert request is not None
            with pytest.raises(ValueError, match="^" + re.escape(row[1].strip("`")) + "$"):
                catalogue.check(json.loads(request[1]))

    def test_what_a_server_has_is_what_the_page_shows(self):
        shown = json.loads(blocks("json", DOCS / "reference/samplers.md")[1].text)
        assert describe_samplers(_samplers("xtc"), None)["samplers"] == [shown]

    def test_figures_are_those_of_the_records(self):
        text = page("explanation/benchmarks/samplers.md")
        costs = json.loads((ROOT / "benchmarks/sampling/strategies.json").read_text())["rows"]
        ours = {row["strategy"]: row for row in reversed(costs) if row["way"].startswith("ours")}
        shown = re.findall(r"^\| (.+?) \| ([\d,]+) µs \| ([\d,]+) µs \|", text, re.MULTILINE)
        assert len(shown) == 9
        for name, device, host in shown:
            own = next(row for row in costs if row["strategy"] == name)
            assert (device, host) == (f"{own['us']:,.0f}", f"{own['host_us']:,.0f}"), name
        assert set(ours) == {name for name, _, _ in shown}
        served = json.loads((ROOT / "benchmarks/sampling/serving.json").read_text())["rows"]
        rows = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d.]+) \|$", text, re.MULTILINE)
        assert rows == [(row["case"], f"{row['tokens_per_s']:,.0f}", f"{row['ratio']:.3f}") for row in served]

    def test_the_strategy_of_the_tutorial_works_as_a_package(self, site: Path):
        """In the pipeline of a worker, on a row whose limit is known."""
        import torch

        package(site, "how-to/write-a-sampler.md", "samplers")
        (item,) = planned("how-to/write-a-sampler.md").items
        assert (item.name, item.package, item.roles) == ("top-a", "acme-graft", ("worker",))
        logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 2).log()
        _step(load(item.target, item.name, item.package), logits, [{"top_a": 0.8}, {}])
        assert logits[0].exp().tolist() == pytest.approx([0.5, 0.3, 0, 0])
        assert logits[1].exp().tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05])

    def test_the_unit_tests_of_the_tutorial_pass(self, site: Path):
        package(site, "how-to/write-a-sampler.md", "samplers")
        scope: dict[str, object] = {"__name__": "example"}
        block = blocks("python", OWN)[1]
        exec(compile(block.text, str(block), "exec"), scope)
        tests = [value for name, value in scope.items() if name.startswith("test_") and callable(value)]
        assert len(tests) == 2
        for test in tests:
            test()

    def test_the_other_strategies_of_the_tutorial_do_what_they_say(self):
        import torch

        scope: dict[str, object] = {"__name__": "example"}
        for block in blocks("python", OWN):
            if "class Fresh" in block.text or "class Settle" in block.text:
                exec(compile(block.text, str(block), "exec"), scope)
        logits = torch.zeros(3, 5)
        _step(scope["Fresh"], logits, [{"fresh": 2.0}, {}, {"fresh": 2.0, "fresh_chance": 0.0}], [1, 3, 3])
        assert logits.tolist() == [[0, -2, 0, -2, 0], [0] * 5, [0] * 5]
        logits = torch.ones(2, 5)
        pipeline = _step(scope["Settle"], logits, [{"settle": 0.5}, {}])
        assert logits.tolist() == [[1] * 5] * 2
        pipeline.after(torch.tensor([0, 0]))
        pipeline.run(logits, HostStep(pipeline.seeds, {0: Tokens([], []), 1: Tokens([], [])}), [0, 1])
        assert logits.tolist() == [[1.5] * 5, [1] * 5]


TUTORIALS = {
    name: DOCS / "tutorial" / f"first-{name}.md" for name in ("patch", "sampler", "scheduler", "attention-kernel")
}


def install(session: Session, tutorial: Path) -> None:
    """Lay out the package of a tutorial and plan it, with the page's own files."""
    project = next(found for block in blocks("toml", tutorial) if "project" in (found := tomllib.loads(block.text)))
    (module,) = project["tool"]["setuptools"]["py-modules"]
    entry_points = project["project"]["entry-points"]
    session.package(project["project"]["name"], entry_points, {module: blocks("python", tutorial)[0].text})
    session.plan(next(block.text for block in blocks("toml", tutorial) if "defaults" in tomllib.loads(block.text)))


class TestTutorials:
    """Each tutorial's package in a real vLLM, doing what its page says."""

    @pytest.mark.server
    def test_the_patch_is_called_in_the_engine_and_prints(self, graft: Session):
        install(graft, TUTORIALS["patch"])
        graft.simulate()
        request = json.loads(re.search(r"-d '(.+)'$", page("tutorial/first-patch.md"), re.MULTILINE)[1])
        with graft.server("--served-model-name", request["model"]) as server:
            status, body = server.post("/v1/completions", request)
            assert status == 200, body
            assert_active(server.run_view(), "count-steps", roles=("engine",))
            assert_called(server.run_view(), "count-steps", at_least=100)
            assert "step 100" in server.log.read_text(encoding="utf-8")

    def test_a_misspelt_method_is_refused_with_the_nearest_name(self, site: Path):
        """As the page says of `shedule`; on a scheduler that stands in for vLLM's."""
        (site / "stand_in.py").write_text("class Scheduler:\n    def schedule(self): ...\n")
        text = blocks("python", TUTORIALS["patch"])[0].text.replace("def schedule", "def shedule")
        scope: dict[str, object] = {"__name__": "example"}
        exec(text.replace("vllm.v1.core.sched.scheduler:Scheduler", "stand_in:Scheduler"), scope)
        sys.modules.pop("stand_in", None)
        importlib.import_module("stand_in")
        with pytest.raises(GraftError, match="did you mean 'schedule'"):
            Engine().apply([scope["CountSteps"]])

    @pytest.mark.compiled
    @pytest.mark.server
    def test_the_sampler_favours_its_token_and_refuses_nonsense(self, graft: Session):
        install(graft, TUTORIALS["sampler"])
        (block,) = blocks("json", TUTORIALS["sampler"])
        request = json.loads(block.text)
        plain = {key: value for key, value in request.items() if not key.startswith("favourite")}
        with graft.server("--served-model-name", request["model"]) as server:
            tokens = []
            for asked in (request, plain):
                status, body = server.post("/v1/completions", asked)
                assert status == 200, body
                tokens.append(json.loads(body)["choices"][0]["token_ids"])
            assert f'"token_ids": {tokens[0]}' in page("tutorial/first-sampler.md")
            assert tokens[1] != tokens[0]
            status, body = server.post("/v1/completions", {**request, "favourite": "x"})
            assert status == 400
            assert "favourite must be a whole number" in body
            # One client's token that the model does not have costs the others nothing.
            status, body = server.post("/v1/completions", {**request, "favourite": 10**9})
            assert status == 200, body
            assert_active(server.run_view(), "favourite", roles=("worker",))
            assert_called(server.run_view(), "favourite")

    @pytest.mark.compiled
    @pytest.mark.server
    def test_the_kernel_answers_as_vllms_own_and_a_wrong_one_is_refused_as_quoted(self, graft: Session):
        tutorial = TUTORIALS["attention-kernel"]
        install(graft, tutorial)
        (block,) = blocks("json", tutorial)
        request = json.loads(block.text)
        tokens = []
        for disabled in (None, "1"):
            graft.env["GRAFT_DISABLE"] = disabled
            with graft.server("--served-model-name", request["model"]) as server:
                status, body = server.post("/v1/completions", request)
                assert status == 200, body
                tokens.append(json.loads(body)["choices"][0]["token_ids"])
                if not disabled:
                    assert_called(server.run_view(), "plain-attention")
        assert tokens[0] == tokens[1]
        graft.env["GRAFT_DISABLE"] = None
        module = graft.site / "acme_attention.py"
        module.write_text(module.read_text(encoding="utf-8").replace("return output\n", "return output[:1]\n", 1))
        server = graft.server("--served-model-name", request["model"])
        with pytest.raises(GraftError):
            server.start().wait_healthy()
        (quoted,) = blocks("text", tutorial)
        assert quoted.text.strip() in server.log.read_text(encoding="utf-8")

    @pytest.mark.engine
    def test_the_scheduler_shortens_the_wait_as_the_page_shows(self, graft: Session):
        """Virtual time gives the same figures everywhere, so the page's are compared as they stand."""
        tutorial = TUTORIALS["scheduler"]
        workload = next(block.text for block in blocks("toml", tutorial) if "workload" in tomllib.loads(block.text))
        (graft.folder / "burst.toml").write_text(workload, encoding="utf-8")
        command = re.search(r"^\$ vllm-graft (simulate .+)$", page("tutorial/first-scheduler.md"), re.MULTILINE)[1]
        reports = [simulated(graft, command)]
        install(graft, tutorial)
        reports.append(simulated(graft, command))
        assert [(report["scheduler"], report["sound"]) for report in reports] == [
            ("vLLM's own, fcfs", True),
            ("shortest-first", True),
        ]
        rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \|$", page("tutorial/first-scheduler.md"), re.MULTILINE)
        assert len(rows) == 3
        for name, *shown in rows:
            key, _, part = name.partition(".")
            found = [report[key][part] if part else report[key] for report in reports]
            assert shown == [f"{value:.2f} s" if part else f"{value:.0f}" for value in found]


def simulated(session: Session, command: str) -> dict[str, object]:
    """The report of a `vllm-graft simulate` command of a page."""
    done = session.script(
        f"import sys; from vllm_graft.cli import main; sys.exit(main({shlex.split(command)!r}))", timeout_s=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: any warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class TestSite:
    """The site that is built from the pages."""

    def test_every_page_is_built_and_can_be_searched(self, built: Path):
        found = json.loads((built / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
        searchable = {entry["location"].partition("#")[0] for entry in found}
        for path in DOCS.rglob("*.md"):
            name = str(path.relative_to(DOCS).with_suffix(".html"))
            assert (built / name).is_file()
            assert name in searchable

    def test_nothing_is_loaded_from_another_host(self, built: Path):
        """The site works offline: only links that a reader clicks may leave it."""
        loaded = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\s\"'>]+)")
        for path in built.rglob("*.html"):
            assert loaded.findall(path.read_text(encoding="utf-8")) == [], path

    def test_every_table_is_one(self, built: Path):
        """A row that is left as text means that the table above it was cut."""
        for path in built.rglob("*.html"):
            prose = re.sub(r"<pre.*?</pre>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            assert not re.findall(r"<p>\|.*", prose), path


GUIDES = DOCS / "how-to/plugin-guides.md"

START = """
import json
from vllm import LLM, SamplingParams
llm = LLM(MODEL, max_model_len=256, max_num_seqs=1, num_gpu_blocks_override=64)
engine = llm.llm_engine
for name, priority in zip("abc", (1, 5, 3)):
    engine.add_request(name, name * 20, SamplingParams(max_tokens=3, ignore_eos=True), priority=priority)
done = ""
while engine.has_unfinished_requests():
    done += "".join(output.request_id[0] for output in engine.step() if output.finished)
from vllm_graft.ledger import runs
items = [[item["name"], item["state"], item["calls"]] for run in runs() for row in run.rows() for item in row["items"]]
print("FACTS", json.dumps([done, items]))
"""


class TestGuides:
    """The page for those who come from the plugin guides."""

    @pytest.mark.engine
    def test_their_package_runs_in_a_real_llm(self, graft: Session):
        """With a general plugin, a manager and the variable; the order of the answers shows the patch."""
        block, project = blocks("python", GUIDES)[0], tomllib.loads(blocks("toml", GUIDES)[0].text)["project"]
        graft.simulate("instant", "virtual")
        graft.package(project["name"], project["entry-points"], {"vllm_custom_patches": block.text})
        graft.env["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
        graft.env["VLLM_CUSTOM_PATCHES"] = "PriorityScheduler"
        done = graft.script(START)
        assert done.returncode == 0, done.stderr[-3000:]
        line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS"))
        order, items = json.loads(line.removeprefix("FACTS"))
        assert order == "bca"
        ((name, state, calls),) = items
        assert (name, state) == ("PriorityScheduler", "applied")
        assert calls >= 9

    @pytest.mark.parametrize(
        "name",
        """
        SamplerBase ConstrainedJSONSampler SchedulerBase PriorityFairnessScheduler AttentionBackend ModelPluginInterface
        CustomMoEModel ModelRegistry Platform AttentionBackendEnum register_backend VLLM_ATTENTION_BACKEND VLLMPatch
        PatchManager min_vllm_version apply_from_env applied_patches is_applied VLLM_CUSTOM_PATCHES VLLM_PLUGINS
        MODEL_TYPE vllm.general_plugins vllm.logits_processors vllm.stat_logger_plugins vllm.io_processor_plugins
        is_argmax_invariant update_state __call__ my_threshold json_state use_v1 _Backend
        vllm.platform_plugins LoRAResolver IOProcessor StatSink
        """.split(),  # noqa: SIM905
    )
    def test_every_name_of_the_guides_is_on_the_page(self, name: str):
        """Whoever searches the page for what a guide uses finds what is done here."""
        assert re.search(rf"\b{re.escape(name)}\b", GUIDES.read_text(encoding="utf-8"))

    def test_one_file_serves_many_models(self):
        """Each gets what its profile names, with its options."""
        Path("graft.toml").write_text(blocks("toml", GUIDES)[1].text, encoding="utf-8")
        found = {size: resolve(PlanRequest(f"org/Model-{size}")) for size in ("70B", "7B", "1B")}
        names = {size: [item.name for item in plan] for size, plan in found.items()}
        assert names == {
            "70B": ["stat-logger-guard", "priority-fairness"],
            "7B": ["stat-logger-guard", "request-log"],
            "1B": ["stat-logger-guard"],
        }
        assert found["70B"].items[1].options["max_wait_sec"] == 60

    def test_the_threshold_is_each_requests_own(self):
        """And requests that do not ask are left alone."""
        import torch

        scope: dict[str, object] = {"__name__": "example"}
        exec(compile(blocks("python", GUIDES)[1].text, str(GUIDES), "exec"), scope)
        logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 3).log()
        _step(scope["Threshold"], logits, [{"my_threshold": 0.5}, {}, {"my_threshold": 0.2}])
        assert logits[0].exp().tolist() == pytest.approx([0.5, 0.3, 0, 0])
        assert logits[1].exp().tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05])
        assert logits[2].exp().tolist() == pytest.approx([0.5, 0.3, 0.15, 0])


def sampler(name: str) -> type[OptInSampler]:
    """The class behind a name that ships."""
    return load(SHIPPED[name], name, "vllm-graft")


def _samplers(*names: str) -> Plan:
    return Plan(tuple(PlanItem("sampler", name, SHIPPED[name], "vllm-graft", ("worker",)) for name in names))


def _key_row(key: Key) -> list[str]:
    """A key as a table has it: name, aliases, type, range, default."""
    least, most = key.low, key.high
    if key.kind.startswith("list"):
        span = f"up to {most}"
    elif most is not None:
        span = f"{least:g} to {most:g}"
    else:
        span = "any" if least is None else f"{least:g} and more"
    aliases = ", ".join(f"`{name}`" for name in key.aliases)
    return [f"`{key.name}`", aliases, key.kind, span, f"`{json.dumps(key.default)}`"]


def _in_toml(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _step(
    kind: type[OptInSampler], logits: object, requests: list[dict[str, object]], text: list[int] | None = None
) -> SamplerPipeline:
    """One step of a sampler over these logits, a row for each request, all with the same text before it."""
    import torch

    model = ServedModel("m", logits.shape[1], len(requests), torch.device("cpu"))
    ledger = Ledger()
    ledger.set_item("sampler", "one", "applied")
    made = GuardedSampler(
        PlanItem("sampler", "one", "m:C", "p", ("worker",), kind.options), kind(), model, ledger, None
    )
    made.sampler.setup(model)
    pipeline = SamplerPipeline([made], model, 0)
    for slot, extra in enumerate(requests):
        asked = SimpleNamespace(extra_args=extra, temperature=1.0, top_p=1.0, top_k=0, seed=1, max_tokens=9)
        assert pipeline.enter(slot, asked, tuple) == bool(extra)
    texts = {slot: Tokens(text or [], []) for slot in range(len(requests))}
    pipeline.run(logits, HostStep(pipeline.seeds, texts), list(range(len(requests))))
    assert not made.aside
    return pipeline


class TestLinks:
    @pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
    def test_a_link_leads_somewhere(self, path: Path):
        for link in re.findall(r"\]\(([^)\s]+)\)", _prose(path)):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.is_file(), f"{path.name}: {link}"
            assert not anchor or anchor in _anchors(target), f"{path.name}: {link}"

    @pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
    def test_no_page_names_a_host_that_it_should_not(self, path: Path):
        allowed = {"download.pytorch.org", "github.com", "127.0.0.1", "localhost"}
        text = path.read_text(encoding="utf-8")
        named = {host.partition(":")[0] for host in re.findall(r"https?://([^\s/)`\"'>]+)", text)}
        named |= set(re.findall(r"(?<![\w./@-])(?:[a-z0-9-]+\.)+(?:com|org|net|io|ai|dev)(?![\w-]|\.\w)", text))
        assert named <= allowed

    @pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
    def test_no_page_names_a_place_on_the_writers_machine(self, path: Path):
        assert not re.findall(r"(?<![\w.])/(?:root|work|home/\w+)\b", path.read_text(encoding="utf-8"))

    @pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: path.name)
    def test_nobody_is_sent_to_an_index_that_does_not_have_the_package(self, path: Path):
        """Until it is on one, it is installed from a clone or a wheel."""
        assert not re.findall(r"pip install ['\"]?vllm-graft\b", path.read_text(encoding="utf-8"))

    def test_the_navigation_has_every_page_once(self):
        listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
        assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))

    def test_every_page_is_reached_from_the_first(self):
        linked = set(re.findall(r"\]\(([\w/-]+\.md)", page("index.md")))
        assert {str(path.relative_to(DOCS)) for path in DOCS.glob("*/*.md")} <= linked


def _prose(path: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"``.+?``|`[^`\n]+`", "", text)


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as they are commonly made: lower case, hyphens for blanks."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
