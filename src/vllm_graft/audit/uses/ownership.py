"""What a package itself puts on the objects that its code is given: names that it does not lean on vLLM for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_graft.audit.uses.relies import contents
from vllm_graft.audit.uses.state import Found
from vllm_graft.audit.uses.values import Name, Own, owns_of


class Ownership:
    """For each class of vLLM that is patched, and each subclass of one, the attributes that are the package's own."""

    def __init__(self, founds: Sequence[Found]) -> None:
        self._targets: dict[Name, set[str]] = {}
        self._classes: dict[Own, frozenset[str]] = {}
        for found in founds:
            for put in found.puts:
                names = self._targets.setdefault(_above(put.target), set())
                names.add(put.target.qualname.rpartition(".")[2])
                for own in owns_of(put.value):
                    names.update(_stored(own))

    def of_target(self, target: Name) -> frozenset[str]:
        """The names that patches put on the class around a target, and those that they set on its objects."""
        return frozenset(self._targets.get(_above(target), ()))

    def of_class(self, cls: Own) -> frozenset[str]:
        """The names that a class of the package and its own bases define, and those that their methods set."""
        if cls not in self._classes:
            self._classes[cls] = frozenset(_defined(cls, ()))
        return self._classes[cls]


def _above(target: Name) -> Name:
    return Name(target.module, target.qualname.rpartition(".")[0])


def _defined(cls: Own, seen: tuple[Own, ...]) -> Iterator[str]:
    if cls in seen or cls.inside is None:
        return
    yield from cls.inside.names
    for value in cls.inside.names.values():
        for own in owns_of(value):
            yield from _stored(own)
    for base in cls.bases:
        for own in owns_of(base):
            yield from _defined(own, (*seen, cls))


def _stored(own: Own) -> frozenset[str]:
    """The attributes that a function sets on its first parameter."""
    return contents(own.function).set if own.function is not None else frozenset()
