"""Scenarios of policies that evict blocks one by one, on vLLM's real scheduler; test_eviction_simulated.py runs them.

The policy of the plan calls ``behave``, which each scenario sets. Every step is watched: who holds which block, whether
the block tables of a worker that follows the schedules are those of the manager, and whether each query finds the
tokens that it should.
"""

import json
import random
import time
import traceback
from collections import Counter
from types import SimpleNamespace

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_graft.bindings.attention.eviction import EvictingManager, apply_evictions_v1
from vllm_graft.contracts import KVPolicy
from vllm_graft.ledger import current

BLOCK = 16


def behave(request):
    raise NotImplementedError


class Behaving(KVPolicy):
    """The policy of the plan: does what the scenario says."""

    def evict(self, request):
        return behave(request)


def keep_all(request):
    return ()


def thin_out(request):
    """Keeps the first block and the last two; of the others every third one."""
    return [block for block in request.evictable[1:-2] if block % 3]


class Engine:
    """An engine in this process, driven step by step."""

    def __init__(self, policy, **arguments):
        self.policy = policy
        given = {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 512, "async_scheduling": False}
        # Every block is looked at after each step.
        given["num_gpu_blocks_override"] = 1024
        self.use()
        self.llm = LLM(MODEL, skip_tokenizer_init=True, disable_log_stats=True, **{**given, **arguments})
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.cache = self.scheduler.kv_cache_manager
        self.pool = self.cache.block_pool
        (self.manager,) = self.cache.coordinator.single_type_managers
        assert isinstance(self.manager, EvictingManager), type(self.manager)
        self.whole = self.pool.get_num_free_blocks()
        self.preemptions = self.number = 0
        self.outputs = {}
        self.watch = Watch(self)

    def use(self):
        global behave
        behave = self.policy

    def add(self, prompt, tokens, **params):
        self.number += 1
        name = f"r{self.number}"
        kind = RequestOutputKind.FINAL_ONLY
        given = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=kind, **params)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, given)
        return name

    def step(self):
        for output in self.engine.step():
            self.outputs[output.request_id] = output

    def finish(self):
        while self.engine.has_unfinished_requests():
            self.step()
        self.step()

    def used(self):
        return self.whole - self.pool.get_num_free_blocks()

    def close(self):
        """Everything has been given back, and nothing is remembered."""
        self.watch.check_holders()
        assert self.used() == 0, self.used()
        assert not any(block.ref_cnt for block in self.pool.blocks if not block.is_null)
        known = ("_asked", "_cacheable_tokens", "_pending_evictions", "_scores", "req_to_blocks")
        assert not any(getattr(self.manager, name) for name in known), {n: getattr(self.manager, n) for n in known}
        self.engine.engine_core.shutdown()


