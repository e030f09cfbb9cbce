"""Wheels of vLLM on the package index, read by byte ranges and cached on this machine.

Of the 300 MB of a wheel of vLLM its Python files are 11 MB, and the few that a patch needs some 100 KB. A folder for
each release holds the wheel's directory and the Python files that were read. Files are written by renaming and verified
against the directory whenever they are read: a killed process leaves nothing that another would mistake for a complete
file, and several processes may fill one folder at once.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
import zipfile
import zlib
from collections import deque
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
    refusal,
    retry_once,
    without_password,
)
from vllm_graft.errors import ConfigError
from vllm_graft.files import cache_folder, replace_file
from vllm_graft.sources.origins import DAMAGE, ModuleText, Source, Tree, decode, module_of

FetchProgress = Callable[[int, int], None]
"""Called with the bytes that arrived, and with their total."""

# The bytes at the end that are requested first: the directory of a wheel of vLLM has 0.6 MB.
TAIL: Final = 768 << 10
# Members with a smaller gap are requested together: a request takes as long as the transfer of the gap.
GAP: Final = 256 << 10


class ByteSpan(NamedTuple):
    """Some bytes of a file, and where they begin."""

    first: int
    data: bytes

    @property
    def end(self) -> int:
        """The position after the last byte."""
        return self.first + len(self.data)


class RemoteWheel:
    """A wheel at an address, which is read by ranges; a ``Source``.

    requests:  the number of requests made
    bytes:     the number of bytes received

    ``directory`` may be given from the cache, together with ``size``.
    """

    def __init__(
        self,
        url: str,
        *,
        version: str = "",
        size: int | None = None,
        http: HttpClient | None = None,
        directory: ByteSpan | None = None,
        progress: FetchProgress | None = None,
    ) -> None:
        self.url = url
        self.version = version
        self.requests = 0
        self.bytes = 0
        self._size = size
        self._http = http
        self._directory = directory
        self._progress = progress or (lambda done, total: None)
        self._held: dict[str, bytes] = {}

    @property
    def size(self) -> int:
        """The size of the whole wheel."""
        if self._size is None:
            # Not by asking for the last bytes without a position, which some servers do not understand.
            self._span(0, 1)
        assert self._size is not None
        return self._size

    @property
    def directory(self) -> ByteSpan:
        """The end of the wheel from its directory on, for the cache."""
        first = self._archive.start_dir
        return ByteSpan(first, self._file.part(first, self.size))

    def modules(self) -> list[str]:
        """Return the dotted names of all modules of ``vllm``, sorted."""
        return sorted(self._members)

    def member(self, module: str) -> zipfile.ZipInfo | None:
        """Return a module's entry in the directory: name, size and checksum."""
        return self._members.get(module)

    def read(self, module: str) -> ModuleText | None:
        """Read a module of ``vllm``, fetching it if necessary."""
        member = self._members.get(module)
        if member is None:
            return None
        if module not in self._held:
            self.fetch([module])
        path = f"{without_password(self.url)}/{member.filename}"
        return ModuleText(path, decode(self._held[module]), member.filename.endswith("/__init__.py"))

    def fetch(self, modules: Iterable[str]) -> None:
        """Fetch modules in few requests and hold them; names that the wheel does not have are skipped."""
        self._held.update(self.each(name for name in modules if name not in self._held))

    def each(self, modules: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield modules in the order of the wheel without holding them; each is complete and verified."""
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
        """Yield the ranges to request, with neighbouring members in one."""
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
        """The latest end of each member by its start: its own header does not tell before it is read."""
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
        """Request the bytes ``first`` to ``end``, once more if the connection breaks."""
        headers = {"Range": f"bytes={first}-{end - 1}", "Cache-Control": "no-cache"}

        def ask() -> HttpResponse:
            self.requests += 1
            self._http = self._http or client()
            answer = self._http.get(self.url, headers, want=206, heard=heard)
            self.bytes += len(answer.body)
            announced = answer.headers.get("content-length", "")
            if answer.status == 206 and announced.isdigit() and len(answer.body) < int(announced):
                raise ServerUnreachable(f"{len(answer.body)} of {announced} bytes came")
            return answer

        try:
            answer = retry_once(ask)
        except ServerUnreachable as error:
            raise ConfigError(
                f"the server of the wheel cannot be reached or breaks off: {error}",
                where=without_password(self.url),
                fix=f"check the network and try again, or {by_hand(self.version)}",
            ) from error
        if answer.status == 200:
            raise ConfigError(
                "the server sends the wheel only as a whole, not by ranges",
                where=without_password(self.url),
                fix=by_hand(self.version),
            )
        if answer.status == 416:
            raise self._damaged(f"it ends before byte {first}")
        if answer.status != 206:
            raise refusal(answer, self.url, by_hand(self.version))
        said = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("content-range", ""))
        if said is None or int(said[1]) != first:
            raise self._damaged("the server answers with a different range than requested")
        if self._size is None:
            self._size = int(said[2])
        if self._size != int(said[2]):
            raise self._damaged(f"it has {said[2]} bytes instead of {self._size}")
        if len(answer.body) != end - first:
            raise self._damaged(f"{len(answer.body)} bytes came instead of {end - first}")
        return answer.body

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(
            f"the wheel on the server is cut short or damaged: {what}",
            where=without_password(self.url),
            fix=f"try again later or with another PIP_INDEX_URL, or {by_hand(self.version)}",
        )


class _Ranged(io.RawIOBase):
    """A remote file for ``zipfile``: its end and some spans are in memory, the rest is requested."""

    def __init__(self, ask: Callable[[int, int], bytes], size: int, tail: ByteSpan) -> None:
        self._ask = ask
        self._size = size
        self._spans = [tail]
        self._at = 0

    @contextmanager
    def holding(self, span: ByteSpan) -> Iterator[None]:
        """Hold some bytes in memory for a while."""
        self._spans.append(span)
        try:
            yield
        finally:
            self._spans.remove(span)

    def part(self, first: int, end: int) -> bytes:
        """Return the bytes ``first`` to ``end``, from memory or from the server."""
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


# The file with the number and size of a tree's files when it was unpacked.
MARK: Final = "whole.json"
_FORMAT: Final = 1
_LEFT_OVER_S: Final = 3600
_NAMED: Final = 5


def open_release(
    version: str, *, offline: bool = False, progress: FetchProgress | None = None, index: PackageIndex | None = None
) -> Source:
    """Open the sources of a release: a tree that the test matrix fetched, else the cached wheel, filled by ranges.

    ``offline`` contacts no server. ``progress`` is called with the bytes that arrived and their total. Several releases
    may share an ``index``, which is then requested once. ConfigError if the release is not available.
    """
    number = number_of(version)
    tree = cache_folder() / "sources" / number
    if is_whole(tree):
        return Tree(tree, number)
    kept = CachedWheel(number, offline=offline, progress=progress, index=index)
    # The release has to exist: its modules are asked for.
    kept.modules()
    return kept


def cached_versions() -> list[str]:
    """Return the releases that have something in the cache, oldest first."""
    found: set[Version] = set()
    for folder in (*cache_folder().glob("sources/*"), *cache_folder().glob("wheels/*")):
        with contextlib.suppress(InvalidVersion):
            found.add(Version(folder.name))
    return [str(version) for version in sorted(found)]


def is_whole(tree: Path) -> bool:
    """Return whether a tree still holds everything that the test matrix unpacked into it, by its mark."""
    try:
        mark = json.loads((tree / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return bool(mark == content(tree))


def content(tree: Path) -> dict[str, int]:
    """Count the files and their bytes, without those that Python compiled later."""
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
        progress: FetchProgress | None = None,
        index: PackageIndex | None = None,
    ) -> None:
        self.version = version
        self.folder = cache_folder() / "wheels" / version
        self._offline = offline
        self._progress = progress
        self._index = index or PackageIndex()
        self._wheel: RemoteWheel | None = None
        self._online = False

    def modules(self) -> list[str]:
        """Return the dotted names of all modules of ``vllm``, sorted."""
        return self._known().modules()

    def read(self, module: str) -> ModuleText | None:
        """Read a module of ``vllm``, fetching it if it is not cached."""
        member = self._known().member(module)
        data = self._content(member) if member is not None else None
        if member is not None and data is None:
            data = dict(self._fetched([module])).get(module)
            # The index may have another wheel by now.
            member = self._known().member(module)
        if member is None or data is None:
            return None
        return ModuleText(str(self._path(member)), decode(data), member.filename.endswith("/__init__.py"))

    def fetch(self, modules: Iterable[str]) -> None:
        """Cache modules in few requests; cached ones cost nothing, unknown names are skipped."""
        known = ((name, self._known().member(name)) for name in modules)
        if missing := [name for name, member in known if member is not None and self._content(member) is None]:
            deque(self._fetched(missing), maxlen=0)

    def _fetched(self, modules: list[str]) -> Iterator[tuple[str, bytes]]:
        """Yield modules from the server, each after it was cached."""
        if self._offline:
            raise self._missing(modules)
        wheel = self._connected()
        for name, data in wheel.each(modules):
            if member := wheel.member(name):
                self._write(self._path(member), data)
            yield name, data

    def _known(self) -> RemoteWheel:
        """Return the wheel with its directory; the server is asked only if none is cached."""
        if self._wheel is None:
            self._wheel = self._directory() or self._connected()
        return self._wheel

    def _connected(self) -> RemoteWheel:
        """Return the wheel on the index, and cache its directory."""
        if self._wheel is not None and self._online:
            return self._wheel
        if self._offline:
            raise self._missing([])
        link, kept = self._index.wheel(self.version), self._directory()
        if kept is not None and (kept.url != link.filename or link.size not in (None, kept.size)):
            kept = None
        size, directory = (kept.size, kept.directory) if kept is not None else (link.size, None)
        http, progress = self._index.client, self._progress
        wheel = RemoteWheel(
            link.url, version=self.version, size=size, http=http, directory=directory, progress=progress
        )
        if directory is None:
            # A line that says what the directory is of, and the end of the wheel as it is.
            first, data = wheel.directory
            head = {"format": _FORMAT, "filename": link.filename, "size": wheel.size, "first": first}
            line = json.dumps({**head, "crc": zlib.crc32(data)}).encode()
            self._write(self.folder / "directory", line + b"\n" + data)
        self._wheel, self._online = wheel, True
        return wheel

    def _directory(self) -> RemoteWheel | None:
        """Return the cached directory as a wheel without an address; None if there is none that can be used."""
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
        """Return the cached bytes of a member; None if they are missing or damaged."""
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
                f"what was fetched cannot be cached: {error.strerror or error}",
                where=str(path),
                fix="make room or give the permission, or set GRAFT_CACHE_DIR to another folder",
            ) from error

    @cached_property
    def _parts(self) -> Path:
        """The folder for files before they are renamed; leftovers of a killed process are removed after an hour."""
        folder = self.folder / "parts"
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > _LEFT_OVER_S:
                    file.unlink()
        return folder

    def _missing(self, modules: list[str]) -> ConfigError:
        what = f"vLLM {self.version} is not in the local cache"
        if modules:
            more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
            what = (
                f"of vLLM {self.version}, these modules are not in the local cache: {', '.join(modules[:_NAMED])}{more}"
            )
        what += ", and --offline contacts no server"
        fix = "run it once without --offline, or name a wheel of that release instead"
        return ConfigError(what, where=str(self.folder), fix=fix)
