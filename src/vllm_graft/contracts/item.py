"""The base of all contracts: a name, and options that are declared before they are used."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import ClassVar

# What JSON can hold: `--additional-config` carries options too.
OptionTable = dict[str, bool | int | float | str | list[bool | int | float | str]]
"""A table as the value of an option, such as the keys that requests carry by default."""

OptionValue = bool | int | float | str | list[str] | OptionTable
"""The value of an option: what TOML and JSON can both say in one line."""


def summary_of(kind: type) -> str:
    """Return the first paragraph of a class's own docstring, on one line; empty if it has none."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())


class Item:
    """The base of every contract.

    A subclass declares the options it understands, each with its default; the default's type is the option's type::

        class CsvSink(StatSink):
            options = {"path": "requests.csv", "flush_every": 100}

    ``[options.NAME]`` in ``graft.toml`` sets them; an unknown name, a wrong type, or a value that ``check_options``
    refuses stops the start with the file and the line. ``self.option("path")`` reads one.
    """

    options: ClassVar[Mapping[str, OptionValue]] = {}

    def __init__(self, options: Mapping[str, OptionValue] | None = None) -> None:
        self._options: dict[str, OptionValue] = {**type(self).options, **(options or {})}

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Optional: refuse values that cannot work, with an ``OptionError`` or a ValueError.

        ``options`` holds every declared option. Called by ``vllm-graft plan`` and before a start makes the item.
        """

    @classmethod
    def check_machine(cls, options: Mapping[str, OptionValue]) -> None:
        """Optional: say with an ``OptionError`` what this machine lacks for these options, such as a folder.

        Called by ``vllm-graft plan`` alone, which shows it as a warning: the server may run on another machine.
        """

    def option(self, name: str) -> OptionValue:
        """Return the value of a declared option: the one of the configuration, else the default."""
        return self._options[name]
