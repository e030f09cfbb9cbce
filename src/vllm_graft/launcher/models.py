"""Two models that need no hub: a real 135M chat model from a package's wheel, and a random one made in a second.

Both are folders that vLLM loads like any other model. They are made once, in the cache folder, with a manifest of sizes
and checksums that reveals a damaged folder, which is then made again.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from vllm_graft.errors import SetupError
from vllm_graft.files import cache_folder
from vllm_graft.launcher import model_files

ModelProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of a step, the amount done, and the total."""

EMBEDDED = "smollm2-135m-instruct"
TINY = "tiny-llama"

_log = logging.getLogger(__name__)


def embedded_model(progress: ModelProgress | None = None, *, verify: bool = False) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, a real chat model; the first call downloads 93 MB.

    Sizes are checked on every call; ``verify`` compares checksums too. A damaged folder is made again.
    """

    def make(folder: Path, progress: ModelProgress) -> None:
        _require("numpy", "gguf", "safetensors", "tokenizers")
        from vllm_graft.launcher import smollm2

        smollm2.make(folder, progress)

    return _prepare(EMBEDDED, make, progress or _ignore, verify)


def tiny_model(progress: ModelProgress | None = None, *, verify: bool = False) -> Path:
    """Return the folder of a two-layer Llama with random weights and one token per byte: fast, and always equal.

    Its text is babble. It is checked and made again like the embedded model.
    """

    def make(folder: Path, progress: ModelProgress) -> None:
        _require("numpy", "safetensors", "tokenizers")
        from vllm_graft.launcher import tiny_llama

        tiny_llama.make(folder)
        progress("making the tiny model", 1, 1)

    return _prepare(TINY, make, progress or _ignore, verify)


def _ignore(step: str, done: int, total: int) -> None:
    """Show no progress."""


def _prepare(name: str, make: Callable[[Path, ModelProgress], None], progress: ModelProgress, verify: bool) -> Path:
    folder = cache_folder() / name
    if not model_files.find_damage(folder, checksums=verify):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.warning("another process is making %s; waiting for it", folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have made it while this one waited for the lock.
            faults = model_files.find_damage(folder, checksums=verify)
            if faults and folder.exists():
                _log.warning("%s is damaged: %s; making it again", folder, "; ".join(faults))
            if faults:
                staging, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
                _remove(staging, old)
                staging.mkdir()
                try:
                    make(staging, progress)
                    model_files.write_manifest(staging)
                    if folder.exists():
                        folder.rename(old)
                    staging.rename(folder)
                finally:
                    _remove(staging, old)
    except OSError as error:
        fix = "make room or give the permission, or set GRAFT_CACHE_DIR to a folder with 600 MB free"
        raise SetupError(f"the model cannot be made: {error}", where=str(folder), fix=fix) from error
    return folder


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)


def _require(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        what = f"making a model needs {' and '.join(missing)}, which this Python does not have"
        raise SetupError(what, where=sys.executable, fix=f"pip install {' '.join(missing)}")
