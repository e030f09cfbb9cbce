"""splitmix64: the published sequence, and the same mixing for integers, arrays and tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_graft.splitmix import GAMMA, finalize_array, finalize_tensor, signed, splitmix64

WORDS = st.integers(0, 2**64 - 1)


def test_the_sequence_is_the_published_one():
    """The first numbers for the seed 1234567, as other implementations print them."""
    assert [splitmix64(1234567, index) for index in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(WORDS)
def test_arrays_and_tensors_are_mixed_as_integers_are(word: int):
    """Products of 64 bits wrap in all of them, signed or not."""
    state = (word + GAMMA) % 2**64
    expected = splitmix64(word, 0)
    assert int(finalize_array(np.array([state], dtype=np.uint64))[0]) == expected
    assert int(finalize_tensor(torch.tensor([signed(state)]))[0]) == signed(expected)


@pytest.mark.parametrize(("number", "expected"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**70 + 5, 5)])
def test_signed_keeps_the_lowest_64_bits(number: int, expected: int):
    """As int64 holds them."""
    assert signed(number) == expected
