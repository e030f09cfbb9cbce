"""The files of a package: which there are, what their modules are called, and their text, parsed once."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final

from vllm_graft.audit.uses.syntax import BodyBudget, drop_definition_details, outline, parse
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import absolute

if TYPE_CHECKING:
    from vllm_graft.audit.uses.values import Scope

_WORD: Final = re.compile(rb"\bvllm\b(?!-)")
_IMPORT: Final = re.compile(rb"^[ \t]*(?:from|import)[ \t][^\n(]*(?:\([^)]*\))?", re.MULTILINE)
_TESTS: Final = frozenset({"test", "tests"})
_TEST_FILE: Final = re.compile(r"test_.*\.py|.*_test\.py")
# The number of texts that are cached: the functions of a file are walked one after the other.
_TEXTS: Final = 64
_SKIPPED: Final = frozenset({"node_modules", "build", "__pycache__", "venv"})


@dataclass(eq=False)
class SourceFile:
    """One Python file.

    path:   where it lies
    shown:  its path for reports, from the package's root on
    name:   its module as the path spells it, which relative imports go by
    stored: the attributes that its functions set, once it has been parsed
    body_budget: how many lines of functions may be held between their parse and their walk
    """

    path: Path
    shown: str
    name: str
    scope: Scope | None = field(default=None, repr=False)
    stored: frozenset[str] = field(default=frozenset(), repr=False)
    body_budget: BodyBudget = field(default_factory=BodyBudget, repr=False)
    _functions: list[Function] = field(default_factory=list, repr=False)

    @property
    def is_package(self) -> bool:
        """True if it is the ``__init__.py`` of a package."""
        return self.path.name == "__init__.py"

    @property
    def data(self) -> bytes:
        """Its content, read each time, so that a large package is not also held in memory as text."""
        return self.path.read_bytes()

    @cached_property
    def names_vllm(self) -> bool:
        """True if it has the word "vllm", and not only as part of a longer one such as ``vllm_ascend``."""
        return _WORD.search(self.data) is not None

    @cached_property
    def words_of_imports(self) -> frozenset[bytes]:
        """The words of its import statements, found without parsing it."""
        return frozenset(word for line in _IMPORT.findall(self.data) for word in re.findall(rb"\w+", line))

    @property
    def text(self) -> str:
        """Its content as text, in the encoding that it declares."""
        return importlib.util.decode_source(self.data)

    def cut(self, first: int, last: int) -> str:
        """Return its lines from one to another, both included."""
        text, starts = _lined(self)
        # A file that has become shorter meanwhile has nothing there.
        return text[starts[first - 1] : starts[min(last, len(starts) - 1)]] if first < len(starts) else ""

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree without the bodies of functions; SyntaxError or ValueError if it has none."""
        tree = parse(self.text)
        self._functions, self.stored, imports = outline(tree, self, self.body_budget)
        found: set[str] = set()
        for node in imports:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            else:
                found.add(absolute(node, self.name, self.is_package))
        self.__dict__["imports"] = frozenset(above for name in found for above in upwards(name))
        return tree

    @cached_property
    def imports(self) -> frozenset[str]:
        """Every module that an import statement in it shows to be one, with the packages above it."""
        assert self.tree is not None
        known: frozenset[str] = self.__dict__["imports"]
        return known

    def forget_tree(self) -> None:
        """Drop the syntax tree and what only a walk needs of its functions, once it has been walked."""
        self.__dict__.pop("tree", None)
        drop_definition_details(self._functions)
        self._functions = []

    @cached_property
    def module(self) -> str:
        """The name that Python imports it by, from the top-level package on."""
        # By texts, which cost less than paths: every folder above every file is looked into.
        folder, parts = os.path.dirname(self.path), [] if self.is_package else [self.path.stem]
        while os.path.basename(folder) and os.path.isfile(os.path.join(folder, "__init__.py")):
            folder, name = os.path.split(folder)
            parts.append(name)
        return ".".join(reversed(parts))


@functools.lru_cache(maxsize=_TEXTS)
def _lined(file: SourceFile) -> tuple[str, list[int]]:
    """Return the text of a file, and where its lines begin as the parser counts them: a form feed ends none."""
    text = file.text
    return text, [0, *accumulate(map((1).__add__, map(len, text.split("\n"))))]


def upwards(name: str) -> Iterator[str]:
    """Yield a dotted name and the names of the packages above it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def files_below(folder: Path, base: Path) -> list[SourceFile]:
    """Return the Python files in a folder, without hidden and built ones and without vLLM's own package."""
    found: list[SourceFile] = []
    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        skipped = entry.name.startswith(".") or entry.name in _SKIPPED
        if os.path.splitext(entry.name)[1] == ".py" and entry.is_file():
            found.append(source_file(folder / entry.name, base))
        elif not skipped and entry.is_dir(follow_symlinks=False) and not is_vllm(folder / entry.name):
            found += files_below(folder / entry.name, base)
    return found


def is_test(inside: PurePath) -> bool:
    """Return whether a file is one of a package's tests, by its path below the package's root."""
    folders, name = inside.parts[:-1], inside.name
    return any(one in _TESTS for one in folders) or name == "conftest.py" or bool(_TEST_FILE.fullmatch(name))


def source_file(path: Path, base: Path) -> SourceFile:
    """Return one file, shown and named from ``base`` on."""
    inside = path.relative_to(base)
    parts = inside.parent.parts if path.name == "__init__.py" else (*inside.parent.parts, path.stem)
    return SourceFile(path, inside.as_posix(), ".".join(parts))


def is_vllm(folder: Path) -> bool:
    """Return whether it is the package of vLLM itself; a plugin may have a subpackage of that name."""
    above = folder.parent / "__init__.py"
    return folder.name == "vllm" and (folder / "__init__.py").is_file() and not above.is_file()
