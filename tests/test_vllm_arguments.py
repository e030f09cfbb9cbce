"""vLLM's command line, in every spelling that its parser takes."""

import pytest

from vllm_graft.vllm_arguments import VllmArguments


def told(*words: str) -> VllmArguments:
    return VllmArguments(words)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("--max-model-len", "8"), "8"),
        (("--max_model_len=8",), "8"),
        (("--max-model-len", "4", "--max-model-len=8"), "8"),
        (("--max-model-len", "--port"), ""),
        (("--max-model-len",), ""),
        (("--max-model-len-of", "8"), None),
        ((), None),
    ],
)
def test_the_last_value_counts(words, value):
    assert told(*words).value("--max-model-len") == value


def test_an_argument_with_several_values():
    words = told("--a", "1", "--names", "x", "y", "--b", "--names=z", "w")
    assert words.values("--names") == ["z", "w"]
    assert words.values("--none") == []


def test_values_that_may_be_meant():
    words = told("--quant", "awq", "-qfp8", "--quantization-config.x=1", "-q=a", "--q_", "x")
    assert words.possible_values("--quantization", "-q") == ["awq", "fp8", "a"]
    assert told("--", "-", "--quantized=1").possible_values("--quantization") == []


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (("m", "--port", "1"), "m"),
        (("vllm", "serve", "m"), ""),
        (("serve", "m"), "m"),
        (("--port", "1", "--model=m"), "m"),
        (("--port", "1"), ""),
    ],
)
def test_the_model(words, model):
    assert told(*words).model == model


def test_presence():
    words = told("--speculative-config.method", "x", "--ssl_keyfile", "k")
    assert words.given("--speculative-config")
    assert not words.given("--speculative")
    assert words.any_begins("--uds", "--ssl")
    assert not words.any_begins("--config")


def test_a_switch_and_its_opposite():
    assert told("--no-async-scheduling", "--async_scheduling").switched("--async-scheduling") is True
    assert told("--async-scheduling", "--no_async_scheduling").switched("--async-scheduling") is False
    assert told("--async").switched("--async-scheduling") is None


def test_a_json_argument():
    assert told("--x", '{"a": 1}').document("--x") == {"a": 1}
    assert told("--x", "[1]").document("--x") == {}
    assert told("--x", "{").document("--x") == {}
