"""How a server is asked: through pip's own session and settings, else by a plain client that reads the same settings.

pip knows the user's index, proxy, certificates and passwords, and some indexes answer nobody else. Its session is no
public interface, so that every use of it is guarded; what the plain client can do without it, it does.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import logging
import netrc
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit
from urllib.request import url2pathname

from vllm_graft.audit.releases.settings import Settings
from vllm_graft.errors import ConfigError

Heard = Callable[[int], None]
"""Called with the number of bytes that came."""

PAUSE_S = 0.5
"""Between two tries."""

_CHUNK: Final = 1 << 17
_TIMEOUT_S: Final = 60.0
_log = logging.getLogger(__name__)


class Unreachable(Exception):
    """No answer came, or it broke off."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said: the status, the headers in lower case, and the body where the status was the one wanted."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class Client(Protocol):
    """Something that can ask servers.

    ``indexes`` are the package indexes that the user has set, in the order to ask them.
    """

    @property
    def indexes(self) -> Sequence[str]:
        """The addresses of the package indexes."""
        ...

    def get(
        self, url: str, headers: Mapping[str, str], *, want: int = 200, heard: Heard = lambda count: None
    ) -> Answer:
        """Ask once. The body is read only where the status is ``want``: another may come with a wheel of 300 MB."""
        ...


def client() -> Client:
    """The client to use here: pip's session, or the plain one where there is no pip or it is built differently."""
    try:
        return PipClient()
    # Whatever a pip that this was not written for does, it must not keep anybody from auditing.
    except (Exception, SystemExit) as error:
        _log.debug("pip's own session cannot be used: %r", error)
        return PlainClient(Settings.read())


class PipClient:
    """pip's own session: its index, proxy, certificates, netrc and keyring."""

    def __init__(self) -> None:
        with _importable_pip(), _same_distutils(), _quiet():
            command: Any = importlib.import_module("pip._internal.commands").create_command("download")
            # pip's cache would answer a range with a whole wheel, and a question on the terminal would hang a job.
            options, _ = command.parse_args(["--no-cache-dir", "--no-input", "vllm"])
            # What a session raises from pip 26 on is no OSError any more.
            self._error: type[Exception] = importlib.import_module("pip._internal.exceptions").PipError
            # Its retries would sleep as long as a server asks for, which may be an hour.
            self._session: Any = command._build_session(options, retries=0)
        chosen = [] if options.no_index else [options.index_url, *options.extra_index_urls]
        self.indexes: Sequence[str] = tuple(str(url) for url in chosen)

    def get(
        self, url: str, headers: Mapping[str, str], *, want: int = 200, heard: Heard = lambda count: None
    ) -> Answer:
        """Ask through the session."""
        if urlsplit(url).scheme == "file":
            return _from_disk(url, headers, want)
        try:
            with _quiet(), self._session.get(url, headers=_plain(headers), stream=True) as response:
                known = {str(key).lower(): str(value) for key, value in response.headers.items()}
                pieces = response.iter_content(_CHUNK) if response.status_code == want else ()
                return Answer(response.status_code, known, _gathered(pieces, heard))
        # The errors of requests are OSErrors, those of urllib3 about addresses ValueErrors.
        except (OSError, ValueError, self._error) as error:
            # After its last retry the session speaks of the status in words only.
            if said := re.search(r"too many (\d{3}) error responses", str(error)):
                return Answer(int(said[1]), {})
            raise Unreachable(_reason(error)) from error


