"""The patches that people write after vLLM's own guide to plugins, with the targets that today's vLLM has."""

import json
import re
from pathlib import Path

import pytest

from vllm_graft.testing import Session, assert_active, assert_called

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "patches.md").read_text(encoding="utf-8")

PATCHES = '''
import logging

from vllm_graft import VLLMPatch, min_vllm_version

logger = logging.getLogger("vllm.seeds")


@min_vllm_version("0.9.1")
class PrioritySchedulerPatch(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], processes={"engine"}):
    """Adds priority-based scheduling."""

    def get_priority(self, request) -> int:
        """New method added to Scheduler."""
        return request.priority

    def schedule(self, *args, **kwargs):
        """Override existing method."""
        self.graft_waiting = sorted(self.waiting, key=lambda r: self.get_priority(r), reverse=True)
        # Call original via _original_ prefix
        return self._original_schedule(*args, **kwargs)

    def schedule_with_priority(self):
        """Can be called instead of the standard schedule()."""
        return self.schedule()


class AdmissionLog(VLLMPatch["vllm.v1.engine.input_processor:InputProcessor"], processes={"frontend"}):
    """Sees each request before the engine does."""

    def process_inputs(self, call, request_id, *args, **kwargs):
        logger.info("request %s", request_id)
        return call(request_id, *args, **kwargs)
'''

ENTRIES = {"PrioritySchedulerPatch": "seed_patches:PrioritySchedulerPatch", "AdmissionLog": "seed_patches:AdmissionLog"}


def serve_and_ask(session: Session) -> None:
    """A real server with both patches, named as the guide names them, and one request."""
    session.package("seed-patches", {"vllm_graft.plugins": ENTRIES}, {"seed_patches": PATCHES})
    session.env["VLLM_CUSTOM_PATCHES"] = "PrioritySchedulerPatch,AdmissionLog"
    asked = {"model": "m", "prompt": "hi", "max_tokens": 5, "ignore_eos": True}
    with session.server("--served-model-name", "m", "--max-model-len", "256") as server:
        status, body = server.post("/v1/completions", asked)
        assert status == 200, body
        view = server.run_view()
        assert view is not None
        assert_active(view, "PrioritySchedulerPatch", roles=("engine",))
        assert_active(view, "AdmissionLog", roles=("frontend",))
        assert_called(view, "PrioritySchedulerPatch", at_least=5)
        assert_called(view, "AdmissionLog", at_least=1)
        assert view.findings() == []
        engine = next(process for process in view.processes if "engine" in process.record.roles)
        assert engine.calls("AdmissionLog") == 0, "it is not this process's"


@pytest.mark.server
def test_on_the_simulated_device(graft: Session):
    """On every release of the matrix."""
    graft.simulate()
    serve_and_ask(graft)


@pytest.mark.server
@pytest.mark.compiled
def test_on_a_real_build(graft: Session):
    """On the builds for CPUs."""
    serve_and_ask(graft)


PRIORITIES = """
import json
from vllm import LLM, SamplingParams
llm = LLM(MODEL, max_model_len=256, max_num_seqs=SEQS, num_gpu_blocks_override=64)
engine = llm.llm_engine
for name, priority in zip("abcde", (1, 5, 0, 3, 5)):
    engine.add_request(name, name * 20, SamplingParams(max_tokens=3, ignore_eos=True), priority=priority)
PLAY
print("FACTS", json.dumps([done, engine.engine_core.engine_core.scheduler.get_request_counts()]))
"""
TO_THE_END = """
done = ""
while engine.has_unfinished_requests():
    done += "".join(output.request_id[0] for output in engine.step() if output.finished)
"""
ONE_STEP = """
output = engine.engine_core.engine_core.scheduler.schedule_with_priority()
done = "".join(new.req_id[0] for new in output.scheduled_new_reqs)
"""


@pytest.mark.engine
@pytest.mark.parametrize(
    ("module", "name", "seqs", "play", "planned", "stock"),
    [
        ("priority_scheduler", "PrioritySchedulerPatch", 1, TO_THE_END, ["bedac", [0, 0]], ["abcde", [0, 0]]),
        ("priority_output", "priority-output", 8, ONE_STEP, ["bedac", [5, 0]], None),
    ],
)
def test_high_priority_goes_first(
    graft: Session, module: str, name: str, seqs: int, play: str, planned: list[object], stock: list[object] | None
):
    """The patches as the page shows them; without them the order is that of arrival, or there is no such method."""
    (text,) = re.findall(rf"^```python\n(# {module}\.py\n.+?)^```", PAGE, re.MULTILINE | re.DOTALL)
    graft.simulate("H200", "virtual")
    graft.env["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
    graft.package("guide", {"vllm_graft.plugins": {name: f"{module}:PrioritySchedulerPatch"}}, {module: text})
    script = PRIORITIES.replace("SEQS", str(seqs)).replace("PLAY", play)
    for patches, wanted in ((name, planned), (None, stock)):
        graft.env["VLLM_CUSTOM_PATCHES"] = patches
        done = graft.script(script)
        if wanted is None:
            assert "has no attribute 'schedule_with_priority'" in done.stderr
        else:
            assert done.returncode == 0, done.stderr[-3000:]
            line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS"))
            assert json.loads(line.removeprefix("FACTS")) == wanted
