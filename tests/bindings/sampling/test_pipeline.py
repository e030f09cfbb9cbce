"""The pipeline: slots that stay while indices move, stages in order, truncations as one, failures undone."""

import itertools
import math
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.bindings.sampling.guarded import GuardedSampler
from vllm_graft.bindings.sampling.pipeline import SamplerPipeline
from vllm_graft.bindings.sampling.processor_v1 import BatchTracker
from vllm_graft.bindings.sampling.step import DeviceStep, HistoryMirror, HostStep, Tokens
from vllm_graft.contracts import Key, Rows, Sampler, SamplingStrategy, ServedModel, Truncation
from vllm_graft.contracts.kernels import uniform
from vllm_graft.contracts.sampling import OptInSampler
from vllm_graft.ledger import Guard, Ledger
from vllm_graft.plan import PlanItem

SLOTS, VOCABULARY = 16, 8
MODEL = ServedModel("m", VOCABULARY, SLOTS, torch.device("cpu"))


class Adds(SamplingStrategy):
    """Adds to the logits of a request."""

    keys = (Key("adds", "float", 0.0, switch=True),)
    stage = "penalty"

    def setup(self, model):
        self.numbers = model.per_slot(0.0)

    def open(self, slot, params):
        self.numbers[slot] = params.number("adds")
        return True

    def step(self, logits, rows):
        logits[rows.rows] += self.numbers.of(rows)[:, None]


class Doubles(SamplingStrategy):
    """Doubles the logits of a request."""

    keys = ("doubles",)
    stage = "transform"

    def open(self, slot, params):
        return not params.greedy

    def step(self, logits, rows):
        logits[rows.rows] *= 2


class Raises(SamplingStrategy):
    """Spoils its rows, then raises if a marked one is among them."""

    keys = ("raises",)
    marked = ()

    def open(self, slot, params):
        self.slots = {**getattr(self, "slots", {}), slot: params["raises"]}
        return True

    def step(self, logits, rows):
        logits[rows.rows] += 100
        if any(self.slots[slot] == "yes" for _, slot in rows.pairs):
            raise RuntimeError("a marked request")


class AtLeast(Truncation):
    """Keeps what is not too far below the greatest."""

    keys = (Key("at_least", "float", 0.0, switch=True),)

    def setup(self, model):
        self.below = model.per_slot(math.inf)

    def open(self, slot, params):
        self.below[slot] = params.number("at_least")
        return True

    def threshold(self, stats, rows):
        return stats.max - self.below.of(rows)


class AtLeastToo(AtLeast):
    """Another one."""

    keys = (Key("at_least_too", "float", 0.0, switch=True),)

    def open(self, slot, params):
        self.below[slot] = params.number("at_least_too")
        return True


class Last(Sampler):
    """Picks the last token."""

    keys = (Key("last", "int", 0, switch=True),)

    def sample(self, logits, params):
        if any(each["last"] == 13 for each in params):
            raise RuntimeError("thirteen")
        return [logits.shape[1] - int(each["last"]) for each in params]


class Bench:
    """Planned samplers over a V1 batch, as a worker has them."""

    def __init__(self, *kinds: type[OptInSampler], **options: object) -> None:
        self.ledger = Ledger()
        self.failed: dict[int, str] = {}
        made = []
        for kind in kinds:
            name = kind.__name__.lower()
            self.ledger.set_item("sampler", name, "applied")
            item = PlanItem("sampler", name, "m:C", "p", ("worker",), {**kind.options, **options})
            made.append(GuardedSampler(item, kind({}), MODEL, self.ledger, self.failed.__setitem__))
            made[-1].sampler.setup(MODEL)
        self.pipeline = SamplerPipeline(made, MODEL, 7)
        self.tokens: dict[int, Tokens] = {}
        self.batch = BatchTracker(self.pipeline, self.tokens, SLOTS)
        self.step = HostStep(self.pipeline.seeds, self.tokens)

    def change(self, added=(), removed=(), moved=()):
        """vLLM's account of what changed: (index, keys), index, (from, to, direction)."""
        account = [(index, request(**extra), [1, 2], []) for index, extra in added]
        directions = [(first, second, SimpleNamespace(name=name)) for first, second, name in moved]
        self.batch.update(SimpleNamespace(added=account, removed=list(removed), moved=directions))

    def run(self, rows: int, value: float = 1.0) -> torch.Tensor:
        """One step over logits that are all alike."""
        logits = torch.full((rows, VOCABULARY), value) + torch.arange(VOCABULARY) / 100
        self.pipeline.run(logits, self.step, self.batch.layout)
        return logits

    def first(self, rows: int) -> list[float]:
        """The first logit of each row after a step, rounded."""
        return [round(float(x), 4) for x in self.run(rows)[:, 0]]

    def state(self, name: str) -> str:
        """How the ledger has a sampler."""
        return self.ledger._items[name].state


