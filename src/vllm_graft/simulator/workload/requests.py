"""A workload: requests in the order of their arrival, made in Python, read line by line, or generated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.errors import ConfigError
from vllm_graft.fields import Fields
from vllm_graft.splitmix import GAMMA, finalize_array

if TYPE_CHECKING:
    import os

PROMPTS: Final = ("prompt_tokens", "prompt", "prompt_token_ids")
"""The ways to give a prompt; a request has exactly one."""

KEYS: Final = ("at", *PROMPTS, "max_tokens", "id", "group", "priority", "prefix", "extra", "ignore_eos")
"""The keys of a line in a workload's file."""

_LARGEST: Final = 256 * 1024 * 1024
"""The most characters of a workload's file."""

_LAST_TOKEN: Final = 2**31 - 1
"""vLLM keeps token ids in 32 bits."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning that prompts with this prefix share."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request. Exactly one of ``prompt_tokens``, ``prompt`` and ``prompt_token_ids`` is set."""

    at: float
    """Seconds after the start."""
    max_tokens: int
    """The most tokens of its output."""
    prompt_tokens: int | None = None
    """The length of an invented prompt, its prefix included."""
    prompt: str | None = None
    """A prompt as text."""
    prompt_token_ids: tuple[int, ...] | None = None
    """A prompt as token ids."""
    id: str = ""
    """Its name; without one, its number in the workload."""
    group: str = ""
    """The class or tenant under which the report counts it."""
    priority: int = 0
    """vLLM's priority: the lowest goes first, where the scheduling policy uses it."""
    prefix: Prefix | None = None
    """The shared beginning of an invented prompt."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's ``extra_args`` for plugins, ``vllm_xargs`` over HTTP."""
    ignore_eos: bool | None = None
    """True if it goes on to ``max_tokens``; None for yes, unless answers have a natural length."""

    def as_dict(self) -> dict[str, Any]:
        """Return the request as a line of a workload's file."""
        row: dict[str, Any] = {"at": self.at}
        row.update({name: getattr(self, name) for name in PROMPTS if getattr(self, name) is not None})
        row["max_tokens"] = self.max_tokens
        row.update({name: value for name in ("id", "group", "priority") if (value := getattr(self, name))})
        if self.prefix is not None:
            row["prefix"] = {"name": self.prefix.name, "tokens": self.prefix.tokens}
        if self.extra:
            row["extra"] = dict(self.extra)
        if self.ignore_eos is not None:
            row["ignore_eos"] = self.ignore_eos
        return row


class Workload:
    """Requests in the order of their arrival, those of one moment in the given order, each with a name of its own."""

    def __init__(self, requests: Iterable[WorkloadRequest], name: str = "workload") -> None:
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

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def has_text(self) -> bool:
        """True if a prompt is text, which needs a tokenizer."""
        return any(request.prompt is not None for request in self.requests)

    def lines(self) -> Iterator[str]:
        """Return the lines of a file that ``read`` reads."""
        return (json.dumps(request.as_dict(), ensure_ascii=False) for request in self.requests)


def read(path: str | os.PathLike[str]) -> Workload:
    """Read a workload from a file: JSON Lines, or a description where the name ends in ``.toml``."""
    file = Path(path)
    try:
        with file.open(encoding="utf-8", newline=None) as stream:
            # A pipe shows its end only when it comes, and /dev/zero has none.
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
        from vllm_graft.simulator.workload.description import generate

        return generate(text, str(file))
    requests: dict[str, WorkloadRequest] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            values = json.loads(line, object_pairs_hook=partial(_table, where))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"is not JSON: {error}", where=where, fix="put one JSON object on each line, or name the file .toml"
            ) from error
        request = read_request(values, where)
        key = request.id or f"{len(requests):06d}"
        if key in requests:
            raise ConfigError(f"the id {key!r} is taken by a line above", where=where, fix="rename one of them")
        requests[key] = replace(request, id=key)
    return Workload(requests.values(), str(file))


def _table(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build the object of a line; a key may be given once."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ConfigError(f"the key {key!r} is given twice", where=where, fix="keep one of them")
        table[key] = value
    return table


def read_request(values: object, where: str) -> WorkloadRequest:
    """Read the request of a line; a ConfigError says what is wrong with it."""
    fields = Fields(values, "a request", lambda key: where)
    fields.only(KEYS)
    given = [name for name in PROMPTS if name in fields]
    if len(given) != 1:
        found = f"has {' and '.join(given)}" if given else "has no prompt"
        raise fields.wrong(None, f"a request {found}", f"give one of {', '.join(PROMPTS)}")
    tokens = fields.count("prompt_tokens") if "prompt_tokens" in fields else None
    prefix = None
    if "prefix" in fields:
        inner = Fields(fields.raw("prefix"), "a prefix", lambda key: where)
        inner.only(("name", "tokens"))
        prefix = Prefix(inner.text("name"), inner.count("tokens"))
        if tokens is None:
            fix = "give prompt_tokens, or leave prefix out"
            raise fields.wrong("prefix", "a prefix is for an invented prompt", fix)
        if prefix.tokens > tokens:
            what = f"the prefix has {prefix.tokens} tokens and the whole prompt {tokens}"
            raise fields.wrong("prefix", what, "raise prompt_tokens, which counts the prefix too")
    ids = fields.raw("prompt_token_ids")
    if ids is not None:
        whole = isinstance(ids, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in ids)
        if not whole or not ids or min(ids) < 0 or max(ids) > _LAST_TOKEN:
            what = f"prompt_token_ids must be a list of whole numbers from 0 to {_LAST_TOKEN}"
            raise fields.wrong("prompt_token_ids", what, "correct the list")
    return WorkloadRequest(
        at=fields.number("at"),
        max_tokens=fields.count("max_tokens"),
        prompt_tokens=tokens,
        prompt=fields.text("prompt") if "prompt" in fields else None,
        prompt_token_ids=tuple(ids) if ids is not None else None,
        id=fields.text("id") if "id" in fields else "",
        group=fields.text("group") if "group" in fields else "",
        priority=fields.count("priority", 0, least=None),
        prefix=prefix,
        extra=fields.table("extra"),
        ignore_eos=fields.flag("ignore_eos"),
    )


def build_prompt(request: WorkloadRequest, vocabulary: int) -> dict[str, Any]:
    """Build a request's prompt in vLLM's form; an invented one has token ids below ``vocabulary``."""
    if request.prompt is not None:
        return {"prompt": request.prompt}
    if request.prompt_token_ids is not None:
        return {"prompt_token_ids": list(request.prompt_token_ids)}
    prefix = request.prefix
    shared = [] if prefix is None else invent_tokens(f"prefix/{prefix.name}", prefix.tokens, vocabulary)
    own = invent_tokens(f"request/{request.id}", (request.prompt_tokens or 0) - len(shared), vocabulary)
    return {"prompt_token_ids": shared + own}


def invent_tokens(name: str, count: int, vocabulary: int) -> list[int]:
    """Return token ids that follow from a name; a longer list begins like a shorter one."""
    import numpy as np

    key = np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        words = finalize_array(key + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA))
    ids: list[int] = (words % np.uint64(vocabulary)).tolist()
    return ids
