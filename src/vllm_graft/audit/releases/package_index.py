"""The package index: which releases of vLLM there are, where the wheel of one is, and how servers are asked.

pip knows the user's index, proxy, certificates and passwords, and some indexes answer no other client, so its own
session is used where possible. That session is not a public interface: every use of it is guarded, and a plain client
that reads the same settings takes over if it fails.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import importlib
import importlib.util
import json
import logging
import netrc
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import url2pathname

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from vllm_graft.errors import ConfigError

_SECTIONS = ("global", "download", ":env:")


@dataclass(frozen=True, slots=True)
class PipSettings:
    """The part of pip's configuration that the plain client needs."""

    indexes: tuple[str, ...]
    proxy: str = ""
    cert: str = ""

    @classmethod
    def read(cls) -> PipSettings:
        """Read pip's files, as pip itself lists them, and the environment, which takes precedence."""
        values = dict(_from_files())
        for name in ("index-url", "extra-index-url", "no-index", "proxy", "cert"):
            values[name] = os.environ.get(f"PIP_{name.upper().replace('-', '_')}") or values.get(name, "")
        if values["no-index"].lower() in ("1", "true", "yes", "on"):
            return cls(())
        main = values["index-url"] or _default_index()
        return cls((main, *values["extra-index-url"].split()), values["proxy"], values["cert"])


def _from_files() -> Mapping[str, str]:
    """Return what ``pip config list`` prints, of several sections the last; empty if there is no pip to run."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for command in ([sys.executable, "-m", "pip"], ["pip"]):
        try:
            done = subprocess.run([*command, "config", "list"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        for line in done.stdout.splitlines() if done.returncode == 0 else ():
            name, _, value = line.partition("=")
            section, _, key = name.partition(".")
            if section in found:
                with contextlib.suppress(ValueError, SyntaxError):
                    value = str(ast.literal_eval(value))
                found[section][key] = value
        if done.returncode == 0:
            break
    return {key: value for section in _SECTIONS for key, value in found[section].items()}


def _default_index() -> str:
    """Return the index that pip asks by default; only pip knows its address."""
    try:
        return str(importlib.import_module("pip._internal.models.index").PyPI.simple_url)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "no package index is set, and there is no pip to ask for the usual one",
            where="PIP_INDEX_URL",
            fix="set PIP_INDEX_URL to the address of an index, or install pip",
        ) from error


OnBytes = Callable[[int], None]
"""Called with the number of bytes that arrived."""

# The pause between two attempts.
PAUSE_S = 0.5
_CHUNK: Final = 1 << 17
_TIMEOUT_S: Final = 60.0
_log = logging.getLogger(__name__)


class ServerUnreachable(Exception):
    """The server did not answer, or broke off."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A server's response: status, headers in lower case, and the body if the status was the wanted one."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class HttpClient(Protocol):
    """A client for package indexes and wheels."""

    @property
    def indexes(self) -> Sequence[str]:
        """The package indexes that the user has set, in the order to ask them."""

    def get(
        self, url: str, headers: Mapping[str, str], *, want: int = 200, heard: OnBytes = lambda count: None
    ) -> HttpResponse:
        """Request once. The body is read only if the status is ``want``: another may come with a wheel of 300 MB."""


def client() -> HttpClient:
    """Return pip's session, or the plain client if there is no pip or it is built differently."""
    try:
        return PipClient()
    # A pip that this was not written for must not make the audit fail, whatever it raises.
    except (Exception, SystemExit) as error:
        _log.debug("pip's own session cannot be used: %r", error)
        return PlainClient(PipSettings.read())


