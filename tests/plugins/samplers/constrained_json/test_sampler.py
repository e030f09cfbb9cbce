"""The sampler writes valid JSON with the embedded model's vocabulary, whatever the logits and the limit are."""

from __future__ import annotations

import copy
import itertools
import json
import logging

import pytest

torch = pytest.importorskip("torch")

from vllm_graft.contracts import Params, ServedModel  # noqa: E402
from vllm_graft.errors import ConfigError  # noqa: E402
from vllm_graft.plugins.samplers.constrained_json import ConstrainedJSONSampler  # noqa: E402

SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 1.0, "top_k": 200, "top_p": 0.7},
]


def deep(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(deep, inner), default=0) if isinstance(value, dict | list) else 0


class TestDocuments:
    @pytest.mark.parametrize("sampling", SAMPLING, ids=str)
    def test_every_answer_parses(self, sampling, request_of, write):
        """Many seeds, limits, depths and roots, in batches."""
        writers = [
            request_of(
                seed=seed, max_tokens=2 + 2 * seed, depth=1 + seed % 9, root=("object", "any")[seed % 2], **sampling
            )
            for seed in range(24)
        ]
        texts = [text for at in range(0, 24, 8) for text in write(*writers[at : at + 8])]
        for writer, text in zip(writers, texts, strict=True):
            value = json.loads(text)
            assert deep(value) <= writer.params["json_max_depth"]
            assert isinstance(value, dict) or writer.params["json_root"] == "any"

    def test_the_documents_are_more_than_brackets(self, request_of, write):
        texts = write(*(request_of(seed=seed, max_tokens=60) for seed in range(12)))
        assert len(set(texts)) == 12
        signs = set("".join(texts))
        assert signs >= set('{}[]",:')

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
    def test_the_shortest_limits_are_kept(self, max_tokens, request_of, write):
        """A document of one token needs a vocabulary that has it: {} is one here."""
        for text in write(*(request_of(seed=seed, max_tokens=max_tokens) for seed in range(8))):
            json.loads(text)

    def test_without_a_limit_it_goes_on_until_the_document_ends(self, request_of, write, tokenizer):
        writer = request_of(max_tokens=None, depth=1)
        closing = [token for token in range(len(tokenizer)) if {'"', "}"} & set(tokenizer.decode([token]))]
        writer.noise = writer.noise.index_add(1, torch.tensor(closing), torch.full((16, len(closing)), 6.0))
        json.loads(write(writer)[0])
        assert writer.generated[-1] == tokenizer.eos_token_id

    def test_the_end_token_comes_with_the_document_and_then_for_ever(self, request_of, sampler, tokenizer):
        """As with min_tokens or ignore_eos."""
        writer = request_of()
        writer.generated += tokenizer.encode('{"a": 1}')
        for _ in range(3):
            writer.generated += sampler.sample(writer.logits()[None].clone(), [writer.params]).tolist()
        assert writer.generated[-3:] == [tokenizer.eos_token_id] * 3

    def test_no_special_token_is_picked(self, request_of, sampler, tokenizer):
        """Not even where they are all the model wants, and inside of a string."""
        writer = request_of(temperature=0.0)
        writer.generated += tokenizer.encode('{"a')
        logits = writer.logits()[None].clone()
        logits[:, tokenizer.all_special_ids] = 1e4
        logits[:, len(tokenizer) :] = 1e4
        (token,) = sampler.sample(logits, [writer.params]).tolist()
        assert token not in tokenizer.all_special_ids
        assert token < len(tokenizer)

    def test_a_model_that_wants_blanks_gets_none(self, request_of, sampler, tokenizer):
        writer = request_of(temperature=0.0, max_tokens=40)
        blank = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()]
        while not writer.done:
            logits = writer.logits()[None].clone()
            logits[:, blank] += 100.0
            writer.generated += sampler.sample(logits, [writer.params]).tolist()
        json.loads(tokenizer.decode(writer.generated, skip_special_tokens=True))

    def test_where_all_allowed_tokens_were_taken_away_it_ends_the_document(self, request_of, sampler, tokenizer):
        """Another sampler may have left a single token, which is no JSON."""
        for sampling in SAMPLING:
            writer = request_of(**sampling)
            writer.generated += tokenizer.encode('{"a": [1, "b')
            while not writer.done:
                logits = torch.full((1, writer.noise.shape[1]), float("-inf"))
                logits[0, 5] = 1.0
                writer.generated += sampler.sample(logits, [writer.params]).tolist()
            assert json.loads(tokenizer.decode(writer.generated, skip_special_tokens=True)) == {"a": [1, "b"]}


