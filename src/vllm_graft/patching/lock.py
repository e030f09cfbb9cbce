"""``patches.lock``: which upstream code each patch was reviewed against, written by ``vllm-graft lock`` and committed.

::

    [stat-logger-guard."vllm.v1.metrics.loggers:StatLoggerManager.__init__"]
    "0.31.0" = "s:1f3a5b7c9d0e2f40 b:8a6c4e2f0b1d3597"
    "0.32.0" = "s:1f3a5b7c9d0e2f40 b:0c2e4a6f8b1d3579"

The file lies in the package that the patch comes from, so that it travels with it: beside the patch's module, or in a
folder above it up to the top-level package. A module in no package has one of its own, ``module.patches.lock``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_graft.errors import ConfigError

if TYPE_CHECKING:
    from vllm_graft.patching.declaration import Declaration, Patch
    from vllm_graft.sources import Fingerprint

NAME: Final = "patches.lock"

ReviewedHooks = dict[str, dict[str, "Fingerprint"]]
"""The fingerprints of one patch: by the upstream name of each hook, by the release that was reviewed."""

_HEAD: Final = "# Upstream code that a person has read beside these patches. Written by `vllm-graft lock`; commit it.\n"


class Lock:
    """The contents of one lock file."""

    def __init__(self, path: Path, patches: dict[str, ReviewedHooks] | None = None) -> None:
        self.path = path
        self.patches: dict[str, ReviewedHooks] = {} if patches is None else patches

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Read a lock file, empty if there is none, or raise ConfigError if it is damaged."""
        import tomllib

        from vllm_graft.sources import Fingerprint

        def fingerprints(seen: Mapping[str, str]) -> dict[str, Fingerprint]:
            return {str(version): Fingerprint.parse(text) for version, text in seen.items()}

        try:
            data = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            return cls(
                path, {name: {hook: fingerprints(seen) for hook, seen in hooks.items()} for name, hooks in data.items()}
            )
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            fix = "restore it from version control, or delete it and run `vllm-graft lock`"
            raise ConfigError(f"it is not a list of fingerprints: {error}", where=str(path), fix=fix) from error

    def write(self) -> None:
        """Write the file, sorted so that a small change makes a small diff."""

        def order(version: str) -> list[tuple[int, str]]:
            return [(int(part), "") if part.isdigit() else (0, part) for part in version.split(".")]

        lines = [_HEAD]
        for patch, hooks in sorted(self.patches.items()):
            # TOML quotes keys with other characters than these.
            name = patch if all(part.isalnum() or part in "-_" for part in patch) else f'"{patch}"'
            for hook, seen in sorted(hooks.items()):
                lines.append(f'\n[{name}."{hook}"]\n')
                lines += [f'"{version}" = "{seen[version]}"\n' for version in sorted(seen, key=order)]
        self.path.write_text("".join(lines), encoding="utf-8")


def hook_name(declaration: Declaration, attribute: str) -> str:
    """Return the name of a hook's upstream code in the file: "module:Class.method" or "module:function"."""
    return f"{declaration.target.module}:{declaration.target.inside(attribute)}"


def fingerprints_of(patch: Patch) -> ReviewedHooks | None:
    """Return the reviewed fingerprints of a patch, or None if no lock file lists it."""
    path = file_of(patch)
    if path is None or not path.is_file():
        return None
    stamp = path.stat().st_mtime_ns
    held = _read.get(path)
    if held is None or held[0] != stamp:
        held = _read[path] = (stamp, Lock.read(path).patches)
    return held[1].get(patch.declaration.name)


_read: dict[Path, tuple[int, Mapping[str, ReviewedHooks]]] = {}


def file_of(patch: Patch) -> Path | None:
    """Return the lock file of a patch, or the path where it would be; None if the patch's module has no file."""
    module = sys.modules.get(patch.__module__)
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    folder = Path(file).parent
    if "." not in patch.__module__ and not hasattr(module, "__path__"):
        # A module outside any package shares its folder with modules of other projects.
        return folder / f"{patch.__module__}.{NAME}"
    depth = patch.__module__.count(".") - (0 if hasattr(module, "__path__") else 1)
    above = [folder, *folder.parents][: max(depth, 0) + 1]
    return next((place / NAME for place in above if (place / NAME).is_file()), folder / NAME)
