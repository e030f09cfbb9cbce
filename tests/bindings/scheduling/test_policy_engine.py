"""Scheduling policies on vLLM's real engine: order, preemption and failures; nothing is lost, and the answers are those
of vLLM's own scheduler."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from vllm_graft.testing import Session

pytestmark = pytest.mark.engine

GUIDE = '''
from vllm_graft import SchedulerBase

class PriorityFairnessScheduler(SchedulerBase):
    """
    Custom scheduler that balances priority with fairness.
    Priority: higher-priority requests are served first.
    Fairness: no request waits more than max_wait_time.
    """
    def __init__(self, config: dict):
        self.max_wait_sec = config.get("max_wait_sec", 30)
        self.priority_weight = config.get("priority_weight", 0.7)
        self.fairness_weight = config.get("fairness_weight", 0.3)
    def schedule(self, waiting_queue: list, running_queue: list,
                 kv_cache_state: dict) -> dict:
        """
        Score-based scheduling with priority and fairness.
        """
        import time
        # Score each waiting request
        scored_requests = []
        current_time = time.time()
        for req in waiting_queue:
            wait_time = current_time - req["arrival_time"]
            priority = req.get("priority", 3) # 1=highest, 5=lowest
            # Score: combination of priority and wait time
            priority_score = (6 - priority) / 5 # Normalize to [0, 1]
            fairness_score = min(1.0, wait_time / self.max_wait_sec)
            total_score = (
                self.priority_weight * priority_score +
                self.fairness_weight * fairness_score
            )
            # Boost if approaching max wait time
            if wait_time > self.max_wait_sec * 0.8:
                total_score += 0.5 # Emergency boost
            scored_requests.append({
                "request": req,
                "score": total_score,
                "wait_time": wait_time,
            })
        # Sort by score (descending)
        scored_requests.sort(key=lambda x: -x["score"])
        # Admit requests based on available KV cache
        available_blocks = kv_cache_state["free_blocks"]
        prefill_requests = []
        for scored in scored_requests:
            req = scored["request"]
            blocks_needed = self._estimate_blocks(req)
            if blocks_needed <= available_blocks:
                prefill_requests.append(req)
                available_blocks -= blocks_needed
        return {
            "prefill_requests": prefill_requests,
            "decode_requests": running_queue, # Continue all running
            "preempt_requests": [],
        }
    def _estimate_blocks(self, request: dict) -> int:
        """Estimate KV cache blocks needed for a request."""
        tokens = request.get("input_length", 0) + request.get("max_tokens", 1024)
        block_size = 16 # tokens per block
        return (tokens + block_size - 1) // block_size
'''
"""The scheduler of the plugin guide, word for word; only its base class is imported."""

POLICIES = '''
import random
from vllm_graft import SchedulingPolicy
from vllm_graft.contracts import Schedule


class Urgent(SchedulingPolicy):
    """The smallest priority first, at the cost of the running request with the greatest."""

    def schedule(self, waiting, running, kv_cache):
        order = sorted(waiting, key=lambda r: (r.priority, r.arrival))
        worst = max(running, key=lambda r: r.priority, default=None)
        if order and worst is not None and order[0].priority < worst.priority:
            return Schedule(order, preempt=[worst])
        return Schedule(order)


class Restless(SchedulingPolicy):
    """Starts some, in any order, and preempts some that did nothing to deserve it."""

    def __init__(self, options=None):
        super().__init__(options)
        self.draw = random.Random(3)

    def schedule(self, waiting, running, kv_cache):
        assert 0 <= kv_cache["free_blocks"] <= kv_cache.total_blocks == 119, dict(kv_cache)
        assert all(not r.computed_tokens for r in waiting) and waiting == sorted(waiting, key=lambda r: r.arrival)
        preempt = [r for r in running if self.draw.random() < 0.03 and r.preemptions < 6]
        some = [r for r in waiting if self.draw.random() < 0.8]
        self.draw.shuffle(some)
        return {
            "prefill_requests": some,
            "decode_requests": [r for r in running if r not in preempt],
            "preempt_requests": preempt,
        }


class Raises(Restless):
    """Fails in the middle of the work."""

    def schedule(self, waiting, running, kv_cache):
        if len(running) > 7:
            raise RuntimeError("no idea")
        return super().schedule(waiting, running, kv_cache)


class Forgets(Restless):
    """Leaves out a running request in the middle of the work."""

    def schedule(self, waiting, running, kv_cache):
        if len(running) > 7:
            return Schedule(waiting, decode=running[1:])
        return super().schedule(waiting, running, kv_cache)


class Idle(SchedulingPolicy):
    """Lets nothing start."""

    def schedule(self, waiting, running, kv_cache):
        return Schedule()


class Meddles(SchedulingPolicy):
    """Writes into the requests that it is given."""

    def schedule(self, waiting, running, kv_cache):
        for request in waiting:
            request.request_id = "somebody else"
        return Schedule(waiting)


class Exits(SchedulingPolicy):
    """Ends the process, it thinks."""

    def schedule(self, waiting, running, kv_cache):
        raise SystemExit(1)


def chosen(options):
    """A plan names one item and a process has one plan: which policy an engine gets is said before it is made."""
    from guide import PriorityFairnessScheduler
    return {**globals(), "PriorityFairnessScheduler": PriorityFairnessScheduler}[CHOSEN](options)


class Chosen(SchedulingPolicy):
    def __new__(cls, options):
        return chosen(options)

    def schedule(self, waiting, running, kv_cache): ...
'''

SCRIPT = """
import gc, json, random, threading
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm_graft.ledger import runs

