"""The real engine on the simulated accelerator: batches, texts that end, log probabilities, drafts, sleep."""

import pytest

from vllm_graft.launcher.models import tiny_model
from vllm_graft.simulator.tokens import HashedTokens, read_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALL = {"GRAFT_SIMULATED_KV_BYTES": "400000"}
"""A KV cache for a few requests only, so that requests are preempted."""
INSIDE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine in the program's own process, where several can follow each other."""


def test_batches_preempt_cache_and_constrain_as_on_a_device(program):
    """One engine, async scheduling, in a process of its own."""
    program(
        """
        llm = engine()
        crowd = [[10 + n] + [6, 7, 8] * 10 for n in range(40)]
        together = tokens(llm, crowd, max_tokens=150)
        assert {len(each) for each in together} == {150}
        assert len({tuple(each) for each in together}) == len(crowd)
        assert together[:3] == [tokens(llm, [each], max_tokens=150)[0] for each in crowd[:3]]
        assert counted(llm, "vllm:num_preemptions") > 0

        llm.generate("a prompt of more than thirty-two characters", use_tqdm=False)
        again = llm.generate("a prompt of more than thirty-two characters", use_tqdm=False)[0]
        assert again.num_cached_tokens == 32

        shapes = [{"choice": ["yes", "no"]}, {"json": SCHEMA}]
        wishes = [SamplingParams(max_tokens=200, structured_outputs=StructuredOutputsParams(**s)) for s in shapes]
        choice, document = llm.generate(["a", "b"], wishes, use_tqdm=False)
        assert choice.outputs[0].text in ("yes", "no")
        assert isinstance(json.loads(document.outputs[0].text)["age"], int)
        llm.llm_engine.engine_core.shutdown()
        """,
        **SMALL,
    )


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        pytest.param("async_scheduling=False", INSIDE, id="in-process-sync"),
        pytest.param("tensor_parallel_size=2", {}, id="two-workers"),
    ],
)
def test_any_arrangement_of_processes_gives_the_same_tokens(program, make, arguments, environ):
    code = f"llm = engine({arguments}); print('TOKENS', tokens(llm, [[9, 8, 7]], max_tokens=5))"
    output = program(code + "\nllm.llm_engine.engine_core.shutdown()", **environ)
    source = HashedTokens(0, read_tokenizer(tiny_model() / "tokenizer.json"))
    alone = source.open(make.new(prompt=(9, 8, 7), all_stop_token_ids=set()))
    assert f"TOKENS [{[alone.token(index, None) for index in range(5)]}]" in output


