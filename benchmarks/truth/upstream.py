"""What vLLM's own sources call and store, for what no signature tells; scanned once for each release."""

from __future__ import annotations

import ast
import json
from functools import cached_property
from pathlib import Path

from truth.collect import Shape, shape_of
from vllm_graft.files import cache_folder

_FORMAT = 1


class Sources:
    """The Python files of the installed vLLM."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder = folder
        self._file = cache_folder() / "corpus" / f"upstream-{version}-{_FORMAT}.json"

    def calls(self, method: str) -> list[Shape]:
        """Return the calls ``anything.method(...)`` in vLLM."""
        found = self._scan["calls"].get(method, [])
        return [Shape(one[0], tuple(one[1]), one[2], one[3]) for one in found]

    def definers(self, method: str) -> int:
        """Return how many classes of vLLM define a method."""
        return int(self._scan["defined"].get(method, 0))

    def stores(self, attribute: str) -> bool:
        """Tell whether vLLM stores an attribute on something other than ``self``."""
        return attribute in self._stored

    def mentions(self, word: str) -> int:
        """Return how often a name stands anywhere in vLLM as a name, an attribute or a string."""
        return int(self._scan["mentions"].get(word, 0))

    @cached_property
    def _stored(self) -> frozenset[str]:
        return frozenset(self._scan["stored"])

    @cached_property
    def _scan(self) -> dict[str, dict[str, list[list[object]]]]:
        try:
            return json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            pass
        scan = self._scanned()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(scan), encoding="utf-8")
        return scan

    def _scanned(self) -> dict[str, object]:
        calls: dict[str, set[tuple[object, ...]]] = {}
        defined: dict[str, int] = {}
        mentions: dict[str, int] = {}
        stored: set[str] = set()
        for path in self.folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    shape = shape_of(node)
                    key = (shape.positional, shape.keywords, shape.star, shape.double_star)
                    calls.setdefault(node.func.attr, set()).add(key)
                elif isinstance(node, ast.ClassDef):
                    for one in node.body:
                        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                            defined[one.name] = defined.get(one.name, 0) + 1
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    stored |= {node.attr} if getattr(node.value, "id", "") != "self" else set()
                word = (
                    node.attr
                    if isinstance(node, ast.Attribute)
                    else node.id
                    if isinstance(node, ast.Name)
                    else node.value
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
                    else ""
                )
                if word:
                    mentions[word] = mentions.get(word, 0) + 1
        return {
            "calls": {name: sorted(found, key=str) for name, found in calls.items()},
            "defined": defined,
            "stored": sorted(stored),
            "mentions": mentions,
        }