def request(temperature: float = 1.0, seed: int | None = None, **extra: object) -> SimpleNamespace:
    return SimpleNamespace(
        extra_args=extra or None, temperature=temperature, top_p=1.0, top_k=0, seed=seed, max_tokens=9
    )


def test_each_strategy_has_the_requests_that_carry_its_key():
    """Rows of others are none of its business, and several strategies may have one row."""
    bench = Bench(Adds, Doubles)
    bench.change(added=[(0, {"adds": 3}), (1, {}), (2, {"doubles": 1}), (3, {"adds": 1, "doubles": 1})])
    assert bench.first(4) == [4, 1, 2, 4]


def test_a_default_asks_for_nothing():
    """Clients send all keys they know, with the values that mean off."""
    bench = Bench(Adds)
    bench.change(added=[(0, {"adds": 0.0})])
    assert not bench.pipeline.concerns(bench.batch.layout)


def test_keys_that_the_plan_gives_to_requests():
    """A request may say otherwise, or that it wants none; one without any extra arguments has them too."""
    bench = Bench(Adds, defaults={"adds": 3.0})
    bench.change(added=[(0, {}), (1, {"adds": 1}), (2, {"adds": 0}), (3, {"other": 1})])
    assert bench.first(4) == [4, 2, 1, 4]
    bench = Bench(Adds, defaults={"adds": 0.0})
    bench.change(added=[(0, {}), (1, {"adds": 1})])
    assert bench.first(2) == [1, 2]


class Everybodys(Sampler):
    """Has no keys."""

    def sample(self, logits, params):
        return [3 for _ in params]


def test_a_sampler_without_keys_has_every_request_or_none():
    """The plan says which."""
    for every, picked in ((True, [3, 3]), (False, [0, 0])):
        bench = Bench(Everybodys, every_request=every)
        bench.pipeline.overrides = True
        bench.change(added=[(0, {}), (1, {"other": 1})])
        sampled = torch.tensor([0, 0])
        bench.run(2)
        bench.pipeline.after(sampled)
        assert sampled.tolist() == picked


def test_who_asks_for_a_sampler_that_was_put_aside_is_turned_away():
    """The front end may not have heard of it yet. Who has begun goes on, as does who has it by default."""
    bench = Bench(Adds, Raises)
    bench.change(added=[(0, {"raises": "yes"}), (1, {})])
    bench.run(2)
    assert bench.state("raises") == "quarantined"
    bench.change(added=[(2, {"raises": "no"}), (3, {"adds": 1}), (4, {})])
    (slot,) = bench.failed
    assert bench.batch.index(slot) == 2
    assert "raises: was put aside after a failure" in bench.failed[slot]
    bench.failed.clear()
    preempted = [(0, request(raises="no"), [1, 2], [5])]
    bench.batch.update(SimpleNamespace(added=preempted, removed=[], moved=[]))
    assert not bench.failed
    bench = Bench(Raises, defaults={"raises": "yes"})
    bench.change(added=[(0, {})])
    bench.run(1)
    assert bench.state("raises") == "quarantined"
    bench.change(added=[(1, {})])
    assert not bench.failed


def test_bad_values_that_came_past_the_front_end_are_said(caplog: pytest.LogCaptureFixture):
    """The request goes on without the strategy, which is no secret."""
    bench = Bench(Adds)
    with caplog.at_level("ERROR", logger="vllm.graft"):
        bench.change(added=[(0, {"adds": "much"})])
    assert bench.first(1) == [1]
    assert "adds must be a number, but is 'much'" in caplog.text


def test_stages_decide_the_order_not_the_plan():
    """A penalty comes before a transformation however the plan lists them."""
    for kinds in ((Adds, Doubles), (Doubles, Adds)):
        bench = Bench(*kinds)
        bench.change(added=[(0, {"adds": 1, "doubles": 1})])
        assert bench.first(1) == [4]


def test_a_moved_request_keeps_what_it_asked_for():
    """The index is vLLM's, the slot is ours."""
    bench = Bench(Adds)
    bench.change(added=[(0, {"adds": 1}), (1, {"adds": 2}), (2, {})])
    bench.change(moved=[(2, 0, "UNIDIRECTIONAL")])
    assert bench.first(2) == [1, 3]


def test_a_swap_exchanges_two_requests():
    """Also one that asked for nothing."""
    bench = Bench(Adds)
    bench.change(added=[(0, {"adds": 1}), (1, {})])
    bench.change(moved=[(0, 1, "SWAP")])
    assert bench.first(2) == [1, 2]


