"""The simulated accelerator: its tokens, its bookkeeping, its refusals, and the real engine on top of it."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.plugins.platforms.simulated import refusals
from vllm_graft.plugins.platforms.simulated.adapters import AdapterShelf
from vllm_graft.plugins.platforms.simulated.batch import RequestTable
from vllm_graft.plugins.platforms.simulated.memory import DEFAULT_KV_BYTES, KV_BYTES_VARIABLE, kv_bytes
from vllm_graft.plugins.platforms.simulated.timing import Timeline
from vllm_graft.plugins.platforms.simulated.tokens import HashedTokens, allowed_tokens, mix, skewed
from vllm_graft.plugins.platforms.simulated.vocabulary import Vocabulary, read_tokenizer, vocabulary
from vllm_graft.testing.models import tiny_model

EOS = 2


def params(**given):
    usual = {"seed": None, "min_tokens": 0, "all_stop_token_ids": {EOS}, "allowed_token_ids": None}
    return SimpleNamespace(**{**usual, **given})


def new(name="a", prompt=(5, 6, 7), *, computed=0, prefill=None, lora=None, **given):
    """A request as the scheduler introduces it; the V2 runner's carries all its tokens in ``prefill``."""
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=list(prompt),
        prompt_embeds=None,
        prefill_token_ids=prefill,
        num_computed_tokens=computed,
        sampling_params=params(**given),
        lora_request=SimpleNamespace(lora_name=lora) if lora else None,
    )


