"""The tenant of a request, and the weights of tenants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2s
from typing import Final

from vllm_graft.contracts import OptionError, WaitingRequest, nearest

LONGEST: Final = 128
"""Names are truncated to this length: they are clients' words, and are kept."""

_MOST_BITS: Final = 256
"""Longer integers are no names: Python refuses to convert those of more than 4300 digits to text."""

_ENDPOINTS: Final = ("chatcmpl-", "cmpl-", "resp_", "resp-")


def tenant_reader(sources: Sequence[str], key: str, item: str) -> Callable[[WaitingRequest], str]:
    """Return a function that reads a request's tenant from the first source that has one, else the empty name.

    Sources: ``xargs`` (the value of ``key`` among its ``vllm_xargs``, text or a number), ``cache_salt``, ``lora``, and
    ``request_id`` (the part before the first hyphen of an ``X-Request-Id`` that the gateway sets).
    """
    known: Mapping[str, Callable[[WaitingRequest], object]] = {
        "xargs": lambda request: request.extra.get(key),
        "cache_salt": lambda request: request.cache_salt,
        "lora": lambda request: request.lora,
        "request_id": _prefix,
    }
    for source in sources:
        if source not in known:
            what = f"names {source!r}, which a tenant cannot be read from{nearest(source, known)}"
            raise OptionError(what, option="tenant_from", item=item, fix=f"use {list(known)}")
    if not sources:
        what = "names no source of tenants"
        raise OptionError(what, option="tenant_from", item=item, fix=f"name some of {list(known)}")
    readers = [known[source] for source in sources]

    def tenant(request: WaitingRequest) -> str:
        for read in readers:
            name = _name(read(request))
            if name:
                return name
        return ""

    return tenant


def display_name(tenant: str, request: WaitingRequest) -> str:
    """Return the name of a tenant in status and metrics.

    A cache salt is a secret that keeps others from guessing prompts, so it shows as a hash.
    """
    if not tenant or tenant != request.cache_salt[:LONGEST]:
        return tenant
    return f"salt-{blake2s(request.cache_salt.encode('utf-8', 'replace'), digest_size=6).hexdigest()}"


def parse_weights(rows: Sequence[str], item: str) -> dict[str, float]:
    """Parse weights written as ``tenant=weight``."""
    weights: dict[str, float] = {}
    for row in rows:
        name, equals, text = row.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not equals or not name or not 1e-6 <= weight <= 1e6:
            what = f"holds {row!r}, which is not a tenant and its weight"
            raise OptionError(what, option="weights", item=item, fix='write "tenant=2", the weight above 0')
        if name in weights:
            what = f"gives the tenant {name!r} two weights"
            raise OptionError(what, option="weights", item=item, fix="remove one of them")
        weights[name] = weight
    return weights


def _name(value: object) -> str:
    """Return a tenant's name as a client wrote it, text or a number; empty for anything else.

    Converting a list nested a thousand times to text would be a RecursionError, with which one client's request would
    have the scheduler put aside.
    """
    if isinstance(value, str):
        return value[:LONGEST]
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= _MOST_BITS):
        return str(value)[:LONGEST]
    return ""


def _prefix(request: WaitingRequest) -> str:
    name = request.request_id
    for endpoint in _ENDPOINTS:
        name = name.removeprefix(endpoint)
    prefix, hyphen, _ = name.partition("-")
    return prefix if hyphen else ""