def test_an_index_filled_again_in_the_same_step_is_not_among_the_removed():
    """What was there before must not leak into the newcomer."""
    bench = Bench(Adds)
    bench.change(added=[(0, {"adds": 1})])
    bench.change(added=[(0, {})])
    assert bench.first(1) == [1]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "swap", "condense"]), st.integers(0, 7), st.integers(0, 7)), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_whatever_moves_every_row_gets_its_own(actions):
    """Random batches against a plain list of what each index holds."""
    bench, held = Bench(Adds), {}
    for number, (action, first, second) in enumerate(actions, start=1):
        if action == "add":
            extra = {"adds": number} if number % 3 else {}
            bench.change(added=[(first, extra)])
            held[first] = number if number % 3 else 0
        elif action == "remove" and first in held:
            bench.change(removed=[first])
            del held[first]
        elif action == "swap" and first in held and second in held and first != second:
            bench.change(moved=[(first, second, "SWAP")])
            held[first], held[second] = held[second], held[first]
        elif action == "condense" and first in held and first != second:
            bench.change(moved=[(first, second, "UNIDIRECTIONAL")])
            held[second] = held.pop(first)
        rows = max(held, default=-1) + 1
        if rows:
            assert bench.first(rows) == [1 + held.get(index, 0) for index in range(rows)]
    assert len(bench.tokens) == len(held)


def test_truncations_count_together():
    """The strictest limit holds for each row, and the greatest logit always stays."""
    bench = Bench(AtLeast, AtLeastToo)
    bench.change(
        added=[
            (0, {"at_least": 0.025}),
            (1, {"at_least_too": 0.015}),
            (2, {"at_least": 0.045, "at_least_too": 0.025}),
            (3, {}),
        ]
    )
    kept = [int(row.isfinite().sum()) for row in bench.run(4)]
    assert kept == [3, 2, 3, VOCABULARY]


def test_a_strategy_that_raises_leaves_no_trace_and_is_put_aside():
    """Its rows are as before, others' work stays, and it is not called again."""
    bench = Bench(Adds, Raises)
    bench.change(added=[(0, {"raises": "yes"}), (1, {"adds": 1, "raises": "no"}), (2, {"adds": 2})])
    assert bench.first(3) == [1, 2, 3]
    assert bench.state("raises") == "quarantined"
    assert bench.first(3) == [1, 2, 3]
    assert not bench.failed


def test_or_it_costs_the_request_it_raised_for():
    """The batch is taken apart: who did not raise gets what it asked for."""
    bench = Bench(Adds, Raises, on_error="request")
    bench.change(added=[(0, {"raises": "yes"}), (1, {"adds": 1, "raises": "no"}), (2, {"adds": 2})])
    assert bench.first(3) == [1, 102, 3]
    assert bench.state("raises") == "applied"
    (slot,) = bench.failed
    assert bench.batch.index(slot) == 0
    assert "raises: RuntimeError: a marked request" in bench.failed[slot]
    assert bench.first(3) == [1, 102, 3]


def test_picks_take_the_place_of_vllms():
    """Where somebody puts them in; else they are forced through the logits."""
    bench = Bench(Last)
    bench.change(added=[(0, {}), (1, {"last": 1}), (2, {"last": 2})])
    bench.pipeline.overrides = True
    assert bench.run(3).isfinite().all()
    sampled = torch.zeros(3, dtype=torch.int32)
    bench.pipeline.after(sampled)
    assert sampled.tolist() == [0, VOCABULARY - 1, VOCABULARY - 2]
    bench.pipeline.after(other := torch.zeros(3, dtype=torch.int64))
    assert other.tolist() == [0, 0, 0], "picks are good for one step"
    bench.pipeline.overrides = False
    assert bench.run(3).argmax(-1).tolist() == [VOCABULARY - 1, VOCABULARY - 1, VOCABULARY - 2]


@pytest.mark.parametrize("policy", ["quarantine", "request"])
def test_a_pick_that_cannot_be_is_vllms_again(policy: str):
    """An id outside the vocabulary would read past the end of the model's table."""
    bench = Bench(Last, on_error=policy)
    bench.pipeline.overrides = True
    bench.change(added=[(0, {"last": -3}), (1, {"last": 3})])
    bench.run(2)
    sampled = torch.zeros(2, dtype=torch.int64)
    bench.pipeline.after(sampled)
    if policy == "request":
        assert sampled.tolist() == [VOCABULARY - 1, VOCABULARY - 3]
        assert len(bench.failed) == 1
    else:
        assert sampled.tolist() == [0, 0]
        assert bench.state("last") == "quarantined"


class Endless(Sampler):
    """Returns an iterator without an end."""

    keys = (Key("endless", "int", 0, switch=True),)

    def sample(self, logits, params):
        self.asked = 0
        while self.asked < 1000:
            self.asked += 1
            yield 1
        raise AssertionError("a thousand tokens were asked for")


def test_an_iterator_without_an_end_is_not_read_to_its_end():
    """It would fill the machine's memory, and with it end every other request."""
    bench = Bench(Endless)
    bench.change(added=[(0, {"endless": 1}), (1, {"endless": 1})])
    assert bench.run(2).isfinite().all()
    assert "ValueError: sample must return 2 token ids" in bench.ledger._items["endless"].reason