class TestRepeating:
    @pytest.mark.parametrize("sampling", SAMPLING, ids=str)
    def test_the_same_seed_gives_the_same_answer(self, sampling, request_of, write):
        assert write(request_of(seed=5, **sampling)) == write(request_of(seed=5, **sampling))

    def test_another_seed_gives_another(self, request_of, write):
        assert write(request_of(seed=5)) != write(request_of(seed=10))

    @pytest.mark.parametrize("sampling", SAMPLING, ids=str)
    def test_a_batch_gives_what_each_gives_alone(self, sampling, request_of, write):
        together = write(request_of(seed=3, **sampling), request_of(seed=4, temperature=0.9), request_of(seed=5))
        alone = write(request_of(seed=3, **sampling)) + write(request_of(seed=4, temperature=0.9))
        assert together == alone + write(request_of(seed=5))

    def test_a_request_whose_state_was_lost_goes_on_as_if_nothing_happened(self, request_of, write):
        assert write(request_of(seed=7), forget=True) == write(request_of(seed=7))

    def test_one_that_was_set_back_does_so_too(self, request_of, write):
        writer = request_of(seed=7)
        whole = write(writer)
        del writer.generated[4:]
        assert write(writer) == whole

    def test_a_step_that_is_computed_twice_gives_the_same(self, request_of, sampler):
        writer = request_of(seed=None)
        first = sampler.sample(writer.logits()[None].clone(), [writer.params]).tolist()
        assert sampler.sample(writer.logits()[None].clone(), [writer.params]).tolist() == first

    def test_without_a_seed_two_ranks_agree_and_two_requests_differ(self, sampler, request_of):
        texts = []
        for _ in range(2):
            rank = copy.copy(sampler)
            rank._requests = itertools.count()
            writers = [request_of(seed=None) for _ in range(2)]
            for _ in range(20):
                logits = torch.stack([writer.logits() for writer in writers])
                for writer, token in zip(
                    writers, rank.sample(logits, [w.params for w in writers]).tolist(), strict=True
                ):
                    writer.generated.append(token)
            texts.append([writer.generated for writer in writers])
        assert texts[0] == texts[1]
        assert texts[0][0] != texts[0][1]


class TestRefusals:
    def test_a_root_that_does_not_exist_is_refused(self):
        with pytest.raises(ValueError, match="json_root must be one of object, any, but is 'array'"):
            ConstrainedJSONSampler.check({"json_root": "array"})
        ConstrainedJSONSampler.check({"json_root": "any"})

    def test_only_the_switch_asks_for_it(self):
        assert ConstrainedJSONSampler.is_requested({"json_sampler": True})
        assert not ConstrainedJSONSampler.is_requested({"json_sampler": False, "json_max_depth": 3})

    def test_a_model_without_an_end_token_is_refused(self, tokenizer):
        model = ServedModel("m", len(tokenizer), 8, torch.device("cpu"), (), load_tokenizer=lambda: tokenizer)
        with pytest.raises(ConfigError, match="eos_token_id"):
            ConstrainedJSONSampler().setup(model)

    def test_a_token_that_something_else_picked_is_said_once(self, request_of, sampler, caplog):
        """Nothing can fix the document then: the answer goes on without it."""
        writer = request_of(temperature=0.0)
        writer.generated += [sampler._masks._trie.tokens(1)[0]]
        logits = writer.logits()[None].clone()
        with caplog.at_level(logging.WARNING):
            tokens = [sampler.sample(logits.clone(), [writer.params]).tolist() for _ in range(2)]
        assert tokens == [[int(logits.argmax())]] * 2
        assert [record.getMessage() for record in caplog.records if "something else picked it" in record.getMessage()]
        assert len(caplog.records) == 1


def test_states_that_are_not_used_are_forgotten(model, request_of):
    """The cache is bounded, and what it forgot is worked out again, the same."""
    from vllm_graft.plugins.samplers.constrained_json.automaton import start
    from vllm_graft.plugins.samplers.constrained_json.masks import Masks
    from vllm_graft.plugins.samplers.constrained_json.vocabulary import token_bytes

    masks = Masks(token_bytes(model.tokenizer), model.eos, model.vocabulary, model.device, size=2)
    before = masks.allowed(start("object"), 8).mask(None)
    for depth in range(1, 6):
        masks.allowed(start("any"), depth)
    assert masks.allowed.cache_info().currsize == 2
    again = masks.allowed(start("object"), 8).mask(None)
    assert again is not before
    assert torch.equal(again, before)


def test_importing_it_does_not_import_torch():
    """The front end imports it for its keys."""
    import subprocess
    import sys

    code = "import sys, vllm_graft.plugins.samplers.constrained_json; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_params_need_no_more_than_the_contract_has(sampler, model):
    """The defaults of ``Params`` will do."""
    params = Params({key.name: key.default for key in ConstrainedJSONSampler.request_keys()})
    (token,) = sampler.sample(torch.zeros(1, model.vocabulary), [params]).tolist()
    assert sampler._texts[token].lstrip().startswith(b"{")
