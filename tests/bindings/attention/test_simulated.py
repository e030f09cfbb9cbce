"""Planned items of the attention point on the simulated accelerator: proven in every process, refused, or left out."""

import json
import subprocess
from typing import Any

import pytest

from vllm_graft.testing import Session

pytestmark = pytest.mark.engine

PLAN = '[defaults]\nattention = "sink-window"\n[options.sink-window]\nwindow = 256\n'

GENERATE = """
import json
from vllm import LLM, SamplingParams
from vllm_graft.ledger import runs
llm = LLM(MODEL, max_model_len=512, skip_tokenizer_init=True)
params = SamplingParams(max_tokens=5, detokenize=False)
print("TOKENS", len(llm.generate([{"prompt_token_ids": [5] * 400}], params)[0].outputs[0].token_ids))
print("ROWS " + json.dumps([row for view in runs() for row in view.rows()]), flush=True)
"""

KERNEL = """
from vllm_graft.contracts import AttentionKernel

class Plain(AttentionKernel):
    def forward(self, query, key, value, kv_cache, batch):
        raise RuntimeError("never called here")
"""


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr[-4000:]
    assert "TOKENS 5" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("ROWS "))
    found: list[dict[str, Any]] = json.loads(line.removeprefix("ROWS "))
    return found


def test_a_policy_is_applied_in_engine_core_and_in_every_worker(graft: Session):
    """With two workers, each of which reports for itself."""
    graft.plan(PLAN)
    graft.simulate()
    rows = rows_of(graft.script(GENERATE.replace("max_model_len", "tensor_parallel_size=2, max_model_len")))
    found = {row["name"]: row["items"] for row in rows if set(row["roles"]) & {"engine", "worker"}}
    assert len(found) == 3, found
    for items in found.values():
        assert [(item["name"], item["state"]) for item in items] == [("sink-window", "applied")]
    assert [item["figures"] for name, (item,) in found.items() if "Worker" in name] == [{"attention layers": 2}] * 2


def test_a_pipeline_stage_without_the_layers_that_are_meant_is_complete(graft: Session):
    """Each of two stages has one layer, and one of them a window."""
    graft.plan(PLAN + 'layers = "0"\n')
    graft.simulate()
    rows = rows_of(graft.script(GENERATE.replace("max_model_len", "pipeline_parallel_size=2, max_model_len")))
    found = {row["name"]: row["items"] for row in rows if "worker" in row["roles"]}
    assert [item["state"] for (item,) in found.values()] == ["applied", "applied"]
    assert sorted(item["figures"].get("attention layers", 0) for (item,) in found.values()) == [0, 1]


def test_a_kernel_is_left_out_with_a_reason(graft: Session):
    graft.package("kernels", {"vllm_graft.plugins": {"plain": "kernels:Plain"}}, {"kernels": KERNEL})
    graft.plan('[defaults]\nattention = "plain"\n')
    graft.simulate()
    done = graft.script(GENERATE)
    (items,) = (row["items"] for row in rows_of(done) if "engine" in row["roles"])
    assert [(item["name"], item["state"]) for item in items] == [("plain", "skipped")]
    assert items[0]["reason"] == "the simulated accelerator computes no attention"
    assert "S011: attention plain is left out: the simulated accelerator computes no attention" in (
        done.stdout + done.stderr
    )


REFUSED = """
from vllm import LLM
LLM(MODEL, max_model_len=512, skip_tokenizer_init=True, {arguments})
"""


@pytest.mark.parametrize(
    ("window", "arguments", "reason"),
    [
        (100, "", "a window of 100 tokens is too small: with KV-cache blocks of 16 tokens it moves by 64 tokens"),
        (256, "disable_hybrid_kv_cache_manager=True", "vLLM's hybrid KV-cache manager is off"),
        (256, "kv_cache_dtype='fp8'", "its KV cache is quantized (fp8"),
    ],
)
def test_what_cannot_have_a_window_stops_the_start(graft: Session, window: int, arguments: str, reason: str):
    graft.plan(PLAN.replace("256", str(window)))
    graft.simulate()
    graft.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = graft.script(REFUSED.format(arguments=arguments))
    assert done.returncode != 0
    assert "model.layers.0.self_attn.attn: attention 'sink-window' (from " in done.stderr
    assert reason in done.stderr
