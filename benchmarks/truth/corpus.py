"""Packages from the package index, pinned, and unpacked into the cache folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from vllm_graft.files import cache_folder


@dataclass(frozen=True)
class Entry:
    """One package of the corpus; nobody tunes the audit on one that is held out."""

    name: str
    version: str
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name}-{self.version}"


CORPUS = (
    Entry("arctic-inference", "0.3.0"),
    Entry("vllm-ascend", "0.23.0.post1"),
    Entry("lmcache", "0.5.6"),
    Entry("tpu-inference", "0.28.0"),
    Entry("vllm-omni", "0.28.0"),
    Entry("vllm-spyre", "1.10.0"),
    Entry("openrlhf", "0.11.2"),
    Entry("trl", "1.16.0"),
    Entry("verl", "0.9.1"),
    Entry("unsloth-zoo", "2026.10.9"),
    Entry("terratorch", "1.2.13"),
    Entry("ms-swift", "4.6.0"),
    Entry("ray", "2.60.0"),
    Entry("vllm-rbln", "0.12.0"),
    Entry("skyrl", "0.3.0"),
    Entry("ai-dynamo", "1.6.1", held_out=True),
    Entry("aibrix-kvcache", "0.8.0", held_out=True),
    Entry("arctic-inference", "0.1.2", held_out=True),
    Entry("areal", "1.0.4", held_out=True),
    Entry("lighteval", "0.13.0", held_out=True),
    Entry("llmcompressor", "0.14.0.1", held_out=True),
    Entry("lmcache", "0.4.2", held_out=True),
    Entry("tpu-inference", "0.20.0", held_out=True),
    Entry("vllm-kunlun", "0.11.1", held_out=True),
    Entry("vllm-omni", "0.20.0", held_out=True),
    Entry("vllm-spyre", "1.4.0", held_out=True),
    Entry("vllm-tgis-adapter", "0.10.0", held_out=True),
)


def unpack(entry: Entry) -> Path:
    """Return the folder with the package's files, downloaded on first use."""
    folder = cache_folder() / "corpus" / entry.label
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        archive = _wheel(entry, Path(name)) or _source_distribution(entry, Path(name))
        inside = Path(name) / "unpacked"
        _extract(archive, inside)
        try:
            inside.rename(folder)
        except OSError:
            # Another run was faster.
            if not folder.is_dir():
                raise
    return folder


def _wheel(entry: Entry, folder: Path) -> Path | None:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", "-d", str(folder)]
    subprocess.run([*pip, f"{entry.name}=={entry.version}"], capture_output=True, check=False)
    return next(folder.glob("*.whl"), None)


def _source_distribution(entry: Entry, folder: Path) -> Path:
    """Fetch the archive itself: pip would run its build to learn its dependencies."""
    index = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    ).stdout.strip()
    url = f"{(index or 'https://pypi.org/simple').rstrip('/')}/{entry.name}/"
    with urllib.request.urlopen(url) as answer:
        page = answer.read().decode()
    stem = re.escape(entry.name).replace(r"\-", "[-_.]")
    links = re.findall(rf'["\']([^"\']*/{stem}-{re.escape(entry.version)}\.tar\.gz)', page, re.IGNORECASE)
    if not links:
        sys.exit(f"the index has no wheel and no source archive of {entry.label}: {url}")
    target = folder / "source.tar.gz"
    with urllib.request.urlopen(urllib.request.urljoin(url, links[0])) as answer, target.open("wb") as file:
        shutil.copyfileobj(answer, file)
    return target


def _extract(archive: Path, folder: Path) -> None:
    """Unpack Python files and metadata; nothing else is read."""
    wanted = re.compile(r"(\.py|\.toml|\.txt|\.cfg|/METADATA|/PKG-INFO|entry_points\.txt)$")
    folder.mkdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if wanted.search(name)])
        return
    with tarfile.open(archive) as tar:
        members = [one for one in tar.getmembers() if one.isfile() and wanted.search(one.name)]
        tar.extractall(folder, members, filter="data")
    (top,) = folder.iterdir()
    for path in list(top.iterdir()):
        path.rename(folder / path.name)
    top.rmdir()
