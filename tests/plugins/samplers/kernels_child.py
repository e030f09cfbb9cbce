"""Runs every check of the Triton kernels under Triton's interpreter, on tensors of the host, and prints what came out.

A process of its own, because Triton decides at import whether kernels are interpreted.
"""

import json
import math
import os
import random
import sys
import traceback

os.environ["TRITON_INTERPRET"] = "1"

import torch
from sampler_steps import Tensors, made, params_of, rows_of

from vllm_graft.bindings.sampling import isolation, step
from vllm_graft.bindings.sampling import triton_kernels as binding_kernels
from vllm_graft.contracts import kernels as building_blocks
from vllm_graft.contracts import triton_kernels
from vllm_graft.plugins.samplers import xtc, xtc_kernels
from vllm_graft.plugins.samplers.dry import Dry
from vllm_graft.plugins.samplers.matching import by_torch, kernels
from vllm_graft.plugins.samplers.matching import strategy as matching_strategy
from vllm_graft.plugins.samplers.no_repeat_ngram import NoRepeatNgram
from vllm_graft.plugins.samplers.top_n_sigma import TopNSigma
from vllm_graft.plugins.samplers.xtc import Xtc, exclude_top

VOCABULARY = 70
SLOTS = 5


def some_logits(draw, rows, width=VOCABULARY, step=0):
    """Rows with masked tokens, some with hardly any token left, in memory that may be wider than a row."""
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    logits = torch.randn(rows, width + step, generator=generator) * 3
    for row in range(rows):
        masked = torch.rand(width + step, generator=generator) < draw.choice([0.0, 0.3, 0.97, 1.0])
        logits[row, masked] = -math.inf
    return logits[:, :width]


def check_randomness():
    """Numbers that do not fit wrap in the kernel as they do in torch."""
    draw = random.Random(3)
    for count in (1, 255, 600):
        seeds = torch.tensor([draw.randrange(-(2**63), 2**63) for _ in range(count)])
        positions = torch.tensor([draw.randrange(2**20) for _ in range(count)])
        for salt in (0, 1, 0x585443):
            found = triton_kernels.uniform_by_triton(seeds, positions, salt)
            assert torch.equal(found, building_blocks.uniform(seeds, positions, salt))


def check_last_tokens():
    """Out of a ring that has turned, for texts that are shorter than the window too."""
    draw = random.Random(5)
    binding_kernels._COLUMNS = 16
    for window in (1, 16, 40):
        ring = step.Ring(6, window, torch.device("cpu"))
        slots, positions = torch.tensor([5, 0, 3]), torch.tensor([draw.randrange(1, 400) for _ in range(3)])
        for slot, end in zip(slots.tolist(), positions.tolist(), strict=True):
            at = torch.arange(max(0, end - ring.size), end)
            ring.write(torch.full_like(at, slot), at, at + 1000 * slot)
        found = binding_kernels.last_by_triton(ring._tokens, slots, positions, window)
        assert torch.equal(found, ring.last(slots, positions, window)), window


def some_text(draw):
    kinds = [list(range(3)), [*range(VOCABULARY)], [0, 1, 2, -1, VOCABULARY, 5000]]
    text = draw.choices(draw.choice(kinds), k=draw.randint(0, 60))
    return text * draw.choice([1, 1, 5])


def places(draw, rows=8):
    """Some rows, for some slots and for nobody."""
    return dict(zip(draw.sample(range(rows), SLOTS + 1), draw.sample(range(SLOTS + 1), SLOTS + 1), strict=True))


def both(strategy, kind, by_torch, by_kernel, draw):
    texts = {slot: some_text(draw) for slot in range(SLOTS + 1)}
    rows = rows_of(places(draw), Tensors(texts))
    tokens = rows.history.tokens(rows, strategy.window)
    first = some_logits(draw, 8, step=draw.choice([0, 3]))
    second = first.clone()
    by_torch(first, rows, tokens)
    by_kernel(second, rows, tokens)
    return first, second


