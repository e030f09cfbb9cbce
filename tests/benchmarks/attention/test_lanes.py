"""Lanes against Hugging Face with the mask written out, on the tiny model."""

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from benchmarks.attention.lanes import EVERYBODY, Network, Reading
from benchmarks.attention.policies import BLOCK, BestBlocks, Full, Policy, RandomBlocks, SinkWindow

from vllm_graft.testing import tiny_model

TOKENS = 288
POLICIES: list[Policy] = [Full(), SinkWindow(128, 0), SinkWindow(192, 4), BestBlocks(0.25), RandomBlocks(0.5)]


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(tiny_model())


@pytest.fixture
def tokens(network: Network) -> torch.Tensor:
    return torch.randint(5, network.model.config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def reference(tokens: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Logits of one pass in which query i attends to the tokens of ``seen[i]``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_model(), dtype=torch.float32, attn_implementation="eager"
    )
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    found: torch.Tensor = model(tokens[None], attention_mask=mask).logits[0]
    return found


def test_every_lane_computes_what_its_mask_says(network: Network, tokens: torch.Tensor):
    """Whatever slots the tokens have, and however many lanes are computed together."""
    reading = Reading(network, POLICIES, TOKENS)
    logits: dict[Policy, list[torch.Tensor]] = {policy: [] for policy in POLICIES}
    masks = {policy: torch.zeros(TOKENS, TOKENS, dtype=torch.bool) for policy in POLICIES}
    for begin, states in reading.read(tokens):
        for policy in POLICIES:
            logits[policy].append(network.logits(states[policy]))
            lane = reading.lane_of[policy]
            masks[policy][begin : begin + BLOCK, lane.at[lane.held]] = True
    for policy in POLICIES:
        torch.testing.assert_close(
            torch.cat(logits[policy]), reference(tokens, masks[policy].tril()), rtol=1e-4, atol=1e-4
        )
    assert len({mask.numpy().tobytes() for mask in masks.values()}) == len(POLICIES)


def test_a_policy_that_drops_nothing_has_no_lane_of_its_own(network: Network, tokens: torch.Tensor):
    reading = Reading(network, POLICIES, TOKENS)
    for begin, _ in reading.read(tokens[:192]):
        assert (reading.lane_of[SinkWindow(128, 0)] is reading.base) == (begin < 128)
        assert reading.lane_of[SinkWindow(192, 4)] is reading.base


def test_the_attention_of_a_token_adds_up_to_one(network: Network, tokens: torch.Tensor):
    reading = Reading(network, POLICIES, TOKENS)
    for begin, _ in reading.read(tokens[:128]):
        assert float(reading.base.mass.sum()) == pytest.approx(begin + BLOCK, rel=1e-4)


def test_branches_do_not_see_each_other(network: Network, tokens: torch.Tensor):
    """Two questions at once are answered as each would be alone."""
    context, questions = tokens[:64], [tokens[64:70], tokens[80:89]]
    reading = Reading(network, [Full()], 128)
    for _ in reading.read(context):
        pass
    positions = torch.cat([torch.arange(64, 64 + len(question)) for question in questions])
    branches = torch.cat([torch.full((len(question),), number) for number, question in enumerate(questions)])
    assert EVERYBODY not in branches
    states = reading.step(torch.cat(questions), positions, branches)[Full()]
    for number, question in enumerate(questions):
        alone = torch.cat((context, question))
        expected = reference(alone, torch.ones(len(alone), len(alone), dtype=torch.bool).tril())[64:]
        torch.testing.assert_close(network.logits(states[branches == number]), expected, rtol=1e-4, atol=1e-4)
