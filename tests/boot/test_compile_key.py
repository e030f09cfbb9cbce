"""What of a plan changes vLLM's compile key besides its patches."""

from vllm_graft.boot.process import _traced_hash
from vllm_graft.plan import Plan, PlanItem


def routed(**options: str) -> Plan:
    return Plan((PlanItem("router", "mask", "acme:Mask", "acme", ("worker",), options),))


def test_a_planned_router_does_because_it_is_called_from_compiled_code():
    """On CPUs: which layers call it decides what was compiled."""
    found = {_traced_hash(plan) for plan in (routed(layers="all"), routed(layers="0-3"), routed(layers="0-3"))}
    assert len(found) == 2
    assert all(found)


def test_other_items_do_not():
    assert _traced_hash(Plan()) == ""
    assert _traced_hash(Plan((PlanItem("model", "acme", "acme:Acme", "acme", ("worker",)),))) == ""
