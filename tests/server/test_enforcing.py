"""Who asks, written into what the engine is sent, whatever way a request took through vLLM."""

import asyncio
from types import SimpleNamespace

import pytest

from vllm_graft.errors import StartError
from vllm_graft.server.callers import Caller
from vllm_graft.server.enforcing import ASKING, enforce

ACME = ("tenant", Caller("acme", 2, 3))


def sent_by(asking, **facts):
    """What an engine is sent by a client in whose task somebody asks."""
    sent = []

    async def add_request_async(request):
        sent.append(request)

    client = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=add_request_async))
    enforce(client)
    request = SimpleNamespace(**{"priority": 0, "sampling_params": None, "pooling_params": None, **facts})

    async def work():
        ASKING.set(asking)
        # As vLLM does for streams, cancellation and background responses.
        await asyncio.create_task(client.engine_core.add_request_async(request))

    asyncio.run(work())
    assert sent == [request]
    return request


@pytest.mark.parametrize(("asked", "given"), [(0, 3), (1, 2), (-4, 3), (5, 5)])
def test_a_request_has_its_caller_s_tenant_and_priority(asked, given):
    """Whatever else it carries stays."""
    params = SimpleNamespace(extra_args={"tenant": "mighty", "other": 1})
    request = sent_by(ACME, priority=asked, sampling_params=params)
    assert (request.priority, params.extra_args) == (given, {"tenant": "acme", "other": 1})


def test_a_request_that_carries_nothing_has_it_too():
    """Beam search and uploads hand nothing on; pooling has another place for it."""
    params = SimpleNamespace(extra_args=None)
    assert sent_by(ACME, sampling_params=params).sampling_params.extra_args == {"tenant": "acme"}
    params = SimpleNamespace(extra_kwargs=None)
    assert sent_by(ACME, pooling_params=params).pooling_params.extra_kwargs == {"tenant": "acme"}


def test_where_nobody_was_asked_a_request_stays_as_it_is():
    """Such as vLLM's own."""
    params = SimpleNamespace(extra_args={"tenant": "kept"})
    request = sent_by(None, priority=1, sampling_params=params)
    assert (request.priority, params.extra_args) == (1, {"tenant": "kept"})


def test_a_client_without_such_a_place_stops_the_start():
    """Callers that are not enforced would be worse than none."""
    with pytest.raises(StartError, match="no place where callers can be enforced"):
        enforce(SimpleNamespace())
