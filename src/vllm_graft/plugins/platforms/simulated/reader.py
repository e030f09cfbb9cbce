"""Reads a model's ``config.json``: values by any of the names that models give them, each checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm_graft.errors import ConfigError

_NESTED: Final[Mapping[str, tuple[str, ...]]] = {
    "attn_config": ("kv_n_heads",),
    "ffn_config": ("ffn_hidden_size", "moe_num_experts", "moe_top_k"),
}
"""What DBRX and MPT keep in parts of their own, and other models beside the rest."""


class NotModelled(ConfigError):
    """A model that is as it should be, but of a kind that only the device 'instant' takes."""


class Reader:
    """The text part of a ``config.json``."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._config = config
        self._config = self.part("text_config") or config
        for name, keys in _NESTED.items():
            part = self.part(name) or {}
            self._config = {**{key: part[key] for key in keys if key in part}, **self._config}

    @property
    def kind(self) -> str:
        """The model's type; empty where there is none."""
        value = self.get("model_type")
        if value is not None and not isinstance(value, str):
            raise self.wrong("model_type", f"must be a name, and is {value!r}")
        return value or ""

    def get(self, name: str) -> Any:
        """A value as it stands; None where there is none."""
        return self._config.get(name)

    def part(self, name: str) -> Mapping[str, Any] | None:
        """A part of the configuration that is one of its own."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, f"must be an object, and is {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Whether something is so."""
        value = self.get(name)
        if value is not None and value not in (True, False):
            raise self.wrong(name, f"must be true or false, and is {value!r}")
        return default if value is None else bool(value)

    def entries(self, name: str) -> tuple[Any, ...]:
        """A list's entries; none where there is no list."""
        value = self.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise self.wrong(name, f"must be a list, and is {value!r}")
        return tuple(value or ())

    def optional(self, *names: str) -> int | None:
        """The first of the names that holds a whole number above 0."""
        for name in names:
            value = self.get(name)
            if isinstance(value, list | tuple) and value:
                if any(each != value[0] for each in value):
                    raise self.unmodelled(f"{name}: parts or layers that differ")
                value = value[0]
            if value in (None, 0, False):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.wrong(name, f"must be a whole number above 0, and is {value!r}")
            return value
        return None

    def count(self, *names: str) -> int:
        """The same, and an error where it is missing."""
        value = self.optional(*names)
        if value is None:
            raise self.wrong(names[0], "is missing" if names[0] not in self._config else "must be above 0")
        return value

    def wrong(self, name: str, what: str) -> ConfigError:
        """The error about a value that cannot be."""
        return ConfigError(
            f"{name}: {what}", where=self.where, fix="give the config.json of a decoder model, as it was published"
        )

    def unmodelled(self, what: str) -> NotModelled:
        """The error about a model that is as it should be, but of a kind that nobody has modelled."""
        return NotModelled(
            f"{what} are not modelled",
            where=self.where,
            fix="take another model, or the device 'instant', whose steps take no time",
        )
