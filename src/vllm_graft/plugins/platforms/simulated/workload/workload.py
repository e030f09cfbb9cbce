"""A workload: requests in the order of their arrival, made in Python, read line by line, or generated."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.errors import ConfigError
from vllm_graft.plugins.platforms.simulated.workload.request import Request, request_of

if TYPE_CHECKING:
    import os

_LARGEST: Final = 256 * 1024 * 1024
"""The characters of a workload that are read at most."""


class Workload:
    """Requests in the order of their arrival; those of one moment in the order given. Each has a name of its own."""

    def __init__(self, requests: Iterable[Request], name: str = "workload") -> None:
        self.name = name
        named = [
            request if request.id else replace(request, id=f"{index:06d}") for index, request in enumerate(requests)
        ]
        seen: set[str] = set()
        for request in named:
            if request.id in seen:
                raise ConfigError(f"two requests have the id {request.id!r}", where=name, fix="rename one of them")
            seen.add(request.id)
        if not named:
            raise ConfigError("the workload has no requests", where=name, fix="add some")
        self.requests = tuple(sorted(named, key=lambda request: request.at))

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def has_text(self) -> bool:
        """Whether some prompt is text, for which a tokenizer is needed."""
        return any(request.prompt is not None for request in self.requests)

    def lines(self) -> Iterator[str]:
        """The workload as lines of a file that ``read`` reads."""
        return (json.dumps(request.as_dict(), ensure_ascii=False) for request in self.requests)


def read(path: str | os.PathLike[str]) -> Workload:
    """The workload of a file: JSON Lines, or a description that generates one where the name ends in ``.toml``."""
    file = Path(path)
    try:
        with file.open(encoding="utf-8", newline=None) as stream:
            # Of a pipe nobody knows the end before it comes, and /dev/zero has none.
            text = stream.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise ConfigError(
                f"the workload has more than {_LARGEST} characters", where=str(file), fix="describe it in a TOML file"
            )
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"the workload cannot be read: {reason}", where=str(file), fix="name a JSON Lines or TOML file"
        ) from error
    if file.suffix.lower() == ".toml":
        from vllm_graft.plugins.platforms.simulated.workload.description import generate

        return generate(text, str(file))
    return _from_lines(text, str(file))


def _from_lines(text: str, name: str) -> Workload:
    requests: dict[str, Request] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            values = json.loads(line, object_pairs_hook=partial(_table, where))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"is not JSON: {error}", where=where, fix="put one JSON object on each line, or name the file .toml"
            ) from error
        request = request_of(values, where)
        key = request.id or f"{len(requests):06d}"
        if key in requests:
            raise ConfigError(f"the id {key!r} is taken by a line above", where=where, fix="rename one of them")
        requests[key] = replace(request, id=key)
    return Workload(requests.values(), name)


def _table(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a line, whose keys are given once."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ConfigError(f"the key {key!r} is given twice", where=where, fix="keep one of them")
        table[key] = value
    return table