def test_texts_end_and_log_probabilities_are_given(program):
    """Natural ends, what a request forbids or demands, log probabilities of outputs and of prompts in chunks."""
    program(
        """
        EOS = 258
        llm = engine(max_logprobs=-1, max_num_batched_tokens=64)
        crowd = [[10 + n] + [6, 7, 8] * 10 for n in range(40)]

        def ends(**given):
            return [(len(each.token_ids), each.finish_reason) for each in answers(llm, crowd, SamplingParams(**given))]

        natural = answers(llm, crowd, SamplingParams(max_tokens=220))
        lengths = [len(each.token_ids) for each in natural]
        assert 14 < sum(lengths) / len(lengths) < 28 and len(set(lengths)) > 10, lengths
        assert {(each.token_ids[-1], each.finish_reason, each.stop_reason) for each in natural} == {(EOS, "stop", None)}
        assert ends(max_tokens=10) == [(n, "stop") if n <= 10 else (10, "length") for n in lengths]
        assert ends(max_tokens=60, ignore_eos=True) == [(60, "length")] * 40
        assert ends(max_tokens=220, min_tokens=30) == [(max(n, 31), "stop") for n in lengths]

        free = SamplingParams(max_tokens=200, ignore_eos=True)
        (long,) = answers(llm, crowd[:1], free)
        letter = next(each for each in long.text[20:] if each.isascii() and each.isprintable())
        (cut,) = answers(llm, crowd[:1], SamplingParams(max_tokens=200, ignore_eos=True, stop=[letter]))
        assert (cut.finish_reason, cut.stop_reason, cut.text) == ("stop", letter, long.text.split(letter)[0])
        (stopped,) = answers(llm, crowd[:1], SamplingParams(max_tokens=50, stop_token_ids=[70], logit_bias={70: 100}))
        assert (stopped.finish_reason, stopped.stop_reason, len(stopped.token_ids)) == ("stop", 70, 1)

        (banned,) = tokens(llm, crowd[:1], max_tokens=200, ignore_eos=True, logit_bias={long.token_ids[0]: -100})
        assert long.token_ids[0] not in banned
        (clean,) = answers(
            llm, crowd[:1], SamplingParams(max_tokens=200, ignore_eos=True, bad_words=[letter, letter + "z"])
        )
        assert letter not in clean.text and "z" not in clean.text

        def check(token, row, count):
            ordered = sorted(row.values(), key=lambda each: each.rank)
            values = [each.logprob for each in ordered]
            assert token in row and len(row) in (count, count + 1)
            assert [each.rank for each in ordered][:count] == list(range(1, count + 1))
            assert values == sorted(values, reverse=True) and values[0] <= 0
            assert sum(map(math.exp, values)) < 1.0001

        for asked, count in ((0, 0), (1, 1), (5, 5), (-1, 259)):
            params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=asked, prompt_logprobs=asked)
            given = [{"prompt_token_ids": prompt} for prompt in crowd[:5]]
            several = llm.generate(given, params, use_tqdm=False)
            alone = llm.generate(given[:1], params, use_tqdm=False)[0]
            assert several[0].outputs[0].logprobs == alone.outputs[0].logprobs
            assert several[0].prompt_logprobs == alone.prompt_logprobs
            for each in several:
                output = each.outputs[0]
                assert len(output.logprobs) == 6 and len(each.prompt_logprobs) == 31
                assert each.prompt_logprobs[0] is None
                places = [*zip(output.token_ids, output.logprobs), *zip(crowd[0][1:], each.prompt_logprobs[1:])]
                for token, row in places:
                    check(token, row, count)

        mixed = answers(llm, crowd[:3], [SamplingParams(max_tokens=4, logprobs=k) for k in (None, 3, 7)])
        assert mixed[0].logprobs is None
        for each, count in zip(mixed[1:], (3, 7)):
            for token, row in zip(each.token_ids, each.logprobs):
                check(token, row, count)
        (greedy,) = answers(llm, crowd[:1], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=2))
        assert {row[token].rank for token, row in zip(greedy.token_ids, greedy.logprobs)} == {1}
        (named,) = answers(llm, crowd[:1], SamplingParams(max_tokens=4, ignore_eos=True, logprob_token_ids=[5, 6]))
        assert [set(row) for row in named.logprobs] == [{token, 5, 6} for token in named.token_ids]
        wish = SamplingParams(max_tokens=99, logprobs=2, structured_outputs=StructuredOutputsParams(json=SCHEMA))
        (document,) = [each.outputs[0] for each in llm.generate("a", wish, use_tqdm=False)]
        assert isinstance(json.loads(document.text)["age"], int)
        assert all(token in row for token, row in zip(document.token_ids, document.logprobs))

        from vllm.pooling_params import PoolingParams
        from vllm_graft.simulator.refusals import check_request
        for refused in (SamplingParams(thinking_token_budget=5), PoolingParams()):
            try:
                check_request(refused)
            except VLLMValidationError as error:
                assert "simulated accelerator" in str(error)
            else:
                raise AssertionError(refused)
        llm.llm_engine.engine_core.shutdown()
        """,
        GRAFT_SIMULATED_OUTPUT_TOKENS="20",
    )


