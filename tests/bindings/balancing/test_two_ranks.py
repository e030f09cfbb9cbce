"""A planned balancer in vLLM's own rearrangement of experts, on two ranks that move real weights.

Not on several GPUs: see ``rank_driver``, which stands for a worker.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("rank_driver.py")
LAST = 3


NAMES = (
    "none", "stock-balancer", "fewest-moves", "Random", "Raises", "Loses", "Writes", "FailsOnOneRank",
)  # fmt: skip

Seen = dict[str, list[dict]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank saw with each balancer."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "MEETING": f"file://{folder / 'meeting'}", "GRAFT_STATE_DIR": str(folder / "state")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, str(DRIVER), str(folder / f"{rank}.json"), *NAMES],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        printed = [each.communicate(timeout=200)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0, 0], "\n".join(printed)
    both = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    return {name: [each[name] for each in both] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_ranks_agree_and_no_expert_is_lost(seen: Seen, name: str):
    """Each slot has the weights of the expert that vLLM's map names, whatever the balancer does."""
    first, second = seen[name]
    assert first["maps"] == second["maps"]
    assert all(each for rank in (first, second) for each in rank["fits"])
    assert all(set(row) == set(range(8)) for each in first["maps"] for row in each)


def states(seen: Seen, name: str) -> list[str]:
    return [each["state"] for each in seen[name]]


def test_the_stock_policy_answers_the_same_through_the_contract(seen: Seen):
    """Nothing but the figures is added."""
    assert seen["none"][0]["policy"] == "DefaultEplbPolicy"
    assert seen["stock-balancer"][0]["policy"] == "BalancerPolicy"
    # Loads are given by slot, so equal maps mean equal loads.
    assert seen["stock-balancer"][0]["maps"] == seen["none"][0]["maps"]
    assert states(seen, "stock-balancer") == ["applied", "applied"]


def test_fewest_moves_moves_fewer_and_says_how_many(seen: Seen):
    """The first rank has the calls and the figures; both are proven."""
    first, second = seen["fewest-moves"]
    assert states(seen, "fewest-moves") == ["applied", "applied"]
    assert first["calls"]["place"] == 4
    assert second["figures"] == {}
    figures = first["figures"]
    assert figures["rearrangements"] == 4
    assert 0 < figures["experts moved"] < seen["stock-balancer"][0]["figures"]["experts moved"]
    assert 0 < figures["balance before, per mille"] <= figures["balance after, per mille"] <= 1000


def test_ranks_follow_one_answer(seen: Seen):
    """A balancer need not answer the same on every rank, or twice."""
    assert seen["Random"][0]["maps"][0] != seen["Random"][0]["maps"][1]
    assert states(seen, "Random") == ["applied", "applied"]


@pytest.mark.parametrize(
    ("name", "reason", "calls"),
    [("Raises", "no idea", 2), ("Loses", "expert 7 of layer 0 is in no slot", 1), ("Writes", "read-only", 1)],
)
def test_a_balancer_that_fails_is_put_aside_on_every_rank(seen: Seen, name: str, reason: str, calls: int):
    """vLLM's own policy goes on."""
    first, second = seen[name]
    assert states(seen, name) == ["quarantined", "quarantined"]
    assert reason in first["reason"]
    assert "first rank" in second["reason"]
    assert first["calls"]["place"] == calls
    assert first["maps"][LAST] != first["maps"][0]


def test_a_rank_that_cannot_make_it_follows(seen: Seen):
    """With a lenient plan it is refused there alone."""
    assert states(seen, "FailsOnOneRank") == ["applied", "refused"]
