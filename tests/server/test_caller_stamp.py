"""The caller's stamp on what the engine is sent, whatever way a request took through vLLM."""

import asyncio
from types import SimpleNamespace

import pytest

from vllm_graft.errors import StartError
from vllm_graft.patching import Engine
from vllm_graft.server.callers import CURRENT_CALLER, Caller, install_stamp

core_client = pytest.importorskip("vllm.v1.engine.core_client")

ACME = ("tenant", Caller("acme", 2, 3))
CLIENTS = ["AsyncMPClient", "DPAsyncMPClient", "DPLBAsyncMPClient"]


@pytest.fixture(params=CLIENTS)
def client(request, monkeypatch):
    """An engine client of vLLM's of each kind, stamped; ``sent`` has what it would send to the engine."""
    sent = []

    async def add_request_async(self, request):
        sent.append(request)

    for name in ("AsyncMPClient", "DPAsyncMPClient"):
        monkeypatch.setattr(getattr(core_client, name), "add_request_async", add_request_async)
    core = object.__new__(getattr(core_client, request.param))
    made = SimpleNamespace(engine_core=core, sent=sent)
    engine = Engine()
    install_stamp(made, engine)
    yield made
    engine.revert_all()


def sent_by(client, caller, **facts):
    """What an engine is sent by a client in whose task the caller is set."""
    request = SimpleNamespace(**{"priority": 0, "sampling_params": None, "pooling_params": None, **facts})

    async def work():
        CURRENT_CALLER.set(caller)
        # As vLLM does for streams, cancellation and background responses.
        await asyncio.create_task(client.engine_core.add_request_async(request))

    asyncio.run(work())
    assert client.sent.pop() is request
    assert not client.sent
    return request


@pytest.mark.parametrize(("asked", "given"), [(0, 3), (1, 2), (-4, 3), (5, 5)])
def test_a_request_has_its_caller_s_tenant_and_priority(client, asked, given):
    """Whatever else it carries stays."""
    params = SimpleNamespace(extra_args={"tenant": "mighty", "other": 1})
    request = sent_by(client, ACME, priority=asked, sampling_params=params)
    assert (request.priority, params.extra_args) == (given, {"tenant": "acme", "other": 1})


def test_a_request_that_carries_nothing_has_it_too(client):
    """Beam search and uploads pass nothing on; pooling has another place for it."""
    params = SimpleNamespace(extra_args=None)
    assert sent_by(client, ACME, sampling_params=params).sampling_params.extra_args == {"tenant": "acme"}
    params = SimpleNamespace(extra_kwargs=None)
    assert sent_by(client, ACME, pooling_params=params).pooling_params.extra_kwargs == {"tenant": "acme"}


def test_where_nobody_was_asked_a_request_stays_as_it_is(client):
    """Such as vLLM's own."""
    params = SimpleNamespace(extra_args={"tenant": "kept"})
    request = sent_by(client, None, priority=1, sampling_params=params)
    assert (request.priority, params.extra_args) == (1, {"tenant": "kept"})


class Foreign:
    """An engine client of another package, which the patches do not reach."""

    async def add_request_async(self, request):
        raise AssertionError


@pytest.mark.parametrize("core", [None, Foreign()], ids=["none", "foreign"])
def test_a_client_without_such_a_place_stops_the_start(core):
    """Callers that are not enforced would be worse than none."""
    engine = Engine()
    with pytest.raises(StartError, match="no place where callers can be enforced"):
        install_stamp(SimpleNamespace(engine_core=core), engine)
    engine.revert_all()


def test_a_vllm_without_the_method_stops_the_start(monkeypatch):
    """The reason names what is missing."""
    monkeypatch.delattr(core_client.DPAsyncMPClient, "add_request_async")
    monkeypatch.delattr(core_client.AsyncMPClient, "add_request_async")
    monkeypatch.delattr(core_client.EngineCoreClient, "add_request_async")
    engine = Engine()
    with pytest.raises(StartError, match=r"callers can be enforced: .*add_request_async"):
        install_stamp(SimpleNamespace(engine_core=object.__new__(core_client.AsyncMPClient)), engine)
    engine.revert_all()