def torch_settings() -> tuple[object, ...]:
    found = (torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    return (*found, torch.empty(0).device)


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("default device", lambda: torch.set_default_device("meta")),
        ("number of threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("deterministic algorithms", lambda: torch.use_deterministic_algorithms(True)),
    ],
)
@pytest.mark.parametrize("raises", [False, True])
def test_settings_of_torch_are_put_back_at_the_sampler_s_cost(setting: str, change: Callable[[], None], raises: bool):
    """The whole process has them: vLLM's next step would fail, and with it every request."""

    class Meddles(Adds):
        def step(self, logits, rows):
            change()
            if raises:
                raise KeyError("besides")

    bench, before = Bench(Meddles), torch_settings()
    bench.change(added=[(0, {"adds": 1}), (1, {})])
    assert bench.first(2) == [1, 1]
    assert torch_settings() == before
    assert f"RuntimeError: step has changed torch's {setting}, which" in bench.ledger._items["meddles"].reason


@pytest.mark.parametrize("raises", [False, True])
def test_a_seed_for_the_whole_process_is_taken_back(raises: bool):
    """Requests of others without a seed would be given the same random numbers in each step."""

    class Seeds(Adds):
        def step(self, logits, rows):
            torch.manual_seed(torch.initial_seed())
            torch.rand(9)
            if raises:
                raise KeyError("besides")

    bench, set_seed = Bench(Seeds), torch.manual_seed
    bench.change(added=[(0, {"adds": 1})])
    torch.rand(3)
    state = torch.get_rng_state()
    assert bench.first(1) == [1]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.manual_seed is set_seed
    assert "RuntimeError: step has changed torch's random seed, which" in bench.ledger._items["seeds"].reason


def test_a_signal_ends_the_process_in_the_middle_of_another_setting_too():
    """vLLM's handlers raise SystemExit, once: swallowed, the worker would go on until it is killed."""

    class Meddles(Adds):
        def step(self, logits, rows):
            torch.set_default_dtype(torch.float64)
            signal.raise_signal(signal.SIGTERM)
            torch.set_default_dtype(torch.float32)

    bench, before = Bench(Meddles), torch_settings()
    bench.change(added=[(0, {"adds": 1}), (1, {})])
    handler = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("asked to end"))
    try:
        with pytest.raises(SystemExit, match="asked to end"):
            bench.run(2)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert torch_settings() == before
    assert bench.state("meddles") == "applied"


def test_a_request_that_ended_is_not_asked_for_again():
    """With asynchronous scheduling it has a row in the next step too, and the sampler must not pay for that."""
    bench = Bench(Last, on_error="request")
    bench.pipeline.overrides = True
    bench.change(added=[(0, {"last": 13}), (1, {"last": 3})])
    for _ in range(2):
        bench.run(2)
        sampled = torch.zeros(2, dtype=torch.int64)
        bench.pipeline.after(sampled)
        assert int(sampled[1]) == VOCABULARY - 3
    assert len(bench.failed) == 1
    assert bench.state("last") == "applied"


class Asks(Doubles):
    """Cannot tell whether it is asked for."""

    keys = ("asks",)

    @classmethod
    def is_requested(cls, params):
        raise KeyError("is_requested")


class Hedges(Doubles):
    """Says of each key whether it is asked for, in a tensor that is neither true nor false."""

    keys = ("hedges",)

    @classmethod
    def is_requested(cls, params):
        return torch.ones(2)


def test_a_question_that_raises_costs_the_sampler_not_the_engine():
    """Nothing of a sampler's may raise where a request enters."""
    bench = Bench(Asks, Hedges, Adds)
    bench.change(added=[(0, {"asks": 1, "hedges": 1, "adds": 1})])
    assert bench.first(1) == [2]
    assert [bench.state(name) for name in ("asks", "hedges", "adds")] == ["quarantined", "quarantined", "applied"]


class Hears(SamplingStrategy):
    """Remembers what it is told."""

    keys = ("hears",)

    def open(self, slot, params):
        self.heard = []
        return True

    def step(self, logits, rows):
        """Changes nothing."""

    def sampled(self, tokens, rows):
        self.heard.append((tokens.tolist(), [slot for _, slot in rows.pairs]))


def test_who_wants_to_know_is_told_what_was_picked():
    """Of its own rows, after samplers have had their say."""
    bench = Bench(Hears, Last)
    bench.pipeline.overrides = True
    bench.change(added=[(0, {}), (1, {"hears": 1}), (2, {"hears": 1, "last": 1})])
    bench.run(3)
    bench.pipeline.after(torch.tensor([5, 6, 7 - 1]))
    ((tokens, slots),) = bench.pipeline.samplers[0].sampler.heard
    assert tokens == [6, VOCABULARY - 1]
    assert [bench.batch.index(slot) for slot in slots] == [1, 2]


def test_a_request_without_a_seed_gets_one_that_all_ranks_agree_on():
    """Two workers that see the same requests enter have the same numbers; two requests have different ones."""
    one, other = Bench(Adds), Bench(Adds)
    for bench in (one, other):
        bench.change(added=[(0, {"adds": 1}), (1, {"adds": 1})])
    seeds = [[bench.pipeline.seeds[slot] for slot in bench.batch.layout] for bench in (one, other)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, -(2**63), 2**70])