def check_dry():
    """Lengths, windows, breakers, the greatest of several penalties, nobody's rows."""
    for seed in range(6):
        draw = random.Random(seed)
        kernels._BLOCK = draw.choice([64, 256])
        dry = made(Dry, VOCABULARY, slots=SLOTS, options={"window": draw.choice([2, 40, 150])})
        for slot in range(SLOTS - 1):
            keys = {
                "dry_multiplier": draw.choice([0.5, 2.0, 1e30]),
                "dry_base": draw.choice([1.0, 1.75, 1e30]),
                "dry_allowed_length": draw.randint(1, 4),
                "dry_penalty_last_n": draw.choice([-1, 1, 20]),
                "dry_sequence_breakers": draw.choice([[], ["a"], ["b", "c"]]),
            }
            dry.open(slot, params_of(Dry, **keys))
        first, second = both(dry, Dry, dry._change_by_torch, dry._change_by_kernel, draw)
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def check_longest():
    """Both cut a match at the same length."""
    kernels._BLOCK = 512
    dry = made(Dry, VOCABULARY, slots=SLOTS, options={"window": 300})
    dry.open(0, params_of(Dry, dry_multiplier=1e-8, dry_base=1.2, dry_sequence_breakers=[]))
    rows = rows_of({0: 0}, Tensors({0: [7] * 300}))
    first = torch.zeros(1, VOCABULARY)
    second = first.clone()
    dry._change_by_torch(first, rows, rows.history.tokens(rows, 300))
    dry._change_by_kernel(second, rows, rows.history.tokens(rows, 300))
    assert math.isclose(first[0, 7].item(), -(1e-8 * 1.2**126), rel_tol=1e-3), first[0, 7]
    torch.testing.assert_close(first, second, rtol=1e-4, atol=0)


def check_tokens_that_are_not_known():
    """They match nothing, not even one another."""
    kernels._BLOCK = 16
    dry = made(Dry, VOCABULARY, slots=SLOTS, options={"window": 20})
    dry.open(0, params_of(Dry, dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1, dry_sequence_breakers=[]))
    for text, expected in (([4, -1, 5, 4, -1], []), ([4, -1, 2, 5, 4, -1, 2], [[0, 5]])):
        rows = rows_of({0: 0}, Tensors({0: text}))
        for way in (dry._change_by_torch, dry._change_by_kernel):
            logits = torch.zeros(1, VOCABULARY)
            way(logits, rows, rows.history.tokens(rows, 20))
            assert logits.nonzero().tolist() == expected, (text, way)
            assert logits.sum() == -len(expected)


def check_no_repeat_ngram():
    """Sizes, windows, whitelists, rows in which nothing would stay, nobody's rows."""
    kept = 0
    for seed in range(10):
        draw = random.Random(seed)
        kernels._BLOCK, kernels._ROW_BLOCK = draw.choice([16, 64]), draw.choice([16, 128])
        strategy = made(NoRepeatNgram, VOCABULARY, slots=SLOTS, options={"window": draw.choice([2, 40, 150])})
        for slot in range(SLOTS - 1):
            keys = {
                "no_repeat_ngram_size": draw.randint(1, 4),
                "no_repeat_ngram_window": draw.choice([0, 1, 20]),
                "no_repeat_ngram_whitelist": draw.choice([[], [0], [1, 2]]),
            }
            strategy.open(slot, params_of(NoRepeatNgram, **keys))
        first, second = both(strategy, NoRepeatNgram, strategy._change_by_torch, strategy._change_by_kernel, draw)
        assert torch.equal(first, second)
        kept += int((first > -math.inf).any(1).sum())
    assert kept


def check_bans_that_would_leave_nothing():
    """The row is as it was, a token that is named twice included."""
    before = torch.tensor([[1.0, 2.0, -math.inf, 3.0], [1.0, 2.0, 5.0, -math.inf]])
    tokens = torch.tensor([[0, 1, 0, 3, -1], [0, 1, 0, -1, -1]])
    for ban in (by_torch.ban, kernels.ban):
        logits = before.clone()
        ban(logits, torch.arange(2), tokens)
        assert logits.tolist() == [before[0].tolist(), [-math.inf, -math.inf, 5.0, -math.inf]]


def check_xtc():
    """Drawn and undrawn rows, ties, thresholds down to 0, rows of -inf, several pieces."""
    changed = 0
    for seed in range(10):
        draw = random.Random(seed)
        xtc_kernels._PIECE = draw.choice([16, 32, 128])
        logits = some_logits(draw, 8, step=draw.choice([0, 3]))
        logits[draw.randrange(8)] = logits[0].round()
        rows = torch.tensor(draw.sample(range(8), 6))
        drawn = torch.tensor([draw.random() < 0.7 for _ in range(6)])
        logarithms = torch.tensor([draw.choice([0.0, 0.003, 0.0517, 0.1003, 0.2003]) for _ in range(6)]).log()
        first, second = logits.clone(), logits.clone()
        exclude_top(first, rows, drawn, logarithms)
        slots = torch.tensor(draw.sample(range(9), 6))
        chances, table = torch.zeros(9), torch.zeros(9)
        chances[slots], table[slots] = drawn.float() / 2, logarithms
        xtc_kernels.exclude(second, rows, slots, torch.full((6,), 0.3), chances=chances, logarithms=table)
        assert torch.equal(first, second)
        changed += int((first != logits).any(1).sum())
    assert changed > 10


