"""A planned sampler, patches and a stat sink on a GPU, under both model runners, beside the stock engine.

    PYTHONPATH=src:SITE python benchmarks/gpu/both_runners.py MODEL [--json FILE]

SITE holds a CUDA build of vLLM, MODEL is a folder such as `vllm-graft model --tiny` prints. For each model runner the
same batch runs twice, stock and with the plan. Printed: which rows the sampler changed, whether the others are the
stock engine's to the token, and what every process says of itself. The recorded result is in `both_runners.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_graft.testing.packages import lay_out, python_path

ITEMS = """
from vllm_graft import SamplingStrategy, VLLMPatch, wrap

class Force(SamplingStrategy):
    keys = ("force",)
    def __init__(self, options=None):
        super().__init__(options)
        self.tokens = {}
    def open(self, slot, params):
        self.tokens[slot] = int(params["force"])
        return True
    def step(self, logits, rows):
        import torch
        wanted = torch.tensor([self.tokens[slot] for slot in rows.slots.tolist()], device=logits.device)
        logits[rows.rows] = float("-inf")
        logits[rows.rows, wanted] = 0.0

class OnEngine(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="on-engine", processes={"engine"}):
    @wrap
    def schedule(self, *args, **kwargs):
        return self._original_schedule(*args, **kwargs)

class OnWorker(VLLMPatch["vllm.v1.worker.worker_base:WorkerWrapperBase"], name="on-worker", processes={"worker"}):
    @wrap
    def execute_model(self, *args, **kwargs):
        return self._original_execute_model(*args, **kwargs)
"""

PLAN = '[defaults]\nsamplers = ["force"]\npatches = ["on-engine", "on-worker"]\nstats = ["request-log"]\n'

PROMPTS = 32
TOKENS = 32


def child(model: str) -> None:
    """One engine, one batch: every second request asks for the sampler where there is one."""
    from vllm import LLM, SamplingParams

    from vllm_graft.ledger import runs

    planned = os.environ.get("GRAFT_DISABLE") != "1"
    llm = LLM(model, dtype="bfloat16", max_model_len=256, gpu_memory_utilization=0.3, skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": [10 + number, 20, 30 + number]} for number in range(PROMPTS)]
    params = [
        SamplingParams(
            max_tokens=TOKENS,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"force": 40 + number} if planned and number % 2 else None,
        )
        for number in range(PROMPTS)
    ]
    outputs = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    rows = [row for view in runs() for row in view.rows() if row["life"] == "running"]
    findings = [finding.as_dict() for view in runs() for finding in view.findings()]
    runner = "V2" if getattr(llm.llm_engine.vllm_config, "use_v2_model_runner", False) else "V1"
    print(
        "RESULT " + json.dumps({"runner": runner, "outputs": outputs, "rows": rows, "findings": findings}), flush=True
    )


def engine(model: str, folder: Path, runner: str, disable: str) -> dict[str, object]:
    env = {
        **os.environ,
        "PYTHONPATH": python_path(folder),
        "GRAFT_CONFIG": str(folder / "graft.toml"),
        "GRAFT_STATE_DIR": str(folder / f"state-{runner}-{disable}"),
        "GRAFT_DISABLE": disable,
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, model, "--child"], env=env, cwd=folder, capture_output=True, text=True
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(
            f"the engine failed ({runner}, GRAFT_DISABLE={disable}):\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        )
    found: dict[str, object] = json.loads(line[7:])
    return found


def compare(runner: str, stock: dict, ours: dict) -> dict[str, object]:
    plain = [number for number in range(PROMPTS) if number % 2 == 0]
    forced = [number for number in range(PROMPTS) if number % 2]
    return {
        "runner": ours["runner"],
        "asked": runner,
        "forced_rows_right": sum(ours["outputs"][n] == [40 + n] * TOKENS for n in forced),
        "forced_rows": len(forced),
        "other_rows_as_stock": sum(ours["outputs"][n] == stock["outputs"][n] for n in plain),
        "other_rows": len(plain),
        "findings": ours["findings"],
        "processes": [
            {
                "name": row["name"],
                "roles": row["roles"],
                "start_method": row["start_method"],
                "vllm": row["vllm"],
                "runner": row["runner"],
                "items": {item["name"]: [item["state"], item["calls"], item["hooks"]] for item in row["items"]},
            }
            for row in ours["rows"]
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model)
        return 0
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(folder, "vllm-graft", {"vllm.general_plugins": {"graft": "vllm_graft.boot:register"}})
        own = {"force": "gpu_items:Force", "on-engine": "gpu_items:OnEngine", "on-worker": "gpu_items:OnWorker"}
        lay_out(folder, "gpu-items", {"vllm_graft.plugins": own}, {"gpu_items": ITEMS})
        (folder / "graft.toml").write_text(PLAN, encoding="utf-8")
        for runner in ("V2", "V1"):
            results.append(
                compare(runner, engine(args.model, folder, runner, "1"), engine(args.model, folder, runner, "0"))
            )
            print(json.dumps(results[-1], indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