def step(scheduled, *, fresh=(), cached=(), finished=()):
    """One scheduler output; ``cached`` holds (name, computed tokens, output tokens)."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=list(fresh),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[each[0] for each in cached],
            num_computed_tokens=[each[1] for each in cached],
            num_output_tokens=[each[2] for each in cached],
        ),
        finished_req_ids=set(finished),
    )


def stream(vocabulary=None, *, seed=0, **given):
    return HashedTokens(seed, vocabulary or Vocabulary(1000, frozenset({0, 1, EOS}))).open(new(**given))


def first(count, **given):
    tokens = stream(**given)
    return [tokens.token(index, None) for index in range(count)]


def mask_of(*ids, size=1000):
    bits = np.zeros((size + 31) // 32 * 32, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def due(table, output):
    """What a step brings, as {request: position of its token, or None}."""
    return {share.request_id: share.index for share in table.advance(output).shares}


@pytest.fixture
def table():
    return RequestTable(HashedTokens(0, Vocabulary(1000)))


class TestTokens:
    def test_the_same_request_gets_the_same_tokens(self):
        assert first(50) == first(50, name="another id")

    @pytest.mark.parametrize("other", [{"prompt": (5, 6, 8)}, {"seed": 1}, {"lora": "adapter"}])
    def test_another_prompt_seed_or_adapter_gets_others(self, other):
        assert first(50) != first(50, **other)

    def test_a_request_with_a_seed_of_its_own_does_not_depend_on_the_engines(self):
        own = [HashedTokens(engine, Vocabulary(1000)).open(new(seed=7)).token(0, None) for engine in (0, 1)]
        assert own[0] == own[1]

    def test_no_token_is_special_or_ends_the_request(self):
        small = Vocabulary(8, frozenset({0, 1}))
        assert set(first(200, vocabulary=small, all_stop_token_ids={EOS, 7})) == {3, 4, 5, 6}

    def test_a_vocabulary_of_nothing_but_special_tokens_still_gives_one(self):
        assert first(1, vocabulary=Vocabulary(2, frozenset({0, 1})))[0] in (0, 1)

    def test_allowed_token_ids_are_honoured(self):
        assert set(first(50, allowed_token_ids=[40, 41])) == {40, 41}

    def test_a_trace_is_replayed(self):
        assert first(3, trace_decode_token_ids=[9, 8, 7]) == [9, 8, 7]

    def test_numbers_are_stable_for_good(self):
        assert mix(0, 0) == 0xE220A8397B1DCDAF


class TestGrammar:
    def test_a_token_the_grammar_allows_is_chosen(self):
        tokens = stream()
        assert {tokens.token(index, mask_of(3, 500, 999)) for index in range(50)} == {3, 500, 999}

    def test_the_text_ends_as_soon_as_it_may(self):
        assert stream().token(4, mask_of(3, EOS, 999)) == EOS

    def test_but_not_before_min_tokens(self):
        tokens = stream(min_tokens=5)
        assert (tokens.token(4, mask_of(3, EOS)), tokens.token(5, mask_of(3, EOS))) == (3, EOS)

    def test_min_tokens_yields_to_a_grammar_that_allows_nothing_else(self):
        assert stream(min_tokens=5).token(0, mask_of(EOS)) == EOS

    def test_a_row_with_all_bits_set_is_no_constraint(self):
        free = np.full(32, -1, dtype=np.int32)
        assert stream().token(3, free) == stream().token(3, None)

    def test_a_grammar_without_a_way_out_does_not_raise(self):
        assert 0 <= stream().token(0, mask_of()) < 1000

    def test_allowed_token_ids_narrow_it_further_where_they_can(self):
        tokens = stream(allowed_token_ids=[500, 600])
        assert (tokens.token(0, mask_of(3, 500)), tokens.token(0, mask_of(3))) == (500, 3)

    def test_bits_beyond_the_vocabulary_are_ignored(self):
        assert np.flatnonzero(allowed_tokens(mask_of(3, 40, 63, size=64), 40)).tolist() == [3]

    @pytest.mark.parametrize("count", [1, 2, 64, 65, 128_000])
    def test_a_choice_stays_in_range(self, count):
        picks = {skewed(number, count) for number in (0, 1, 2**63, 2**64 - 1, *(mix(1, i) for i in range(500)))}
        assert min(picks) >= 0
        assert max(picks) < count


class TestBatch:
    def test_a_prompt_in_chunks_gets_its_token_with_the_last_one(self, table):
        prompt = range(10)
        assert due(table, step({"a": 4}, fresh=[new(prompt=prompt)])) == {"a": None}
        assert due(table, step({"a": 4}, cached=[("a", 4, 0)])) == {"a": None}
        assert due(table, step({"a": 2}, cached=[("a", 8, 0)])) == {"a": 0}
        assert due(table, step({"a": 1}, cached=[("a", 10, 1)])) == {"a": 1}

    def test_a_cached_prefix_counts_as_computed(self, table):
        assert due(table, step({"a": 1}, fresh=[new(prompt=range(33), computed=32)])) == {"a": 0}

    def test_steps_in_flight_are_counted_under_async_scheduling(self, table):
        due(table, step({"a": 3}, fresh=[new()]))
        assert [due(table, step({"a": 1}, cached=[("a", 3 + n, 1 + n)])) for n in range(3)] == [
            {"a": 1},
            {"a": 2},
            {"a": 3},
        ]

    def test_v1_a_preempted_request_computes_its_output_again_before_the_next_token(self, table):
        due(table, step({"a": 3}, fresh=[new()]))
        assert due(table, step({"a": 4}, cached=[("a", 0, 5)])) == {"a": None}
        assert due(table, step({"a": 4}, cached=[("a", 4, 5)])) == {"a": 5}

    def test_v2_a_preempted_request_comes_back_as_a_new_one_with_its_output(self, table):
        due(table, step({"a": 3}, fresh=[new(prefill=[5, 6, 7])]))
        again = new(prefill=[5, 6, 7, 101, 102])
        assert due(table, step({"a": 4}, fresh=[again])) == {"a": None}
        assert due(table, step({"a": 1}, cached=[("a", 4, 2)])) == {"a": 2}

    def test_a_preemption_changes_no_token(self, table):
        plain = table.advance(step({"a": 3}, fresh=[new()])).shares[0].stream
        again = table.advance(step({"a": 5}, fresh=[new(prefill=[5, 6, 7, 101, 102])])).shares[0].stream
        assert plain.token(2, None) == again.token(2, None)

    def test_a_finished_request_is_forgotten_even_in_an_empty_step(self, table):
        due(table, step({"a": 3, "b": 3}, fresh=[new("a"), new("b")]))
        assert due(table, step({}, finished=["a", "never seen"])) == {}
        assert len(table) == 1

    def test_an_id_may_be_used_again_in_the_step_that_ends_it(self, table):
        due(table, step({"a": 3}, fresh=[new("a")]))
        assert due(table, step({"a": 4}, fresh=[new("a", prompt=range(4))], finished=["a"])) == {"a": 0}

    def test_a_share_says_what_a_model_of_the_device_needs(self, table):
        (share,) = table.advance(step({"a": 4}, fresh=[new(prompt=range(10), computed=2)])).shares
        assert (share.new_tokens, share.context) == (4, 6)

    def test_a_prompt_of_embeddings_has_their_length(self, table):
        request = new()
        request.prompt_token_ids, request.prompt_embeds = None, np.zeros((6, 8))
        assert due(table, step({"a": 6}, fresh=[request])) == {"a": 0}


class TestVocabulary:
    def test_the_tokenizers_file_names_special_ids_and_the_end(self, tmp_path):
        content = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}, {"id": 5}]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        assert read_tokenizer(tmp_path / "tokenizer.json") == Vocabulary(6, frozenset({2, 5}))

    def test_a_model_is_its_configuration_alone_where_there_is_no_such_file(self, tmp_path):
        hf = SimpleNamespace(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=None)
        model = SimpleNamespace(
            get_vocab_size=lambda: 64, hf_text_config=hf, tokenizer=None, model=str(tmp_path / "not-there")
        )
        assert vocabulary(model) == Vocabulary(64, frozenset({1, 2, 3}))


class TestTime:
    def test_steps_run_one_after_another(self):
        now, slept = [100.0], []
        timeline = Timeline(clock=lambda: now[0], sleep=slept.append)
        ends = [timeline.launch(2.0), timeline.launch(3.0)]
        assert ends == [102.0, 105.0]
        now[0] = 101.0
        timeline.wait(ends[0])
        timeline.wait()
        assert slept == [1.0, 4.0]

    def test_an_idle_device_starts_at_once(self):
        now = [100.0]
        timeline = Timeline(clock=lambda: now[0])
        timeline.launch(2.0)
        now[0] = 200.0
        assert timeline.launch(1.0) == 201.0


class TestMemory:
    def test_the_variable_sets_the_bytes(self):
        assert kv_bytes({KV_BYTES_VARIABLE: " 4096 "}) == 4096
        assert kv_bytes({}) == kv_bytes({KV_BYTES_VARIABLE: ""}) == DEFAULT_KV_BYTES

    @pytest.mark.parametrize("text", ["4GB", "-1", "0", "1e9", "²"])
    def test_anything_else_is_refused_by_name(self, text):
        with pytest.raises(ConfigError, match=KV_BYTES_VARIABLE):
            kv_bytes({KV_BYTES_VARIABLE: text})


class TestAdapters:
    def test_the_longest_unused_adapter_leaves_unless_it_is_pinned(self):
        shelf = AdapterShelf(2)
        assert [shelf.add(1), shelf.add(2), shelf.pin(1), shelf.add(3)] == [True] * 4
        assert shelf.ids() == {1, 3}
        assert [shelf.remove(1), shelf.remove(1), shelf.pin(9)] == [True, False, False]


class TestRefusals:
    def config(self, *, parallel=None, **given):
        usual = {"distributed_executor_backend": "uni", "nnodes": 1}
        return SimpleNamespace(parallel_config=SimpleNamespace(**{**usual, **(parallel or {})}), **given)

    def test_a_plain_configuration_passes(self):
        refusals.check_config(self.config(model_config=SimpleNamespace(runner_type="generate", logits_processors=[])))

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"speculative_config": object()}, "speculative_config"),
            ({"model_config": SimpleNamespace(logits_processors=["mod:Cls"])}, "logits_processors"),
            ({"model_config": SimpleNamespace(runner_type="pooling")}, "pooling"),
            ({"model_config": SimpleNamespace(is_hybrid=True)}, "state-space"),
            ({"parallel": {"distributed_executor_backend": "ray"}}, "'ray'"),
            ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size"),
        ],
    )
    def test_what_cannot_be_honoured_is_named(self, given, named):
        with pytest.raises(ConfigError, match=named):
            refusals.check_config(self.config(**given))


PRELUDE = """
import json
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