def check_statistics():
    """Rows of -inf, several pieces, means far from zero."""
    for seed in range(8):
        draw = random.Random(seed)
        triton_kernels._PIECE = draw.choice([16, 32, 128])
        logits = some_logits(draw, 8, step=draw.choice([0, 3])) + draw.choice([0.0, 300.0])
        rows = torch.tensor(draw.sample(range(8), 6))
        expected, found = (
            building_blocks._statistics_by_torch(logits, rows),
            triton_kernels.statistics_by_triton(logits, rows),
        )
        for name in ("max", "logsumexp", "mean", "std"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)


def check_mask():
    """The limit itself stays, -inf leaves a row alone."""
    for seed in range(8):
        draw = random.Random(seed)
        triton_kernels._PIECE = draw.choice([16, 128])
        logits = some_logits(draw, 8, step=draw.choice([0, 3]))
        rows = torch.tensor(draw.sample(range(8), 6))
        limits = torch.tensor([draw.choice([-math.inf, 0.5, logits[row, 3].item()]) for row in rows.tolist()])
        expected, found = logits.clone(), logits.clone()
        building_blocks._mask_by_row(expected, rows, limits)
        triton_kernels.mask_by_triton(found, rows, limits)
        assert torch.equal(expected, found)


def check_write_back():
    """Rows that hold no numbers, nothing, or are others' stay; those that held none before are nobody's fault."""
    outcomes = set()
    for seed in range(24):
        draw = random.Random(seed)
        binding_kernels._PIECE = draw.choice([16, 32, 128])
        logits = some_logits(draw, 8, step=draw.choice([0, 3]))
        logits[draw.randrange(8), 5] = draw.choice([math.nan, math.inf, 0.0])
        rows = torch.tensor(draw.sample(range(8), 6))
        result = some_logits(draw, 6)
        for row in draw.sample(range(6), 3):
            result[row, draw.randrange(VOCABULARY)] = draw.choice([math.nan, math.inf, -math.inf])
        mine = draw.choice([None, torch.tensor([draw.random() < 0.5 for _ in range(6)])])
        forbidden = draw.random() < 0.5
        expected, found = logits.clone(), logits.clone()
        seen = torch.zeros(2, 1, dtype=torch.int32)
        given = {"mine": mine, "keep_forbidden": forbidden}
        binding_kernels.write_back_by_triton(found, rows, result, **given, seen=seen[0])
        before = logits[rows]
        after = torch.where(before == -math.inf, before, result) if forbidden else result
        bad = (after.isnan() | (after == math.inf)).any(1)
        was_bad = (before.isnan() | (before == math.inf)).any(1)
        own = torch.ones(6, dtype=torch.bool) if mine is None else mine
        keep = own & ~bad & (after > -math.inf).any(1)
        expected[rows[keep]] = after[keep]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        broken = bad & ~was_bad & own
        by_torch, by_row = logits.clone(), logits.clone()
        isolation.has_triton = lambda tensor: False
        isolation.write_back(by_torch, rows, result, **given, seen=seen[1])
        torch.testing.assert_close(by_torch, expected, rtol=0, atol=0, equal_nan=True)
        assert seen.tolist() == [[int(broken.any())]] * 2
        assert isolation.write_back_on_host(by_row, rows, result, **given) == broken.tolist()
        # On the host nothing is written where any row holds no numbers.
        torch.testing.assert_close(by_row, logits if broken.any() else expected, rtol=0, atol=0, equal_nan=True)
        outcomes.add(bool(broken.any()))
    assert outcomes == {True, False}


def check_whole_strategies():
    """As on a GPU: set up, opened, and a step by kernels alone, beside the same by torch."""
    kernels._BLOCK = xtc_kernels._PIECE = triton_kernels._PIECE = 64
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    asked = {
        Dry: {"dry_multiplier": 1.0},
        NoRepeatNgram: {"no_repeat_ngram_size": 2},
        Xtc: {"xtc_probability": 1.0},
        TopNSigma: {"top_n_sigma": 1.0},
    }
    for kind, keys in asked.items():
        found = []
        for answer in (True, False):
            for module in (building_blocks, matching_strategy, xtc):
                module.has_triton = lambda tensor, answer=answer: answer
            strategy = made(kind, VOCABULARY, slots=2)
            strategy.open(1, params_of(kind, **keys))
            logits = torch.linspace(0, 4, VOCABULARY).repeat(3, 1)
            logits[:, 5:7] = 9.0
            logits[:, 7] = 9.5
            rows = rows_of({2: 1, 0: 2}, Tensors({1: text, 2: text}), {1: 0.0, 2: 0.0})
            if kind is TopNSigma:
                stats = building_blocks.statistics(logits, rows.rows)
                building_blocks.mask_below(logits, rows.rows, strategy.threshold(stats, rows))
            else:
                strategy.step(logits, rows)
            found.append(logits)
        torch.testing.assert_close(*found)
        assert not torch.equal(found[0][2], found[0][1]), kind
        assert torch.equal(found[0][0], found[0][1]), kind


def main():
    torch.set_num_threads(1)
    found = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
