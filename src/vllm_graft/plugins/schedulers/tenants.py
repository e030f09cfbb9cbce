"""The tenant of a request, from what it carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2s
from typing import Final

from vllm_graft.contracts import WaitingRequest
from vllm_graft.errors import OptionError, nearest

LONGEST: Final = 128
"""Names are cut to this length: they are clients' words, and are kept."""

_MOST_BITS: Final = 256
"""Longer integers are no names. Python refuses to write those of more than 4300 digits as text."""

_ENDPOINTS: Final = ("chatcmpl-", "cmpl-", "resp_", "resp-")


def reader(sources: Sequence[str], key: str, item: str) -> Callable[[WaitingRequest], str]:
    """A function that gives a request's tenant: the first of the sources that has one, else the empty name.

    Sources: ``xargs`` (the value of ``key`` among its ``vllm_xargs``, text or a number), ``cache_salt``, ``lora``, and
    ``request_id`` (what stands before the first hyphen of an ``X-Request-Id`` that the gateway sets).
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
        what = "says nowhere to read the tenant from"
        raise OptionError(what, option="tenant_from", item=item, fix=f"name some of {list(known)}")
    readers = [known[source] for source in sources]

    def tenant(request: WaitingRequest) -> str:
        for read in readers:
            name = _name(read(request))
            if name:
                return name
        return ""

    return tenant


def shown_as(tenant: str, request: WaitingRequest) -> str:
    """The name under which a tenant shows in status and metrics.

    A cache salt keeps others from guessing prompts, and must not be read there: it shows as a hash.
    """
    if not tenant or tenant != request.cache_salt[:LONGEST]:
        return tenant
    return f"salt-{blake2s(request.cache_salt.encode('utf-8', 'replace'), digest_size=6).hexdigest()}"


def weights_of(rows: Sequence[str], item: str) -> dict[str, float]:
    """Weights written as ``tenant=weight``."""
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
            raise OptionError(what, option="weights", item=item, fix="take one of them out")
        weights[name] = weight
    return weights


def _name(value: object) -> str:
    """Return a tenant's name as a client wrote it: text or a number. Anything else is none.

    A list nested a thousand times cannot be written as text: that would be a RecursionError, and one client's request
    would have the scheduler put aside.
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
