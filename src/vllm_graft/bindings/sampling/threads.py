"""How many threads samplers work with on a CPU.

torch shares out every operation on more than 32,768 numbers, and waits for all threads after each. Where a machine has
other work, each of these waits is a time slice of somebody else: an operation of 50 us then takes 1.5 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

FEW_LOGITS: Final = 2_000_000
"""Up to so many, a pass of one thread takes less than a millisecond."""


def are_few(logits: torch.Tensor) -> bool:
    """Whether one thread is enough for these logits."""
    return logits.device.type == "cpu" and logits.numel() <= FEW_LOGITS


@contextmanager
def one_thread_for_few(logits: torch.Tensor) -> Iterator[None]:
    """Work on these logits with one thread, where that is enough; switching costs less than a microsecond."""
    import torch

    before = torch.get_num_threads() if are_few(logits) else 1
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
