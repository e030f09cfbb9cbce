"""What a planned sampler costs a request in the front end: processor time of the checks, beside vLLM's own work.

    python -m benchmarks.sampling.requests

Needs vLLM, and no engine: vLLM makes sampling parameters of its own request classes, with our patches in and without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping

from vllm_graft.bindings.sampling import patches, requests
from vllm_graft.ledger import current
from vllm_graft.ledger.record import Record
from vllm_graft.patching import default_engine
from vllm_graft.plan import Plan, PlanItem, Run, export_plan
from vllm_graft.plan.catalogue import SHIPPED

SAMPLERS = ("dry", "xtc", "top-n-sigma", "no-repeat-ngram", "constrained-json")

# What a client for story writing sends with every request, most of it with the value that means off.
CLIENT = {
    "dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2, "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "dry_penalty_last_n": 0, "xtc_probability": 0.5, "xtc_threshold": 0.1, "top_n_sigma": 0, "mirostat_mode": 0,
    "mirostat_tau": 5, "mirostat_eta": 0.1, "smoothing_factor": 0, "smoothing_curve": 1, "dynatemp_min": 0,
    "dynatemp_max": 0, "dynatemp_exponent": 1, "tfs": 1, "typical_p": 1, "eta_cutoff": 0, "epsilon_cutoff": 0,
    "top_a": 0, "skew": 0, "guided_regex": None, "custom_token_bans": "", "sampler_priority": ["dry", "xtc"],
    "no_repeat_ngram_size": 0, "temperature_last": False, "ban_eos_token": False, "rep_pen_range": 0, "grammar": "",
}  # fmt: skip

CASES: Mapping[str, Mapping[str, object]] = {
    "no key": {},
    "one key": {"dry_multiplier": 0.8},
    "one key in vllm_xargs": {"vllm_xargs": {"dry_multiplier": 0.8}},
    "30 keys of a client": CLIENT,
    "500 unknown names": {f"dry_penalty_lst_{number:03d}": 1 for number in range(500)},
}


def cost_us(make: Callable[[], object], ask: Callable[[object], None], number: int) -> float:
    """The processor time of one request, its body already read: the least of seven rounds, others disturb the rest."""
    rounds = []
    for _ in range(7):
        made = [make() for _ in range(number)]
        started = time.process_time_ns()
        for each in made:
            ask(each)
        rounds.append((time.process_time_ns() - started) / number / 1000)
    return min(rounds)


def measure(number: int) -> list[dict[str, object]]:
    """Each case, for one prompt and for 300, without our patches and with them."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    def ask(prompts: int, *, checked: bool) -> Callable[[object], None]:
        def one(request: object) -> None:
            for _ in range(prompts):
                params = request.to_sampling_params(16, {})  # type: ignore[attr-defined]
                if checked:
                    requests.check(params)

        return one

    def rows(*, checked: bool) -> dict[tuple[str, int], float]:
        return {
            (case, prompts): cost_us(
                lambda extra=extra: CompletionRequest(model="m", prompt="x", **extra),  # type: ignore[misc]
                ask(prompts, checked=checked),
                max(2, number // prompts),
            )
            for case, extra in CASES.items()
            for prompts in (1, 300)
        }

    stock = rows(checked=False)
    items = tuple(PlanItem("sampler", name, SHIPPED[name], "vllm-graft", ("worker",)) for name in SAMPLERS)
    run, plan = Run("benchmark", 1), Plan(items)
    export_plan(plan, run)
    current().begin_run(run.id, plan)
    current().open(Record.of_this_process(run.id, plan.hash, "m", ["frontend"], "", ""))
    patches.install(default_engine())
    ours = rows(checked=True)
    current().close()
    return [
        {"case": case, "prompts": prompts, "stock_us": round(stock[case, prompts], 1), "us": round(us, 1)}
        for (case, prompts), us in ours.items()
    ]


def main() -> int:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=2000, help="requests in a round (default: 2000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    found = measure(args.requests)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{'case':<24}{'prompts':>8}{'vLLM, us':>12}{'with us, us':>14}")
    for row in found:
        print(f"{row['case']:<24}{row['prompts']:>8}{row['stock_us']:>12}{row['us']:>14}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
