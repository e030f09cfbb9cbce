"""What became of one request."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["done", "rejected", "aborted"]
"""Served to its end; turned away by vLLM; or cut off, by the scheduler or because the run ended."""


@dataclass(frozen=True, slots=True)
class Result:
    """One request's fate. Moments are modelled seconds after the start; None where it was never reached."""

    id: str
    group: str
    priority: int
    at: float
    state: State
    reason: str = ""
    """vLLM's finish reason, or why the request was turned away or cut off."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def queue_s(self) -> float | None:
        """From the arrival to the first step it was part of."""
        return _between(self.at, self.scheduled_at)

    @property
    def ttft_s(self) -> float | None:
        """From the arrival to the first token."""
        return _between(self.at, self.first_token_at)

    @property
    def e2e_s(self) -> float | None:
        """From the arrival to the last token."""
        return _between(self.at, self.finished_at)

    @property
    def tpot_s(self) -> float | None:
        """The mean time from one token to the next; None with fewer than two."""
        took = _between(self.first_token_at, self.finished_at)
        return took / (self.output_tokens - 1) if took is not None and self.output_tokens > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """The row of the per-request file; the tokens as a hash."""
        row = {name: _rounded(getattr(self, name)) for name in _ROW}
        row["tokens"] = _hash([array("q", self.token_ids).tobytes()])[:16]
        return row


_ROW = (
    *("id", "group", "priority", "at", "state", "reason", "prompt_tokens", "output_tokens", "cached_tokens"),
    *("scheduled_at", "first_token_at", "finished_at", "queue_s", "ttft_s", "tpot_s", "e2e_s"),
)


def digest(results: Iterable[Result]) -> str:
    """A hash of all that two equal runs have in common: states, counts, moments and tokens."""
    return _hash(json.dumps(_essence(result)).encode() for result in results)


def _essence(result: Result) -> list[Any]:
    # Why a request was turned away is worded differently from release to release.
    reason = result.reason if result.state == "done" else ""
    moments = [result.scheduled_at, result.first_token_at, result.finished_at]
    return [
        result.id,
        result.state,
        reason,
        result.prompt_tokens,
        result.output_tokens,
        result.cached_tokens,
        *(None if moment is None else round(moment * 1e6) for moment in (result.at, *moments)),
        _hash([array("q", result.token_ids).tobytes()]),
    ]


def _hash(parts: Iterable[bytes] | Sequence[bytes]) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(part)
    return made.hexdigest()


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