def tokens(llm, prompts, **kwargs):
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(each.outputs[0].token_ids) for each in llm.generate(given, SamplingParams(**kwargs), use_tqdm=False)]

def engine(**kwargs):
    return LLM(model=MODEL, max_model_len=256, max_num_seqs=64, disable_log_stats=False, **kwargs)

if __name__ == "__main__":
"""


def surroundings(**environ):
    return {**os.environ, "GRAFT_SIMULATE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **environ}


def run(code, **environ):
    """A program in a process of its own, on the simulated accelerator, with what the prelude defines."""
    body = textwrap.indent(textwrap.dedent(code), "    ")
    return subprocess.run(
        [sys.executable, "-c", f"MODEL = {str(tiny_model())!r}\n{PRELUDE}{body}"],
        env=surroundings(**environ),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=200,
        check=False,
    )


TROUBLE = ("Cannot access accelerator", "leaked shared_memory", "Traceback")


@pytest.mark.engine
@pytest.mark.slow
class TestEngine:
    def test_batches_preempt_cache_and_constrain_as_on_a_device(self):
        """One engine, async scheduling, in a process of its own, with a KV cache for a few requests only."""
        done = run(
            """
            llm = engine()
            crowd = [[10 + n] + [6, 7, 8] * 10 for n in range(40)]
            together = tokens(llm, crowd, max_tokens=150)
            assert {len(each) for each in together} == {150}
            assert len({tuple(each) for each in together}) == len(crowd)
            assert together[:3] == [tokens(llm, [each], max_tokens=150)[0] for each in crowd[:3]]
            preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
            assert preempted > 0

            llm.generate("a prompt of more than thirty-two characters", use_tqdm=False)
            again = llm.generate("a prompt of more than thirty-two characters", use_tqdm=False)[0]
            assert again.num_cached_tokens == 32

            schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
            shapes = [{"choice": ["yes", "no"]}, {"json": schema}]
            wishes = [SamplingParams(max_tokens=200, structured_outputs=StructuredOutputsParams(**s)) for s in shapes]
            choice, document = llm.generate(["a", "b"], wishes, use_tqdm=False)
            assert choice.outputs[0].text in ("yes", "no")
            assert isinstance(json.loads(document.outputs[0].text)["age"], int)

            try:
                llm.generate("a", SamplingParams(logprobs=1), use_tqdm=False)
            except VLLMValidationError as error:
                assert "logprobs" in str(error)
            else:
                raise AssertionError("logprobs were not refused")
            assert tokens(llm, crowd[:1], max_tokens=4)[0] == together[0][:4]
            llm.llm_engine.engine_core.shutdown()
            print("DONE")
            """,
            **{KV_BYTES_VARIABLE: "400000"},
        )
        assert done.returncode == 0, done.stdout
        assert "DONE" in done.stdout
        assert not [sign for sign in TROUBLE if sign in done.stdout], done.stdout

    @pytest.mark.parametrize(
        ("arguments", "environ"),
        [
            pytest.param("async_scheduling=False", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, id="in-process-sync"),
            pytest.param("tensor_parallel_size=2", {}, id="two-workers"),
        ],
    )
    def test_any_arrangement_of_processes_gives_the_same_tokens(self, arguments, environ):
        done = run(f"llm = engine({arguments}); print('TOKENS', tokens(llm, [[9, 8, 7]], max_tokens=5))", **environ)
        assert done.returncode == 0, done.stdout
        source = HashedTokens(0, read_tokenizer(tiny_model() / "tokenizer.json"))
        alone = source.open(new(prompt=(9, 8, 7), all_stop_token_ids=set()))
        assert f"TOKENS [{[alone.token(index, None) for index in range(5)]}]" in done.stdout

    def test_a_bad_size_of_the_memory_stops_the_start_with_its_name(self):
        done = run("engine()", **{KV_BYTES_VARIABLE: "lots"})
        assert done.returncode != 0
        assert f"{KV_BYTES_VARIABLE}: 'lots' is not a number of bytes" in done.stdout


@pytest.fixture
def server(tmp_path):
    """The address of vLLM's API server on the simulated accelerator, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model())]
    command += ["--served-model-name", "tiny", "--port", str(port), "--max-model-len", "256"]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, env=surroundings(), stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", process, tmp_path / "log")
            yield f"http://127.0.0.1:{port}", process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)


def wait_until_healthy(address, process, log):
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2)
        except OSError:
            time.sleep(0.3)
        else:
            return
    raise AssertionError(log.read_text())


def complete(address, **body):
    """A completion's status and text."""
    content = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 8, **body}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.server
@pytest.mark.slow
def test_the_api_server_streams_refuses_and_ends(server):
    address, process = server
    status, text = complete(address, stream=True, stream_options={"include_usage": True})
    *_, usage, end = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert (status, end, json.loads(usage)["usage"]["completion_tokens"]) == (200, "[DONE]", 8)
    status, text = complete(address, logprobs=1)
    assert status == 400
    assert "no logits are computed" in text
    assert complete(address)[0] == 200
    process.terminate()
    assert process.wait(30) == 0
