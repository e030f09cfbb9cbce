"""The clocks of modelled time, and the queue of steps on them."""

import math
import time

from vllm_graft.simulator.clock import RealClock, Timeline, VirtualClock


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0
        self.waited: list[float] = []

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        self.waited.append(moment)


class TestTime:
    def test_steps_run_one_after_another(self):
        clock = FakeClock()
        timeline = Timeline(clock)  # type: ignore[arg-type]
        ends = [timeline.launch([2.0]), timeline.launch([3.0])]
        assert ends == [102.0, 105.0]
        timeline.wait(ends[0])
        timeline.wait()
        assert clock.waited == [102.0, 105.0]
        assert (timeline.steps, timeline.busy_s) == (2, 5.0)

    def test_an_idle_device_starts_at_once(self):
        clock = FakeClock()
        timeline = Timeline(clock)  # type: ignore[arg-type]
        timeline.launch([2.0])
        clock.time = 200.0
        assert timeline.launch([1.0]) == 201.0

    def test_stages_of_a_pipeline_work_at_the_same_time(self):
        timeline = Timeline(FakeClock())  # type: ignore[arg-type]
        assert [timeline.launch([1.0, 1.0]) for _ in range(3)] == [102.0, 103.0, 104.0]

    def test_a_request_does_not_overtake_its_own_token(self):
        timeline = Timeline(FakeClock())  # type: ignore[arg-type]
        assert timeline.launch([1.0, 1.0], needs=["a"], gives=["a"]) == 102.0
        assert timeline.launch([1.0, 1.0], needs=["b"]) == 103.0, "another one follows at once"
        assert timeline.launch([1.0, 1.0], needs=["b"]) == 104.0, "so does the next chunk of a prompt"
        assert timeline.launch([1.0, 1.0], needs=["a"], gives=["a"]) == 105.0
        assert timeline.launch([1.0, 1.0], needs=["a"], gives=["a"]) == 107.0

    def test_a_factor_divides_the_waiting(self, monkeypatch):
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
        clock = RealClock(speed=10.0)
        assert clock.now() == 50.0
        clock.wait_until(70.0)
        clock.wait_until(40.0)
        assert slept == [2.0]

    def test_a_moment_that_is_reached_has_come(self):
        clock = VirtualClock()
        start = clock.now()
        early = 0
        for number in range(1, 4000):
            moment = start + round(number * 0.001237, 6)
            clock.wait_until(moment)
            early += clock.now() < moment
            clock.reach(moment)
            assert moment <= clock.now() < moment + 1e-6
        assert early, "or there is nothing to test"

    def test_virtual_time_takes_the_place_of_pythons_and_gives_it_back(self):
        originals = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter", "time_ns")}
        clock = VirtualClock()
        clock.install(self)
        try:
            began = time.time()
            assert began == clock.now() == 1e9
            clock.wait_until(began + 3600.5)
            assert time.monotonic() - began == 3600.5
            assert time.time_ns() == 1_000_003_600_500_000_000
            clock.wait_until(began)
            assert time.perf_counter() - began == 3600.5, "it never goes back"
            assert clock.real() != time.perf_counter()
        finally:
            clock.remove()
        assert {name: getattr(time, name) for name in originals} == originals
        assert math.isclose(time.time(), originals["time"](), abs_tol=5)

    def test_virtual_time_stays_until_the_last_engine_has_ended(self):
        """One that is collected ends after the next was made in its process, and maybe twice."""
        original, clock, first, second = time.time, VirtualClock(), object(), object()
        clock.install(first)
        clock.install(second)
        try:
            for _ in range(2):
                clock.release(first)
                assert time.time() == 1e9
            clock.release(second)
            assert time.time is original
        finally:
            clock.remove()
