"""A patch of compiled model code over a warm compile cache: switched off, on, off and on again, beside plain setattr.

    PYTHONPATH=src:SITE python benchmarks/gpu/compile_cache.py MODEL [--json FILE]

SITE holds a CUDA build of vLLM, MODEL is a folder such as `vllm-graft model --tiny` prints. vLLM keeps what
torch.compile made under a key that knows nothing of patches. One cache folder serves all runs: first without the patch
(cold), then with it, without and with it again. The same four runs with a patch set by hand in a plugin, in a cache of
their own, show what happens otherwise. Printed for each run: the tokens, whether they are those of an engine in the
same state that compiled in an empty folder, whether the graph was loaded or compiled, and the seconds to the answer
(the ways run beside each other).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_graft.testing.packages import lay_out, python_path

PATCH = """
from vllm_graft import VLLMPatch, wrap

class Doubled(VLLMPatch["vllm.model_executor.models.llama:LlamaMLP"], name="doubled", processes={"worker"}):
    @wrap
    def forward(self, call, x):
        return call(x) * -2.0
"""

BY_HAND = """
import os

def register():
    if os.environ.get("BY_HAND") != "1":
        return
    from vllm.model_executor.models.llama import LlamaMLP
    original = LlamaMLP.forward
    if getattr(original, "by_hand", False):
        return
    def forward(self, x):
        return original(self, x) * -2.0
    forward.by_hand = True
    LlamaMLP.forward = forward
"""

PLANNED = '[defaults]\npatches = ["doubled"]\n'
EMPTY = "[defaults]\n"

STATES = (False, True, False, True)


def child(model: str) -> None:
    """One engine, one greedy answer."""
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 28,  # else vLLM measures memory, and engines beside each other disturb that
        skip_tokenizer_init=True,
        compilation_config={"cudagraph_capture_sizes": [1]},
    )
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [10, 20, 30]}], params, use_tqdm=False)
    result = {
        "tokens": list(output.outputs[0].token_ids),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print("RESULT " + json.dumps(result), flush=True)


def run(model: str, folder: Path, *, way: str, on: bool, cache: str) -> dict[str, object]:
    plan = folder / f"{way}-{on}.toml"
    plan.write_text(PLANNED if way == "planned" and on else EMPTY, encoding="utf-8")
    env = {
        **os.environ,
        "PYTHONPATH": python_path(folder),
        "GRAFT_CONFIG": str(plan),
        "GRAFT_STATE_DIR": str(folder / "state"),
        "BY_HAND": "1" if way == "by hand" and on else "0",
        "VLLM_CACHE_ROOT": str(folder / f"cache-{cache}"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, model, "--child"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"the engine failed ({way}, on={on}):\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    text = done.stdout + done.stderr
    loaded = any(words in text for words in ("Directly load AOT compilation", "Directly load the compiled graph"))
    return {"way": way, "cache": cache, "on": on, "loaded": loaded, **json.loads(line[7:])}


def over_one_cache(model: str, folder: Path, way: str) -> list[dict[str, object]]:
    """The four runs of one way, one after the other, over a cache folder of their own."""
    return [run(model, folder, way=way, on=on, cache=way.replace(" ", "-")) for on in STATES]


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
        lay_out(
            folder,
            "vllm-graft",
            {
                "vllm.general_plugins": {"graft": "vllm_graft.boot:register"},
                "vllm_graft.plugins": {"doubled": "gpu_doubled:Doubled"},
            },
            {"gpu_doubled": PATCH},
        )
        lay_out(folder, "by-hand", {"vllm.general_plugins": {"by_hand": "by_hand:register"}}, {"by_hand": BY_HAND})
        with ThreadPoolExecutor() as chains:
            alone = [
                chains.submit(run, args.model, folder, way="planned", on=on, cache=f"alone-{on}") for on in STATES[:2]
            ]
            kept = [chains.submit(over_one_cache, args.model, folder, way) for way in ("planned", "by hand")]
        right = {bool(one.result()["on"]): one.result() for one in alone}
        assert right[False]["tokens"] != right[True]["tokens"], "the patch changes nothing that could be seen"
        results += right.values()
        for one in (one for chain in kept for one in chain.result()):
            one["right"] = one["tokens"] == right[bool(one["on"])]["tokens"]
            results.append(one)
            print(
                f"{one['way']:8} patch {'on ' if one['on'] else 'off'}  {'loaded  ' if one['loaded'] else 'compiled'}  "
                f"{one['seconds']:5.1f} s  {'right' if one['right'] else 'WRONG'}  {one['tokens']}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
