"""The patches of the sampler point: a target that the installed vLLM lacks is logged, with what follows from it."""

import logging
import sys
from types import ModuleType

import pytest

from vllm_graft.bindings.sampling import patches
from vllm_graft.boot.process import process
from vllm_graft.errors import TargetError
from vllm_graft.patching import Engine, VLLMPatch, wrap

MISSING = TargetError("there is no such class", where="here", fix="none")


def test_a_patch_that_does_not_fit_is_logged_with_its_consequence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Without it the server works another way, which must not be a secret."""
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.sampler", ModuleType("vllm.v1.sample.sampler"))
    row = {patches.AfterPenalties: patches.SAMPLER_PATCHES[patches.AfterPenalties]}
    monkeypatch.setattr(patches, "SAMPLER_PATCHES", row)
    engine = Engine(strict=False)
    with caplog.at_level("WARNING", logger="vllm.graft"):
        patches.install(engine)
    assert "patch graft.after-penalties is not applied, so strategies work before the penalties" in caplog.text
    assert "there is no 'Sampler' in vllm.v1.sample.sampler" in caplog.text
    assert [hook.state for hook in engine.report()] == ["refused"]


def test_so_is_one_that_waited_for_its_module(caplog: pytest.LogCaptureFixture):
    """It is refused when vLLM imports the module, long after the start."""
    with caplog.at_level("WARNING", logger="vllm.graft"):
        process._patch_refused(patches.ChatKeys, MISSING)
    assert "graft.chat-keys is not applied, so samplers' keys work in vllm_xargs only" in caplog.text


@pytest.mark.parametrize(("takes", "level"), [(False, logging.DEBUG), (True, logging.WARNING)])
def test_before_0_31_the_v2_runner_needs_no_patch(
    takes: bool, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It takes no samplers there, and a plan that needs it to is refused: not worth a warning in every process."""
    monkeypatch.setattr(patches, "v2_takes_samplers", lambda: takes)
    with caplog.at_level(logging.DEBUG, logger="vllm.graft"):
        patches.log_refusal(patches.V2Builder, MISSING)
    assert [record.levelno for record in caplog.records] == [level]


def test_patches_of_other_rooms_are_not_explained_here(caplog: pytest.LogCaptureFixture):
    """Those that boot needs refuse a plan instead."""

    class Other(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="graft.other-test", why="a test"):
        @wrap
        def step(self, call):
            return call()

    patches.log_refusal(Other, MISSING)
    assert not caplog.records


def test_every_patch_says_what_a_server_without_it_does():
    """As the end of a sentence, and every patch of the module is in the table."""
    declared = {each for each in vars(patches).values() if isinstance(each, type) and issubclass(each, VLLMPatch)}
    assert declared - {VLLMPatch} == set(patches.SAMPLER_PATCHES)
    assert all(text and not text.endswith(".") for text in patches.SAMPLER_PATCHES.values())
