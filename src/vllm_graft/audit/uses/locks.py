"""What ``patches.lock`` says of a hook, found as the patch engine finds it, by the path of the patch's file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vllm_graft.audit.uses.files import SourceFile
from vllm_graft.errors import ConfigError
from vllm_graft.patching.lock import NAME, Lock, ReviewedHooks


class Locks:
    """The lock files of one package, each read once; ``broken`` has those that cannot be read."""

    def __init__(self) -> None:
        self.broken: list[ConfigError] = []
        self._read: dict[Path, Mapping[str, ReviewedHooks]] = {}

    def reviewed(self, file: SourceFile, patch: str, hook: str) -> dict[str, str]:
        """The fingerprint that a hook's upstream code had in each release that a person reviewed."""
        seen = self._of(lock_of(file)).get(patch, {}).get(hook, {})
        return {release: str(fingerprint) for release, fingerprint in seen.items()}

    def _of(self, path: Path) -> Mapping[str, ReviewedHooks]:
        if path not in self._read:
            try:
                self._read[path] = Lock.read(path).patches
            except ConfigError as error:
                self.broken.append(error)
                self._read[path] = {}
        return self._read[path]


def lock_of(file: SourceFile) -> Path:
    """The lock file that speaks of the patches in a file, or the place where it would be."""
    folder = file.path.parent
    depth = len(file.module.split(".")) - (0 if file.is_package else 1)
    if not depth:
        return folder / f"{file.path.stem}.{NAME}"
    return next(
        (place / NAME for place in [folder, *folder.parents][:depth] if (place / NAME).is_file()), folder / NAME
    )