def made(policy, is_async, **words):
    global engine, core
    if policy:
        import policies
        policies.CHOSEN = policy
    engine = LLM(MODEL, async_scheduling=is_async, seed=1, **words).llm_engine
    core = engine.engine_core.engine_core.scheduler
    return {"done": "", "answers": {}, "preempted": 0, "in_flight": 0}

def step(facts):
    for output in engine.step():
        if output.finished:
            assert output.request_id not in facts["answers"]
            facts["done"] += output.request_id[0]
            facts["answers"][output.request_id] = list(output.outputs[0].token_ids)

def ended(facts):
    for _ in range(3):
        engine.step()
    for thread in threading.enumerate():
        if thread.name == "graft-ledger":  # a failure is written off the step path
            thread.join()
    rows = [row for view in runs() for row in view.rows() if "engine" in row["roles"]]
    facts["item"] = rows[0]["items"][0] if rows and rows[0]["items"] else {}
    pool = core.kv_cache_manager.block_pool
    facts["free"] = pool.get_num_free_blocks() + 1 == pool.num_gpu_blocks
    facts["left"] = len(core.requests) + len(core.running) + len(core.waiting)
    facts["views"] = len(getattr(core.waiting, "_views", ()))
    facts["scheduler"] = type(core).__name__
    return facts

def some(policy, is_async, *arrivals):
    # One at a time: (steps before it comes, name, priority, tokens)
    facts = made(policy, is_async, max_model_len=256, max_num_seqs=1, num_gpu_blocks_override=64)
    for steps, name, priority, tokens in arrivals:
        for _ in range(steps):
            step(facts)
        words = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.add_request(name, name * 20, words, priority=priority)
    while engine.has_unfinished_requests():
        step(facts)
    return ended(facts)

def many(policy, is_async):
    # Few blocks, so that vLLM preempts too; aborts and grammars.
    facts = made(policy, is_async, max_model_len=512, max_num_seqs=16, num_gpu_blocks_override=120)
    preempt = core._preempt_request
    def counted(request, *args, **kwargs):
        facts["preempted"] += 1
        facts["in_flight"] += request.num_in_flight_tokens > 0
        preempt(request, *args, **kwargs)
    core._preempt_request = counted
    draw, coming, names, aborted = random.Random(7), [], [], set()
    for number in range(150):
        words = dict(max_tokens=draw.randint(1, 120), ignore_eos=True)
        if number % 5 == 0:
            words = {**words, "ignore_eos": False, "structured_outputs": StructuredOutputsParams(choice=["yes", "no"])}
        coming.append((str(number), chr(97 + number % 26) * draw.randint(1, 250), SamplingParams(**words), number % 6))
    coming.reverse()
    while coming or engine.has_unfinished_requests():
        for _ in range(draw.randint(0, 6)):
            if coming:
                name, prompt, params, priority = coming.pop()
                engine.add_request(name, prompt, params, priority=priority)
                names.append(name)
        if draw.random() < 0.15 and names:
            name = draw.choice(names)
            if name not in facts["answers"] and name not in aborted:
                aborted.add(name)
                engine.abort_request([name])
        step(facts)
    facts["lost"] = sorted({str(number) for number in range(150)} - set(facts["answers"]) - aborted)
    return ended(facts)

CLASSES = [(0, name, priority, 3) for name, priority in zip("abcde", (5, 0, 1, 4, 2))]
URGENT = [(0, "a", 3, 40), (3, "b", 2, 20), (9, "c", 1, 5)]
TWO = [(0, "a", 0, 3), (0, "b", 0, 3)]
shown = {}
for mode in ("async", "sync"):
    shown[mode] = {}
    for key, play in PLAYS:
        shown[mode][key] = play(mode == "async")
        gc.collect()
print("FACTS", json.dumps(shown))
"""
# The name of a play, and the play; a policy's has the name of the policy.
STOCK = """
PLAYS = [("order", lambda a: some("", a, *CLASSES)), ("urgent", lambda a: some("", a, *URGENT)),
         ("stress", lambda a: many("", a))]
