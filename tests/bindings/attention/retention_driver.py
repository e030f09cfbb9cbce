"""Scenarios of a planned ``sink-window`` on vLLM's real scheduler and block pool; test_retention.py runs them.

Every step of every scenario is watched: who holds which block, whether the pool counts them so, and whether each query
finds in its window the tokens that it should.
"""

import json
import random
import traceback
from collections import Counter

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.bindings.attention.retention import SinkWindowManager, SinkWindowSpec

BLOCK = 16
SHAPE = WindowShape.fit(20, 128, BLOCK)
"""The window of the plan: two first blocks, and up to eight more."""
MOST = SHAPE.most // BLOCK
INTERVAL = "prefix_cache_retention_interval"
DENSE = {INTERVAL: None} if INTERVAL in EngineArgs.__dataclass_fields__ else {}
"""Has vLLM cache every block, as it does up to 0.28. From 0.29 on it caches the ends of prompts where layers slide."""


class Engine:
    """An engine in this process, driven step by step."""

    def __init__(self, **arguments):
        given = {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 512, "async_scheduling": False}
        # Every block is looked at after each step.
        given["num_gpu_blocks_override"] = 1024
        self.llm = LLM(MODEL, skip_tokenizer_init=True, disable_log_stats=True, **{**given, **arguments})
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.cache = self.scheduler.kv_cache_manager
        self.pool = self.cache.block_pool
        self.managers = self.cache.coordinator.single_type_managers
        self.sinks = [manager for manager in self.managers if isinstance(manager, SinkWindowManager)]
        assert self.sinks, [type(manager).__name__ for manager in self.managers]
        assert all(manager.kv_cache_spec.shape == SHAPE for manager in self.sinks)
        self.whole = self.pool.get_num_free_blocks()
        self.preemptions = 0
        self.number = 0
        self.outputs = {}
        self.watch = Watch(self)

    def add(self, prompt, tokens, name=None):
        self.number += 1
        name = name or f"r{self.number}"
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return name

    def step(self):
        for output in self.engine.step():
            self.outputs[output.request_id] = output

    def finish(self):
        while self.engine.has_unfinished_requests():
            self.step()
        # Ends that the scheduler learns of with the next step.
        self.step()

    def cached(self, prompt):
        """Serve a prompt, and say how many of its tokens the prefix cache had."""
        name = self.add(prompt, 1)
        self.finish()
        return self.outputs[name].num_cached_tokens

    def evict(self, prompt, index):
        """Take a block of a prompt out of the prefix cache, in the groups with a window."""
        for manager in self.sinks:
            key = self.hashes(prompt)[index]
            (block,) = self.pool.get_cached_block(key, [manager.kv_cache_group_id])
            self.pool.evict_blocks({block.block_id})

    def hashes(self, prompt):
        return self.watch.hashes[tuple(prompt)]

    def used(self):
        return self.whole - self.pool.get_num_free_blocks()

    def close(self):
        """Everything has been given back, and nobody is left."""
        self.watch.check_holders()
        assert self.used() == 0, self.used()
        assert not any(block.ref_cnt for block in self.pool.blocks if not block.is_null)
        assert not any(manager.req_to_blocks for manager in self.managers)
        self.engine.engine_core.shutdown()


