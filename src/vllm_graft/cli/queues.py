"""The queues of a server for people: a row for each class and each tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from vllm_graft.cli.table import table
from vllm_graft.ledger.queue_statistics import busiest
from vllm_graft.text import printable

_HEAD: Final = (
    "QUEUE", "PID", "BY", "VALUE", "WAITING", "RUNNING", "ADMITTED", "REFUSED", "ENDED", "ABORTED",
    "WAIT MEAN", "P99", "MAX", "TOKENS", "SHARE",
)  # fmt: skip
_PLAIN: Final = ("waiting", "running", "admitted", "refused", "ended", "aborted")


def render_queues(rows: Sequence[Mapping[str, object]]) -> str:
    """The figures as a table; empty where there are none."""
    if not rows:
        return ""
    kept, left_out = busiest(rows)
    more = f"\nand {left_out} more: --json has all of them" if left_out else ""
    return table(_HEAD, [_cells(row) for row in kept]) + more


def _cells(row: Mapping[str, object]) -> list[str]:
    return [
        str(row["item"]),
        str(row["pid"]),
        str(row["label"]),
        _name(row),
        *(str(row[name]) for name in _PLAIN),
        *(_seconds(row[name]) for name in ("wait_mean_s", "wait_p99_s", "wait_max_s")),
        str(row["tokens"]),
        f"{100 * float(str(row['share'])):.1f} %",
    ]


def _name(row: Mapping[str, object]) -> str:
    """A value is a client's word: nothing in it may reach the terminal as anything but a letter."""
    shown = printable(str(row["value"]))
    return shown if len(shown) <= 40 else shown[:39] + "…"


def _seconds(value: object) -> str:
    return f"{value:.2f} s" if isinstance(value, float | int) else ""
