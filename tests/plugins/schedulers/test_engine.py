"""The schedulers that ship on vLLM's real engine, in virtual time: nothing is lost, every block is free again, and the
answers are those of vLLM's own scheduler."""

import json

import pytest

from vllm_graft.testing import Session

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCRIPT = """
import json, random, sys
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

ASYNC, BLOCKS = sys.argv[1] == "async", 120
llm = LLM(MODEL, max_model_len=512, max_num_seqs=16, num_gpu_blocks_override=BLOCKS, async_scheduling=ASYNC, seed=1)
engine = llm.llm_engine
core = engine.engine_core.engine_core.scheduler
preempted, preempt = [], core._preempt_request

def counted(request, *args, **kwargs):
    preempted.append(request.request_id)
    preempt(request, *args, **kwargs)

core._preempt_request = counted
draw = random.Random(7)
coming = []
for number in range(150):
    words = dict(max_tokens=draw.randint(1, 120), ignore_eos=True, extra_args={"tenant": f"t{number % 4}"})
    if number % 5 == 0:
        words = {**words, "ignore_eos": False, "structured_outputs": StructuredOutputsParams(choice=["yes", "no"])}
    coming.append((str(number), chr(97 + number % 26) * draw.randint(1, 250), SamplingParams(**words), number % 6))
coming.reverse()
names, done, aborted = [], {}, set()
while coming or engine.has_unfinished_requests():
    for _ in range(draw.randint(0, 6)):
        if coming:
            name, prompt, params, priority = coming.pop()
            engine.add_request(name, prompt, params, priority=priority)
            names.append(name)
    if draw.random() < 0.15 and names:
        name = draw.choice(names)
        if name not in done and name not in aborted:
            aborted.add(name)
            engine.abort_request([name])
    for output in engine.step():
        if output.finished:
            assert output.request_id not in done
            done[output.request_id] = list(output.outputs[0].token_ids)
for _ in range(3):
    engine.step()
pool = core.kv_cache_manager.block_pool
facts = {
    "scheduler": type(core).__name__,
    "lost": sorted({str(number) for number in range(150)} - set(done) - aborted),
    "free": pool.get_num_free_blocks() + 1 == pool.num_gpu_blocks,
    "left": len(core.requests) + len(core.running) + len(core.waiting),
    "taken": len(getattr(core.waiting, "_taken", ())),
    "preempted": len(preempted),
    "answers": {name: tokens for name, tokens in done.items()},
}
print("FACTS", json.dumps(facts))
"""


ADAPTERS = """
import json
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM(MODEL, max_model_len=256, max_num_seqs=8, enable_lora=True, max_loras=1, max_lora_rank=8, seed=1)
engine = llm.llm_engine
core = engine.engine_core.engine_core.scheduler
for number in range(30):
    adapter = LoRARequest(f"a{number % 3}", number % 3 + 1, FOLDER)
    params = SamplingParams(max_tokens=5 + number % 7, ignore_eos=True)
    engine.add_request(str(number), "abc", params, lora_request=adapter, priority=number % 5 + 1)
done, mixed = {}, 0
while engine.has_unfinished_requests():
    mixed = max(mixed, len({request.lora_request.lora_name for request in core.running}))
    for output in engine.step():
        if output.finished:
            done[output.request_id] = len(output.outputs[0].token_ids)
pool = core.kv_cache_manager.block_pool
free = pool.get_num_free_blocks() + 1 == pool.num_gpu_blocks
print("FACTS", json.dumps({"done": done, "mixed": mixed, "left": len(core.waiting) + len(core.running), "free": free}))
"""


def played(graft: Session, scheduler: str, mode: str, script: str = SCRIPT) -> dict[str, object]:
    graft.simulate("H200", "virtual")
    graft.env["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
    name, *options = scheduler.split(",")
    table = "".join(f"{option}\n" for option in options)
    graft.plan(f'[defaults]\nscheduler = "{name}"\n[options.{name}]\n{table}' if scheduler else "")
    done = graft.script(script.replace("sys.argv[1]", repr(mode)))
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS"))
    facts: dict[str, object] = json.loads(line.removeprefix("FACTS"))
    return facts


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_stress_leaves_nothing_behind(graft: Session, mode: str):
    """Few blocks, so that requests are preempted; aborts, grammars, all classes and several tenants."""
    stock = played(graft, "", mode)
    assert (stock["lost"], stock["free"], stock["left"]) == ([], True, 0)
    for name in ("priority-fairness", "priority-fairness,reserved_slots = 3", "tenant-fairness"):
        facts = played(graft, name, mode)
        assert facts["scheduler"] == ("PlannedAsyncScheduler" if mode == "async" else "PlannedScheduler")
        assert (facts["lost"], facts["free"], facts["left"], facts["taken"]) == ([], True, 0, 0)
        assert facts["preempted"] > 10  # type: ignore[operator]
        common = stock["answers"].keys() & facts["answers"].keys()  # type: ignore[attr-defined]
        assert len(common) > 100
        for each in common:
            assert facts["answers"][each] == stock["answers"][each]  # type: ignore[index]


@pytest.mark.parametrize("scheduler", ["priority-fairness", "tenant-fairness"])
def test_requests_that_wait_for_a_slot_of_their_adapter_keep_their_place(graft: Session, scheduler: str):
    """One adapter at a time, three of them: who cannot be taken in a step is put back, and all are served."""
    folder = graft.folder / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}))
    facts = played(graft, scheduler, "async", ADAPTERS.replace("FOLDER", repr(str(folder))))
    assert facts["done"] == {str(number): 5 + number % 7 for number in range(30)}
    assert (facts["mixed"], facts["left"], facts["free"]) == (1, 0, True)