class PlainClient:
    """The standard library's client, with what the settings say of indexes, proxy and certificates."""

    def __init__(self, settings: Settings) -> None:
        self.indexes: Sequence[str] = settings.indexes
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=_tls(settings.cert))]
        if settings.proxy:
            handlers.append(urllib.request.ProxyHandler({"http": settings.proxy, "https": settings.proxy}))
        self._opener = urllib.request.build_opener(*handlers)
        self._passwords = {split.netloc.rpartition("@")[2]: split for split in map(urlsplit, self.indexes)}

    def get(
        self, url: str, headers: Mapping[str, str], *, want: int = 200, heard: Heard = lambda count: None
    ) -> Answer:
        """Ask with a request of our own."""
        scheme = urlsplit(url).scheme
        if scheme == "file":
            return _from_disk(url, headers, want)
        if scheme not in ("http", "https"):
            raise Unreachable(f"{scheme or 'no scheme'} is not http, https or file")
        request = urllib.request.Request(without_password(url), headers={"User-Agent": "vllm-graft", **_plain(headers)})
        if word := self._authorization(urlsplit(url)):
            # A redirect to another host must not carry it along.
            request.add_unredirected_header("Authorization", word)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                known = {key.lower(): value for key, value in response.headers.items()}
                pieces = iter(lambda: response.read(_CHUNK), b"") if response.status == want else ()
                return Answer(response.status, known, _gathered(pieces, heard))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, {key.lower(): value for key, value in error.headers.items()})
        except (OSError, ValueError, HTTPException) as error:
            raise Unreachable(_reason(error)) from error

    def _authorization(self, url: SplitResult) -> str:
        host = url.netloc.rpartition("@")[2]
        holder = url if url.username else self._passwords.get(host, url)
        user, password = unquote(holder.username or ""), unquote(holder.password or "")
        if not user:
            with contextlib.suppress(OSError, netrc.NetrcParseError):
                found = netrc.netrc().authenticators(url.hostname or "")
                user, password = (found[0], found[2] or "") if found else ("", "")
        return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}" if user else ""


def patiently(ask: Callable[[], Answer]) -> Answer:
    """Ask, and once more where no answer came or the server is in trouble."""
    with contextlib.suppress(Unreachable):
        answer = ask()
        if answer.status < 500:
            return answer
    time.sleep(PAUSE_S)
    return ask()


def without_password(url: str) -> str:
    """An address fit for showing and keeping: no user, no password, no fragment."""
    split = urlsplit(url)
    return urlunsplit((split.scheme, split.netloc.rpartition("@")[2], split.path, split.query, ""))


def refusal(answer: Answer, url: str, fix: str) -> ConfigError:
    """What to raise where a server answered and did not give what was asked for."""
    status = answer.status
    where = without_password(url)
    if status in (401, 403, 407):
        what = f"the server refuses to give it (HTTP {status})"
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


def _gathered(pieces: Iterator[bytes] | Sequence[bytes], heard: Heard) -> bytes:
    body = bytearray()
    for piece in pieces:
        body += piece
        heard(len(piece))
    return bytes(body)


def _from_disk(url: str, headers: Mapping[str, str], want: int) -> Answer:
    """An index or a wheel in a folder of this machine answers like a server."""
    path = Path(url2pathname(urlsplit(url).path))
    path = path / "index.html" if path.is_dir() else path
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", ""))
    if not path.is_file():
        return Answer(404, {})
    if not asked:
        return Answer(200, {"content-type": "text/html"}, path.read_bytes() if want == 200 else b"")
    first, last = int(asked[1]), int(asked[2])
    with path.open("rb") as file:
        file.seek(first)
        body = file.read(last - first + 1)
    span = f"bytes {first}-{first + len(body) - 1}/{path.stat().st_size}"
    return Answer(206, {"content-range": span}, body)


def _tls(cert: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cert or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificates cannot be read: {error}", where=cert, fix="correct PIP_CERT") from error


def _reason(error: BaseException) -> str:
    """The innermost reason: what requests and urllib wrap around it says nothing to a person."""
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
    """pip's warnings on retries are for pip's own terminal; ours says what became of it."""
    logger = logging.getLogger("pip")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _importable_pip() -> Iterator[None]:
    """An environment made without pip still has the one that Python brings along for new environments."""
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
    """Leave the process with the distutils it would have had: importing pip sets setuptools' own aside for good.

    Whoever imported setuptools afterwards, as torch does, would stop at an assertion of its.
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
