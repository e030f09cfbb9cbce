"""What a planned KV policy buys on a modelled device, in virtual time: room for more requests, and shorter steps."""

import json
from typing import Any

import pytest

from vllm_graft.testing import Session

pytestmark = pytest.mark.engine

PLAN = '[defaults]\nattention = "sink-window"\n[options.sink-window]\nwindow = 512\n'

STUDY = """
import json
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_graft.simulator.workload import Workload, WorkloadRequest, run

running, used, original = [], [], Scheduler.schedule

def schedule(self, *args, **kwargs):
    output, pool = original(self, *args, **kwargs), self.kv_cache_manager.block_pool
    running.append(len(self.running))
    used.append((pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) / max(len(self.running), 1))
    return output

Scheduler.schedule = schedule
simulated = {"device": "H200", "speed": "virtual", "kv_bytes": 20_000 * 131072}
args = {"model": "llama-3-8b", "max_model_len": 4000, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
many = Workload([WorkloadRequest(0.0, 100, prompt_tokens=2000, id=f"r{n}") for n in range(40)])
crowd = run(many, args, simulated).as_dict()
at_once = max(running)
running.clear(), used.clear()
alone = run(Workload([WorkloadRequest(0.0, 200, prompt_tokens=3500, id="long")]), args, simulated).as_dict()
print("STUDY " + json.dumps([crowd, at_once, alone, used]), flush=True)
"""


def study(graft: Session, plan: str, more: str = "") -> tuple[dict[str, Any], int, dict[str, Any], list[float]]:
    graft.plan(plan)
    graft.simulate("H200", "virtual")
    done = graft.script(STUDY.replace('id="long"', f'id="long"{more}'))
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("STUDY "))
    found = json.loads(line.removeprefix("STUDY "))
    return found[0], found[1], found[2], found[3]


def test_more_requests_fit_and_steps_are_shorter(graft: Session):
    crowd, at_once, alone, used = study(graft, "")
    thrifty, more_at_once, thrifty_alone, thrifty_used = study(graft, PLAN)
    assert (crowd["attention"], thrifty["attention"]) == ("", "sink-window")
    assert thrifty["sound"]
    assert crowd["done"] == thrifty["done"] == 40
    # 20,000 tokens hold nine requests of 2,100, and thirty of 576 and a part of a prompt.
    assert at_once <= 10
    assert more_at_once >= 25
    assert thrifty["makespan_s"] < 0.8 * crowd["makespan_s"]
    # One request alone: its blocks by the pool's own count, and the time of a step.
    assert max(used) >= 3600 / 16
    assert max(thrifty_used[10:-5]) <= 576 / 16 + 1
    assert thrifty_alone["tpot_s"]["mean"] < alone["tpot_s"]["mean"]
    assert thrifty_alone["steps"] == alone["steps"]


def test_a_request_has_the_steps_of_the_window_that_it_asks_for(graft: Session):
    """As if the window were planned for all; another request of the same server has full attention."""
    _, _, planned, _ = study(graft, PLAN)
    asking = PLAN.replace("512", "4000") + 'default = "full"\n'
    crowd, at_once, asked, used = study(graft, asking, ', extra={"kv_window": 512}')
    assert crowd["done"] == 40
    assert at_once <= 10
    assert max(used[10:-5]) <= 576 / 16 + 1
    assert asked["tpot_s"]["mean"] == pytest.approx(planned["tpot_s"]["mean"], rel=1e-3)


SHARE = """[defaults]
attention = "scored-blocks"
[options.scored-blocks]
keep = 0.25
min_tokens = 512
every = 4
"""


def test_a_share_of_the_blocks_is_kept_and_steps_read_less(graft: Session):
    """Scores are made up; the blocks are freed by the real manager, and steps read the others."""
    _, _, alone, used = study(graft, "")
    thrifty, _, thrifty_alone, thrifty_used = study(graft, SHARE)
    assert thrifty["attention"] == "scored-blocks"
    assert thrifty["sound"]
    # A quarter of the 231 blocks that the request fills, and those that it fills and has just filled.
    assert max(used) >= 3600 / 16
    assert max(thrifty_used[30:-5]) <= 231 / 4 + 3
    assert thrifty_alone["tpot_s"]["mean"] < alone["tpot_s"]["mean"]


def test_a_policy_that_was_refused_fails_the_run(graft: Session):
    """The figures are those of a stock engine then."""
    graft.plan(PLAN.replace("512", "100").replace("[defaults]", '[defaults]\non_failure = "warn"'))
    (graft.folder / "w.jsonl").write_text('{"at": 0, "prompt_tokens": 300, "max_tokens": 5}\n', encoding="utf-8")
    words = ["simulate", "--model", "llama-3-8b", "--device", "H200", "--speed", "virtual", "--workload", "w.jsonl"]
    done = graft.script(f"import sys\nfrom vllm_graft.cli import main\nsys.exit(main({words!r}))")
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert "attention: sink-window; plan " in done.stdout
    assert "S002 error: attention sink-window: is refused: model.layers.0.self_attn.attn: " in done.stdout
    assert "a window of 100 tokens is too small" in done.stdout
    assert "These are not the figures of the plan" in done.stdout
