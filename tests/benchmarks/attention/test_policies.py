"""What the measured policies keep: a window is the server's own, and blocks stay or go whole."""

import math

import pytest

pytest.importorskip("torch")

import torch
from benchmarks.attention.policies import (
    BLOCK,
    LAST,
    WINDOW_BLOCK,
    BestBlocks,
    Full,
    Policy,
    RandomBlocks,
    SinkWindow,
    all_policies,
    choose_blocks,
    tokens_held,
)

from vllm_graft.bindings.attention.compaction import WindowShape

TOKENS = 1024


def read(policy: Policy, masses: torch.Tensor) -> list[list[int]]:
    """The positions that are held while each block is read, that block included; ``masses`` are those of the tokens."""
    held, found = torch.empty(0, dtype=torch.long), []
    for begin in range(0, TOKENS, BLOCK):
        held = held[policy.keep(begin, held, masses[held])]
        held = torch.cat((held, torch.arange(begin, begin + BLOCK)))
        found.append(held.tolist())
    return found


EQUAL = torch.ones(TOKENS)


@pytest.mark.parametrize("window", [256, 512])
@pytest.mark.parametrize("sinks", [0, 4, 64])
def test_a_window_is_what_a_server_with_the_plugin_attends_to(window: int, sinks: int):
    shape = WindowShape.fit(sinks, window, WINDOW_BLOCK)
    pairs = 0
    for begin, held in zip(range(0, TOKENS, BLOCK), read(SinkWindow(window, sinks), EQUAL), strict=True):
        for query in range(begin, begin + BLOCK):
            seen = [at for at in held if at <= query]
            assert len(seen) == query + 1 - shape.gap(query)
            assert all(at < shape.first or at >= shape.start(query) for at in seen)
            pairs += len(seen)
    assert pairs == shape.pairs(0, TOKENS)


def test_full_attention_keeps_everything():
    assert read(Full(), EQUAL)[-1] == list(range(TOKENS))


@pytest.mark.parametrize("kind", [BestBlocks, RandomBlocks])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_whole_blocks_stay_the_first_the_last_and_a_share(kind: type, share: float):
    before: set[int] = set()
    for filled, held in enumerate(read(kind(share), EQUAL)):
        blocks = {at // BLOCK for at in held}
        assert sorted(held) == [at for block in sorted(blocks) for at in range(block * BLOCK, (block + 1) * BLOCK)]
        assert {0, *range(max(0, filled - LAST), filled + 1)} <= blocks
        always = 1 + LAST
        assert len(blocks - {filled}) == min(filled, always + math.ceil(share * max(0, filled - always)))
        assert blocks - {filled} <= before or not before
        before = blocks


def test_blocks_with_the_most_attention_stay():
    masses = EQUAL.clone()
    for block in (3, 11, 17):
        masses[block * BLOCK + 5] = 100.0
    blocks = {at // BLOCK for at in read(BestBlocks(0.25), masses)[-1]}
    assert {3, 11, 17} <= blocks


def test_a_lot_is_drawn_once_and_old_blocks_are_not_worse_off():
    """With a new lot each time a block would have to win them all."""
    held = read(RandomBlocks(0.5), EQUAL)
    middle = [at // BLOCK for at in held[-1][::BLOCK]]
    assert any(block in range(1, 10) for block in middle)
    assert read(RandomBlocks(0.5), EQUAL) == held


def test_a_share_is_one_of_the_blocks_between_the_first_and_the_last():
    assert choose_blocks(range(10), 10, 0.4, score=float) == [0, 4, 5, 6, 7, 8, 9]
    assert choose_blocks(range(10), 10, 0.1, score=lambda index: -index) == [0, 1, 6, 7, 8, 9]
    assert choose_blocks([0, 1, 2], 3, 0.1, score=float) == [0, 1, 2]


@pytest.mark.parametrize("policy", all_policies(), ids=lambda policy: policy.name)
def test_how_much_is_held_does_not_depend_on_the_scores(policy: Policy):
    scores = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))
    assert tokens_held(policy, TOKENS - BLOCK) == len(read(policy, scores)[-1]) - BLOCK


def test_every_policy_has_a_name_of_its_own():
    names = [policy.name for policy in all_policies()]
    assert names[0] == "full attention"
    assert len(set(names)) == len(names) == 19
