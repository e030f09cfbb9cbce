"""One request of a workload: when it arrives, its prompt, and how much it wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_graft.plugins.platforms.simulated.workload.fields import Fields, shown

PROMPTS: Final = ("prompt_tokens", "prompt", "prompt_token_ids")
"""The ways to give a prompt, of which a request has one."""

KEYS: Final = ("at", *PROMPTS, "max_tokens", "id", "group", "priority", "prefix", "extra", "ignore_eos")
"""What a line of a workload's file may hold."""

_LAST_TOKEN: Final = 2**31 - 1
"""vLLM keeps token ids in 32 bits."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning that a prompt shares with all others that name it."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """A request. Exactly one of ``prompt_tokens``, ``prompt`` and ``prompt_token_ids`` is given."""

    at: float
    """Seconds after the start."""
    max_tokens: int
    """The most tokens it wants."""
    prompt_tokens: int | None = None
    """The length of an invented prompt, its prefix included."""
    prompt: str | None = None
    """A prompt as text."""
    prompt_token_ids: tuple[int, ...] | None = None
    """A prompt as token ids."""
    id: str = ""
    """Its name; its number in the workload where it has none."""
    group: str = ""
    """The class or tenant that it is counted under."""
    priority: int = 0
    """As vLLM has it: the lowest goes first where the scheduling policy looks at it."""
    prefix: Prefix | None = None
    """The beginning it shares with others, of an invented prompt."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What plugins read: vLLM's ``extra_args``, ``vllm_xargs`` over HTTP."""
    ignore_eos: bool | None = None
    """Whether it goes on to ``max_tokens`` regardless; None for yes unless answers have a natural length."""

    def as_dict(self) -> dict[str, Any]:
        """The request as a line of a workload's file has it."""
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


def request_of(values: object, where: str) -> Request:
    """The request that a line describes; a ConfigError says what is wrong with it."""
    fields = Fields(values, "a request", lambda key: where)
    fields.only(KEYS)
    given = [name for name in PROMPTS if name in fields]
    if len(given) != 1:
        found = f"has {' and '.join(given)}" if given else "has no prompt"
        raise fields.wrong(None, f"a request {found}", f"give one of {', '.join(PROMPTS)}")
    tokens = fields.count("prompt_tokens") if "prompt_tokens" in fields else None
    return Request(
        at=fields.number("at"),
        max_tokens=fields.count("max_tokens"),
        prompt_tokens=tokens,
        prompt=fields.text("prompt") if "prompt" in fields else None,
        prompt_token_ids=_token_ids(fields) if "prompt_token_ids" in fields else None,
        id=fields.text("id") if "id" in fields else "",
        group=fields.text("group") if "group" in fields else "",
        priority=fields.count("priority", 0, least=None),
        prefix=_prefix(fields, tokens, where),
        extra=fields.table("extra"),
        ignore_eos=_ignore_eos(fields),
    )


def _token_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.raw("prompt_token_ids")
    whole = isinstance(ids, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in ids)
    if not whole or not ids or min(ids) < 0 or max(ids) > _LAST_TOKEN:
        raise fields.wrong(
            "prompt_token_ids",
            f"prompt_token_ids must be a list of whole numbers from 0 to {_LAST_TOKEN}",
            "correct the list",
        )
    return tuple(ids)


def _prefix(fields: Fields, tokens: int | None, where: str) -> Prefix | None:
    if "prefix" not in fields:
        return None
    inner = Fields(fields.raw("prefix"), "a prefix", lambda key: where)
    inner.only(("name", "tokens"))
    prefix = Prefix(inner.text("name"), inner.count("tokens"))
    if tokens is None:
        raise fields.wrong("prefix", "a prefix is for an invented prompt", "give prompt_tokens, or leave prefix out")
    if prefix.tokens > tokens:
        raise fields.wrong(
            "prefix",
            f"the prefix has {prefix.tokens} tokens and the whole prompt {tokens}",
            "raise prompt_tokens, which counts the prefix too",
        )
    return prefix


def _ignore_eos(fields: Fields) -> bool | None:
    value = fields.raw("ignore_eos")
    if value is not None and not isinstance(value, bool):
        raise fields.wrong(
            "ignore_eos", f"ignore_eos must be true or false, and is {shown(value)}", "correct the value"
        )
    return value
