"""The callers of a server, and their tenant and priority on every request that its engine is sent.

The operator writes a file that maps keys, or a header, to tenants and priorities::

    tenant_header = "X-Tenant"      # a header that your gateway sets and clients cannot; or keys, or both

    [[caller]]
    tenant = "acme"
    key_sha256 = ["<the key's hash>"]
    best_priority = 1               # a request for a better one gets this
    priority = 3                    # of requests that name none

    [others]                        # without this table, unknown callers are refused
    tenant = "others"
    best_priority = 5

Endpoints differ in what they pass on: beam search drops priorities and ``vllm_xargs``, uploads have neither, later
turns of a conversation with tools get another priority. So nothing is written into HTTP requests. The gate sets the
caller in the context of the task, which every task that vLLM starts for the request inherits, and patches of vLLM's
engine client stamp it on what the engine is sent, whatever way the request took through vLLM.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_graft.errors import ConfigError, PatchError, StartError
from vllm_graft.fields import Fields, parse_toml
from vllm_graft.patching import Engine, VLLMPatch, wrap
from vllm_graft.plan import Plan

_LOG: Final = logging.getLogger("vllm.graft")

_TOP: Final = ("tenant_key", "tenant_header", "key_header", "caller", "others")
_CALLER: Final = ("tenant", "key_sha256", "best_priority", "priority")
_OTHERS: Final = ("tenant", "best_priority", "priority")
_HASH: Final = re.compile(r"[0-9a-fA-F]{64}")
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The name of a header (RFC 9110, 5.1); HTTP sends no other."""
_LOOK_S: Final = 5.0
_NAME_IT: Final = "name a file of callers in `callers`"
_MAX_FILE_BYTES: Final = 8 << 20
"""The largest file of callers in bytes: room for fifty thousand of them."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, the best priority of its requests, and the priority of those that name none."""

    tenant: str
    best_priority: int
    priority: int

    def cap(self, requested: int) -> int:
        """Return the priority of a request; smaller goes first, and what is not above 0 counts as not named."""
        return max(requested, self.best_priority) if requested > 0 else self.priority


