"""The rate of admissions: what an engine can take, not what its clients ask for."""

import pytest

from vllm_graft.bindings.scheduling.clock import KNOWN_S, RATE_WINDOW_S, SLOW_S, AdmissionRate


def played(rate: AdmissionRate, start: float, steps: int, length: float, admitted: int, waiting: int) -> float:
    """So many steps of one kind; the time after them."""
    for number in range(1, steps + 1):
        rate.end_step(start + number * length, admitted, waiting)
    return start + steps * length


def test_a_server_that_nobody_waits_for_has_no_pace():
    """Its admissions are as many as its clients' requests."""
    rate = AdmissionRate()
    played(rate, 0.0, 1000, 0.05, 1, 0)
    assert rate.per_second == 0.0


def test_the_pace_is_that_of_the_time_in_which_requests_were_left_waiting():
    """A quiet hour before, and the step that fills the empty slots, do not count."""
    rate = AdmissionRate()
    now = played(rate, 0.0, 100, 0.05, 3, 0)
    now = played(rate, now + 3600, 1, 0.05, 128, 500)
    played(rate, now, 100, 0.05, 2, 500)
    assert rate.per_second == pytest.approx(40.0, rel=0.05)


def test_a_moment_of_waiting_says_nothing():
    """Until about a second of it has been seen, the rate is not known."""
    rate = AdmissionRate()
    now = played(rate, 0.0, 1, 0.05, 0, 5)
    now = played(rate, now, int(KNOWN_S / 0.05) - 2, 0.05, 1, 5)
    assert rate.per_second == 0.0
    played(rate, now, 4, 0.05, 1, 5)
    assert rate.per_second == pytest.approx(20.0, rel=0.1)


def test_the_pace_follows_a_change_within_its_window():
    """What was long ago is forgotten, and all of it after a time in which nobody waited."""
    rate = AdmissionRate()
    now = played(rate, 0.0, 1000, 0.05, 2, 9)
    now = played(rate, now, int(RATE_WINDOW_S * 1.1 / 0.05), 0.05, 1, 9)
    assert rate.per_second == pytest.approx(20.0, rel=0.05)
    rate.end_step(now, 9, 0)
    assert rate.per_second == 0.0
    rate.end_step(now + 1, 0, 9)
    assert rate.per_second == pytest.approx(20.0, rel=0.05)
    rate.end_step(now + 2, 9, 0)
    now = played(rate, now + 2, 1000, 0.05, 1, 0)
    rate.end_step(now, 0, 9)
    assert rate.per_second == 0.0
    played(rate, now, 40, 0.05, 3, 9)
    assert rate.per_second == pytest.approx(60.0, rel=0.05)


def test_a_pause_is_no_slow_step():
    """An engine that stands still for minutes has not become that slow."""
    rate = AdmissionRate()
    now = played(rate, 0.0, 400, 0.05, 1, 9)
    rate.end_step(now + 300, 0, 9)
    assert rate.per_second > 9.0


@pytest.mark.parametrize("admitted", [0, -1])
def test_an_engine_that_admits_nobody_is_slow(admitted):
    """After some seconds that is known: at most one in all of them. More may be put back in a step than go."""
    rate = AdmissionRate()
    now = played(rate, 0.0, 1, 0.05, 0, 9)
    now = played(rate, now, int(SLOW_S / 0.05) - 2, 0.05, admitted, 9)
    assert rate.per_second == 0.0
    played(rate, now, 4, 0.05, admitted, 9)
    assert rate.per_second == pytest.approx(1 / SLOW_S, rel=0.05)
