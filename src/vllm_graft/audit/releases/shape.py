"""What a release is asked for: the shape of a name, a class's attributes, where else a name is, who mentions it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from vllm_graft.audit.releases.call_sites import CallSite
from vllm_graft.sources.modules import Kind

BODY: Final = 8
"""How many digits of a body's fingerprint are compared. Thirty-two bits: the catalogue's size is mostly these."""

NOT_OURS: Final = "vllm.third_party"
"""What vLLM carries of others, which the catalogue leaves out."""

FOREIGN: Final = "name of another package"
"""The kind of what a module of vLLM imports from elsewhere: ``torch``, ``time``. What it is vLLM does not say."""


METHODS: Final = ("function", "classmethod", "staticmethod")
"""The kinds of what can be called."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one name looks like in one release.

    module, qualname:  where it is defined, which may be another place than was asked for
    kind:              function, classmethod, staticmethod, property, class, value, module, or ``FOREIGN``
    signature:         what counts of its signature; see ``upstream.fingerprint.signature``
    body:              the first digits of its body's fingerprint; empty for classes and modules
    inherited:         whether a base class defines it, and not the class that was asked for
    opaque:            whether a decorator may take other arguments than the signature says
    """

    module: str
    qualname: str
    kind: Kind | str
    signature: tuple[str, ...] = ()
    body: str = ""
    inherited: bool = False
    opaque: bool = False

    @property
    def name(self) -> str:
        """Module and qualified name."""
        return f"{self.module}:{self.qualname}" if self.qualname else self.module


class Release(Protocol):
    """One release of vLLM, from whatever it is read."""

    @property
    def version(self) -> str:
        """Its number."""
        ...

    def shape(self, module: str, qualname: str) -> Shape | None:
        """What a name looks like, or None where it is not there; a module where ``qualname`` is empty."""
        ...

    def attributes(self, module: str, qualname: str) -> frozenset[str] | None:
        """What a class and its bases define, attributes set on ``self`` included; a module's names without a class."""
        ...

    def constructor(self, module: str, qualname: str) -> tuple[tuple[str, ...], ...] | None:
        """The signatures that a construction of a class has to fit, all of them; None where they are not known."""
        ...

    def abstract(self, module: str, qualname: str) -> frozenset[str]:
        """The methods that a subclass of a class has to define."""
        ...

    def outside(self, module: str, qualname: str) -> frozenset[str]:
        """What else answers for a class's attributes: bases from outside vLLM, and ``__getattr__``."""
        ...

    def config(self, module: str, qualname: str, attribute: str) -> Shape | None:
        """The configuration class that an attribute of a class is annotated with."""
        ...

    def lineage(self, module: str, qualname: str) -> Sequence[str]:
        """A class and its bases in vLLM as Python looks through them, each as "module:Class"."""
        ...

    def definers(self, method: str) -> Collection[str]:
        """Every class that defines a method, as "module:Class"."""
        ...

    def calls(self, method: str) -> Collection[CallSite]:
        """The calls of a method in vLLM that show what they pass; none where they are not known."""
        ...

    def elsewhere(self, name: str) -> Collection[Shape]:
        """Every function or class of this name at the top level of a module."""
        ...

    def unmentioned(self, names: Collection[str]) -> frozenset[str]:
        """Those of the names that no code of the release mentions, their definitions aside."""
        ...
