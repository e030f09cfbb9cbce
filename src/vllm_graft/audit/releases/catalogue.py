"""The shipped catalogue: every name of vLLM 0.26 to 0.32 with its signature and the fingerprint of its body.

One compressed file. A name stands there once for all releases that have it in the same form, so that a
release costs little more than what is new in it. ``make catalogue`` builds it; ``written.py`` says how it is written.
"""

from __future__ import annotations

import ast
import lzma
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Final

from vllm_graft.audit.releases.call_sites import CallList, CallSite, call_sites, methods
from vllm_graft.audit.releases.listed import Listed
from vllm_graft.audit.releases.outline import entries, mentions
from vllm_graft.audit.releases.shape import NOT_OURS
from vllm_graft.audit.releases.written import Contents, Form, Pages, dump
from vllm_graft.errors import ConfigError
from vllm_graft.files import replace_file
from vllm_graft.sources.finder import Finder
from vllm_graft.sources.origins import Source

FILE: Final = Path(__file__).with_name("catalogue.xz")

_FILTERS: Final = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


def _calls_beside(path: Path) -> Path:
    """Return the file with the calls that belong to a catalogue."""
    return path.with_name("calls.xz")


class Catalogue:
    """Some releases of vLLM, name by name."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    @classmethod
    def shipped(cls) -> Catalogue:
        """The one that comes with this package."""
        return cls.read(FILE)

    @classmethod
    def read(cls, path: Path) -> Catalogue:
        """The catalogue in a file; ConfigError where it is none."""
        try:
            return cls(Pages(lzma.decompress(path.read_bytes()).decode(), _calls_beside(path)))
        except (OSError, lzma.LZMAError, ValueError) as error:
            raise ConfigError(
                f"the catalogue of vLLM's releases cannot be read: {error}",
                where=str(path),
                fix="install vllm-graft again, or build it with `make catalogue`",
            ) from error

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases it knows, oldest first."""
        return self._pages.releases

    def release(self, version: str) -> Listed:
        """One release that it knows."""
        return Listed(version, self._pages, 1 << self.releases.index(version))


class Builder:
    """A catalogue in the making: what is there already, and releases that are added."""

    def __init__(self, path: Path | None = None) -> None:
        pages = Catalogue.read(path)._pages if path is not None else None
        self._contents = pages.contents() if pages is not None else Contents()
        self._calls = pages.call_list if pages is not None else CallList()

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases that are in it so far."""
        return tuple(self._contents.releases)

    def add(self, version: str, source: Source, say: Callable[[int, int], None] = lambda done, all_: None) -> None:
        """Read a whole release, newer than all that are in it; ``say`` is told how far it is."""
        self._contents.releases.append(version)
        self._bit = 1 << (len(self._contents.releases) - 1)
        finder, words, defined = Finder(source), Counter[str](), set[str]()
        names = sorted(name for name in source.modules() if not name.startswith(NOT_OURS))
        calls, called = list[tuple[str, CallSite]](), set[str]()
        for number, name in enumerate(names):
            module = finder.module(name)
            say(number + 1, len(names))
            if module is None:
                continue
            words.update(mentions(module.file.text))
            tree = ast.parse(module.file.text)
            calls += call_sites(tree, name)
            called.update(methods(tree))
            self._contents.modules[name] = self._contents.modules.get(name, 0) | self._bit
            for qualname, entry in entries(module):
                self._enter(name, qualname, Form(self._bit, entry))
                if entry.kind != "import":
                    defined.add(qualname.rpartition(".")[2])
        self._calls.add(version, calls, called)
        for word in defined:
            if words[word] <= 0:
                self._contents.unmentioned[word] = self._contents.unmentioned.get(word, 0) | self._bit

    def _enter(self, module: str, qualname: str, form: Form) -> None:
        forms = self._contents.names.setdefault(module, {}).setdefault(qualname, [])
        for number, known in enumerate(forms):
            if known.entry == form.entry:
                forms[number] = Form(known.mask | form.mask, known.entry)
                return
        forms.append(form)

    def write(self, path: Path) -> None:
        """Put it on the disk as a whole or not at all; the same releases give the same bytes."""
        packed = lzma.compress(self.text.encode(), format=lzma.FORMAT_XZ, filters=_FILTERS)
        replace_file(path, packed)
        self._calls.write(_calls_beside(path))

    @cached_property
    def text(self) -> str:
        """What is compressed."""
        return dump(self._contents)
