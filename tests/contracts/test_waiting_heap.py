"""A heap of waiting requests against the obvious: a list that is sorted at every question."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.contracts import WaitingHeap, WaitingRequest


def request(name: int) -> WaitingRequest:
    return WaitingRequest(str(name), 0, 0.0, 1, 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "add", "take", "discard"]), st.integers(0, 12), st.integers(0, 4))))
def test_it_agrees_with_a_sorted_list(operations: list[tuple[str, int, int]]):
    """Keys in order, those of one key as they were added; a request that is added again has its new key only."""
    heap = WaitingHeap()
    rows: list[tuple[int, int, str]] = []
    for number, (operation, name, key) in enumerate(operations):
        if operation == "add":
            rows = [row for row in rows if row[2] != str(name)] + [(key, number, str(name))]
            heap.add(key, request(name))
        elif operation == "take" and rows:
            rows.sort()
            assert heap.first_key() == rows[0][0]
            assert heap.take().request_id == rows.pop(0)[2]
        elif operation == "discard":
            assert heap.discard(request(name)) == any(row[2] == str(name) for row in rows)
            rows = [row for row in rows if row[2] != str(name)]
        assert len(heap) == len(rows)
        assert {each.request_id for each in heap} == {row[2] for row in rows}
        assert (request(name) in heap) == any(row[2] == str(name) for row in rows)
        if rows:
            assert heap.first().request_id == min(rows)[2]
    if not rows:
        with pytest.raises(IndexError):
            heap.first()


def test_stale_entries_do_not_pile_up():
    """However many come and go, the heap is at most a little more than twice what is live."""
    heap = WaitingHeap()
    for name in range(10_000):
        heap.add(name % 7, request(name))
        if name >= 10:
            assert heap.discard(request(name - 10))
        assert len(heap._entries) <= 2 * len(heap) + 66
