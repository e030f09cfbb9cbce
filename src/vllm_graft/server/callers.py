"""Who a caller is, from a file that the operator writes: the tenant and the best priority behind a key or a header.

tenant_header = "X-Tenant"      # a header that your gateway sets, and that clients cannot; or keys, or both

[[caller]]
tenant = "acme"
key_sha256 = ["<the key's hash>"]
best_priority = 1               # asks for less, get that; asks for more, get this
priority = 3                    # where the request names none

[others]                        # without this table, who is nobody of these is turned away
tenant = "others"
best_priority = 5
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_graft.errors import ConfigError, nearest
from vllm_graft.plan import Plan

_LOG: Final = logging.getLogger("vllm.graft")

_TOP: Final = ("tenant_key", "tenant_header", "key_header", "caller", "others")
_CALLER: Final = ("tenant", "key_sha256", "best_priority", "priority")
_OTHERS: Final = ("tenant", "best_priority", "priority")
_LOOK_S: Final = 5.0
_NAME_IT: Final = "name a file of callers in `callers`"
_LARGEST: Final = 8 << 20
"""More bytes than any file of callers has: fifty thousand of them take 8 MiB."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may ask: the tenant that is served, the best priority, and the one of requests that name none."""

    tenant: str
    best_priority: int
    priority: int

    def capped(self, asked: int) -> int:
        """The priority a request gets; smaller goes first, and what is not above 0 counts as not named."""
        return max(asked, self.best_priority) if asked > 0 else self.priority


@dataclass(frozen=True, slots=True)
class Callers:
    """Every caller of a file.

    tenant_key:    the name under which the tenant travels among a request's ``vllm_xargs``
    tenant_header: the header that names the tenant; empty where keys do
    key_header:    the header that carries a key
    """

    tenant_key: str
    tenant_header: str
    key_header: str
    by_key: Mapping[str, Caller]
    by_tenant: Mapping[str, Caller]
    others: Caller | None

    @classmethod
    def read(cls, path: str | Path) -> Callers:
        """Read and check a file; every fault is a ConfigError with its place."""
        try:
            data = tomllib.loads(_content(path).decode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            fix = "correct `callers`, or make the file readable"
            raise ConfigError(f"cannot be read: {error}", where=str(path), fix=fix) from None
        except (RecursionError, ValueError) as error:
            # Besides TOMLDecodeError: tables nested too deeply, and numbers with more digits than Python reads.
            raise ConfigError(f"is not valid TOML: {error}", where=str(path), fix="correct the syntax there") from None
        return _Reader(str(path)).callers(data)

    def fits(self, plan: Plan) -> None:
        """ConfigError where the planned scheduler would read the tenant from elsewhere, which clients write."""
        for item in plan.of("scheduler"):
            sources, key = item.options.get("tenant_from"), item.options.get("tenant_key")
            if isinstance(sources, list) and sources[:1] != ["xargs"]:
                raise ConfigError(
                    f"{item.name} reads tenants from {sources}, so that callers' tenants would not count",
                    where=f"option tenant_from of {item.name}",
                    fix='put "xargs" first, or take `callers` out',
                )
            if key is not None and key != self.tenant_key:
                raise ConfigError(
                    f"{item.name} reads tenants under {key!r}, and callers' tenants travel under {self.tenant_key!r}",
                    where=f"option tenant_key of {item.name}",
                    fix="give both the same name",
                )

    def who(self, header: Callable[[str], str]) -> Caller | None:
        """Who asks, by the request's headers; None for nobody that is let in."""
        key = header(self.key_header).strip()
        if key[:7].lower() == "bearer ":
            key = key[7:].strip()
        found = self.by_key.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()) if key else None
        if found is not None:
            return found
        named = header(self.tenant_header).strip() if self.tenant_header else ""
        if named in self.by_tenant:
            return self.by_tenant[named]
        if named and self.others is not None:
            return Caller(named, self.others.best_priority, self.others.priority)
        return self.others


