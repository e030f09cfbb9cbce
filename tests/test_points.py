"""The table of points: each row is bound, or marked as not there."""

import importlib

import pytest

from vllm_graft import bindings, contracts
from vllm_graft.contracts import Item
from vllm_graft.contracts.validation import REQUIRED
from vllm_graft.plan.catalogue import load
from vllm_graft.points import POINTS, RELEASES, Point

OURS = [point for point in POINTS if any(name.startswith("vllm_graft.contracts:") for name in point.contracts)]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_row_is_bound_on_all_releases_or_on_none(point: Point):
    assert point.bound in (RELEASES, ())


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_row_that_is_not_bound_names_no_contract(point: Point):
    assert point.bound or not point.contracts


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_every_contract_of_ours_that_a_row_names_exists(point: Point):
    for name in point.contracts:
        if name.startswith("vllm_graft."):
            assert isinstance(load(name, point.name, "vllm-graft"), type)


def test_every_contract_belongs_to_a_point():
    named = {name.partition(":")[2] for point in OURS for name in point.contracts}
    assert named == {kind.__name__ for kind in REQUIRED}
    public = {each for each in vars(contracts).values() if isinstance(each, type) and issubclass(each, Item)}
    assert {kind.__name__ for kind in public - {Item}} == named


def test_every_point_with_a_contract_has_a_binding_that_its_table_names():
    rooms = {"sampler": "sampling", "scheduler": "scheduling", "attention": "attention", "stats": "stats"}
    rooms |= {"expert-balancer": "balancing"}
    rooms |= {"model": "models", "router": "routing"}
    assert {point.name for point in OURS} == rooms.keys()
    for point, room in rooms.items():
        assert importlib.import_module(f"vllm_graft.bindings.{room}")
        assert f"\n{point} " in (bindings.__doc__ or "")
