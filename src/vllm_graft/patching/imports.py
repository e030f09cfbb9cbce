"""Noticing that a module of an exact name has run its body, before its importer sees it.

A finder at the head of ``sys.meta_path`` asks the finders behind it for the module and hooks its loader's
``exec_module``. Names copied by ``from module import name`` are thus taken from the patched module; an importer that
took them while the module was still running, as circular imports do, keeps the unpatched ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from vllm_graft.errors import TargetError

Notice = Callable[[str], None]


class ImportWatch(MetaPathFinder):
    """Calls ``before`` and ``after`` around the body of each watched module, at a reload too.

    An exception in ``after`` fails the import.
    """

    def __init__(self, before: Notice, after: Notice) -> None:
        self._before = before
        self._after = after
        self._names: frozenset[str] = frozenset()

    def watch(self, names: frozenset[str]) -> None:
        """Watch exactly these modules; the finder is only there while there are any."""
        self._names = names
        if names and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        elif not names and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the finders behind this one make of a watched name."""
        if fullname not in self._names or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find else None
            if isinstance(spec, ModuleSpec):
                self._hook(spec)
                return spec
        return None

    def _hook(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # A loader may serve several modules: that of a zip file does.
            if module.__name__ != spec.name:
                run(module)
                return
            vars(loader).pop("exec_module", None)
            self._before(spec.name)
            run(module)
            self._after(spec.name)

        if isinstance(loader, type):
            raise TargetError(f"the module {spec.name!r} is built into Python", fix="import it before the patch")
        loader.exec_module = exec_module  # type: ignore[method-assign]

    def await_end(self, module: ModuleType) -> None:
        """Call ``after`` when the body of a module that is running now has ended."""
        spec = module.__spec__
        if spec is None or "_graft_ended" in vars(spec):
            return
        plain = type(spec)
        after = self._after

        class RunningSpec(plain):  # type: ignore[misc, valid-type]
            """The import system's last act on a module is to set ``_initializing`` of its spec to False."""

            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, value)
                if name != "_initializing" or value:
                    return
                self.__class__ = plain  # type: ignore[assignment]
                del self._graft_ended
                if sys.modules.get(self.name) is module:
                    _end(self.name, after)

        setattr(spec, "_graft_ended", False)  # noqa: B010 - specs have no such attribute for a type checker
        spec.__class__ = RunningSpec


def _end(name: str, after: Notice) -> None:
    try:
        after(name)
    except BaseException:
        # As the import system does with a module whose body raises: the next import must not find it.
        sys.modules.pop(name, None)
        raise