class Watch:
    """Checks the scheduler after each of its steps, and follows it as a worker does."""

    def __init__(self, engine):
        self.engine = engine
        self.steps = self.evicted = 0
        self.worker = SimpleNamespace(requests={}, input_batch=SimpleNamespace(req_id_to_index={}))
        self.written = {}
        """By block number: the request, index and evictions of what was last written into it."""
        self.evictions = Counter()
        """By request: the blocks that it has lost since it was last computed from its beginning."""
        self.peak = Counter()
        scheduler = engine.scheduler
        self.original = scheduler.schedule
        scheduler.schedule = self.schedule
        preempt = scheduler._preempt_request

        def count(request, *args, **kwargs):
            engine.preemptions += 1
            self.evictions[request.request_id] = 0
            return preempt(request, *args, **kwargs)

        scheduler._preempt_request = count

    def schedule(self, *args, **kwargs):
        self.engine.use()
        output = self.original(*args, **kwargs)
        self.steps += 1
        self.check_holders()
        self.follow(output)
        for name, number in output.num_scheduled_tokens.items():
            request = self.engine.scheduler.requests[name]
            self.check_request(request, request.num_computed_tokens - number, request.num_computed_tokens)
        return output

    def follow(self, output):
        """Keep the block tables of a worker: it is sent whole tables, then new blocks and what is gone."""
        for name in output.finished_req_ids:
            self.worker.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.worker.requests[new.req_id] = SimpleNamespace(block_ids=tuple(list(ids) for ids in new.block_ids))
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = self.worker.requests[name]
            if name in cached.resumed_req_ids:
                state.block_ids = tuple(list(ids) for ids in blocks)
            elif blocks is not None:
                for own, more in zip(state.block_ids, blocks, strict=True):
                    own.extend(more)
        for name, gone in (getattr(output, "graft_evicted", None) or {}).items():
            self.evictions[name] += len(gone)
            self.evicted += len(gone)
        apply_evictions_v1(self.worker, output)
        for name in output.num_scheduled_tokens:
            ((table,), blocks) = (self.worker.requests[name].block_ids, self.engine.manager.req_to_blocks[name])
            assert table == [block.block_id for block in blocks], (name, table, blocks)

    def check_holders(self):
        """The pool's reference counts are the requests that hold a block; more than one only if it is cached."""
        held = Counter()
        for name, blocks in self.engine.manager.req_to_blocks.items():
            own = [block.block_id for block in blocks if not block.is_null]
            assert len(set(own)) == len(own), (name, own)
            held.update(own)
            self.peak[name] = max(self.peak[name], len(own))
        for block in self.engine.pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == held[block.block_id], (block, held[block.block_id])
                assert block.ref_cnt < 2 or block.block_hash is not None, block
        assert self.engine.used() == len(held), (self.engine.used(), len(held))

    def check_request(self, request, begin, end):
        """What is held was written for these tokens, for another request only before any eviction of it."""
        name, blocks = request.request_id, self.engine.manager.req_to_blocks[request.request_id]
        for index in range(begin // BLOCK):
            block = blocks[index]
            if block.is_null:
                assert self.evictions[name], f"{name}: block {index} is gone, and nothing was evicted"
                continue
            writer, place, lost = self.written[block.block_id]
            upto = (index + 1) * BLOCK
            assert place == index, (name, index, place)
            assert writer.all_token_ids[:upto] == request.all_token_ids[:upto], (name, index, writer.request_id)
            assert writer is request or not lost, f"{name} shares a block that {writer.request_id} wrote with gaps"
        for index in range(begin // BLOCK, -(-end // BLOCK)):
            assert not blocks[index].is_null, f"{name}: block {index} is gone, and the step writes it"
            self.written[blocks[index].block_id] = (request, index, self.evictions[name])


def prompt(seed, length):
    draw = random.Random(seed)
    return [draw.randrange(1, 250) for _ in range(length)]


def item():
    (found,) = current().view().as_dict()["items"]
    return found


def evicted_blocks_are_free_and_gone_from_every_table():
    engine = Engine(thin_out, enable_prefix_caching=False)
    names = [engine.add(prompt(each, 100 + 200 * each), 150) for each in range(5)]
    engine.finish()
    assert all(len(engine.outputs[name].outputs[0].token_ids) == 150 for name in names)
    assert engine.watch.evicted == engine.manager.freed > 100
    assert item()["figures"]["KV blocks freed"] == engine.manager.freed
    assert item()["figures"]["KV blocks held"] == 0
    engine.close()


def what_comes_after_an_eviction_is_no_hit():
    """A second request shares what was computed before, and nothing after."""
    engine = Engine(lambda request: [1] if request.tokens == 512 else (), max_num_batched_tokens=256)
    words = prompt(2, 1000)
    engine.add(words, 5)
    engine.finish()
    again = engine.add(words, 5)
    engine.finish()
    assert engine.outputs[again].num_cached_tokens == 512
    assert engine.watch.evicted == 1, "the hit fills its blocks without the policy being asked at 512 tokens again"
    engine.close()


def short_requests_and_several_samples():
    """Shorter than a block, one token, and the samples of one prompt."""
    engine = Engine(thin_out)
    names = [engine.add(prompt(each, size), tokens) for each, size, tokens in ((1, 1, 1), (2, 15, 2), (3, 300, 1))]
    engine.finish()
    assert [len(engine.outputs[name].outputs[0].token_ids) for name in names] == [1, 2, 1]
    several = engine.add(prompt(4, 200), 80, n=3)
    engine.finish()
    assert [len(each.token_ids) for each in engine.outputs[several].outputs] == [80] * 3
    engine.close()


def preempted_requests_come_back():
    engine = Engine(thin_out, num_gpu_blocks_override=60, max_model_len=900)
    names = [engine.add(prompt(each, 10), 400) for each in range(20)]
    engine.finish()
    assert engine.preemptions > 0
    assert engine.watch.evicted > 100
    assert all(len(engine.outputs[name].outputs[0].token_ids) == 400 for name in names)
    engine.close()


def two_engines_of_a_process_ask_for_themselves():
    first = Engine(thin_out)
    second = Engine(keep_all)
    for engine in (first, second):
        engine.add(prompt(1, 600), 100)
    while first.engine.has_unfinished_requests() or second.engine.has_unfinished_requests():
        first.step()
        second.step()
    for engine in (first, second):
        engine.finish()
    assert first.watch.evicted > 10
    assert second.watch.evicted == 0
    first.close()
    second.close()


def soak(requests, seed, **arguments):
    """Random evictions, arrivals with common beginnings, aborts and a pool that is too small."""
    draw = random.Random(seed)

    def some(request):
        return [block for block in request.evictable if draw.random() < 0.15]

    small = {"num_gpu_blocks_override": 130, "max_model_len": 1000, "max_num_batched_tokens": 200, "max_num_seqs": 24}
    engine = Engine(some, **small, **arguments)
    beginnings = [prompt(each, 700) for each in range(5)]
    living, aborted, sent = [], 0, 0
    while sent < requests or engine.engine.has_unfinished_requests():
        for _ in range(draw.choice([0, 0, 0, 1, 1, 9])):
            if sent < requests and len(engine.scheduler.waiting) < 30:
                head = draw.choice(beginnings)[: draw.choice([0, 0, 40, 130, 300, 650])]
                tail = prompt(draw.random(), draw.choice([1, 5, 30, 100]))
                living.append(engine.add([*head, *tail], draw.choice([1, 2, 8, 30, 120])))
                sent += 1
        if living and draw.random() < 0.05:
            # In the middle of a step's evictions too: some of these were asked about in the last step.
            engine.engine.abort_request([living.pop(draw.randrange(len(living)))])
            aborted += 1
        engine.step()
        living = [name for name in living if name not in engine.outputs or not engine.outputs[name].finished]
    engine.finish()
    hits = sum(bool(output.num_cached_tokens) for output in engine.outputs.values())
    seen = (engine.preemptions, aborted, hits, engine.watch.evicted)
    assert min(seen) > 0, seen
    assert item()["state"] == "applied", item()
    engine.close()


def a_soak():
    soak(1500, 1)


def an_asynchronous_soak():
    soak(700, 2, async_scheduling=True)


def a_soak_of_drafts():
    """Drafts are given blocks, and may be rejected: their blocks are not evictable before they are accepted."""
    soak(300, 3, speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3})


def widens(request):
    object.__setattr__(request, "evictable", request.held)
    return [request.held[-1]]


def empties_keys(request):
    request.keys.clear()
    return ()


def names_all_held(request):
    return request.held


def sleeps(request):
    time.sleep(0.4)
    return ()


def raises(request):
    raise RuntimeError("on purpose")


def exits(request):
    raise SystemExit(3)


LIES = {
    "changes what it is given": (widens, "which is not among the"),
    "drops a block in use": (names_all_held, "which is not among the"),
    "names a block that is none": (lambda request: [10**9], "block 1000000000, which is not among the"),
    "names a negative block": (lambda request: [-1], "block -1, which is not among the"),
    "answers nothing": (lambda request: None, "must return a collection of block indices, but returned None"),
    "answers a number": (lambda request: 3, "must return a collection of block indices, but returned 3"),
    "answers a mapping of words": (lambda request: {"all": True}, "block 'all', which is not among the"),
    "raises": (raises, "RuntimeError: on purpose"),
    "exits": (exits, "SystemExit: 3"),
    "sleeps": (sleeps, "over the budget of 1000 us"),
}


def a_policy_that_lies_costs_itself():
    """It is put aside with the reason; every request ends with all of its tokens, and holds its blocks until then."""
    for lie, (policy, reason) in LIES.items():
        engine = Engine(policy, enable_prefix_caching=False)
        names = [engine.add(prompt(each, 40 + 50 * each), 60) for each in range(4)]
        engine.finish()
        assert all(len(engine.outputs[name].outputs[0].token_ids) == 60 for name in names), lie
        found = item()
        assert found["state"] == "quarantined", (lie, found)
        assert reason in found["reason"], (lie, found)
        assert engine.watch.evicted == 0, lie
        assert max(engine.watch.peak.values()) == -(-(40 + 150 + 60) // BLOCK), lie
        engine.close()


def a_policy_cannot_change_its_requests():
    engine = Engine(empties_keys)
    name = engine.add(prompt(1, 100), 40, extra_args={"kv_note": [1, 2]})
    engine.step()
    params = engine.scheduler.requests[engine.scheduler.running[0].request_id].sampling_params
    engine.finish()
    assert params.extra_args["kv_note"] == [1, 2]
    assert len(engine.outputs[name].outputs[0].token_ids) == 40
    assert item()["state"] == "applied"
    engine.close()


def without_a_way_to_the_workers_nothing_is_evicted():
    """A scheduler that schedules by itself passes no patch: a worker would go on to read blocks that are gone."""
    kind = type("Deaf", (EvictingManager,), {"workers_follow": property(lambda self: False, lambda self, value: None)})
    engine = Engine(thin_out)
    engine.manager.__class__ = kind
    name = engine.add(prompt(1, 300), 60)
    engine.finish()
    assert len(engine.outputs[name].outputs[0].token_ids) == 60
    assert engine.watch.evicted == 0
    assert item()["state"] == "quarantined"
    assert "does not go through Scheduler.schedule" in item()["reason"]
    engine.close()


SCENARIOS = (
    *(evicted_blocks_are_free_and_gone_from_every_table, what_comes_after_an_eviction_is_no_hit),
    *(short_requests_and_several_samples, preempted_requests_come_back, two_engines_of_a_process_ask_for_themselves),
    *(a_soak, an_asynchronous_soak, a_soak_of_drafts),
    *(a_policy_that_lies_costs_itself, a_policy_cannot_change_its_requests),
    without_a_way_to_the_workers_nothing_is_evicted,
)


def main(model, scenarios):
    """Run each scenario, and print what came of it."""
    global MODEL
    MODEL = model
    for scenario in scenarios:
        try:
            scenario()
            trouble = ""
        except Exception:
            trouble = traceback.format_exc()
        print("SCENARIO " + json.dumps([scenario.__name__, trouble]), flush=True)
