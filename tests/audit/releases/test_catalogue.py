"""The catalogue that ships: small, whole, and the same as the sources say."""

from __future__ import annotations

import lzma
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_graft.audit.model import Use
from vllm_graft.audit.releases.catalogue import FILE, Catalogue, CatalogueBuilder
from vllm_graft.audit.releases.source_release import SourceRelease
from vllm_graft.audit.verdicts import ReleasePair
from vllm_graft.errors import ConfigError
from vllm_graft.sources.origins import Installed

TARGETS = Path(__file__).parents[3] / "benchmarks" / "audit_targets.txt"


@pytest.fixture(scope="module")
def shipped() -> Catalogue:
    return Catalogue.shipped()


def targets() -> list[tuple[str, list[str]]]:
    lines = (line.split() for line in TARGETS.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return [(name, states) for name, *states in lines]


def test_it_has_every_release_that_is_supported(shipped):
    assert shipped.releases == ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")


def test_it_is_well_under_a_megabyte():
    assert FILE.stat().st_size < 900_000


@pytest.mark.parametrize(("target", "states"), targets(), ids=[name for name, _ in targets()])
def test_it_gives_the_verdicts_that_reading_the_sources_by_hand_gave(shipped, target, states):
    module, _, qualname = target.partition(":")
    use = Use("replace", module, qualname, "p.py", 1)
    releases = [shipped.release(version) for version in shipped.releases]
    pairs = [ReleasePair.of(old, new, [use]) for old, new in pairwise(releases)]
    assert [pair.judge(use).state for pair in pairs] == states


@pytest.mark.parametrize(
    "module",
    [
        "vllm",
        "vllm.config.vllm",
        "vllm.config.model",
        "vllm.v1.kv_cache_interface",
        "vllm.v1.outputs",
        "vllm.lora.punica_wrapper.punica_base",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.engine.core",
        "vllm.v1.worker.gpu_model_runner",
        "vllm.model_executor.models.llama",
        "vllm.entrypoints.openai.api_server",
        "vllm.envs",
        "vllm.transformers_utils.configs",
    ],
)
def test_it_says_of_the_installed_release_what_its_files_say(shipped, module):
    here = SourceRelease(Installed())
    there = shipped.release(here.version.partition("+")[0])
    read = here._finder.module(module)
    assert read is not None
    classes = [name for name in read.scope if (place := read.place(name)) is not None and place.cls is not None]
    inside = [f"{name}.{inner}" for name in classes for inner in read.class_scope(read.place(name).cls)]
    for name in [*read.scope, *inside]:
        assert there.shape(module, name) == here.shape(module, name)
    for name in classes:
        assert there.attributes(module, name) == here.attributes(module, name)
        assert there.constructor(module, name) == here.constructor(module, name)
        assert there.abstract(module, name) == here.abstract(module, name)
        assert there.outside(module, name) == here.outside(module, name)
        for attribute in here.attributes(module, name) or ():
            assert there.config(module, name, attribute) == here.config(module, name, attribute)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.envs", "VLLM_USE_SIMPLE_KV_OFFLOAD"),
        ("vllm.envs", "CUDA_HOME"),
        ("vllm.transformers_utils.configs", "UltravoxConfig"),
        ("vllm.transformers_utils.processors", "OvisProcessor"),
        ("vllm.platforms", "current_platform"),
        ("vllm", "LLM"),
        ("vllm.v1.worker.gpu_model_runner", "torch"),
    ],
)
def test_it_has_names_that_are_given_on_demand_or_come_from_elsewhere(shipped, module, name):
    """In every release; what they never had they do not have."""
    for version in shipped.releases:
        assert shipped.release(version).shape(module, name) is not None
        assert shipped.release(version).shape(module, f"{name}_not") is None


def test_a_catalogue_that_is_added_to_is_the_one_that_is_built_at_once(make, tmp_path):
    first, second = make("1.0", m="def f(a): ...\nclass C:\n    x = 1"), make("2.0", m="def f(a, b=1): ...")
    at_once = CatalogueBuilder()
    at_once.add("1.0", first)
    at_once.write(tmp_path / "grown.xz")
    at_once = CatalogueBuilder()
    at_once.add("1.0", first)
    at_once.add("2.0", second)
    grown = CatalogueBuilder(tmp_path / "grown.xz")
    grown.add("2.0", second)
    assert grown.text == at_once.text


@pytest.mark.parametrize("content", [b"", b"no xz", lzma.compress(b"something else")])
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path, content):
    (tmp_path / "c.xz").write_bytes(content)
    with pytest.raises(ConfigError, match="make catalogue"):
        Catalogue.read(tmp_path / "c.xz")


@pytest.mark.parametrize(
    ("text", "form"),
    [("releases 0.31.0\n@vllm 3 0\n#", "1"), ("catalogue 2 0.31.0\n#", "2"), ("catalogue 9 0.40.0\n#", "9")],
)
def test_a_catalogue_of_another_form_is_refused(tmp_path, text, form):
    """It would lack what calls are judged by, and everything would seem to fit."""
    (tmp_path / "c.xz").write_bytes(lzma.compress(text.encode()))
    with pytest.raises(ConfigError, match=rf"form {form}, but this vllm-graft reads form 3.*make catalogue"):
        Catalogue.read(tmp_path / "c.xz")


def test_half_a_file_is_an_error_too(tmp_path):
    (tmp_path / "c.xz").write_bytes(FILE.read_bytes()[:100_000])
    with pytest.raises(ConfigError, match="cannot be read"):
        Catalogue.read(tmp_path / "c.xz")


@pytest.mark.parametrize("method", ["_check_and_update_cudagraph_mode", "update_from_output", "compute_slot_mappings"])
def test_it_knows_the_calls_that_the_files_of_the_installed_release_make(shipped, method):
    here = SourceRelease(Installed())
    there = shipped.release(here.version.partition("+")[0])
    assert set(there.calls(method)) == set(here.calls(method)) != set()
    assert set(there.definers(method)) == set(here.definers(method)) != set()
    for definer in here.definers(method):
        assert there.lineage(*definer.split(":")) == here.lineage(*definer.split(":"))