class PipClient:
    """pip's own session: its index, proxy, certificates, netrc and keyring."""

    def __init__(self) -> None:
        with _importable_pip(), _same_distutils(), _quiet():
            command: Any = importlib.import_module("pip._internal.commands").create_command("download")
            # pip's cache would answer a range with a whole wheel, and a question on the terminal would hang a job.
            options, _ = command.parse_args(["--no-cache-dir", "--no-input", "vllm"])
            # What a session raises from pip 26 on is no longer an OSError.
            self._error: type[Exception] = importlib.import_module("pip._internal.exceptions").PipError
            # Its retries would sleep as long as a server asks for, which may be an hour.
            self._session: Any = command._build_session(options, retries=0)
        chosen = [] if options.no_index else [options.index_url, *options.extra_index_urls]
        self.indexes: Sequence[str] = tuple(str(url) for url in chosen)

    def get(
        self, url: str, headers: Mapping[str, str], *, want: int = 200, heard: OnBytes = lambda count: None
    ) -> HttpResponse:
        """Request through the session."""
        if urlsplit(url).scheme == "file":
            return _from_disk(url, headers, want)
        try:
            with _quiet(), self._session.get(url, headers=_plain(headers), stream=True) as response:
                known = {str(key).lower(): str(value) for key, value in response.headers.items()}
                pieces = response.iter_content(_CHUNK) if response.status_code == want else ()
                return HttpResponse(response.status_code, known, _gathered(pieces, heard))
        # The errors of requests are OSErrors, those of urllib3 about addresses ValueErrors.
        except (OSError, ValueError, self._error) as error:
            # After its last retry the session gives the status in words only.
            if said := re.search(r"too many (\d{3}) error responses", str(error)):
                return HttpResponse(int(said[1]), {})
            raise ServerUnreachable(_reason(error)) from error


class PlainClient:
    """The standard library's client, with the indexes, proxy and certificates of pip's settings."""

    def __init__(self, settings: PipSettings) -> None:
        self.indexes: Sequence[str] = settings.indexes
        try:
            context = ssl.create_default_context(cafile=settings.cert or None)
        except (OSError, ssl.SSLError) as error:
            what = f"the certificates cannot be read: {error}"
            raise ConfigError(what, where=settings.cert, fix="correct PIP_CERT") from error
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
        if settings.proxy:
            handlers.append(urllib.request.ProxyHandler({"http": settings.proxy, "https": settings.proxy}))
        self._opener = urllib.request.build_opener(*handlers)
        self._passwords = {split.netloc.rpartition("@")[2]: split for split in map(urlsplit, self.indexes)}

    def get(
        self, url: str, headers: Mapping[str, str], *, want: int = 200, heard: OnBytes = lambda count: None
    ) -> HttpResponse:
        """Request with urllib."""
        scheme = urlsplit(url).scheme
        if scheme == "file":
            return _from_disk(url, headers, want)
        if scheme not in ("http", "https"):
            raise ServerUnreachable(f"{scheme or 'no scheme'} is not http, https or file")
        request = urllib.request.Request(without_password(url), headers={"User-Agent": "vllm-graft", **_plain(headers)})
        address = urlsplit(url)
        host = address.netloc.rpartition("@")[2]
        holder = address if address.username else self._passwords.get(host, address)
        user, password = unquote(holder.username or ""), unquote(holder.password or "")
        if not user:
            with contextlib.suppress(OSError, netrc.NetrcParseError):
                found = netrc.netrc().authenticators(address.hostname or "")
                user, password = (found[0], found[2] or "") if found else ("", "")
        if word := (f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}" if user else ""):
            # A redirect to another host must not carry it along.
            request.add_unredirected_header("Authorization", word)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                known = {key.lower(): value for key, value in response.headers.items()}
                pieces = iter(lambda: response.read(_CHUNK), b"") if response.status == want else ()
                return HttpResponse(response.status, known, _gathered(pieces, heard))
        except urllib.error.HTTPError as error:
            with error:
                return HttpResponse(error.code, {key.lower(): value for key, value in error.headers.items()})
        except (OSError, ValueError, HTTPException) as error:
            raise ServerUnreachable(_reason(error)) from error


def retry_once(ask: Callable[[], HttpResponse]) -> HttpResponse:
    """Request, and once more if the server did not answer or had an internal error."""
    with contextlib.suppress(ServerUnreachable):
        answer = ask()
        if answer.status < 500:
            return answer
    time.sleep(PAUSE_S)
    return ask()