WATCHED = """
import inspect
import vllm.config.vllm as config
from vllm.v1.request import Request
from vllm_graft.simulator.worker import SimulatedWorker

SEEN = {"steps": 0, "shapes": set()}
_unwatched = SimulatedWorker.execute_model

def execute_model(self, output):
    SEEN["steps"] += bool(output.num_scheduled_tokens)
    SEEN["shapes"].update("V1" if each.prefill_token_ids is None else "V2" for each in output.scheduled_new_reqs)
    return _unwatched(self, output)

SimulatedWorker.execute_model = execute_model
# vLLM 0.26 drops as many steps in flight as it has tokens in flight, on any device: too many where drafts are.
LOSES_TOKENS = "async_tokens_to_discard" in inspect.getsource(Request)
CROWD = [[10 + n] + [6, 7, 8] * 10 for n in range(24)]

def results(shape, **given):
    # vLLM writes the V2 runner's shape where it believes in Triton.
    config.HAS_TRITON = shape == "V2"
    SEEN.update(steps=0, shapes=set())
    llm = engine(max_num_batched_tokens=128, **given)
    params = SamplingParams(max_tokens=100, logprobs=1)
    outputs = [(list(each.token_ids), each.logprobs) for each in answers(llm, CROWD, params)]
    steps = SEEN["steps"]
    assert counted(llm, "vllm:num_preemptions") > 0
    assert SEEN["shapes"] == {shape}, SEEN
    again = [llm.generate({"prompt_token_ids": [9] * 50}, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    # A drafting model needs the last block computed anew.
    assert again in ([0, 48], [0, 32]), again
    shapes = [{"choice": ["yes", "no"]}, {"json": SCHEMA}] * 8
    wishes = [SamplingParams(max_tokens=200, structured_outputs=StructuredOutputsParams(**each)) for each in shapes]
    prompts = [f"prompt {n}" for n in range(16)]
    texts = [each.outputs[0].text for each in llm.generate(prompts, wishes, use_tqdm=False)]
    assert set(texts[::2]) <= {"yes", "no"} and all(json.loads(each) for each in texts[1::2])
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    accepted = counted(llm, "vllm:spec_decode_num_accepted_tokens")
    drafted = counted(llm, "vllm:spec_decode_num_draft_tokens")
    again = interrupted(llm) if not (LOSES_TOKENS and drafted and scheduler.async_scheduling) else None
    assert again in (None, [tokens[:40] for tokens, _ in outputs[:6]])
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return (outputs, texts), steps, scheduler.async_scheduling, accepted / (drafted or 1)

def interrupted(llm):
    # All requests are preempted and their output in flight is dropped, twice.
    running, done = llm.llm_engine, {}
    for n in range(6):
        running.add_request(f"again {n}", {"prompt_token_ids": CROWD[n]}, SamplingParams(max_tokens=40))
    steps = 0
    while running.has_unfinished_requests():
        steps += 1
        if steps in (6, 11):
            assert running.engine_core.reset_prefix_cache(reset_running_requests=True)
        for each in running.step():
            done[each.request_id] = list(each.outputs[0].token_ids)
    return [done[name] for name in sorted(done)]
"""


def test_both_shapes_of_a_step_give_the_same_tokens(program):
    """Preemption, chunked prefill, prefix cache and structured output, as the V1 and as the V2 runner is told."""
    program(
        """
        first, *_ = results("V1")
        for shape, given in (("V2", {}), ("V1", {"async_scheduling": False}), ("V2", {"async_scheduling": False})):
            outputs, _, asynchronous, _ = results(shape, **given)
            assert outputs == first, (shape, given)
            assert asynchronous == (not given)
        """,
        setup=WATCHED,
        **SMALL,
        **INSIDE,
    )


def test_drafts_save_steps_and_change_no_token(program):
    """n-gram drafts (synchronous) and those of a model or of ``ngram_gpu`` (asynchronous), in both shapes."""
    program(
        """
        plain, steps, *_ = results("V1")
        ngram = {"method": "ngram", "num_speculative_tokens": 3}
        model = {"method": "eagle", "model": MODEL, "num_speculative_tokens": 3}
        device = {"method": "ngram_gpu", "num_speculative_tokens": 2}
        for shape, drafting, asynchronous in (("V1", ngram, False), ("V1", device, True), ("V2", model, True)):
            outputs, fewer, seen, accepted = results(shape, speculative_config=drafting)
            assert seen == asynchronous, drafting
            assert outputs == plain, drafting
            assert fewer < 0.8 * steps, (fewer, steps)
            assert 0.35 < accepted < 0.75, accepted
        """,
        setup=WATCHED,
        **SMALL,
        **INSIDE,
    )


def test_it_sleeps_and_wakes_in_parts_and_holds_adapters(program):
    program(
        """
        from vllm.lora.request import LoRARequest
        llm = engine(enable_sleep_mode=True, enable_lora=True, max_loras=2)
        before = tokens(llm, [[1, 2, 3]], max_tokens=5)
        for level in (1, 2):
            llm.sleep(level=level)
            assert llm.llm_engine.is_sleeping()
            llm.wake_up(tags=["weights"])
            assert llm.llm_engine.is_sleeping()
            llm.wake_up(tags=["kv_cache"])
            assert not llm.llm_engine.is_sleeping()
            assert tokens(llm, [[1, 2, 3]], max_tokens=5) == before
        llm.sleep()
        llm.wake_up()
        assert tokens(llm, [[1, 2, 3]], max_tokens=5) == before

        adapters = [LoRARequest(f"adapter-{n}", n, MODEL) for n in (1, 2, 3)]
        given = [{"prompt_token_ids": [1, 2, 3]}] * 3
        outputs = llm.generate(given, SamplingParams(max_tokens=5), lora_request=adapters, use_tqdm=False)
        assert len({tuple(each.outputs[0].token_ids) for each in outputs}) == 3
        assert len(llm.llm_engine.list_loras()) == 2
        assert llm.llm_engine.remove_lora(3) and 3 not in llm.llm_engine.list_loras()
        llm.llm_engine.engine_core.shutdown()
        """
    )