class Watch:
    """Checks the scheduler after each of its steps."""

    def __init__(self, engine):
        self.engine = engine
        self.written = {}
        """By block number: the group, request and index that it was last written for."""
        self.known = {}
        """By group, request and index: the block that was found to hold the right tokens."""
        self.hashes = {}
        self.peak = Counter()
        """The most blocks that a request held, by its name."""
        self.steps = 0
        scheduler = engine.scheduler
        self.original = scheduler.schedule
        scheduler.schedule = self.schedule
        preempt = scheduler._preempt_request

        def count(*args, **kwargs):
            engine.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = count

    def schedule(self, *args, **kwargs):
        output = self.original(*args, **kwargs)
        self.steps += 1
        self.check_holders()
        for name, number in output.num_scheduled_tokens.items():
            # The scheduler has counted the step's tokens as computed already.
            request = self.engine.scheduler.requests[name]
            end = request.num_computed_tokens
            self.hashes[tuple(request.prompt_token_ids)] = request.block_hashes
            for manager in self.engine.managers:
                self.check_request(manager, request, end - number, end)
        return output

    def check_holders(self):
        """The pool's reference counts are the requests that hold a block; more than one only if it is cached."""
        held = Counter()
        for manager in self.engine.managers:
            for name, blocks in manager.req_to_blocks.items():
                own = [block.block_id for block in blocks if not block.is_null]
                assert len(set(own)) == len(own), (name, own)
                held.update(own)
                self.peak[name] = max(self.peak[name], len(own))
                limit = getattr(manager, "max_admission_blocks_per_request", None) or getattr(
                    manager, "_max_admission_blocks_per_request", None
                )
                # The number that vLLM reserves for a request.
                assert limit is None or len(own) <= limit, (name, len(own), limit)
        for block in self.engine.pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == held[block.block_id], (block, held[block.block_id])
                assert block.ref_cnt < 2 or block.block_hash is not None, block
        assert self.engine.used() == len(held), (self.engine.used(), len(held))

    def check_request(self, manager, request, begin, end):
        """The first query of a step, which looks back furthest, finds its tokens; then the step's own are written."""
        blocks, name, group = manager.req_to_blocks[request.request_id], request.request_id, manager.kv_cache_group_id
        assert len(blocks) * BLOCK >= end
        sink = isinstance(manager, SinkWindowManager)
        low = SHAPE.start(begin) // BLOCK if sink else 0
        first = SHAPE.first // BLOCK if sink else 0
        for index in (*range(min(first, low)), *range(low, -(-end // BLOCK))):
            block = blocks[index]
            assert not block.is_null, f"{name}: block {index} is gone, and the query at {begin} sees it"
            if (index + 1) * BLOCK <= begin and self.known.get((group, name, index)) is not block:
                where, writer, place = self.written[block.block_id]
                upto = (index + 1) * BLOCK
                assert (where, place) == (group, index)
                assert writer.all_token_ids[:upto] == request.all_token_ids[:upto], (name, index, writer.request_id)
                self.known[group, name, index] = block
        for index in range(begin // BLOCK, -(-end // BLOCK)):
            self.written[blocks[index].block_id] = (group, request, index)
            self.known.pop((group, name, index), None)


def prompt(seed, length):
    draw = random.Random(seed)
    return [draw.randrange(1, 250) for _ in range(length)]


def blocks_do_not_grow_with_the_context():
    """By the block pool's own count: after the prompt, a request holds its first tokens and its window."""
    engine = Engine(enable_prefix_caching=False)
    peaks = {}
    for length in (300, 900, 1700):
        engine.add(prompt(length, length), 200)
        while engine.scheduler.running or engine.scheduler.waiting:
            engine.step()
            if any(request.num_output_tokens > 2 for request in engine.scheduler.running):
                peaks[length] = max(peaks.get(length, 0), engine.used())
        engine.finish()
    assert set(peaks.values()) == {MOST}, peaks
    assert engine.sinks[0].freed > (1900 - SHAPE.most) // BLOCK
    engine.close()


def the_spec_reserves_what_a_request_holds():
    engine = Engine(enable_prefix_caching=False, max_num_batched_tokens=256)
    spec = engine.sinks[0].kv_cache_spec
    assert isinstance(spec, SinkWindowSpec)
    assert spec.max_admission_blocks_per_request(256, 2048) <= MOST + 256 // BLOCK + 1
    assert spec.max_admission_blocks_per_request(256, 100) == 7
    engine.close()


def a_prompt_in_chunks_frees_while_it_is_read():
    engine = Engine(max_num_batched_tokens=128, enable_prefix_caching=False)
    name = engine.add(prompt(1, 1900), 3)
    engine.finish()
    assert engine.watch.steps > 15
    # A chunk more than the window: what it is read into.
    assert engine.watch.peak[name] <= MOST + 128 // BLOCK + 1, engine.watch.peak
    engine.close()


def a_prompt_is_found_again_where_first_blocks_and_window_are_cached():
    engine = Engine(**DENSE)
    words = prompt(2, 1000)
    assert engine.cached(words) == 0
    assert engine.cached(words) == 992
    # The same beginning, another end.
    assert engine.cached([*words[:600], *prompt(3, 50)]) == 592
    # Neither a first block nor one of the window: nobody reads it.
    engine.evict(words, 30)
    assert engine.cached(words) == 992
    # The last one of the window: the window before it is there.
    engine.evict(words, 61)
    assert engine.cached(words) == 976
    engine.close()


def a_hit_ends_before_a_first_block_that_was_evicted():
    engine = Engine()
    words = prompt(4, 1000)
    engine.cached(words)
    engine.evict(words, 1)
    assert engine.cached(words) == 16
    # It has been computed again, with everything after it.
    assert engine.cached(words) == 992
    engine.evict(words, 0)
    assert engine.cached(words) == 0
    assert engine.cached(words) == 992
    engine.close()


def a_window_that_was_evicted_is_no_hit():
    engine = Engine(**DENSE)
    words = prompt(5, 1000)
    engine.cached(words)
    for index in range(20, 62):
        engine.evict(words, index)
    assert engine.cached(words) == 320
    for index in range(2, 62, 4):
        engine.evict(words, index)
    # What is left are the first blocks, and runs shorter than a window.
    assert engine.cached(words) == 32
    engine.close()


def a_drafter_computes_the_last_block_of_every_hit():
    """Of a hit that a first block ends, too."""
    engine = Engine(**DENSE)
    words = prompt(8, 1000)
    engine.cached(words)
    manager = engine.sinks[0]

    def hit(drop):
        found, length = manager.find_longest_cache_hit(
            *(engine.hashes(words), 999, [manager.kv_cache_group_id], engine.pool, manager.kv_cache_spec),
            drop_eagle_block=drop,
            alignment_tokens=BLOCK,
        )
        assert len(found[0]) * BLOCK == length
        return length

    assert (hit(False), hit(True)) == (992, 976)
    engine.evict(words, 1)
    assert (hit(False), hit(True)) == (16, 0)
    engine.close()


def two_requests_share_what_is_cached():
    engine = Engine(**DENSE)
    words = prompt(6, 800)
    engine.cached(words)
    names = [engine.add([*words, *prompt(each, 9)], 100) for each in range(3)]
    engine.step()
    # Each has its own last block; the rest of the hit is held together.
    assert engine.used() < 2 * MOST
    engine.finish()
    assert all(engine.outputs[name].num_cached_tokens == 800 for name in names)
    engine.close()


def preempted_requests_come_back():
    """More requests are admitted than the pool can serve at full length."""
    engine = Engine(num_gpu_blocks_override=60)
    names = [engine.add(prompt(each, 10), 400) for each in range(20)]
    engine.finish()
    assert engine.preemptions > 0
    assert all(len(engine.outputs[name].outputs[0].token_ids) == 400 for name in names)
    alone = Engine(num_gpu_blocks_override=60)
    again = alone.add(prompt(7, 10), 400)
    alone.finish()
    assert alone.outputs[again].outputs[0].token_ids == engine.outputs[names[7]].outputs[0].token_ids
    alone.close()
    engine.close()


def aborted_requests_give_everything_back():
    engine = Engine()
    names = [engine.add(prompt(each, 50 + 90 * each), 300) for each in range(12)]
    for number in range(60):
        engine.step()
        if number % 8 == 7:
            engine.engine.abort_request([names.pop(number % len(names))])
    assert engine.used() > 0
    engine.engine.abort_request(names)
    engine.step()
    engine.finish()
    engine.close()


def soak(requests, seed, **arguments):
    """Random arrivals with common beginnings, aborts and a pool that is too small."""
    small = {"num_gpu_blocks_override": 130, "max_model_len": 1000, "max_num_batched_tokens": 200, "max_num_seqs": 24}
    engine = Engine(**small, **arguments)
    draw = random.Random(seed)
    beginnings = [prompt(each, 700) for each in range(5)]
    living, aborted, sent = [], 0, 0
    while sent < requests or engine.engine.has_unfinished_requests():
        # In bursts: the pool runs full and empties again.
        for _ in range(draw.choice([0, 0, 0, 1, 1, 9])):
            if sent < requests and len(engine.scheduler.waiting) < 30:
                head = draw.choice(beginnings)[: draw.choice([0, 0, 40, 130, 300, 650])]
                tail = prompt(draw.random(), draw.choice([1, 5, 30, 100]))
                living.append(engine.add([*head, *tail], draw.choice([1, 2, 8, 30, 120])))
                sent += 1
        if living and draw.random() < 0.05:
            engine.engine.abort_request([living.pop(draw.randrange(len(living)))])
            aborted += 1
        engine.step()
        living = [name for name in living if name not in engine.outputs or not engine.outputs[name].finished]
    engine.finish()
    hits = sum(bool(output.num_cached_tokens) for output in engine.outputs.values())
    assert min(engine.preemptions, aborted, hits) > 0, (engine.preemptions, aborted, hits)
    engine.close()


def a_soak():
    soak(1500, 1)


def a_soak_with_every_block_cached():
    soak(700, 4, **DENSE)


def a_soak_without_prefix_caching():
    engine = Engine(num_gpu_blocks_override=130, enable_prefix_caching=False)
    draw = random.Random(9)
    for _ in range(60):
        names = [engine.add(prompt(draw.random(), draw.randrange(1, 900)), draw.randrange(1, 60)) for _ in range(5)]
        for _ in range(15):
            engine.step()
        engine.engine.abort_request([draw.choice(names)])
    engine.finish()
    engine.close()


def an_asynchronous_soak():
    soak(1000, 2, async_scheduling=True)


def a_soak_of_drafts():
    """Drafts are given blocks, and may be rejected."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    soak(300, 3, speculative_config=speculative)


WINDOWS = (
    *(blocks_do_not_grow_with_the_context, the_spec_reserves_what_a_request_holds),
    a_prompt_in_chunks_frees_while_it_is_read,
    a_prompt_is_found_again_where_first_blocks_and_window_are_cached,
    *(a_hit_ends_before_a_first_block_that_was_evicted, a_window_that_was_evicted_is_no_hit),
    a_drafter_computes_the_last_block_of_every_hit,
    *(two_requests_share_what_is_cached, preempted_requests_come_back, aborted_requests_give_everything_back),
    *(a_soak, a_soak_with_every_block_cached, a_soak_without_prefix_caching, an_asynchronous_soak, a_soak_of_drafts),
)
"""For a plan that gives every layer the window."""

MIXED = (
    a_prompt_is_found_again_where_first_blocks_and_window_are_cached,
    *(a_hit_ends_before_a_first_block_that_was_evicted, a_soak_with_every_block_cached, an_asynchronous_soak),
)
"""For a plan that leaves some layers with full attention, which have blocks of their own in the same pool."""


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
