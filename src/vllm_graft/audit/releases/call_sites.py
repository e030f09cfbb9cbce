"""How vLLM calls its own methods: the calls ``object.method(...)`` in its sources, which an override has to take.

They lie beside the catalogue in a file of their own, which is read only where an override does not take all that
upstream's signature allows::

    calls 1 0.26.0 0.27.1                     the form of what follows, and the releases
    load_model 0 0,eep_scale_up               a method, and the calls of it: arguments by position, then keywords
    step 1@2 1@5,now|2                        "@2": on ``self``, in the third class of the list; "|2": in which releases
    >vllm.v1.engine.core:EngineCore           the list of classes

A call that unpacks a list or a mapping does not show what it passes and is left out, as is one on ``super()``, which an
override does not get.
"""

from __future__ import annotations

import ast
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vllm_graft.audit.model import Arguments
from vllm_graft.files import replace_file
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted

_HEAD: Final = "calls 1"


@dataclass(frozen=True, slots=True)
class CallSite:
    """One way in which a method is called; ``owner`` is the class, "module:Class", whose ``self`` it is called on."""

    arguments: Arguments
    owner: str = ""


def call_sites(tree: ast.AST, module: str) -> Iterator[tuple[str, CallSite]]:
    """Every method that a module calls, with how."""
    left: list[tuple[ast.AST, str, str]] = [(tree, "", "")]
    while left:
        node, cls, this = left.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not _is_super(node.func.value):
            arguments = Arguments.of(node)
            if not arguments.unpacks and not arguments.unpacks_keywords:
                own = bool(this) and isinstance(node.func.value, ast.Name) and node.func.value.id == this
                yield node.func.attr, CallSite(arguments, f"{module}:{cls}" if own else "")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                left.append((child, f"{cls}.{child.name}".lstrip("."), ""))
            elif isinstance(child, Function) and isinstance(node, ast.ClassDef):
                left.append((child, cls, _first_parameter(child)))
            else:
                left.append((child, cls, this))


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) == "super"


def _first_parameter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    static = any(dotted(one) == "staticmethod" for one in node.decorator_list)
    names = [*node.args.posonlyargs, *node.args.args]
    return names[0].arg if names and not static else ""


def methods(tree: ast.AST) -> Iterator[str]:
    """The names of the methods that the classes of a module define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (one.name for one in node.body if isinstance(one, Function))


@dataclass
class CallList:
    """The calls of some releases, method by method, each with the releases that have it, as bits."""

    releases: list[str] = field(default_factory=list)
    calls: dict[str, dict[CallSite, int]] = field(default_factory=dict)

    def add(self, version: str, found: Iterable[tuple[str, CallSite]], defined: Iterable[str]) -> None:
        """Add a release: the calls in it, of which those of methods that its classes define are kept."""
        self.releases.append(version)
        bit = 1 << (len(self.releases) - 1)
        known = frozenset(name for name in defined if not name.startswith("__"))
        for name, call in found:
            if name in known:
                sites = self.calls.setdefault(name, {})
                sites[call] = sites.get(call, 0) | bit

    def of(self, method: str, version: str) -> list[CallSite]:
        """Return the calls of a method in a release."""
        bit = 1 << self.releases.index(version) if version in self.releases else 0
        return [call for call, mask in self.calls.get(method, {}).items() if mask & bit]

    @classmethod
    def read(cls, path: Path) -> CallList:
        """Return the list in a file; an empty one where there is none."""
        try:
            text = lzma.decompress(path.read_bytes()).decode()
        except (OSError, lzma.LZMAError, ValueError):
            return cls()
        first, *lines = text.split("\n")
        if not first.startswith(f"{_HEAD} "):
            return cls()
        owners = [line[1:] for line in lines if line.startswith(">")]
        found = cls(first.split(" ")[2:])
        every = (1 << len(found.releases)) - 1
        for line in lines:
            name, *words = line.split(" ")
            if not line.startswith(">"):
                found.calls[name] = dict(_parse(word, owners, every) for word in words)
        return found

    def write(self, path: Path) -> None:
        """Write the list into a file."""
        owners = sorted({call.owner for sites in self.calls.values() for call in sites if call.owner})
        places = {owner: number for number, owner in enumerate(owners)}
        every = (1 << len(self.releases)) - 1
        lines = [f"{_HEAD} {' '.join(self.releases)}"]
        for name, sites in sorted(self.calls.items()):
            lines.append(" ".join([name, *sorted(_word(call, mask, places, every) for call, mask in sites.items())]))
        text = "\n".join([*lines, *(f">{owner}" for owner in owners)])
        replace_file(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def _word(call: CallSite, mask: int, places: dict[str, int], every: int) -> str:
    owner = f"@{places[call.owner]}" if call.owner else ""
    passed = ",".join([f"{call.arguments.positional}{owner}", *call.arguments.keywords])
    return passed if mask == every else f"{passed}|{mask}"


def _parse(word: str, owners: list[str], every: int) -> tuple[CallSite, int]:
    passed, _, mask = word.partition("|")
    first, *keywords = passed.split(",")
    positional, _, owner = first.partition("@")
    arguments = Arguments(int(positional), tuple(keywords))
    return CallSite(arguments, owners[int(owner)] if owner else ""), int(mask) if mask else every
