"""``scored-blocks``: which blocks it frees, given their scores."""

import pytest

from vllm_graft.contracts import LayerView, OptionError, RequestBlocks
from vllm_graft.plugins.attention.scored_blocks import ScoredBlocks

OPTIONS = {"first": 16, "recent": 32, "min_tokens": 0}


def request(blocks: int, scores: dict[int, float], held: list[int] | None = None, **more: object) -> RequestBlocks:
    """A request with this many full blocks of 16 tokens and one that it has begun."""
    held = list(range(blocks + 1)) if held is None else held
    evictable = [block for block in held if block < blocks]
    given = {"request_id": "a", "prompt": 100, "keys": {}, "tokens": blocks * 16 + 1, **more}
    return RequestBlocks(block_size=16, held=held, evictable=evictable, scores=scores, **given)  # type: ignore[arg-type]


def test_the_lowest_scores_go_first():
    scores = {block: float(block % 5) for block in range(10)}
    assert ScoredBlocks({**OPTIONS, "keep": 0.7}).evict(request(10, scores)) == [5, 1, 6]


def test_the_first_and_the_recent_blocks_stay_whatever_their_scores():
    scores = {0: 0.0, 1: 0.5, 2: 0.4, 8: 0.0, 9: 0.0}
    assert ScoredBlocks({**OPTIONS, "keep": 0.1}).evict(request(10, scores)) == [2, 1]


def test_a_block_without_a_score_stays():
    assert ScoredBlocks({**OPTIONS, "keep": 0.5}).evict(request(10, {})) == []
    assert ScoredBlocks({**OPTIONS, "keep": 0.5}).evict(request(10, {4: 1.0, 5: 0.9})) == [5, 4]


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.75, 1.0])
def test_the_share_is_of_all_blocks_that_the_request_has_filled(keep: float):
    """Freed ones count among them, so the share holds as the request grows, and no block is freed without need."""
    policy, held = ScoredBlocks({**OPTIONS, "keep": keep}), [0]
    for blocks in range(1, 60):
        held.append(blocks)
        gone = policy.evict(request(blocks, {block: (block * 7 % 13) / 13 for block in held}, held))
        held = [block for block in held if block not in gone]
        allowed = max(3, -(-blocks * int(keep * 100) // 100))
        assert len(held) - 1 == min(blocks, allowed)


def test_a_short_request_keeps_everything():
    policy = ScoredBlocks({**OPTIONS, "keep": 0.1, "min_tokens": 162})
    scores = dict.fromkeys(range(10), 0.1)
    assert policy.evict(request(10, scores)) == ()
    assert policy.evict(request(10, scores, tokens=162))


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("keep", 0.0, "above 0 and up to 1"),
        ("keep", 1.5, "above 0 and up to 1"),
        ("first", -1, "must be 0 or more tokens, but is -1"),
        ("recent", 0, "must be 1 or more tokens, but is 0"),
        ("min_tokens", -5, "must be 0 or more tokens"),
        ("every", 0, "must be 1 or more steps, but is 0"),
        ("layers", "some", "which is neither a layer"),
    ],
)
def test_options_that_cannot_work_are_refused(option: str, value: object, what: str):
    with pytest.raises(OptionError, match=what) as caught:
        ScoredBlocks.check_options({**ScoredBlocks.options, option: value})  # type: ignore[dict-item]
    assert caught.value.option == option


@pytest.mark.parametrize(("own", "held"), [(0.5, 5), (0.7, 7), (0.9, 7)])
def test_a_request_may_ask_for_a_smaller_share(own: float, held: int):
    gone = ScoredBlocks({**OPTIONS, "keep": 0.7}).evict(
        request(10, dict.fromkeys(range(10), 0.1), keys={"kv_keep": own})
    )
    assert len(gone) == 10 - held


@pytest.mark.parametrize("own", [0, -0.1, 0.6, True, "0.3", [0.3], float("nan")])
def test_a_share_that_is_none_is_refused(own: object):
    with pytest.raises(ValueError, match=r"kv_keep must be a number above 0 and up to 0\.5, but is "):
        ScoredBlocks.check_request({"kv_keep": own}, ScoredBlocks.options)
    ScoredBlocks.check_request({"kv_keep": 0.5}, ScoredBlocks.options)


def test_the_defaults_are_accepted():
    ScoredBlocks.check_options(ScoredBlocks.options)


@pytest.mark.parametrize(
    ("layers", "chosen"), [("auto", [16, 24]), ("all", list(range(32))), ("8, 30-", [8, 30, 31]), (" 3 ", [3])]
)
def test_layers_that_score_are_chosen_by_number(layers: str, chosen: list[int]):
    policy = ScoredBlocks({"layers": layers})
    views = [LayerView(f"layers.{index}", index, 32, None, 4, 2, 32, 16, 2048) for index in range(32)]
    assert [view.index for view in views if policy.scores_layer(view)] == chosen