def test_any_seed_that_vllm_takes_fits(seed: int):
    """vLLM takes seeds of more than 63 bits, of a server and of a request."""
    bench = Bench(Adds)
    bench.pipeline._seed = 2**32 - 1
    for index, own in enumerate((None, seed)):
        bench.pipeline.enter(index, request(seed=own, adds=1), list)
    assert bench.pipeline.seeds[0] != bench.pipeline.seeds[1]


def test_history_that_vllm_has_not_filled_in_is_an_error_not_a_guess():
    """With asynchronous scheduling the last token may be a placeholder."""
    tokens = Tokens([1, 2], [3, -1])
    with pytest.raises(RuntimeError, match="has not filled in"):
        tokens.since(1)
    assert Tokens([1, 2], [3]).since(1) == [2, 3]
    assert Tokens([1, 2], [3]).since(2) == [3]
    assert Tokens([1, 2], [3]).since(3) == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=30), st.integers(1, 7))
def test_tokens_sent_to_a_device_are_those_of_the_lists(events, window):
    """Slots change hands, requests grow by one token or by many; what the device has is what vLLM's lists say."""
    tokens: dict[int, Tokens] = {slot: Tokens([slot], []) for slot in range(4)}
    fed = HistoryMirror(tokens, SLOTS, window, torch.device("cpu"))
    device, host = DeviceStep(MODEL.per_slot(0, integer=True), fed), HostStep(MODEL.per_slot(0, integer=True), tokens)
    for slot, number in events:
        if number == 9:
            tokens[slot] = Tokens(list(range(slot, slot + 5)), [])
            fed.enter(slot)
        else:
            tokens[slot].output.extend(range(number))
        pairs = [(row, (slot + row) % 4) for row in range(3)]
        rows, slots = (torch.tensor(each) for each in zip(*pairs, strict=True))
        fed.begin(pairs)
        device.begin(torch.tensor([len(tokens[each]) for _, each in pairs]))
        seen = [Rows(rows, slots, step, pairs) for step in (device, host)]
        assert torch.equal(seen[0].history.tokens(seen[0], window), seen[1].history.tokens(seen[1], window))
        assert torch.equal(seen[0].positions, seen[1].positions)


class Lifts(SamplingStrategy):
    """Does to its rows what a request says."""

    keys = (Key("lifts", "str", "", switch=True),)

    def open(self, slot, params):
        self.what = params["lifts"]
        return True

    def step(self, logits, rows):
        if self.what == "turn":
            logits[rows.rows] *= -1
        elif self.what == "spoil":
            logits[rows.rows, 1] = float("nan")
        else:
            logits[rows.rows] = float("-inf")
            logits[rows.rows, 0] = 0.0


@pytest.mark.parametrize("what", ["turn", "spoil", "force"])
def test_what_is_forbidden_stays_forbidden(what: str):
    """A grammar's mask, and no row is left without any token or with something that is no number."""
    bench = Bench(Lifts)
    bench.change(added=[(0, {"lifts": what})])
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None] + 1
    logits[0, 0] = logits[0, 5] = -math.inf
    before = logits.clone()
    bench.pipeline.run(logits, bench.step, bench.batch.layout)
    assert logits[0].isfinite().tolist() == before[0].isfinite().tolist()
    if what == "turn":
        assert logits[0, 1] == -2
    else:
        assert torch.equal(logits, before)


class Misbehaves(SamplingStrategy):
    """Does with the logits it is given what a test says, if any of its requests is marked."""

    keys = (Key("misbehaves", "str", "", switch=True),)
    misdeed = staticmethod(lambda logits, rows: None)

    def setup(self, model):
        self.marks = model.per_slot(0.0)

    def open(self, slot, params):
        self.marks[slot] = params["misbehaves"] == "yes"
        return True

    def step(self, logits, rows):
        if bool(self.marks.of(rows).any()):
            return self.misdeed(logits, rows)
        return None


class TrustedMisbehaves(Misbehaves):
    """Promises more than it keeps."""

    atomic = True


def write_all(logits, rows):
    logits += 50


def write_all_and_raise(logits, rows):
    logits.fill_(7)
    raise RuntimeError("half-way")


def write_all_and_exit(logits, rows):
    logits.fill_(7)
    sys.exit(1)


def write_beside(logits, rows):
    logits[rows.rows - 1] = 9.0


def renumber(logits, rows):
    rows.rows.zero_()
    rows.slots.zero_()
    logits[rows.rows] += 50


MARKED = ({"misbehaves": "yes"}, {}, {"misbehaves": "no"}, {"adds": 1})