def _content(path: str | Path) -> bytes:
    """Read a regular file of at most ``_LARGEST`` bytes; a pipe would wait for a writer for ever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError("is not a regular file", where=str(path), fix=_NAME_IT)
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ConfigError(f"is larger than {_LARGEST >> 20} MiB", where=str(path), fix=_NAME_IT)
    return content


class _Reader:
    """Reads one file; knows where it is for its errors."""

    def __init__(self, path: str) -> None:
        self._path = path

    def callers(self, data: Mapping[str, Any]) -> Callers:
        self._known(data, _TOP, "the file")
        tenant_header = self._text(data, "tenant_header", "the file", "")
        rows = data.get("caller", [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self._error("callers are an array of tables", "write [[caller]], not [caller]")
        by_key: dict[str, Caller] = {}
        by_tenant: dict[str, Caller] = {}
        for number, row in enumerate(rows, 1):
            place = f"caller {number}"
            self._known(row, _CALLER, place)
            caller = self._caller(row, place)
            keys = self._keys(row, place)
            if not keys and not tenant_header:
                raise self._error(f"{place} ({caller.tenant}) has no key", "add key_sha256, or name a tenant_header")
            for key in keys:
                if key in by_key:
                    raise self._error(f"{place} ({caller.tenant}) has a key of {by_key[key].tenant}", "take one out")
                by_key[key] = caller
            if tenant_header and by_tenant.setdefault(caller.tenant, caller) is not caller:
                raise self._error(f"there are two callers {caller.tenant!r}", "make them one, with both keys")
        others = self._others(data.get("others"))
        if not rows and others is None:
            raise self._error("lets nobody in", "add a [[caller]] or [others]")
        tenant_key = self._text(data, "tenant_key", "the file", "tenant")
        key_header = self._text(data, "key_header", "the file", "Authorization")
        return Callers(tenant_key, tenant_header, key_header, by_key, by_tenant if tenant_header else {}, others)

    def _others(self, given: object) -> Caller | None:
        if given is None:
            return None
        if not isinstance(given, dict):
            raise self._error("`others` must be a table", "write [others]")
        self._known(given, _OTHERS, "others")
        return self._caller({"tenant": "others", **given}, "others")

    def _caller(self, row: Mapping[str, Any], place: str) -> Caller:
        tenant = self._text(row, "tenant", place, "")
        if not tenant:
            raise self._error(f"{place} has no tenant", 'add a line such as tenant = "acme"')
        best = self._priority(row, "best_priority", place, 1)
        usual = self._priority(row, "priority", place, best)
        if usual < best:
            what = f"{place} ({tenant}): priority {usual} is better than best_priority {best}"
            raise self._error(what, "correct one of the two")
        return Caller(tenant, best, usual)

    def _keys(self, row: Mapping[str, Any], place: str) -> list[str]:
        given = row.get("key_sha256", [])
        keys = [given] if isinstance(given, str) else given
        if not isinstance(keys, list) or not all(isinstance(key, str) and _HASH.fullmatch(key) for key in keys):
            what = f"{place}: key_sha256 must be SHA-256 hashes of 64 hexadecimal digits"
            raise self._error(what, "hash each key: printf %s KEY | sha256sum")
        return [key.lower() for key in keys]

    def _priority(self, row: Mapping[str, Any], name: str, place: str, default: int) -> int:
        value = row.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1000:
            raise self._error(f"{place}: {name} must be a whole number from 1 (first), and is {value!r}", "correct it")
        return value

    def _text(self, row: Mapping[str, Any], name: str, place: str, default: str) -> str:
        value = row.get(name, default)
        if not isinstance(value, str):
            raise self._error(f"{place}: {name} must be text, and is {value!r}", "put it in quotes")
        return value

    def _known(self, row: Mapping[str, Any], allowed: tuple[str, ...], place: str) -> None:
        for name in row:
            if name not in allowed:
                raise self._error(f"{place}: unknown key {name!r}{nearest(name, allowed)}", "correct or remove it")

    def _error(self, what: str, fix: str) -> ConfigError:
        return ConfigError(what, where=self._path, fix=fix)


_HASH: Final = re.compile(r"[0-9a-fA-F]{64}")


class CallersFile:
    """The callers of a file that may change while the server runs; a file that has become wrong changes nothing."""

    def __init__(self, path: str, plan: Plan) -> None:
        self._path = Path(path)
        self._plan = plan
        self._stamp = self._seen()
        self._callers = self._read()
        self._looked = time.monotonic()
        self._looking: threading.Thread | None = None

    def now(self) -> Callers:
        """Return the callers as the file had them when it was last looked at, which happens every few seconds."""
        busy = self._looking is not None and self._looking.is_alive()
        if not busy and time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            # A slow disk or a long file must not hold up the event loop.
            self._looking = threading.Thread(target=self.look, name="graft-callers", daemon=True)
            self._looking.start()
        return self._callers

    def look(self) -> None:
        """Read the file again where it has changed."""
        seen = self._seen()
        if seen != self._stamp:
            self._stamp = seen
            self._read_again()

    def _read(self) -> Callers:
        callers = Callers.read(self._path)
        callers.fits(self._plan)
        return callers

    def _read_again(self) -> None:
        try:
            self._callers = self._read()
            _LOG.info("vllm-graft: %s has changed: %d callers by key", self._path, len(self._callers.by_key))
        except ConfigError as error:
            _LOG.error("vllm-graft: the callers stay as they were: %s", error)

    def _seen(self) -> tuple[int, int]:
        try:
            facts = self._path.stat()
        except OSError:
            return (0, 0)
        return (facts.st_mtime_ns, facts.st_size)