"""
PLANNED = """
PLAYS = [("order", lambda a: some("PriorityFairnessScheduler", a, *CLASSES)),
         ("urgent", lambda a: some("Urgent", a, *URGENT)), ("idle", lambda a: some("Idle", a, *TWO))]
PLAYS += [(name, lambda a, name=name: some(name, a, *TWO)) for name in ("Meddles", "Exits")]
PLAYS += [(name, lambda a, name=name: many(name, a))
          for name in ("PriorityFairnessScheduler", "Restless", "Raises", "Forgets")]
"""

Facts = Mapping[str, Any]
MODES = pytest.mark.parametrize("mode", ["async", "sync"])


def played(session: Session, plays: str) -> Mapping[str, Mapping[str, Facts]]:
    session.simulate("H200", "virtual")
    session.env["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
    done = session.script(SCRIPT.replace("shown = {}\n", plays + "shown = {}\n"))
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS"))
    facts: Mapping[str, Mapping[str, Facts]] = json.loads(line.removeprefix("FACTS"))
    for mode in facts.values():
        for name, play in mode.items():
            assert (play["free"], play["left"]) == (True, 0), name
    return facts


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Facts]]:
    return played(Session(tmp_path_factory.mktemp("stock")), STOCK)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Facts]]:
    session = Session(tmp_path_factory.mktemp("planned"))
    session.package(
        "deciders",
        {"vllm_graft.plugins": {"decider": "policies:Chosen"}},
        {"guide": GUIDE, "policies": POLICIES},
    )
    session.plan('[defaults]\nscheduler = "decider"\n')
    facts = played(session, PLANNED)
    for mode, plays in facts.items():
        for name, play in plays.items():
            kind = "PlannedAsyncScheduler" if mode == "async" else "PlannedScheduler"
            assert (play["scheduler"], play["views"]) == (kind, 0), name
    return facts


@MODES
def test_the_scheduler_of_the_guide_orders_the_engine(planned, stock, mode: str):
    """One at a time: by class; a client that gave none has the guide's 3."""
    facts = planned[mode]["order"]
    assert facts["done"] == "cebda"
    assert facts["item"]["state"] == "applied"
    assert facts["item"]["hooks"]["schedule"]["calls"] > 10
    assert stock[mode]["order"]["done"] == "abcde"
    assert facts["answers"] == stock[mode]["order"]["answers"]


@MODES
def test_a_policy_preempts(planned, stock, mode: str):
    """The request that came last and is urgent ends first; the others start again and lose no token."""
    assert planned[mode]["urgent"]["done"] == "cba"
    assert stock[mode]["urgent"]["done"] == "abc"
    assert planned[mode]["urgent"]["answers"] == stock[mode]["urgent"]["answers"]


@MODES
def test_a_policy_that_lets_nothing_start_is_put_aside(planned, mode: str):
    """After a while: the engine would stand still for ever."""
    facts = planned[mode]["idle"]
    assert facts["done"] == "ab"
    assert facts["item"]["state"] == "quarantined"
    assert "lets none of 2 requests start while nothing runs" in facts["item"]["reason"]
    assert "are served in order of arrival" in facts["item"]["reason"]


@MODES
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Meddles", "AttributeError: request_id of a request cannot be written"),
        ("Exits", "SystemExit: 1"),
    ],
)
def test_a_policy_that_would_end_the_engine_is_put_aside(planned, mode: str, name: str, reason: str):
    """Its requests go in the order of their arrival."""
    facts = planned[mode][name]
    assert facts["done"] == "ab"
    assert facts["item"]["state"] == "quarantined"
    assert reason in facts["item"]["reason"]


@MODES
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("PriorityFairnessScheduler", ""),
        ("Restless", ""),
        ("Raises", "RuntimeError: no idea"),
        ("Forgets", "is running, but is in neither decode nor preempt"),
    ],
)
def test_a_stress_leaves_nothing_behind(planned, stock, mode: str, name: str, reason: str):
    """Few blocks, aborts, grammars; policies that order and preempt at random, and fail in the middle of it."""
    facts, plain = planned[mode][name], stock[mode]["stress"]
    assert (facts["lost"], plain["lost"]) == ([], [])
    assert facts["item"]["state"] == ("quarantined" if reason else "applied"), facts["item"]
    assert reason in facts["item"]["reason"]
    if name == "Restless":
        assert facts["preempted"] > 60
        assert (facts["in_flight"] > 20) == (mode == "async")
    common = plain["answers"].keys() & facts["answers"].keys()
    assert len(common) > 100
    assert {each: facts["answers"][each] for each in common} == {each: plain["answers"][each] for each in common}
