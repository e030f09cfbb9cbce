"""A planned balancer in vLLM's own start, on the simulated accelerator: an engine that would never ask it."""

import pytest

from vllm_graft.testing import Session

pytestmark = pytest.mark.engine

START = """
from vllm import LLM
LLM(MODEL, max_model_len=256)
print("started")
"""


def test_a_start_without_eplb_is_refused(graft: Session):
    """The last line says who, why and the next step."""
    graft.simulate()
    graft.plan('[defaults]\nexpert_balancer = "fewest-moves"\n')
    done = graft.script(START)
    assert done.returncode != 0
    line = done.stderr.strip().splitlines()[-1]
    assert "the expert balancer 'fewest-moves' would never be called" in line
    assert "graft.toml:2" in line
    assert "Next: start the engine with --enable-eplb, or remove it from the plan" in line


def test_a_lenient_start_without_eplb_says_what_is_left_out(graft: Session):
    """It is a finding, and the worker shows it as skipped."""
    graft.simulate()
    graft.plan('[defaults]\nexpert_balancer = "fewest-moves"\non_failure = "warn"\n')
    done = graft.script(START)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = done.stdout + done.stderr
    assert "S011: expert-balancer fewest-moves is left out: vLLM rearranges no experts without --enable-eplb" in printed
    assert "fewest-moves skipped" in printed