def without_password(url: str) -> str:
    """Return an address without user, password and fragment, fit for showing and storing."""
    split = urlsplit(url)
    return urlunsplit((split.scheme, split.netloc.rpartition("@")[2], split.path, split.query, ""))


def refusal(answer: HttpResponse, url: str, fix: str) -> ConfigError:
    """Return the error for a response that is not the wanted one."""
    status = answer.status
    where = without_password(url)
    if status in (401, 403, 407):
        what = f"the server denies access (HTTP {status})"
        fix = f"give pip the index, user or proxy that may read it (`pip config`, netrc), or {fix}"
    elif status in (404, 410):
        what = f"the server does not have it (HTTP {status})"
    elif status == 429:
        after = answer.headers.get("retry-after", "")
        what = "the server has had too many requests from here (HTTP 429)"
        fix = f"wait {f'{after} s' if after.isdigit() else 'a minute'} and try again, or {fix}"
    else:
        what = f"the server answers with HTTP {status}"
        fix = f"try again later, or {fix}"
    return ConfigError(what, where=where, fix=fix)


def _plain(headers: Mapping[str, str]) -> dict[str, str]:
    # A compressed answer has no relation to the range that was asked for.
    return {"Accept-Encoding": "identity", **headers}


def _gathered(pieces: Iterator[bytes] | Sequence[bytes], heard: OnBytes) -> bytes:
    body = bytearray()
    for piece in pieces:
        body += piece
        heard(len(piece))
    return bytes(body)


def _from_disk(url: str, headers: Mapping[str, str], want: int) -> HttpResponse:
    """Answer for an index or a wheel in a local folder, as a server would."""
    path = Path(url2pathname(urlsplit(url).path))
    path = path / "index.html" if path.is_dir() else path
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", ""))
    if not path.is_file():
        return HttpResponse(404, {})
    if not asked:
        return HttpResponse(200, {"content-type": "text/html"}, path.read_bytes() if want == 200 else b"")
    first, last = int(asked[1]), int(asked[2])
    with path.open("rb") as file:
        file.seek(first)
        body = file.read(last - first + 1)
    span = f"bytes {first}-{first + len(body) - 1}/{path.stat().st_size}"
    return HttpResponse(206, {"content-range": span}, body)


