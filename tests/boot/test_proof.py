"""What a front end makes of the answers of its engines and workers."""

import json

import pytest

from vllm_graft.boot.proof import gather
from vllm_graft.ledger import ProcessRow
from vllm_graft.ledger.reading import ProcessView
from vllm_graft.ledger.record import ItemState, Record


def row(state: str, *, live: bool) -> ProcessRow:
    """An engine core with one scheduler, as it said itself or as its record was read."""
    record = Record(
        "run", "hash", "m", 5, 1, 1, "pid:[1]", "gpu-03", "EngineCore", ["engine"], "spawn", "0.32.0", "V1", 1.0
    )
    record.items = [ItemState("scheduler", "fair", state)]  # type: ignore[arg-type]
    return ProcessView(record, "running").as_dict(live=live)


@pytest.mark.parametrize("first", ["record", "process"])
def test_what_a_process_says_of_itself_counts_more_than_its_record(first: str):
    """On a full disk the record, which a worker on the same machine reads, may be hours old."""
    stale, own = json.dumps([row("applied", live=False)]), json.dumps([row("quarantined", live=True)])
    (found,) = gather([stale, own] if first == "record" else [own, stale]).rows
    assert found["items"][0]["state"] == "quarantined"
