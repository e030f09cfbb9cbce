"""Releases kept on this machine, and the one way to get a release: what is here first, the rest from the index.

A folder for each release holds the directory of its wheel and the Python files that somebody has read. Files come into
it whole, by renaming, and are checked against the directory whenever they are read: a process that is killed leaves
nothing that another would take for the real thing, and several may fill one folder at once.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Final
from zipfile import ZipInfo

from packaging.version import InvalidVersion, Version

from vllm_graft.audit.releases.index import Index, number_of
from vllm_graft.audit.releases.remote import Progress, Remote, Span
from vllm_graft.errors import ConfigError
from vllm_graft.files import cache_folder, replace_file
from vllm_graft.sources.origins import ModuleText as File
from vllm_graft.sources.origins import Source, Tree
from vllm_graft.sources.parse import decode as text_of

MARK: Final = "whole.json"
"""The file that says of a tree what it held when it was laid out."""

_FORMAT: Final = 1
_LEFT_OVER_S: Final = 3600
_NAMED: Final = 5


def release(
    version: str, *, offline: bool = False, progress: Progress | None = None, index: Index | None = None
) -> Source:
    """A release of vLLM to read from: a tree that the test matrix fetched, else what is kept, else by ranges.

    ``offline`` asks no server. ``progress`` is called with the bytes that came and all that will. Give the same
    ``index`` for several releases, and it is asked once. ConfigError where the release does not exist or cannot be had.
    """
    number = number_of(version)
    tree = cache_folder() / "sources" / number
    if is_whole(tree):
        return Tree(tree, number)
    kept = Kept(number, offline=offline, progress=progress, index=index)
    kept.open()
    return kept


def versions() -> list[str]:
    """The releases of which something is kept, oldest first."""
    folders = [*cache_folder().glob("sources/*"), *cache_folder().glob("wheels/*")]
    found: set[Version] = set()
    for folder in folders:
        with contextlib.suppress(InvalidVersion):
            found.add(Version(folder.name))
    return [str(version) for version in sorted(found)]


def is_whole(tree: Path) -> bool:
    """Whether all that the test matrix unpacked into a folder is still there, by the mark that it left."""
    try:
        mark = json.loads((tree / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return bool(mark == content(tree))


def content(tree: Path) -> dict[str, int]:
    """How many files there are, and their bytes; what Python compiled later is left out of account."""
    files = (file for file in tree.rglob("*") if file.suffix != ".pyc" and file.name != MARK and file.is_file())
    sizes = [file.stat().st_size for file in files]
    return {"files": len(sizes), "bytes": sum(sizes)}


class Kept:
    """A release in the cache, filled from the index as it is read; a ``Source``."""

    def __init__(
        self, version: str, *, offline: bool = False, progress: Progress | None = None, index: Index | None = None
    ) -> None:
        self.version = version
        self.folder = cache_folder() / "wheels" / version
        self._offline = offline
        self._progress = progress
        self._index = index or Index()
        self._wheel: Remote | None = None
        self._online = False

    def open(self) -> None:
        """Make sure that the release exists and its modules are known; ConfigError where it cannot be had."""
        self._known()

    def modules(self) -> list[str]:
        """The dotted names of all modules of ``vllm``, sorted."""
        return self._known().modules()

    def read(self, module: str) -> File | None:
        """A module of ``vllm``; one that is not kept is fetched."""
        member = self._known().member(module)
        data = self._content(member) if member is not None else None
        if member is not None and data is None:
            data = dict(self._fetched([module])).get(module)
            # The index may have another wheel by now.
            member = self._known().member(module)
        if member is None or data is None:
            return None
        return File(str(self._path(member)), text_of(data), member.filename.endswith("/__init__.py"))

    def fetch(self, modules: Iterable[str]) -> None:
        """Keep these modules, in few requests; those that are kept cost nothing, unknown names are passed over."""
        known = ((name, self._known().member(name)) for name in modules)
        missing = [name for name, member in known if member is not None and self._content(member) is None]
        for _ in self._fetched(missing) if missing else ():
            pass

    def _fetched(self, modules: list[str]) -> Iterator[tuple[str, bytes]]:
        """Modules from the server, each kept before it is given."""
        if self._offline:
            raise self._missing(modules)
        wheel = self._connected()
        for name, data in wheel.each(modules):
            if member := wheel.member(name):
                self._write(self._path(member), data)
            yield name, data

    def _known(self) -> Remote:
        """The wheel as far as its directory goes; the server is asked only where none is kept."""
        if self._wheel is None:
            self._wheel = self._directory() or self._connected()
        return self._wheel

    def _connected(self) -> Remote:
        """The wheel on the index, with its directory kept."""
        if self._wheel is not None and self._online:
            return self._wheel
        if self._offline:
            raise self._missing([])
        link = self._index.wheel(self.version)
        kept = self._directory()
        if kept is not None and kept.url == link.filename and link.size in (None, kept.size):
            size: int | None = kept.size
            directory: Span | None = kept.directory
        else:
            size, directory = link.size, None
        wheel = Remote(
            link.url,
            version=self.version,
            size=size,
            asked=self._index.client,
            directory=directory,
            progress=self._progress,
        )
        if directory is None:
            self._keep_directory(link.filename, wheel)
        self._wheel, self._online = wheel, True
        return wheel

    # The directory: a line that says what it is of, and the end of the wheel as it is.

    def _keep_directory(self, filename: str, remote: Remote) -> None:
        end = remote.directory
        head = {
            "format": _FORMAT,
            "filename": filename,
            "size": remote.size,
            "first": end.first,
            "crc": zlib.crc32(end.data),
        }
        self._write(self.folder / "directory", json.dumps(head).encode() + b"\n" + end.data)

    def _directory(self) -> Remote | None:
        """The kept directory as a wheel at no address; None where there is none that can be used."""
        try:
            line, _, data = (self.folder / "directory").read_bytes().partition(b"\n")
            head = json.loads(line)
            if head["format"] != _FORMAT or head["crc"] != zlib.crc32(data):
                return None
            end = Span(int(head["first"]), data)
            return Remote(str(head["filename"]), version=self.version, size=int(head["size"]), directory=end)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    # The files.

    def _path(self, member: ZipInfo) -> Path:
        return self.folder / "files" / member.filename

    def _content(self, member: ZipInfo) -> bytes | None:
        """The kept bytes of a member, or None where they are not there or not the right ones."""
        try:
            data = self._path(member).read_bytes()
        except OSError:
            return None
        return data if len(data) == member.file_size and zlib.crc32(data) == member.CRC else None

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data, scratch=self._parts)
        except OSError as error:
            raise ConfigError(
                f"what was fetched cannot be kept: {error.strerror or error}",
                where=str(path),
                fix="make room or give the permission, or set GRAFT_CACHE_DIR to another folder",
            ) from error

    @cached_property
    def _parts(self) -> Path:
        """Where files are written before they are renamed; what a killed process left there goes after an hour."""
        folder = self.folder / "parts"
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > _LEFT_OVER_S:
                    file.unlink()
        return folder

    def _missing(self, modules: list[str]) -> ConfigError:
        if modules:
            more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
            what = f"of vLLM {self.version}, these modules are not kept: {', '.join(modules[:_NAMED])}{more}"
        else:
            what = f"vLLM {self.version} is not kept here"
        return ConfigError(
            f"{what}, and --offline asks no server",
            where=str(self.folder),
            fix="run it once without --offline, or name a wheel of that release instead",
        )
