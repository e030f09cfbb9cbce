"""X"""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Final, NamedTuple, cast
from zipfile import ZipInfo

from packaging.version import InvalidVersion, Version

from vllm_graft.audit.releases.package_index import (
    HttpClient,
    HttpResponse,
    PackageIndex,
    ServerUnreachable,
    by_hand,
    client,
    number_of,
    patiently,
    refusal,
    without_password,
)
from vllm_graft.errors import ConfigError
from vllm_graft.files import cache_folder, replace_file
from vllm_graft.patching.upstream.sources import DAMAGE, File, Source, Tree, module_of, text_of

Progress = Callable[[int, int], None]
"""Called with the bytes that came, and with all that will come."""

TAIL: Final = 768 << 10
"""What is asked for first, from the end: the directory of a wheel of vLLM has 0.6 MB, so that one request has it."""

GAP: Final = 256 << 10
"""Members with less than this between them are asked for together: a request takes as long as so many bytes."""


class ByteSpan(NamedTuple):
    """Some bytes of a file, and where they begin."""

    first: int
    data: bytes

    @property
    def end(self) -> int:
        """Where they end."""
        return self.first + len(self.data)


class RemoteWheel:
    """A wheel at an address, which is read by ranges; a ``Source``.

    requests:  how many were made
    bytes:     how many came

    ``directory`` may be given where it was kept from another time, together with ``size``.
    """

    def __init__(
        self,
        url: str,
        *,
        version: str = "",
        size: int | None = None,
        asked: HttpClient | None = None,
        directory: ByteSpan | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.url = url
        self.version = version
        self.requests = 0
        self.bytes = 0
        self._size = size
        self._asked = asked
        self._directory = directory
        self._progress = progress or (lambda done, total: None)
        self._held: dict[str, bytes] = {}

    @property
    def size(self) -> int:
        """The bytes of the whole wheel."""
        if self._size is None:
            # Not by asking for the last bytes without a position, which some servers do not understand.
            self._span(0, 1)
        assert self._size is not None
        return self._size

    @property
    def directory(self) -> ByteSpan:
        """The end of the wheel from its directory on, for keeping."""
        first = self._archive.start_dir
        return ByteSpan(first, self._file.part(first, self.size))

    def modules(self) -> list[str]:
        """The dotted names of all modules of ``vllm``, sorted."""
        return sorted(self._members)

    def member(self, module: str) -> zipfile.ZipInfo | None:
        """What the directory says of a module: name, size and checksum."""
        return self._members.get(module)

    def read(self, module: str) -> File | None:
        """A module of ``vllm``; one that was not fetched before is fetched now."""
        member = self._members.get(module)
        if member is None:
            return None
        if module not in self._held:
            self.fetch([module])
        path = f"{without_password(self.url)}/{member.filename}"
        return File(path, text_of(self._held[module]), member.filename.endswith("/__init__.py"))

    def fetch(self, modules: Iterable[str]) -> None:
        """Get many modules in few requests and hold them; names that the wheel does not have are passed over."""
        self._held.update(self.each(name for name in modules if name not in self._held))

    def each(self, modules: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """The same, one by one in the order of the wheel and without holding them; each is whole and checked."""
        groups = list(self._groups({name for name in modules if name in self._members}))
        total = sum(end - first for first, end, _ in groups)
        done = 0
        for first, end, names in groups:
            came = done

            def heard(count: int) -> None:
                nonlocal came
                came += count
                self._progress(min(came, total), total)

            span = ByteSpan(first, self._span(first, end, heard))
            with self._file.holding(span):
                for name in names:
                    yield name, self._content(self._members[name])
            done += end - first

    def _groups(self, modules: set[str]) -> Iterator[tuple[int, int, list[str]]]:
        """What to ask for: neighbours together."""
        members = sorted(modules, key=lambda name: self._members[name].header_offset)
        first = end = 0
        names: list[str] = []
        for name in members:
            begins = self._members[name].header_offset
            if names and begins - end > GAP:
                yield first, end, names
                names = []
            first = first if names else begins
            end = self._ends[begins]
            names.append(name)
        if names:
            yield first, end, names

    @cached_property
    def _file(self) -> _Ranged:
        if self._directory is not None and self._size is not None:
            return _Ranged(self._span, self._size, self._directory)
        first = max(0, self.size - TAIL)
        return _Ranged(self._span, self.size, ByteSpan(first, self._span(first, self.size)))

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(cast(IO[bytes], self._file))
        except DAMAGE as error:
            raise self._damaged(f"its directory cannot be read: {error}") from error

    @cached_property
    def _members(self) -> dict[str, zipfile.ZipInfo]:
        infos = [info for info in self._archive.infolist() if info.filename.startswith("vllm/")]
        # A package goes before a module of the same name, as for Python.
        infos.sort(key=lambda info: info.filename.endswith("/__init__.py"))
        return {name: info for info in infos if (name := module_of(info.filename)) is not None}

    @cached_property
    def _ends(self) -> dict[int, int]:
        """Where a member ends at the latest, by where it begins: its own header does not say before it is read."""
        begins = sorted({info.header_offset for info in self._archive.infolist()})
        return dict(pairwise([*begins, self._archive.start_dir]))

    def _content(self, member: zipfile.ZipInfo) -> bytes:
        try:
            data = self._archive.read(member)
        except DAMAGE as error:
            raise self._damaged(f"{member.filename} is not what its directory says: {error}") from error
        if len(data) != member.file_size:
            raise self._damaged(f"{member.filename} has {len(data)} bytes instead of {member.file_size}")
        return data

    def _span(self, first: int, end: int, heard: Callable[[int], None] = lambda count: None) -> bytes:
        """Bytes ``first`` to ``end``; a connection that breaks is tried again once."""
        headers = {"Range": f"bytes={first}-{end - 1}", "Cache-Control": "no-cache"}

        def ask() -> HttpResponse:
            self.requests += 1
            answer = self._client.get(self.url, headers, want=206, heard=heard)
            self.bytes += len(answer.body)
            announced = answer.headers.get("content-length", "")
            if answer.status == 206 and announced.isdigit() and len(answer.body) < int(announced):
                raise ServerUnreachable(f"{len(answer.body)} of {announced} bytes came")
            return answer

        try:
            answer = patiently(ask)
        except ServerUnreachable as error:
            raise ConfigError(
                f"the server of the wheel cannot be reached or breaks off: {error}",
                where=without_password(self.url),
                fix=f"check the network and try again, or {by_hand(self.version)}",
            ) from error
        self._check(answer, first, end)
        return answer.body

    @cached_property
    def _client(self) -> HttpClient:
        return self._asked or client()

    def _check(self, answer: HttpResponse, first: int, end: int) -> None:
        if answer.status == 200:
            raise ConfigError(
                "the server gives the wheel only as a whole, not by ranges",
                where=without_password(self.url),
                fix=by_hand(self.version),
            )
        if answer.status == 416:
            raise self._damaged(f"it ends before byte {first}")
        if answer.status != 206:
            raise refusal(answer, self.url, by_hand(self.version))
        said = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("content-range", ""))
        if said is None or int(said[1]) != first:
            raise self._damaged("the server answers with another range than it was asked for")
        if self._size is None:
            self._size = int(said[2])
        if self._size != int(said[2]):
            raise self._damaged(f"it has {said[2]} bytes instead of {self._size}")
        if len(answer.body) != end - first:
            raise self._damaged(f"{len(answer.body)} bytes came instead of {end - first}")

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(
            f"the wheel on the server is cut short or damaged: {what}",
            where=without_password(self.url),
            fix=f"try again later or with another PIP_INDEX_URL, or {by_hand(self.version)}",
        )


class _Ranged(io.RawIOBase):
    """A file on a server, as ``zipfile`` wants it: its end is here, spans are for a while, the rest is asked for."""

    def __init__(self, ask: Callable[[int, int], bytes], size: int, tail: ByteSpan) -> None:
        self._ask = ask
        self._size = size
        self._spans = [tail]
        self._at = 0

    @contextmanager
    def holding(self, span: ByteSpan) -> Iterator[None]:
        """Have some bytes here as long as they are needed."""
        self._spans.append(span)
        try:
            yield
        finally:
            self._spans.remove(span)

    def part(self, first: int, end: int) -> bytes:
        """Bytes ``first`` to ``end``, from here or from the server."""
        for span in self._spans:
            if span.first <= first and end <= span.end:
                return span.data[first - span.first : end - span.first]
        # A directory larger than expected: only what comes before is missing.
        tail = self._spans[0]
        if first < tail.first < end <= tail.end:
            self._spans[0] = ByteSpan(first, self._ask(first, tail.first) + tail.data)
            return self.part(first, end)
        return self._ask(first, end)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(f"position {base + offset} is before the beginning")
        self._at = base + offset
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        end = self._size if count is None or count < 0 else min(self._at + count, self._size)
        data = self.part(self._at, end) if end > self._at else b""
        self._at += len(data)
        return data


MARK: Final = "whole.json"
"""The file that says of a tree what it held when it was laid out."""

_FORMAT: Final = 1
_LEFT_OVER_S: Final = 3600
_NAMED: Final = 5


def release(
    version: str, *, offline: bool = False, progress: Progress | None = None, index: PackageIndex | None = None
) -> Source:
    """A release of vLLM to read from: a tree that the test matrix fetched, else what is kept, else by ranges.

    ``offline`` asks no server. ``progress`` is called with the bytes that came and all that will. Give the same
    ``index`` for several releases, and it is asked once. ConfigError where the release does not exist or cannot be had.
    """
    number = number_of(version)
    tree = cache_folder() / "sources" / number
    if is_whole(tree):
        return Tree(tree, number)
    kept = CachedWheel(number, offline=offline, progress=progress, index=index)
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


class CachedWheel:
    """A release in the cache, filled from the index as it is read; a ``Source``."""

    def __init__(
        self,
        version: str,
        *,
        offline: bool = False,
        progress: Progress | None = None,
        index: PackageIndex | None = None,
    ) -> None:
        self.version = version
        self.folder = cache_folder() / "wheels" / version
        self._offline = offline
        self._progress = progress
        self._index = index or PackageIndex()
        self._wheel: RemoteWheel | None = None
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

    def _known(self) -> RemoteWheel:
        """The wheel as far as its directory goes; the server is asked only where none is kept."""
        if self._wheel is None:
            self._wheel = self._directory() or self._connected()
        return self._wheel

    def _connected(self) -> RemoteWheel:
        """The wheel on the index, with its directory kept."""
        if self._wheel is not None and self._online:
            return self._wheel
        if self._offline:
            raise self._missing([])
        link = self._index.wheel(self.version)
        kept = self._directory()
        if kept is not None and kept.url == link.filename and link.size in (None, kept.size):
            size: int | None = kept.size
            directory: ByteSpan | None = kept.directory
        else:
            size, directory = link.size, None
        wheel = RemoteWheel(
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

    def _keep_directory(self, filename: str, remote: RemoteWheel) -> None:
        end = remote.directory
        head = {
            "format": _FORMAT,
            "filename": filename,
            "size": remote.size,
            "first": end.first,
            "crc": zlib.crc32(end.data),
        }
        self._write(self.folder / "directory", json.dumps(head).encode() + b"\n" + end.data)

    def _directory(self) -> RemoteWheel | None:
        """The kept directory as a wheel at no address; None where there is none that can be used."""
        try:
            line, _, data = (self.folder / "directory").read_bytes().partition(b"\n")
            head = json.loads(line)
            if head["format"] != _FORMAT or head["crc"] != zlib.crc32(data):
                return None
            end = ByteSpan(int(head["first"]), data)
            return RemoteWheel(str(head["filename"]), version=self.version, size=int(head["size"]), directory=end)
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