@dataclass(frozen=True, slots=True)
class Callers:
    """Every caller of a file.

    tenant_key:    the key of the tenant among a request's ``vllm_xargs``
    tenant_header: the header that names the tenant; empty if keys do
    key_header:    the header that has the key
    """

    tenant_key: str
    tenant_header: str
    key_header: str
    by_key: Mapping[str, Caller]
    by_tenant: Mapping[str, Caller]
    others: Caller | None

    @classmethod
    def read(cls, path: str | Path) -> Callers:
        """Read and validate a file; raise ConfigError with the place of a mistake."""
        try:
            # Opening a pipe would wait for its writer.
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ConfigError("is not a regular file", where=str(path), fix=_NAME_IT)
                content = file.read(_MAX_FILE_BYTES + 1)
            if len(content) > _MAX_FILE_BYTES:
                raise ConfigError(f"is larger than {_MAX_FILE_BYTES >> 20} MiB", where=str(path), fix=_NAME_IT)
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fix = "correct `callers`, or make the file readable"
            raise ConfigError(f"cannot be read: {error}", where=str(path), fix=fix) from None
        data, path = parse_toml(text, str(path)), str(path)
        table = _CallerFields(data, "the file", path)
        table.only(_TOP)
        tenant_header = table.header("tenant_header")
        rows = data.get("caller", [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise table.wrong(None, "callers are an array of tables", "write [[caller]], not [caller]")
        by_key: dict[str, Caller] = {}
        by_tenant: dict[str, Caller] = {}
        for number, row in enumerate(rows, 1):
            fields = _CallerFields(row, f"caller {number}", path)
            fields.only(_CALLER)
            caller, keys = fields.caller(), fields.keys()
            who = f"caller {number} ({caller.tenant})"
            if not keys and not tenant_header:
                raise table.wrong(None, f"{who} has no key", "add key_sha256, or name a tenant_header")
            for key in keys:
                if key in by_key:
                    raise table.wrong(None, f"{who} uses the same key as {by_key[key].tenant}", "remove one of the two")
                by_key[key] = caller
            if tenant_header and by_tenant.setdefault(caller.tenant, caller) is not caller:
                raise table.wrong(None, f"there are two callers {caller.tenant!r}", "make them one, with both keys")
        others = None
        if "others" in table:
            if not isinstance(data["others"], dict):
                raise table.wrong(None, "`others` must be a table", "write [others]")
            fields = _CallerFields({"tenant": "others", **data["others"]}, "others", path)
            fields.only(_OTHERS)
            others = fields.caller()
        if not rows and others is None:
            raise table.wrong(None, "has no caller", "add a [[caller]] or [others]")
        tenant_key, key_header = table.word("tenant_key", "tenant"), table.header("key_header", "Authorization")
        return cls(tenant_key, tenant_header, key_header, by_key, by_tenant, others)

    def check_plan(self, plan: Plan) -> None:
        """Raise ConfigError if the planned scheduler reads the tenant from elsewhere, where clients may write it."""
        for item in plan.of("scheduler"):
            sources, key = item.options.get("tenant_from"), item.options.get("tenant_key")
            if isinstance(sources, list) and sources[:1] != ["xargs"]:
                raise ConfigError(
                    f"{item.name} reads tenants from {sources}, so callers' tenants would not count",
                    where=f"option tenant_from of {item.name}",
                    fix='put "xargs" first, or remove `callers`',
                )
            if key is not None and key != self.tenant_key:
                raise ConfigError(
                    f"{item.name} reads tenants under {key!r}, but callers' tenants travel under {self.tenant_key!r}",
                    where=f"option tenant_key of {item.name}",
                    fix="give both the same name",
                )

    def identify(self, header: Callable[[str], str]) -> Caller | None:
        """Return the caller of a request by its headers; None if it is unknown, and so refused."""
        # A header is decoded as latin-1, so this gives back the bytes that the client sent.
        key = header(self.key_header).strip()
        if key[:7].lower() == "bearer ":
            key = key[7:].strip()
        found = self.by_key.get(hashlib.sha256(key.encode("latin-1", "surrogateescape")).hexdigest()) if key else None
        if found is not None:
            return found
        named = as_utf8(header(self.tenant_header).strip()) if self.tenant_header else ""
        if named in self.by_tenant:
            return self.by_tenant[named]
        if named and self.others is not None:
            return Caller(named, self.others.best_priority, self.others.priority)
        return self.others


def as_utf8(value: str) -> str:
    """Return a header's value, which was decoded as latin-1, as UTF-8 if it is that."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


class _CallerFields(Fields):
    """A table of the file of callers; ``path`` is the place in errors. Errors never show keys, which are secrets."""

    def __init__(self, values: object, what: str, path: str) -> None:
        super().__init__(values, what, lambda key: path)

    def caller(self) -> Caller:
        """Return the caller of this table."""
        tenant = self.word("tenant")
        if not tenant:
            raise self.wrong(None, f"{self._what} has no tenant", 'add a line such as tenant = "acme"')
        best = self.count("best_priority", 1, most=1000)
        usual = self.count("priority", best, most=1000)
        if usual < best:
            what = f"{self._what} ({tenant}): priority {usual} is better than best_priority {best}"
            raise self.wrong(None, what, "correct one of the two")
        return Caller(tenant, best, usual)

    def keys(self) -> list[str]:
        """Return the hashes of this caller's keys."""
        found = self.raw("key_sha256") or []
        keys = [found] if isinstance(found, str) else found
        if not isinstance(keys, list) or not all(isinstance(key, str) and _HASH.fullmatch(key) for key in keys):
            what = f"{self._what}: key_sha256 must be SHA-256 hashes of 64 hexadecimal digits"
            raise self.wrong(None, what, "hash each key: printf %s KEY | sha256sum")
        return [key.lower() for key in keys]

    def word(self, key: str, default: str = "") -> str:
        """Return a string, which may be empty."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, f"{self._what}: {key} must be a string, but is {value!r}", "put it in quotes")
        return value

    def header(self, key: str, default: str = "") -> str:
        """Return the name of a header; an empty one only if that is the default."""
        name = self.word(key, default)
        if name != default and not _HEADER.fullmatch(name):
            raise self.unfit(key, name, "the name of a header: letters, digits and hyphens")
        return name

    def unknown(self, key: str, hint: str) -> ConfigError:
        return self.wrong(key, f"{self._what}: unknown key {key!r}{hint}", "correct or remove it")

    def unfit(self, key: str, value: object, wanted: str) -> ConfigError:
        return self.wrong(key, f"{self._what}: {key} must be {wanted}, but is {value!r}", "correct it")


class CallersFile:
    """The callers of a file that may change while the server runs; one that becomes invalid changes nothing."""

    def __init__(self, path: str, plan: Plan) -> None:
        self._path = Path(path)
        self._plan = plan
        self._stamp = self._seen()
        self._callers = self._read()
        self._looked = time.monotonic()
        self._looking: threading.Thread | None = None

    def now(self) -> Callers:
        """Return the callers as of the last look at the file, at most a few seconds ago."""
        busy = self._looking is not None and self._looking.is_alive()
        if not busy and time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            # In a thread: a slow disk or a long file must not hold up the event loop.
            self._looking = threading.Thread(target=self.look, name="graft-callers", daemon=True)
            self._looking.start()
        return self._callers

    def look(self) -> None:
        """Read the file again if it has changed."""
        seen = self._seen()
        if seen == self._stamp:
            return
        self._stamp = seen
        try:
            self._callers = self._read()
            _LOG.info("vllm-graft: %s has changed: %d callers by key", self._path, len(self._callers.by_key))
        except ConfigError as error:
            _LOG.error("vllm-graft: the callers stay as they were: %s", error)

    def _read(self) -> Callers:
        callers = Callers.read(self._path)
        callers.check_plan(self._plan)
        return callers

    def _seen(self) -> tuple[int, int]:
        try:
            facts = self._path.stat()
        except OSError:
            return (0, 0)
        return (facts.st_mtime_ns, facts.st_size)


CURRENT_CALLER: Final[ContextVar[tuple[str, Caller] | None]] = ContextVar("vllm_graft_caller", default=None)
"""The caller of this task's request, after the key of the tenant among ``vllm_xargs``."""

_WHY: Final = "vLLM's endpoints drop priorities and vllm_xargs on some paths to the engine"


async def _send_stamped(self: Any, call: Callable[..., Awaitable[Any]], request: Any) -> Any:
    # The last moment before the request is sent.
    stamp_caller(request)
    return await call(request)


class CallerStamp(VLLMPatch["vllm.v1.engine.core_client:AsyncMPClient"], name="graft.caller-stamp", why=_WHY):
    """Stamp the caller on each request that an API server sends to its engine."""

    add_request_async = wrap(_send_stamped)


# DPAsyncMPClient overrides the method without calling that of its base.
class ParallelCallerStamp(
    VLLMPatch["vllm.v1.engine.core_client:DPAsyncMPClient"], name="graft.parallel-caller-stamp", why=_WHY
):
    """Stamp the caller on each request to data-parallel engines, whose client has a method of its own."""

    add_request_async = wrap(_send_stamped)


def stamp_caller(request: Any) -> None:
    """Write the tenant and the capped priority of the current caller into vLLM's ``EngineCoreRequest``."""
    current = CURRENT_CALLER.get()
    if current is None:
        return
    key, caller = current
    request.priority = caller.cap(request.priority)
    for params, name in ((request.sampling_params, "extra_args"), (request.pooling_params, "extra_kwargs")):
        if params is not None:
            setattr(params, name, {**(getattr(params, name) or {}), key: caller.tenant})


def install_stamp(client: Any, engine: Engine) -> None:
    """Patch vLLM's engine clients; refuse a client whose requests the patches do not reach."""
    try:
        engine.apply([CallerStamp, ParallelCallerStamp])
        reason = ""
    except PatchError as error:
        reason = f": {error}"
    # The class whose method is called: another package's client may override it, and bypass the patches.
    kinds = type(getattr(client, "engine_core", None)).__mro__
    sender = next((kind for kind in kinds if "add_request_async" in vars(kind)), None)
    stamped = {"AsyncMPClient", "DPAsyncMPClient"}
    if reason or sender is None or sender.__module__ != "vllm.v1.engine.core_client" or sender.__name__ not in stamped:
        raise StartError(
            f"this vLLM's engine client ({type(client).__name__}) has no place where callers can be enforced{reason}",
            where="engine_core.add_request_async",
            fix="install a vLLM of the tested range, or remove `callers` from the configuration",
        )