def _reason(error: BaseException) -> str:
    """Return the innermost reason: the layers of requests and urllib around it explain nothing."""
    inner = error if isinstance(error, OSError | ValueError | HTTPException) else error.__context__ or error
    for _ in range(8):
        args = [each for each in (getattr(inner, "reason", None), *inner.args) if isinstance(each, BaseException)]
        if not args:
            break
        inner = args[0]
    # urllib3 puts the address of an object of its own in front.
    return re.sub(r"^<?[\w.]*\w+ ?object at 0x[0-9a-f]+>?: ", "", str(inner)) or type(inner).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence pip's warnings on retries, which are for pip's own terminal."""
    logger = logging.getLogger("pip")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _importable_pip() -> Iterator[None]:
    """Make pip importable in an environment without it: Python bundles one for new environments."""
    bundled = None
    if importlib.util.find_spec("pip") is None and (found := importlib.util.find_spec("ensurepip")) and found.origin:
        bundled = next((str(wheel) for wheel in Path(found.origin).parent.glob("_bundled/pip-*.whl")), None)
    if bundled is None:
        yield
        return
    sys.path.append(bundled)
    try:
        yield
    finally:
        sys.path.remove(bundled)


@contextlib.contextmanager
def _same_distutils() -> Iterator[None]:
    """Restore the process's distutils: importing pip disables setuptools' own for good.

    A later import of setuptools, as torch does, would fail at one of its assertions.
    """
    before = {name for name in sys.modules if name.partition(".")[0] == "distutils"}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "distutils" and name not in before]:
            del sys.modules[name]
        for finder in sys.meta_path:
            if type(finder).__name__ == "DistutilsMetaFinder":
                vars(finder).pop("spec_for_distutils", None)


_ACCEPT: Final = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.1, text/html;q=0.01"


@dataclass(frozen=True, slots=True)
class WheelLink:
    """A wheel on an index.

    url:       its address, without user and password
    size:      its bytes, if the index says
    version:   the version in its name, with a local part such as "+cu129" if it has one
    yanked:    whether the project has withdrawn it
    """

    url: str
    size: int | None
    version: str
    filename: str
    yanked: bool = False


class PackageIndex:
    """The distribution ``vllm`` on all indexes that pip uses; each is requested once."""

    def __init__(self, http: HttpClient | None = None, *, distribution: str = "vllm") -> None:
        self.distribution = distribution
        self._http = http
        self._failures: list[ConfigError] = []
        self._lacking: list[ConfigError] = []

    @cached_property
    def client(self) -> HttpClient:
        """The client for the index and its wheels."""
        return self._http or client()

    def versions(self, *, pre: bool = False) -> list[str]:
        """Return the releases that have a wheel, oldest first, without local parts; with ``pre`` also pre-releases."""
        offered = {Version(Version(link.version).public) for link in self._links if not link.yanked}
        return [str(version) for version in sorted(offered) if pre or not version.is_prerelease]

    def wheel(self, version: str) -> WheelLink:
        """Return a wheel of a release, preferably for Linux on x86-64: the Python files of all are the same."""
        wanted = parsed(version)
        found = [(link, Version(link.version)) for link in self._links]
        links = [
            (link.yanked, offered != wanted, not ("linux" in link.filename and "x86_64" in link.filename), link)
            for link, offered in found
            if offered == wanted or (wanted.local is None and Version(offered.public) == wanted)
        ]
        if not links:
            versions = self.versions() or self.versions(pre=True)
            what = f"there is no wheel of vLLM {wanted}"
            if versions:
                what += f"; the nearest is {nearest_version(wanted, versions)}, the newest {versions[-1]}"
            if self._failures:
                what += f"; {len(self._failures)} of {len(self.client.indexes)} indexes did not answer: "
                what += "; ".join(f"{failure.where}: {failure.what}" for failure in self._failures)
            where = " ".join(without_password(url) for url in self.client.indexes)
            raise ConfigError(what, where=where, fix="name one of these, or add an index with PIP_EXTRA_INDEX_URL")
        return min(links, key=lambda each: (*each[:3], each[3].size is None, each[3].filename))[3]

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
            answer = retry_once(lambda: self.client.get(url, {"Accept": _ACCEPT}))
        except ServerUnreachable as error:
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


def by_hand(version: str = "") -> str:
    """Return the next step that always works."""
    pinned = f"vllm=={version}" if version else "vllm"
    return f"download the wheel elsewhere (`pip download --no-deps {pinned}`) and name it with --wheel"


def parsed(version: str) -> Version:
    """Parse the number of a release; ConfigError if it is not one."""
    try:
        return Version(version)
    except InvalidVersion as error:
        raise ConfigError(f"{version!r} is not a version", fix="name a release such as 0.31.0") from error


def number_of(version: str) -> str:
    """Return a release as the index writes it: three numbers, without a build tag."""
    found = parsed(version)
    return f"{found.public}.0" if found.public == f"{found.major}.{found.minor}" else found.public


def nearest_version(wanted: Version, versions: list[str]) -> str:
    """Return the version among sorted ones that shares most of the number, preferably the one just below."""

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


def _links(answer: HttpResponse, url: str) -> Iterator[WheelLink]:
    text = answer.body.decode("utf-8", errors="replace")
    if "json" in answer.headers.get("content-type", ""):
        rows = _from_json(text, url)
    else:
        page = _Anchors()
        page.feed(text)
        rows = ((urljoin(page.base, each["href"] or ""), None, "data-yanked" in each) for each in page.found)
    for address, size, yanked in rows:
        target = without_password(urljoin(url, address))
        filename = unquote(urlsplit(target).path.rpartition("/")[2])
        # A page from the network must not make us read local files.
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


class _Anchors(HTMLParser):
    """The links of a page, and the address that they are relative to, if the page names one."""

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