@pytest.mark.parametrize("kind", [Misbehaves, TrustedMisbehaves])
@pytest.mark.parametrize("misdeed", [write_all, write_all_and_raise, write_all_and_exit, write_beside, renumber])
def test_rows_of_other_requests_are_out_of_reach(misdeed, kind):
    """Whatever is written, and whether the step raises then or not; one that raises has changed nothing."""
    bench = Bench(Adds, type(kind.__name__, (kind,), {"misdeed": staticmethod(misdeed)}))
    bench.change(added=list(enumerate(MARKED)))
    for _ in range(3):
        first = bench.first(4)
        assert (first[1], first[3]) == (1, 2)
        if "raise" in misdeed.__name__ or "exit" in misdeed.__name__:
            assert first == [1, 1, 1, 2]


@pytest.mark.parametrize("misdeed", [write_all, write_beside])
def test_nor_with_drafts_where_only_the_device_knows_whose_they_are(misdeed):
    """All rows are given then, and those of others are put back."""
    bench = Bench(type("Misbehaves", (Misbehaves,), {"misdeed": staticmethod(misdeed)}))
    bench.change(added=[(0, {"misbehaves": "yes"}), (1, {})])
    slots = torch.tensor([bench.batch.layout[row] for row in (0, 1, 0, 1)])
    logits = torch.ones(4, VOCABULARY)
    bench.pipeline.run(logits, bench.step, bench.batch.layout, slots)
    assert logits[[1, 3]].eq(1).all()
    assert not logits[[0, 2]].eq(1).all()


def resize(logits, rows):
    logits.resize_(1, 3)


def empty(logits, rows):
    logits.set_()


def replace(logits, rows):
    logits.data = torch.zeros(2, 2)


def starve(logits, rows):
    logits.untyped_storage().resize_(0)


def transpose(logits, rows):
    return logits.T


def halve(logits, rows):
    return logits.double()


def answer(logits, rows):
    return True


def spoil(logits, rows):
    logits[rows.rows, 2] = math.nan


def exaggerate(logits, rows):
    logits[rows.rows] = math.inf


SPOILT = "ValueError: step gave NaN or +inf, in "
GIVEN = "ValueError: step was given logits of (2, 8) float32 on cpu but left or returned "


@pytest.mark.parametrize("kind", [Misbehaves, TrustedMisbehaves])
@pytest.mark.parametrize(
    ("misdeed", "reason"),
    [
        (resize, GIVEN + "(1, 3) float32 on cpu"),
        (empty, GIVEN + "(0,) float32 on cpu"),
        (replace, GIVEN + "(2, 2) float32 on cpu"),
        (starve, "RuntimeError: Trying to resize storage that is not resizable"),
        (transpose, GIVEN + "(8, 2) float32 on cpu"),
        (halve, GIVEN + "(2, 8) float64 on cpu"),
        (answer, "TypeError: step must change its logits in place or return new ones, but returned bool"),
        (spoil, SPOILT + "2 of 2 rows"),
        (exaggerate, SPOILT + "2 of 2 rows"),
        (write_all_and_exit, "SystemExit: 1"),
    ],
)
def test_what_cannot_be_logits_costs_the_strategy(misdeed, reason: str, kind):
    """The rows are as they were, the reason is said, and nobody else notices."""
    bench = Bench(Adds, type("Bad", (kind,), {"misdeed": staticmethod(misdeed)}))
    bench.change(added=list(enumerate(MARKED)))
    assert bench.first(4) == [1, 1, 1, 2]
    assert bench.state("bad") == "quarantined"
    assert bench.ledger._items["bad"].reason.startswith(reason)
    assert bench.first(4) == [1, 1, 1, 2]


@pytest.mark.parametrize("misdeed", [resize, starve, spoil, exaggerate, write_all_and_exit])
def test_or_the_request_that_it_was_done_for(misdeed):
    """The batch is taken apart for what is no exception too."""
    bench = Bench(type("Bad", (Misbehaves,), {"misdeed": staticmethod(misdeed)}), on_error="request")
    bench.change(added=list(enumerate(MARKED)))
    assert bench.first(3) == [1, 1, 1]
    assert [bench.batch.index(slot) for slot in bench.failed] == [0]
    assert bench.state("bad") == "applied"


def test_a_model_that_gives_no_numbers_is_not_the_strategys_fault():
    """NaN was there before; so it stays, and the strategy stays too."""
    bench = Bench(Adds)
    bench.change(added=[(0, {"adds": 3}), (1, {"adds": 3})])
    logits = torch.ones(2, VOCABULARY)
    logits[0, 3] = math.nan
    bench.pipeline.run(logits, bench.step, bench.batch.layout)
    assert bench.state("adds") == "applied"
    assert logits[1].eq(4).all()
    assert logits[0, 0] == 1


class Returns(Adds):
    """Keeps to vLLM's own convention, and leaves what it is given alone."""

    keys = (Key("returns", "float", 0.0, switch=True),)

    def open(self, slot, params):
        self.numbers[slot] = params.number("returns")
        return True

    def step(self, logits, rows):
        changed = logits.clone()
        super().step(changed, rows)
        return changed


def test_logits_that_a_step_returns_count():
    """In its own rows, as those that are changed in place."""
    bench = Bench(Adds, Returns)
    bench.change(added=[(0, {"returns": 3}), (1, {}), (2, {"returns": 1, "adds": 1})])
    assert bench.first(3) == [4, 1, 3]
    assert bench.state("returns") == "applied"


