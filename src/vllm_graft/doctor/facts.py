"""What the rules look at, gathered once. Neither vLLM nor a plugin is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_graft.doctor.packages import GROUPS, Entry, Package, packages
from vllm_graft.versions import vllm_root, vllm_version
from vllm_graft.vllm_arguments import VllmArguments

if TYPE_CHECKING:
    from vllm_graft.doctor.source import Reading


@dataclass(frozen=True)
class Facts:
    """An environment as vLLM would find it.

    path:      where modules and distributions are looked for
    environ:   the variables
    arguments: what vLLM would be told
    packages:  every distribution, the hidden ones included
    vllm:      the version of the vLLM that would be imported, or None
    root:      its folder
    by_graft:  whether ``vllm-graft serve`` starts it, and not the ``vllm`` command
    """

    path: tuple[str, ...]
    environ: Mapping[str, str]
    arguments: VllmArguments
    packages: tuple[Package, ...]
    vllm: str | None
    root: Path | None
    by_graft: bool = False

    @classmethod
    def gather(
        cls,
        arguments: Sequence[str] = (),
        *,
        path: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        by_graft: bool = False,
    ) -> Facts:
        """The facts of this interpreter, or of another path and environment."""
        places = tuple(sys.path if path is None else path)
        return cls(
            places,
            dict(os.environ if environ is None else environ),
            VllmArguments(tuple(arguments)),
            packages(places),
            vllm_version(),
            vllm_root(),
            by_graft,
        )

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The entry points that importlib gives, in its order: those of hidden distributions are not among them."""
        return tuple(entry for package in self.packages if not package.hidden for entry in package.entries)

    def in_group(self, *groups: str) -> list[Entry]:
        """The entry points of some groups."""
        return [entry for entry in self.entries if entry.group in groups]

    @cached_property
    def plugins(self) -> list[Entry]:
        """All that vLLM itself would find."""
        return self.in_group(*GROUPS)

    @cached_property
    def allowed(self) -> tuple[str, ...] | None:
        """The names in ``VLLM_PLUGINS`` as vLLM splits them, blanks and all; None where it is not set."""
        listed = self.environ.get("VLLM_PLUGINS")
        return None if listed is None else tuple(listed.split(","))

    def uses(self, entry: Entry) -> bool:
        """Whether a server with these arguments loads it: an IO processor only where it is named."""
        named = self.arguments.value("--io-processor-plugin")
        return self.loads(entry) and (entry.group != "vllm.io_processor_plugins" or named == entry.name)

    def loads(self, entry: Entry) -> bool:
        """Whether vLLM takes an entry point at all, by its group and the allow-list."""
        if entry.group == "vllm.logits_processors":
            return True
        if self.allowed is None:
            return entry.group != "vllm.endpoint_plugins"
        return entry.name in self.allowed

    @cached_property
    def reading(self) -> Reading:
        """The modules of this environment, for rules that must know what an object is."""
        from vllm_graft.doctor.source import Reading

        return Reading(self.path, self.root)

    def release(self) -> tuple[int, ...]:
        """The installed vLLM's number, for comparisons; empty where there is none or it says nothing."""
        parts = (self.vllm or "").partition("+")[0].split(".")
        return tuple(int(part) for part in parts[:3] if part.isdigit())

    def names(self, entries: Iterable[Entry]) -> str:
        """Entry points for a sentence: name and package."""
        return ", ".join(f"{entry.name} ({entry.package})" for entry in entries)
