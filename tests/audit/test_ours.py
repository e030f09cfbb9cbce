"""What this package uses of vLLM is there in every release that it supports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_graft.audit.releases.catalogue import Catalogue
from vllm_graft.audit.render.presentation import WORDS
from vllm_graft.audit.report import audit
from vllm_graft.audit.uses import read

OURS = Path(__file__).parents[2] / "src" / "vllm_graft"

KNOWN = {
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor": "asked for where the V2 runner takes processors",
    "vllm.v1.kv_cache_layout:KVCacheLayout": "in a method that only releases with layouts call",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.sample": "wrapped whatever its arguments, of use from 0.31 on",
    "vllm.v1.worker.gpu.sample.logits_processor.loader:build_custom_logits_processors": "done without in others",
}
"""What is used only where a release has it, in a way that reading does not see; and how it is kept to those."""


@pytest.fixture(scope="module")
def reading():
    return read(OURS)


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return Catalogue.shipped()


def test_the_reading_finds_our_bindings_and_patches(reading):
    patched = {use.name for use in reading.uses if use.changes_vllm}
    assert {
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "vllm.v1.worker.gpu_input_batch:InputBatch.__init__",
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
    } <= patched
    assert not reading.unread


@pytest.mark.parametrize("release", Catalogue.shipped().releases[:-1])
def test_nothing_that_we_name_is_missing(reading, catalogue, release):
    newest = catalogue.release(catalogue.releases[-1])
    report = audit([reading], newest, [catalogue.release(release)])
    errors = [finding for finding in report.findings if finding.level == "error"]
    assert [finding for finding in errors if finding.subject.partition(" ")[2] not in KNOWN] == []


def test_what_we_excuse_is_still_used_and_still_missing_somewhere(reading, catalogue):
    report = audit([reading], catalogue.release("0.32.0"), [catalogue.release("0.26.0")])
    errors = {finding.subject.partition(" ")[2] for finding in report.findings if finding.level == "error"}
    assert errors == set(KNOWN)


def test_the_page_has_what_we_patch_and_override(reading, catalogue):
    base, *against = (catalogue.release(version) for version in catalogue.releases)
    report = audit([reading], base, against, steps=True)
    page = (OURS.parents[1] / "docs" / "explanation" / "benchmarks" / "audit.md").read_text(encoding="utf-8")
    _, _, table = page.partition("## This package, audited")
    shown = set(re.findall(r"^\| `.*$", table, re.MULTILINE))
    wanted = {
        f"| `{row.use.name.removeprefix('vllm.')}` | {row.use.way} | "
        + " | ".join(WORDS[cell.verdict.state].short or " " for cell in row.cells)
        + " |"
        for row in report.rows
        if row.use.changes_vllm or row.use.way == "override"
    }
    assert shown == wanted


def test_a_start_with_each_of_several_releases_counts(make, held, tmp_path):
    """``--against 0.3.0 0.2.0``: what the first of them refuses is no less an error."""
    module = "class Engine:\n    def step(self): ...\n"
    base, *against = held("source", *(make(version, m=module) for version in ("0.1.0", "0.3.0", "0.2.0")))
    file = tmp_path / "plugin.py"
    hook = "    @wrap\n    def step(self, call): return call()\n"
    head = "from vllm_graft import VLLMPatch, wrap\nclass P(VLLMPatch['vllm.m:Engine'], name='p', vllm='<0.3'):\n"
    file.write_text(head + hook, encoding="utf-8")
    found = [one for one in audit([read(file)], base, against).findings if one.level == "error"]
    assert [one.code for one in found] == ["P222"]
    assert "0.3.0" in found[0].what