def test_its_rows_have_their_own_positions_numbers_and_history():
    """Rows are numbered anew for a strategy; what is asked of them, or of some of them, is still theirs."""

    class Asks(Misbehaves):
        window = 4

        def step(self, logits, rows):
            part = Rows(rows.rows[1:], rows.slots[1:], rows.step)
            seen.append((rows.positions.tolist(), rows.uniform().tolist(), rows.history.tokens(rows, 4).tolist()))
            parts.append((part.positions.tolist(), part.uniform().tolist(), part.history.tokens(part, 4).tolist()))
            assert [row for row, _ in rows.pairs] == rows.rows.tolist() == [0, 1]
            assert part.pairs == list(rows.pairs)[1:]

    seen, parts = [], []
    bench = Bench(Asks)
    bench.change(added=[(0, {}), (1, {"misbehaves": "a", "seed": 5}), (2, {}), (3, {"misbehaves": "b", "seed": 6})])
    for index, more in ((0, [9]), (1, [5, 6]), (3, [7])):
        bench.tokens[bench.batch.layout[index]].output += more
    bench.run(4)
    assert bench.state("asks") == "applied", bench.ledger._items["asks"].reason
    ((positions, numbers, tokens),) = seen
    assert positions == [4, 3]
    assert numbers == uniform(torch.tensor([5, 6]), torch.tensor([4, 3]), 0).tolist()
    assert tokens == [[1, 2, 5, 6], [-1, 1, 2, 7]]
    assert parts == [(positions[1:], numbers[1:], tokens[1:])]


@pytest.mark.parametrize("method", ["is_requested", "open", "step", "sampled"])
@pytest.mark.parametrize("policy", ["quarantine", "request"])
def test_nothing_a_strategy_raises_ends_the_engine(method: str, policy: str):
    """What would end the process costs the strategy, or the request, like any exception."""

    def leave(*args: object) -> None:
        raise KeyboardInterrupt

    body = classmethod(leave) if method == "is_requested" else leave
    bench = Bench(type("Leaves", (Adds,), {method: body}), on_error=policy)
    bench.change(added=[(0, {"adds": 1}), (1, {})])
    assert bench.first(2) in ([1, 1], [2, 1])
    bench.pipeline.after(torch.zeros(2, dtype=torch.int64))
    if policy == "quarantine" or method in ("is_requested", "sampled"):
        assert bench.state("leaves") == "quarantined"
        assert "KeyboardInterrupt" in bench.ledger._items["leaves"].reason
    else:
        assert len(bench.failed) == 1
        assert bench.state("leaves") == "applied"


def test_nor_anything_that_a_sampler_or_a_truncation_raises():
    """The same for those that pick and those that say a limit."""

    class Quits(Last):
        def sample(self, logits, params):
            sys.exit()

    class Bounds(AtLeast):
        def threshold(self, stats, rows):
            raise GeneratorExit

    bench = Bench(Quits, Bounds)
    bench.change(added=[(0, {"last": 1, "at_least": 0.02})])
    assert bench.run(1).isfinite().all()
    assert (bench.state("quits"), bench.state("bounds")) == ("quarantined", "quarantined")


class Scribbles(AtLeast):
    """Writes into everything it is given."""

    def threshold(self, stats, rows):
        limits = super().threshold(stats, rows)
        for each in (stats.max, stats.logsumexp, stats.mean, stats.std):
            each.fill_(math.inf)
        rows.rows.zero_()
        return limits


@pytest.mark.parametrize("kinds", [1, 2])
def test_a_truncation_cannot_write_into_what_others_need(kinds: int):
    """Its statistics and row numbers are its own: no row is emptied, and no other request's is cut."""
    bench = Bench(*(Scribbles, AtLeastToo)[:kinds])
    bench.change(added=[(0, {}), (1, {"at_least": 0.025}), (2, {"at_least_too": 0.015}), (3, {"at_least": 0.025})])
    for _ in range(2):
        kept = [int(row.isfinite().sum()) for row in bench.run(4)]
        assert kept == [VOCABULARY, 3, VOCABULARY if kinds == 1 else 2, 3]


def test_a_limit_that_is_no_number_costs_the_truncation():
    """It would let all tokens stay, and look as if it worked."""

    class Lost(AtLeast):
        def threshold(self, stats, rows):
            return super().threshold(stats, rows) * math.nan

    bench = Bench(Lost)
    bench.change(added=[(0, {"at_least": 0.025})])
    assert bench.run(1).isfinite().all()
    assert bench.state("lost") == "quarantined"
    assert "threshold gave NaN or +inf, in 1 of 1 rows" in bench.ledger._items["lost"].reason


