"""Building blocks for samplers: random numbers that all devices agree on, and copies to the device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.contracts import PerSlot
from vllm_graft.contracts.kernels import copy_into, indices, to_device, uniform

CPU = torch.device("cpu")


@pytest.fixture
def numbers() -> torch.Tensor:
    seeds = torch.arange(1000)[:, None].expand(-1, 100).reshape(-1)
    positions = torch.arange(100)[None].expand(1000, -1).reshape(-1)
    return uniform(seeds, positions, 3)


def test_randomness_is_spread_evenly(numbers: torch.Tensor):
    """Over neighbouring seeds and positions alike."""
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    shares = torch.histc(numbers, 10, 0, 1) / numbers.numel()
    assert float((shares - 0.1).abs().max()) < 0.005
    table = numbers.view(1000, 100)
    assert abs(float(torch.corrcoef(torch.stack([table[:-1].flatten(), table[1:].flatten()]))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([table[:, :-1].flatten(), table[:, 1:].flatten()]))[0, 1])) < 0.01


def plainly(seed: int, position: int, salt: int) -> float:
    """The same hash with Python's numbers, cut to 64 bits."""
    mask = (1 << 64) - 1

    def mix(number: int) -> int:
        number = (number * 0x9E3779B97F4A7C15 + 1) & mask
        number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
        number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
        return number ^ (number >> 31)

    return (mix((seed + mix(position + (salt << 32))) & mask) >> 40) / 2**24


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20), st.integers(0, 100))
def test_randomness_is_the_same_everywhere(seed: int, position: int, salt: int):
    """Whatever the device does with numbers that do not fit."""
    assert uniform(torch.tensor([seed]), torch.tensor([position]), salt).tolist() == [plainly(seed, position, salt)]


@pytest.mark.parametrize("numbers", [[], [3, 1], [[1, 2], [3, 4]], range(3)], ids=str)
def test_indices_are_int64_even_where_there_are_none(numbers):
    """torch makes float32 of an empty list, which indexes nothing."""
    assert indices(numbers, CPU).dtype == torch.int64
    assert indices(numbers, CPU).tolist() == list(numbers)


def test_numbers_on_a_cpu_are_not_copied_twice():
    """A tensor of the host is the same object there; a list has the type that torch gives it, or the one asked for."""
    mask = torch.zeros(3)
    assert to_device(mask, CPU) is mask
    assert to_device([0.5, 1.0], CPU).dtype == torch.float32
    assert to_device([1, 2], CPU, torch.float32).tolist() == [1.0, 2.0]


class Accelerator:
    """Stands in for a tensor on a device, and keeps what is copied into it."""

    device = torch.device("meta")

    def copy_(self, numbers, non_blocking=False):
        self.copied = (numbers, non_blocking)


def test_what_is_copied_to_a_device_goes_through_pinned_memory(monkeypatch: pytest.MonkeyPatch):
    """Pageable memory would make the host wait; and the host may write on at once."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    target, numbers = Accelerator(), torch.tensor([1, 2])
    copy_into(target, numbers)
    numbers.zero_()
    assert (target.copied[0].tolist(), target.copied[1]) == ([1, 2], True)
    slots = PerSlot(2, 0.0, CPU)
    slots._device = target
    slots[1] = 5.0
    assert slots.all() is target
    assert target.copied[0].tolist() == [0, 5, 0]
