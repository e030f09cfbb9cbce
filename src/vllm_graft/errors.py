"""Every exception the package raises, in one tree.

    GraftError
    ├── ConfigError            the configuration is invalid, or names something that does not exist
    │   └── OptionError        an option of an item has a value that cannot work
    ├── PatchError
    │   ├── DeclarationError   a patch class is written in a way that cannot work
    │   ├── TargetError        the target is missing, or is not the kind of thing the patch expects
    │   ├── VersionError       the installed vLLM is outside the patch's range
    │   ├── DriftError         upstream's code is not what a person reviewed for the patch
    │   └── ConflictError      two patches, or a patch and other code, change the same attribute
    ├── StartError             a process lacks what its plan names
    ├── ServingError           an item failed while serving, and its engine cannot go on without it
    ├── LedgerError            the folder of records cannot be used
    └── SetupError             something this command needs is not installed or not reachable

Each error says who, what, where and what to do next; ``str(error)`` is one paragraph that a person can act on, on one
line and without control characters, whatever the parts were made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from vllm_graft.text import printable


class GraftError(Exception):
    """The base of all our errors: what went wrong, where, and the next step.

    ``what`` is a full clause without a final stop; ``where`` a file, line, process or argument; ``fix`` the next
    step as an imperative.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what, where, fix)

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        fix = f". Next: {self.fix}" if self.fix else ""
        return printable(f"{where}{self.what}{fix}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(kind: type[GraftError], what: str, where: str, fix: str) -> GraftError:
    return kind(what, where=where, fix=fix)


class ConfigError(GraftError):
    """The configuration or an argument is invalid, contradicts itself, or names something that does not exist."""


class OptionError(ConfigError):
    """An option of an item has a value that cannot work; ``what`` is said of the option: "must be above 0, but is -1".

    A plan adds the file and line that gave the value.
    """

    def __init__(self, what: str, *, option: str = "", item: str = "", where: str = "", fix: str = "") -> None:
        self.option = option
        of = f" of {item}" if item else ""
        super().__init__(what, where=where or f"option {option}{of}", fix=fix or "correct the value")


class PatchError(GraftError):
    """A patch cannot be declared, applied or reverted."""


class DeclarationError(PatchError):
    """A patch class is written in a way that cannot work."""


class TargetError(PatchError):
    """The target of a patch is missing, or is not the kind of thing the patch expects."""


class VersionError(PatchError):
    """The installed vLLM is outside the range a patch declares."""


class DriftError(PatchError):
    """Upstream's code is not what a person reviewed for the patch."""


class ConflictError(PatchError):
    """Two patches, or a patch and other code, change the same attribute."""


class StartError(GraftError):
    """A process lacks what its plan names, so the server must not serve."""


class ServingError(GraftError):
    """An item failed while serving, and its engine cannot go on without it."""


class LedgerError(GraftError):
    """The folder of records cannot be used."""


class SetupError(GraftError):
    """Something this command needs is not installed or not reachable."""


E = TypeVar("E", bound=GraftError)


def join(errors: Sequence[E]) -> E:
    """Return one error that says all of several, each with its own place and next step."""
    first, *others = errors
    if not others:
        return first
    what, fix = first.what, first.fix
    for other in others:
        place = f"{other.where}: " if other.where and other.where != first.where else ""
        what += (f". Next: {fix}" if fix else "") + f". Also {place}{other.what}"
        fix = other.fix
    return type(first)(what, where=first.where, fix=fix)


def describe_error(error: BaseException) -> str:
    """Return the type and message of an exception that code of another package raised, whatever its ``str`` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as failure:  # SystemExit would end a server
        return f"{type(error).__name__}: (its message cannot be shown: str() raised {type(failure).__name__})"


def nearest(name: str, options: Iterable[str]) -> str:
    """Return a hint with the option closest to ``name``, or all of them: " (did you mean 'x'?)"."""
    import difflib

    known = sorted(set(options) - {name})
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (there is: {', '.join(known)})" if known else " (there is none)"