class Touchy(torch.Tensor):
    """A tensor that raises wherever it is used outside a guard."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        frame = sys._getframe()
        while frame is not None and frame.f_code is not Guard.__call__.__code__:
            frame = frame.f_back
        if frame is None:
            raise RuntimeError(f"{func.__name__} of a touchy tensor")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "answer", [lambda limits: limits.as_subclass(Touchy), torch.Tensor.to_sparse, torch.nn.Parameter]
)
def test_a_limit_of_another_class_costs_no_other_sampler(answer: Callable[[torch.Tensor], torch.Tensor]):
    """Used as it is outside the guard, it would put all samplers aside."""

    class Odd(AtLeast):
        def threshold(self, stats, rows):
            return answer(super().threshold(stats, rows))

    bench = Bench(Odd, AtLeastToo, Adds)
    bench.change(added=[(0, {"at_least": 0.025}), (1, {"at_least_too": 0.015}), (2, {"adds": 1})])
    kept = [int(row.isfinite().sum()) for row in bench.run(3)]
    assert kept[1:] == [2, VOCABULARY]
    assert kept[0] == (VOCABULARY if bench.state("odd") == "quarantined" else 3)
    assert bench.state("atleasttoo") == bench.state("adds") == "applied"


def test_a_pick_of_another_class_costs_no_other_sampler():
    """It is put in place of vLLM's after the step, outside the guard."""

    class Odd(Last):
        def sample(self, logits, params):
            return torch.tensor(super().sample(logits, params)).as_subclass(Touchy)

    bench = Bench(Odd, Adds)
    bench.pipeline.overrides = True
    bench.change(added=[(0, {"last": 1}), (1, {"adds": 1})])
    bench.run(2)
    sampled = torch.zeros(2, dtype=torch.int64)
    bench.pipeline.after(sampled)
    assert sampled.tolist() == [VOCABULARY - 1, 0]
    assert bench.state("odd") == bench.state("adds") == "applied"


def test_what_was_generated_can_be_read_and_not_written():
    """The list is vLLM's own."""

    class Tampers(Last):
        def sample(self, logits, params):
            assert (params[0].generated, len(params[0].generated), params[0].generated[1:]) == ([4, 5], 2, [5])
            params[0].generated.append(6)

    bench = Bench(Tampers)
    bench.change(added=[(0, {"last": 1})])
    output = bench.tokens[bench.batch.layout[0]].output
    output += [4, 5]
    bench.run(1)
    assert output == [4, 5]
    assert "has no attribute 'append'" in bench.ledger._items["tampers"].reason


def test_opening_has_a_budget_too(monkeypatch: pytest.MonkeyPatch):
    """A strategy that takes seconds to open each request is put aside at the third."""
    clock = itertools.count(10**9, 2 * 10**9)
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    bench = Bench(Adds)
    bench.change(added=[(0, {"adds": 1}), (1, {"adds": 1}), (2, {"adds": 1})])
    assert bench.state("adds") == "quarantined"
    assert "3 calls each took more than 1 s over the budget" in bench.ledger._items["adds"].reason


def test_opening_may_take_longer_than_a_step(monkeypatch: pytest.MonkeyPatch):
    """It is done once for each request: 15 ms are no reason to put a strategy aside, however many requests come."""
    clock = itertools.count(10**9, 15 * 10**6)
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    bench = Bench(Adds)
    for _ in range(200):
        bench.change(added=[(0, {"adds": 1})])
    assert bench.state("adds") == "applied"


class Odd(AtLeast):
    """A limit that is computed for all but raises for one."""

    keys = (Key("odd", "float", 0.0, switch=True),)

    def open(self, slot, params):
        self.below[slot] = params.number("odd")
        return True

    def threshold(self, stats, rows):
        if any(self.below[slot] == 13 for _, slot in rows.pairs):
            raise RuntimeError("thirteen")
        return super().threshold(stats, rows)


def test_a_limit_that_raises_costs_its_request_too():
    """The others' limits hold."""
    bench = Bench(Odd, on_error="request")
    bench.change(added=[(0, {"odd": 0.025}), (1, {"odd": 13}), (2, {"odd": 0.015})])
    kept = [int(row.isfinite().sum()) for row in bench.run(3)]
    assert kept == [3, VOCABULARY, 2]
    assert [bench.batch.index(slot) for slot in bench.failed] == [1]


@pytest.mark.parametrize("answer", [0.5, torch.zeros(3, 1), torch.zeros(1), None], ids=str)
@pytest.mark.parametrize("kinds", [1, 2])
def test_a_limit_that_is_none_costs_the_truncation(answer: object, kinds: int):
    """A number, or limits in another shape, would raise outside of anybody's guard."""

    class Wrong(AtLeast):
        def threshold(self, stats, rows):
            return answer

    bench = Bench(*(Wrong, AtLeastToo)[:kinds])
    bench.change(added=[(row, {"at_least": 0.025, "at_least_too": 0.035}) for row in range(3)])
    kept = [int(row.isfinite().sum()) for row in bench.run(3)]
    assert kept == [VOCABULARY if kinds == 1 else 4] * 3
    assert bench.state("wrong") == "quarantined"
