"""The package index: which releases of vLLM there are, and where the wheel of one lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from typing import Final
from urllib.parse import unquote, urljoin, urlsplit

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from vllm_graft.audit.releases.client import Answer, Client, Unreachable, client, patiently, refusal, without_password
from vllm_graft.errors import ConfigError

_ACCEPT: Final = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.1, text/html;q=0.01"


@dataclass(frozen=True, slots=True)
class WheelLink:
    """A wheel on an index.

    url:       where it lies, without user and password
    size:      its bytes, where the index says
    version:   the version in its name, with a local part such as "+cu129" where it has one
    yanked:    whether the project has withdrawn it
    """

    url: str
    size: int | None
    version: str
    filename: str
    yanked: bool = False


class Index:
    """The distribution ``vllm`` on all indexes that pip is set to use; each is asked once."""

    def __init__(self, asked: Client | None = None, *, distribution: str = "vllm") -> None:
        self.distribution = distribution
        self._asked = asked
        self._failures: list[ConfigError] = []
        self._lacking: list[ConfigError] = []

    @cached_property
    def client(self) -> Client:
        """What the index was asked by; wheels are asked for by the same."""
        return self._asked or client()

    def versions(self, *, pre: bool = False) -> list[str]:
        """The releases that have a wheel, oldest first; with ``pre`` also pre-releases. Local parts are left out."""
        offered = {Version(Version(link.version).public) for link in self._links if not link.yanked}
        return [str(version) for version in sorted(offered) if pre or not version.is_prerelease]

    def wheel(self, version: str) -> WheelLink:
        """A wheel of a release, best one for Linux on x86-64: their Python files are the same."""
        wanted = parsed(version)
        links = [link for link in self._links if _is(link, wanted)]
        if not links:
            raise self._absent(wanted)
        return min(links, key=lambda link: _reluctance(link, wanted))

    @cached_property
    def _links(self) -> list[WheelLink]:
        if not self.client.indexes:
            raise ConfigError(
                "pip is set to use no index", where="PIP_NO_INDEX", fix=f"set PIP_INDEX_URL instead, or {by_hand()}"
            )
        found: list[WheelLink] = []
        for url in self.client.indexes:
            try:
                found += self._page(f"{url.rstrip('/')}/{self.distribution}/")
            except ConfigError as error:
                self._failures.append(error)
        if not found and (problems := [*self._failures, *self._lacking]):
            raise problems[0]
        if not found:
            raise ConfigError(
                f"the index lists no wheel of {self.distribution}",
                where=without_password(self.client.indexes[0]),
                fix=f"set PIP_INDEX_URL to an index that has it, or {by_hand()}",
            )
        return found

    def _page(self, url: str) -> Iterator[WheelLink]:
        try:
            answer = patiently(lambda: self.client.get(url, {"Accept": _ACCEPT}))
        except Unreachable as error:
            raise ConfigError(
                f"the package index cannot be reached: {error}",
                where=without_password(url),
                fix=f"check the network, PIP_INDEX_URL, PIP_CERT and HTTPS_PROXY; use --offline; or {by_hand()}",
            ) from error
        if answer.status == 200:
            return _links(answer, without_password(url))
        refused = refusal(answer, url, f"set PIP_INDEX_URL to an index that has vllm, or {by_hand()}")
        if answer.status not in (404, 410):
            raise refused
        self._lacking.append(refused)
        return iter(())

    def _absent(self, wanted: Version) -> ConfigError:
        versions = self.versions() or self.versions(pre=True)
        what = f"there is no wheel of vLLM {wanted}"
        if versions:
            what += f"; the nearest is {nearest(wanted, versions)}, the newest {versions[-1]}"
        if self._failures:
            what += f"; {len(self._failures)} of {len(self.client.indexes)} indexes did not answer: "
            what += "; ".join(f"{failure.where}: {failure.what}" for failure in self._failures)
        where = " ".join(without_password(url) for url in self.client.indexes)
        return ConfigError(what, where=where, fix="name one of these, or add an index with PIP_EXTRA_INDEX_URL")


def by_hand(version: str = "") -> str:
    """The next step that always works."""
    pinned = f"vllm=={version}" if version else "vllm"
    return f"download the wheel elsewhere (`pip download --no-deps {pinned}`) and name it with --wheel"


def parsed(version: str) -> Version:
    """The number of a release; ConfigError where it is none."""
    try:
        return Version(version)
    except InvalidVersion as error:
        raise ConfigError(f"{version!r} is not a version", fix="name a release such as 0.31.0") from error


def number_of(version: str) -> str:
    """A release as the index calls it: three numbers, and nothing of what it was built for."""
    found = parsed(version)
    return f"{found.public}.0" if found.public == f"{found.major}.{found.minor}" else found.public


def nearest(wanted: Version, versions: list[str]) -> str:
    """Of sorted versions, the one that shares most of the number, and of those the one just below."""

    if versions and wanted > Version(versions[-1]):
        return versions[-1]

    def distance(text: str) -> tuple[int, int, int]:
        other = Version(text)
        shared = 0
        for mine, theirs in zip(wanted.release, other.release, strict=False):
            if mine != theirs:
                return (-shared, abs(mine - theirs), int(other > wanted))
            shared += 1
        return (-shared, 0, int(other > wanted))

    return min(versions, key=distance)


def _is(link: WheelLink, wanted: Version) -> bool:
    offered = Version(link.version)
    return offered == wanted or (wanted.local is None and Version(offered.public) == wanted)


def _reluctance(link: WheelLink, wanted: Version) -> tuple[bool, bool, bool, bool, str]:
    linux = "linux" in link.filename and "x86_64" in link.filename
    return (link.yanked, Version(link.version) != wanted, not linux, link.size is None, link.filename)


def _links(answer: Answer, url: str) -> Iterator[WheelLink]:
    text = answer.body.decode("utf-8", errors="replace")
    rows = _from_json(text, url) if "json" in answer.headers.get("content-type", "") else _from_html(text)
    for address, size, yanked in rows:
        target = without_password(urljoin(url, address))
        filename = unquote(urlsplit(target).path.rpartition("/")[2])
        # A page from the network has no business with this machine's files.
        foreign = urlsplit(target).scheme not in ("http", "https") and urlsplit(url).scheme != "file"
        if foreign or not filename.endswith(".whl"):
            continue
        try:
            version = parse_wheel_filename(filename)[1]
        except (InvalidWheelFilename, InvalidVersion):
            continue
        yield WheelLink(target, size, str(version), filename, yanked)


def _from_json(text: str, where: str) -> Iterator[tuple[str, int | None, bool]]:
    try:
        for file in json.loads(text)["files"]:
            size = file.get("size")
            yield file["url"], size if isinstance(size, int) else None, bool(file.get("yanked"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the index's answer cannot be understood: {error!r}",
            where=where,
            fix=f"set PIP_INDEX_URL to another index, or {by_hand()}",
        ) from error


def _from_html(text: str) -> Iterator[tuple[str, int | None, bool]]:
    page = _Anchors()
    page.feed(text)
    for attributes in page.found:
        yield urljoin(page.base, attributes["href"] or ""), None, "data-yanked" in attributes


class _Anchors(HTMLParser):
    """The links of a page, and the address that they are relative to where the page names one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag == "base":
            self.base = known.get("href") or ""
        elif tag == "a" and known.get("href"):
            self.found.append(known)
