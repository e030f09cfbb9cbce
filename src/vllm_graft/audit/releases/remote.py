"""A wheel on a server, read by ranges: its directory first, then the members that somebody asks for.

Of the 300 MB of a wheel of vLLM its Python files are 11 MB, and the few that a patch stands on some 100 KB.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import IO, Final, NamedTuple, cast

from vllm_graft.audit.releases.client import Answer, Client, Unreachable, client, patiently, refusal, without_password
from vllm_graft.audit.releases.index import by_hand
from vllm_graft.errors import ConfigError
from vllm_graft.sources.origins import DAMAGE, module_of
from vllm_graft.sources.origins import ModuleText as File
from vllm_graft.sources.parse import decode as text_of

Progress = Callable[[int, int], None]
"""Called with the bytes that came, and with all that will come."""

TAIL: Final = 768 << 10
"""What is asked for first, from the end: the directory of a wheel of vLLM has 0.6 MB, so that one request has it."""

GAP: Final = 256 << 10
"""Members with less than this between them are asked for together: a request takes as long as so many bytes."""


class Span(NamedTuple):
    """Some bytes of a file, and where they begin."""

    first: int
    data: bytes

    @property
    def end(self) -> int:
        """Where they end."""
        return self.first + len(self.data)


class Remote:
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
        asked: Client | None = None,
        directory: Span | None = None,
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
    def directory(self) -> Span:
        """The end of the wheel from its directory on, for keeping."""
        first = self._archive.start_dir
        return Span(first, self._file.part(first, self.size))

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

            span = Span(first, self._span(first, end, heard))
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
        return _Ranged(self._span, self.size, Span(first, self._span(first, self.size)))

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

        def ask() -> Answer:
            self.requests += 1
            answer = self._client.get(self.url, headers, want=206, heard=heard)
            self.bytes += len(answer.body)
            announced = answer.headers.get("content-length", "")
            if answer.status == 206 and announced.isdigit() and len(answer.body) < int(announced):
                raise Unreachable(f"{len(answer.body)} of {announced} bytes came")
            return answer

        try:
            answer = patiently(ask)
        except Unreachable as error:
            raise ConfigError(
                f"the server of the wheel cannot be reached or breaks off: {error}",
                where=without_password(self.url),
                fix=f"check the network and try again, or {by_hand(self.version)}",
            ) from error
        self._check(answer, first, end)
        return answer.body

    @cached_property
    def _client(self) -> Client:
        return self._asked or client()

    def _check(self, answer: Answer, first: int, end: int) -> None:
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

    def __init__(self, ask: Callable[[int, int], bytes], size: int, tail: Span) -> None:
        self._ask = ask
        self._size = size
        self._spans = [tail]
        self._at = 0

    @contextmanager
    def holding(self, span: Span) -> Iterator[None]:
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
            self._spans[0] = Span(first, self._ask(first, tail.first) + tail.data)
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
