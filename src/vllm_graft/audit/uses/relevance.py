"""Which functions may have to do with vLLM, by their words alone: most of a large package's do not, and need no walk.

A walk through a function notes names, calls and objects of vLLM, and classes that derive from its own. None of them
can come up where no word of the function leads to one: not through an import, not through a name of its module, not
as a text, and not by the names that configurations usually go by.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from vllm_graft.audit.uses.classes import upstream
from vllm_graft.audit.uses.resolver import VERBS, PackageModules
from vllm_graft.audit.uses.syntax import first_line
from vllm_graft.audit.uses.values import (
    TOP,
    ConditionValue,
    FlagValue,
    Instance,
    LocalDef,
    MappingValue,
    Name,
    Scope,
    SequenceValue,
    TextValue,
    Value,
    Values,
)
from vllm_graft.sources.fingerprint import Function

# Parts words by spaces: together with ``split`` this takes a third of the time of a regular expression.
_APART: Final = str.maketrans({chr(code): " " for code in range(128) if not (chr(code).isalnum() or chr(code) == "_")})
# Words that always call for a walk: vLLM itself, and ways to a module by its text.
_TELLING: Final = frozenset({TOP, "import_module", "__import__", "resolve_name", "TYPE_CHECKING"})
# ``sys.modules``, which calls for a walk, too.
_MODULES: Final = re.compile(r"\.\s*modules\b(?!\s*\()")
_RELATIVE: Final = re.compile(r"\bfrom[\s\\]+\.")
# What a test for a name is written with.
_ASKING: Final = frozenset({"hasattr", "getattr", "find_spec", "signature", "getfullargspec"})


def _stored_attributes(cls: LocalDef, deep: int = 4) -> set[str]:
    """Return the attributes in which methods of a class and its bases have stored tests or instances so far."""
    found = {*cls.inside.tests, *cls.inside.instances} if cls.inside is not None else set()
    for base in cls.bases if deep else ():
        for own in base:
            if isinstance(own, LocalDef):
                found |= _stored_attributes(own, deep - 1)
    return found


def _words(text: str) -> set[str]:
    return set(text.translate(_APART).split())


def _asks(text: str, words: Collection[str]) -> bool:
    """Return whether a text may test for a name or a version."""
    return not _ASKING.isdisjoint(words) or "version" in text.lower()


class Relevance:
    """Decides which functions of a package are walked."""

    def __init__(self, package: PackageModules, short: int) -> None:
        self._package = package
        self._short = short
        self._known: dict[tuple[Scope, str], tuple[bool, bool]] = {}

    def concerns(self, own: LocalDef) -> bool:
        """Return whether a walk through a function's body could find anything of vLLM."""
        node = own.node
        assert isinstance(node, Function)
        cls = own.inside.method_of if own.inside is not None else None
        if (cls is not None and any(upstream(cls))) or own.scope.module().stars:
            return True
        text = own.file.cut(first_line(node), node.end_lineno or node.lineno)
        words = _words(text)
        if cls is not None and not words.isdisjoint(_stored_attributes(cls)):
            return True
        # A configuration is recognized by the usual names of its variables.
        is_config = "_config" in text and any(word.endswith("_config") and not word.startswith(VERBS) for word in words)
        if is_config or not words.isdisjoint(_TELLING):
            return True
        # A class or function inside may be returned.
        if node.__dict__["opens"] or ("modules" in words and _MODULES.search(text)):
            return True
        if "import" in words and (not words.isdisjoint(self._package.tops) or _RELATIVE.search(text)):
            return True
        # A short function may be a test of the version, which others ask.
        short = (node.end_lineno or node.lineno) - node.lineno <= self._short
        if short and _asks(text, words):
            return True
        return any(leads or (short and tests) for leads, tests in self._outside(own.scope.module(), words))

    def _outside(self, module: Scope, words: Collection[str]) -> Iterator[tuple[bool, bool]]:
        """Yield for each word that the module binds whether it leads to vLLM, and whether it may be a test."""
        for word in {*(module.names.keys() & words), *(module.declared.keys() & words)}:
            key = module, word
            if key not in self._known:
                # A name that is only for type checkers stands for nothing elsewhere.
                value = (*module.names.get(word, ()), *module.declared.get(word, ()))
                followed = [self._package.follow(one) or () if isinstance(one, Name) else (one,) for one in value]
                self._known[key] = (
                    self._leads(value, ()),
                    any(
                        isinstance(one, ConditionValue | FlagValue)
                        or (isinstance(one, LocalDef) and self._may_test(one))
                        for held in followed
                        for one in held
                    ),
                )
            yield self._known[key]

    def _leads(self, value: Values, seen: tuple[LocalDef, ...]) -> bool:
        return any(self._leads_on(one, seen) for one in value)

    def _leads_on(self, one: Value, seen: tuple[LocalDef, ...]) -> bool:
        if isinstance(one, Name):
            if one.is_vllm:
                return True
            found = self._package.follow(one)
            if found is None:
                return self._package.is_module(one.dotted)
            return any(not isinstance(other, Name) and self._leads_on(other, seen) for other in found) or any(
                isinstance(other, Name) and (other.is_vllm or self._package.is_module(other.dotted)) for other in found
            )
        if isinstance(one, Instance):
            return True
        if isinstance(one, TextValue):
            return TOP in one.text
        if isinstance(one, SequenceValue):
            return any(self._leads(item, seen) for item in one.items)
        if isinstance(one, MappingValue):
            return any(self._leads(key, seen) or self._leads(held, seen) for key, held in one.pairs)
        if isinstance(one, LocalDef) and one.result:
            return True
        if isinstance(one, LocalDef) and one.function is None and one not in seen:
            inside = one.inside.names.values() if one.inside is not None else ()
            return any(upstream(one)) or any(self._leads(held, (*seen, one)) for held in (*inside, *one.bases))
        return False

    def _may_test(self, own: LocalDef) -> bool:
        node = own.node
        last = node.end_lineno or node.lineno
        if not isinstance(node, Function) or last - node.lineno > self._short:
            return False
        text = own.file.cut(node.lineno, last)
        words = _words(text)
        if _asks(text, words):
            return True
        names = own.scope.module().names
        return any(isinstance(one, (ConditionValue, FlagValue)) for word in names.keys() & words for one in names[word])
