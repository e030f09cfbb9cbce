"""The V2 runner's interface, driven with vLLM's own request states and contexts, beside the V1 runner's.

There is no V2 runner without Triton and a device. What stands in for the device here: memory of the host, and staged
writes that are done by Python instead of a kernel. ``benchmarks/gpu/samplers.py`` runs the real one.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_graft import ledger
from vllm_graft.bindings.sampling import failures
from vllm_graft.bindings.sampling import processor as room
from vllm_graft.bindings.sampling.engine_arguments import v2_takes_samplers
from vllm_graft.bindings.sampling.step import DeviceStep, HistoryMirror, Ring
from vllm_graft.contracts import Key, SamplingStrategy
from vllm_graft.errors import StartError
from vllm_graft.plan import Plan, PlanItem, Run, clear_exported_plan, export_plan

pytestmark = pytest.mark.skipif(not v2_takes_samplers(), reason="the V2 runner takes samplers from vLLM 0.31 on")

SLOTS, LENGTH, VOCABULARY = 8, 96, 50
NAMES = ("dry", "no-repeat-ngram", "top-n-sigma", "xtc")


class Shows(SamplingStrategy):
    """Keeps what it was given, to be looked at."""

    keys = (Key("shows", "bool", False, switch=True),)
    window = 12
    seen: list[dict[str, object]] = []  # noqa: RUF012

    def setup(self, model):
        self.ones = model.per_slot(0.0)

    def open(self, slot, params):
        self.ones[slot] = 1.0
        return True

    def step(self, logits, rows):
        self.seen.append(
            {
                "pairs": sorted(rows.pairs),
                "positions": {
                    row: int(p) for (row, p) in zip(rows.rows.tolist(), rows.positions.tolist(), strict=True)
                },
                "tokens": dict(zip(rows.rows.tolist(), rows.history.tokens(rows, 6).tolist(), strict=True)),
                "uniform": dict(zip(rows.rows.tolist(), rows.uniform().tolist(), strict=True)),
            }
        )
        logits[rows.rows] += self.ones.of(rows)[:, None]


def config() -> SimpleNamespace:
    model = SimpleNamespace(
        model="m",
        seed=3,
        skip_tokenizer_init=True,
        get_vocab_size=lambda: VOCABULARY,
        try_get_generation_config=dict,
        hf_text_config=SimpleNamespace(eos_token_id=2),
    )
    return SimpleNamespace(
        model_config=model, speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=SLOTS)
    )


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plan with every shipped strategy and one that shows what it gets."""
    from vllm_graft.plan.catalogue import SHIPPED

    monkeypatch.setitem(sys.modules, Shows.__module__, sys.modules[__name__])
    Shows.seen.clear()
    items = [PlanItem("sampler", name, SHIPPED[name], "vllm-graft", ("worker",)) for name in NAMES]
    items.append(PlanItem("sampler", "shows", f"{Shows.__module__}:Shows", "p", ("worker",)))
    export_plan(Plan(tuple(items)), Run("v2", 1))
    yield
    clear_exported_plan()
    ledger.current().forget_items()


class Device:
    """vLLM's request states in host memory, and a batch that is stepped by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.gpu import buffer_utils, states
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcRequestState

        monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
        monkeypatch.setattr(buffer_utils.StagedWriteTensor, "apply_write", _write)
        self.states = states.RequestState(SLOTS, LENGTH, 64, 4, VOCABULARY, torch.device("cpu"))
        self.processor = room.PlannedProcessor(config(), LogitsProcRequestState.from_request_state(self.states))

    def add(self, name: str, prompt: list[int], so_far: list[int] | None = None, **extra: object) -> int:
        """A request enters, or comes back with what it had generated."""
        self.states.add_request(name, len(prompt), [*prompt, *(so_far or [])], 0, 99)
        slot = self.states.req_id_to_index[name]
        self.processor.add_request(slot, sampling(**extra))
        self.states.apply_staged_writes()
        self.processor.apply_staged_writes()
        return slot

    def remove(self, name: str) -> None:
        self.states.remove_request(name)

    def tokens(self, name: str) -> list[int]:
        slot = self.states.req_id_to_index[name]
        return self.states.all_token_ids.gpu[slot, : int(self.states.total_len.gpu[slot])].tolist()

    def append(self, name: str, *tokens: int) -> None:
        """What the runner does once tokens are certain."""
        slot = self.states.req_id_to_index[name]
        for token in tokens:
            at = int(self.states.total_len.gpu[slot])
            self.states.all_token_ids.gpu[slot, at] = token
            self.states.total_len.gpu[slot] = at + 1

    def apply(
        self,
        logits: torch.Tensor,
        names: list[str],
        drafts: dict[str, list[int]] | None = None,
        read: int | None = None,
    ) -> torch.Tensor:
        """One call as the sampler makes it: a row for each request, and one more for each of its drafts.

        ``read``: how many tokens of the prompts have been read, where it is not all.
        """
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

        slots, local, fed, positions, ends = [], [], [], [], []
        for name in names:
            known = self.tokens(name)[:read]
            line = [*known, *(drafts or {}).get(name, [])]
            for number, position in enumerate(range(len(known) - 1, len(line))):
                slots.append(self.states.req_id_to_index[name])
                local.append(number)
                positions.append(position)
                fed.append(line[position])
            ends.append(len(line))
        order = [self.states.req_id_to_index[name] for name in names]
        context = LogitsContext(
            expanded_idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping=torch.tensor(order, dtype=torch.int32),
            idx_mapping_np=np.array(order, dtype=np.int32),
            expanded_local_pos=torch.tensor(local, dtype=torch.int32),
            input_ids=torch.tensor(fed, dtype=torch.int32),
            pos=torch.tensor(positions),
            seq_lens_upper_bound_np=np.array(ends, dtype=np.int32),
        )
        return self.processor.apply(logits, context)


def _write(staged: object) -> None:
    """The staged writes of vLLM's tensor, without its kernel."""
    begin = 0
    table = staged.gpu if staged.gpu.dim() == 2 else staged.gpu[:, None]
    for index, start, end in zip(
        staged._staged_write_indices, staged._staged_write_starts, staged._staged_write_cu_lens, strict=True
    ):
        content = torch.tensor(staged._staged_write_contents[begin:end], dtype=table.dtype)
        table[index, start : start + len(content)] = content
        begin = end
    staged.clear_staged_writes()


def sampling(temperature: float = 1.0, seed: int | None = 11, **extra: object) -> SimpleNamespace:
    return SimpleNamespace(
        extra_args=extra or None, temperature=temperature, top_p=1.0, top_k=0, seed=seed, max_tokens=9
    )


@pytest.fixture
def device(planned: None, monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


EVERYTHING = {
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    "ngram": {"no_repeat_ngram_size": 2},
    "sigma": {"top_n_sigma": 1.5},
    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    "all": {
        "dry_multiplier": 1.1,
        "dry_sequence_breakers": [],
        "no_repeat_ngram_size": 3,
        "top_n_sigma": 2.0,
        "xtc_probability": 1.0,
        "xtc_threshold": 0.02,
    },
    "none": {},
}


class HostBatch:
    """The same requests on the V1 runner's interface."""

    def __init__(self) -> None:
        self.processor = room.PlannedProcessor(config(), torch.device("cpu"), False)
        self.outputs: dict[str, list[int]] = {}
        self.rows: list[str] = []

    def add(self, name: str, prompt: list[int], **extra: object) -> None:
        self.outputs[name] = []
        account = [(len(self.rows), sampling(**extra), prompt, self.outputs[name])]
        self.processor.update_state(SimpleNamespace(added=account, removed=[], moved=[], batch_size=len(self.rows) + 1))
        self.rows.append(name)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return self.processor.apply(logits)


def test_both_runners_give_the_same_logits(device: Device):
    """Every strategy and all of them together, step by step, with rows in another order on each runner."""
    host, generator = HostBatch(), torch.Generator().manual_seed(5)
    prompts = {name: torch.randint(0, 6, (20,), generator=generator).tolist() for name in EVERYTHING}
    for name, extra in EVERYTHING.items():
        device.add(name, prompts[name], **extra)
        host.add(name, prompts[name], **extra)
    changed = 0
    for step in range(12):
        names = list(EVERYTHING)
        order = names[step % len(names) :] + names[: step % len(names)]
        logits = torch.randn(len(names), VOCABULARY, generator=generator) * 3
        on_host = host.apply(logits.clone())
        on_device = device.apply(logits[[names.index(name) for name in order]].clone(), order)
        on_device = on_device[[order.index(name) for name in names]]
        torch.testing.assert_close(on_host, on_device, rtol=1e-5, atol=1e-4)
        assert torch.equal(on_host[names.index("none")], logits[names.index("none")])
        changed += int((on_host != logits).any(-1).sum())
        for row, name in enumerate(names):
            token = int(on_host[row, :6].argmax())
            host.outputs[name].append(token)
            device.append(name, token)
    assert changed > 40


def test_a_step_that_is_computed_twice_is_the_same(device: Device):
    """The runner may take a batch in parts and come back."""
    device.add("a", [1, 2, 3, 1, 2], **EVERYTHING["all"])
    device.add("b", [4, 4, 4], **EVERYTHING["dry"])
    logits = torch.randn(2, VOCABULARY)
    first = device.apply(logits.clone(), ["a", "b"])
    again = device.apply(logits.clone(), ["a", "b"])
    torch.testing.assert_close(first, again)
    parts = [device.apply(logits[i : i + 1].clone(), [name]) for i, name in enumerate(["a", "b"])]
    torch.testing.assert_close(first, torch.cat(parts))


def test_a_slot_that_is_used_again_has_nothing_of_its_former_request(device: Device):
    """There is no word of a request that leaves."""
    slot = device.add("a", [1, 2, 1, 2, 1], shows=1, **EVERYTHING["dry"])
    device.apply(torch.zeros(1, VOCABULARY), ["a"])
    device.remove("a")
    assert device.add("b", [7, 8]) == slot
    assert torch.equal(device.apply(torch.zeros(1, VOCABULARY), ["b"]), torch.zeros(1, VOCABULARY))
    device.remove("b")
    assert device.add("c", [9, 9, 9], shows=1) == slot
    device.apply(torch.zeros(1, VOCABULARY), ["c"])
    assert Shows.seen[-1]["tokens"] == {0: [-1, -1, -1, 9, 9, 9]}


def test_a_request_that_comes_back_goes_on_as_if_it_had_stayed(device: Device):
    """Preempted and resumed: its prompt is then what it was plus what it had generated."""
    prompt, so_far = [1, 2, 3, 1, 2], [3, 1]
    device.add("stayed", prompt, **EVERYTHING["all"])
    logits = torch.randn(1, VOCABULARY)
    device.apply(logits.clone(), ["stayed"])
    for token in so_far:
        device.append("stayed", token)
        expected = device.apply(logits.clone(), ["stayed"])
    device.add("came back", prompt, so_far, **EVERYTHING["all"])
    torch.testing.assert_close(device.apply(logits.clone(), ["came back"]), expected)


def test_each_draft_is_judged_after_those_before_it(device: Device):
    """A request has a row for each draft, and only the device knows whose rows are whose."""
    device.add("with", [1, 2, 3], shows=1)
    device.add("other", [5, 5, 5])
    device.add("plain", [6, 7], shows=1)
    names, drafts = ["other", "with", "plain"], {"other": [8], "with": [1, 2, 4]}
    logits = device.apply(torch.zeros(7, VOCABULARY), names, drafts)
    assert logits[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 1]
    seen = Shows.seen[-1]
    slots = {name: device.states.req_id_to_index[name] for name in names}
    assert seen["pairs"] == [*((row, slots["with"]) for row in range(2, 6)), (6, slots["plain"])]
    assert {row: seen["tokens"][row] for row in range(2, 7)} == {
        2: [-1, -1, -1, 1, 2, 3],
        3: [-1, -1, 1, 2, 3, 1],
        4: [-1, 1, 2, 3, 1, 2],
        5: [1, 2, 3, 1, 2, 4],
        6: [-1, -1, -1, -1, 6, 7],
    }
    assert [seen["positions"][row] for row in range(2, 7)] == [3, 4, 5, 6, 2]


def test_drafts_that_were_refused_leave_no_trace(device: Device):
    """The next step has another token where a draft had been."""
    device.add("a", [1, 2, 3], shows=1)
    device.add("b", [9], shows=1)
    device.apply(torch.zeros(5, VOCABULARY), ["a", "b"], {"a": [4, 5, 6]})
    device.append("a", 4, 7)
    device.append("b", 9)
    device.apply(torch.zeros(2, VOCABULARY), ["b", "a"])
    assert Shows.seen[-1]["tokens"][1] == [-1, 1, 2, 3, 4, 7]


@pytest.mark.parametrize("name", ["dry", "ngram", "sigma", "xtc", "all"])
def test_a_draft_row_equals_the_row_it_would_have_had(device: Device, name: str):
    """What a strategy does to the third draft is what it does once those before are certain."""
    device.add("drafted", [1, 2, 3, 1, 2], **EVERYTHING[name])
    device.add("bystander", [3, 3])
    logits = torch.randn(5, VOCABULARY) * 3
    expected = []
    drafted = device.apply(logits.clone(), ["drafted", "bystander"], {"drafted": [3, 1, 2]})
    device.add("certain", [1, 2, 3, 1, 2], **EVERYTHING[name])
    for row, token in enumerate([3, 1, 2, None]):
        expected.append(device.apply(logits[row : row + 1].clone(), ["certain"]))
        if token is not None:
            device.append("certain", token)
    torch.testing.assert_close(drafted[:4], torch.cat(expected))
    assert torch.equal(drafted[4], logits[4])


def test_a_long_history_is_looked_at_through_a_window(device: Device):
    """The ring near the device holds no more than anybody wants, and turns."""
    device.add("a", [1] * 30, shows=1)
    for token in range(2, 40):
        device.apply(torch.zeros(1, VOCABULARY), ["a"])
        device.append("a", token)
    device.apply(torch.zeros(1, VOCABULARY), ["a"])
    assert Shows.seen[-1]["tokens"] == {0: [34, 35, 36, 37, 38, 39]}
    assert json.dumps(Shows.seen[-1]["positions"]) == '{"0": 68}'


def test_a_prompt_that_is_read_in_parts_is_known_whole(device: Device):
    """Each part has a row, whose token comes from before the window: it must not stand where a later one does."""
    prompt = list(range(1, 48)) * 2
    device.processor._history._ring = Ring(SLOTS, 12, torch.device("cpu"), 8)
    device.add("a", prompt, shows=1)
    for read in (26, 66, None):
        device.apply(torch.zeros(1, VOCABULARY), ["a"], read=read)
    device.append("a", 49)
    device.apply(torch.zeros(1, VOCABULARY), ["a"])
    assert Shows.seen[-1]["tokens"] == {0: [43, 44, 45, 46, 47, 49]}
    slot, at = device.states.req_id_to_index["a"], torch.arange(len(prompt) - 11, len(prompt)) % 20
    assert device.processor._history._ring._tokens[slot, at].tolist() == prompt[-11:]


def test_what_fails_around_samplers_puts_them_aside_and_the_engine_goes_on(
    device: Device, monkeypatch: pytest.MonkeyPatch
):
    """Whatever raises where vLLM calls us would end every request there is."""
    device.add("a", [1, 2, 3], shows=1, xtc_probability=0.0, top_n_sigma=1.0)
    monkeypatch.setattr(device.processor._history, "_fetch", _fail)
    logits = torch.arange(VOCABULARY).float()[None]
    changed = device.apply(logits.clone(), ["a"])
    assert changed.isneginf().any(), "who looks at no tokens works on"
    assert not Shows.seen
    monkeypatch.setattr(device.processor.pipeline, "run", _fail)
    assert torch.equal(device.apply(logits.clone(), ["a"]), logits)
    assert device.processor.add_request(3, sampling(shows=1)) is False
    states = {item.name: item.state for item in ledger.current()._items.values()}
    assert states["shows"] == states["top-n-sigma"] == "quarantined"


def test_v1_a_token_that_is_not_known_costs_no_engine(planned: None, monkeypatch: pytest.MonkeyPatch):
    """A placeholder where vLLM has not filled in the last token."""
    host = HostBatch()
    host.add("a", [1, 2], shows=1, top_n_sigma=1.0)
    processor = host.processor
    processor._mirror = HistoryMirror(processor._tokens, 2 * SLOTS, 12, torch.device("cpu"))
    processor._device = DeviceStep(processor.pipeline.seeds, processor._mirror)
    host.outputs["a"].append(-1)
    assert host.apply(torch.arange(VOCABULARY).float()[None]).isneginf().any()
    assert not Shows.seen
    monkeypatch.setattr(processor._batch, "update", _fail)
    processor.update_state(SimpleNamespace(added=[], removed=[], moved=[]))
    logits = torch.arange(VOCABULARY).float()[None]
    assert torch.equal(host.apply(logits.clone()), logits)


def _fail(*args: object) -> None:
    raise RuntimeError("out of order")


class Breaks(SamplingStrategy):
    """Spoils its rows and raises where a request is marked."""

    keys = (Key("breaks", "str", "", switch=True),)

    def open(self, slot, params):
        self.marked = {**getattr(self, "marked", {}), slot: params["breaks"] == "yes"}
        return True

    def step(self, logits, rows):
        logits[rows.rows] += 1.0
        if any(self.marked[slot] for _, slot in rows.pairs):
            raise RuntimeError("a marked request")


@pytest.fixture
def breaking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device with a strategy that raises, beside a shipped one."""
    from vllm_graft.plan.catalogue import SHIPPED

    monkeypatch.setitem(sys.modules, Breaks.__module__, sys.modules[__name__])
    options = {"on_error": request.param}
    items = [
        PlanItem("sampler", "breaks", f"{Breaks.__module__}:Breaks", "p", ("worker",), options),
        PlanItem("sampler", "top-n-sigma", SHIPPED["top-n-sigma"], "vllm-graft", ("worker",)),
    ]
    export_plan(Plan(tuple(items)), Run("v2", 1))
    yield Device(monkeypatch)
    clear_exported_plan()
    ledger.current().forget_items()


def ended(device: Device) -> dict[str, str]:
    """The requests that the worker reports to the engine after a step, by their ids in the runner's own states."""
    output = failures.report(SimpleNamespace(req_states=device.states), SimpleNamespace())
    return getattr(output, failures.NAME, {})


@pytest.mark.parametrize("breaking", ["quarantine"], indirect=True)
def test_a_strategy_that_raises_is_put_aside_as_on_v1(breaking: Device):
    """It leaves no trace, others' work stays, and whoever asks for it afterwards ends with the reason."""
    breaking.add("marked", [1, 2], breaks="yes")
    breaking.add("other", [3, 4], breaks="no", top_n_sigma=1.0)
    breaking.add("plain", [5, 6])
    logits = torch.arange(VOCABULARY).float().expand(3, -1)
    names = ["marked", "other", "plain"]
    for _ in range(2):
        changed = breaking.apply(logits.clone(), names)
        assert torch.equal(changed[::2], logits[::2])
        assert changed[1].isneginf().any()
        assert torch.equal(changed[1][changed[1].isfinite()], logits[1][changed[1].isfinite()])
        assert ended(breaking) == {}
    assert {item.name: item.state for item in ledger.current()._items.values()} == {
        "breaks": "quarantined",
        "top-n-sigma": "applied",
    }
    breaking.add("late", [7], breaks="no")
    breaking.add("later", [8], top_n_sigma=1.0)
    breaking.apply(torch.zeros(5, VOCABULARY), [*names, "late", "later"])
    (reason,) = (found := ended(breaking)).values()
    assert list(found) == ["late"]
    assert "breaks: was put aside after a failure" in reason
    # One that was preempted had begun before, and goes on.
    breaking.remove("other")
    breaking.add("other", [3, 4], [5], breaks="no", top_n_sigma=1.0)
    breaking.apply(torch.zeros(3, VOCABULARY), names)
    assert ended(breaking) == {}


@pytest.mark.parametrize("breaking", ["request"], indirect=True)
def test_or_it_costs_the_request_it_raised_for_as_on_v1(breaking: Device):
    """The batch is taken apart: whoever did not raise gets what it asked for."""
    for name, said in (("a", "no"), ("marked", "yes"), ("b", "no")):
        breaking.add(name, [1, 2], breaks=said)
    changed = breaking.apply(torch.zeros(3, VOCABULARY), ["a", "marked", "b"])
    assert changed[:, 0].tolist() == [1.0, 0.0, 1.0]
    (reason,) = (found := ended(breaking)).values()
    assert list(found) == ["marked"]
    assert "breaks: RuntimeError: a marked request" in reason
    assert ledger.current()._items["breaks"].state == "applied"


class Unfit(SamplingStrategy):
    """Cannot work for any model."""

    keys = ("unfit",)

    def setup(self, model):
        raise RuntimeError(f"no table for {model.vocabulary} tokens")


class Quits(Unfit):
    """Ends the process, it thinks."""

    def setup(self, model):
        raise SystemExit(2)


class Windowed(Unfit):
    """Asks for a window in words."""

    def setup(self, model):
        self.window = "all"


class Slow(Unfit):
    """Takes its time."""

    def setup(self, model):
        time.sleep(0.2)


def test_a_start_that_waits_for_a_sampler_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """From outside it looks as if vLLM hung."""
    monkeypatch.setattr("vllm_graft.bindings.instantiate.SLOW_START_S", 0.05)
    monkeypatch.setitem(sys.modules, Slow.__module__, sys.modules[__name__])
    export_plan(Plan((PlanItem("sampler", "slow", f"{Slow.__module__}:Slow", "p", ("worker",)),)), Run("slow", 1))
    try:
        with caplog.at_level("WARNING", logger="vllm.graft"):
            HostBatch()
    finally:
        clear_exported_plan()
        ledger.current().forget_items()
    assert "the start has waited for 0 s while setup of the sampler 'slow' runs" in caplog.text
    for thread in threading.enumerate():
        if thread.name == "graft-slow-start":
            thread.join(5)
            assert not thread.is_alive(), "nothing waits any more"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Unfit, "RuntimeError: no table for 50 tokens"),
        (Quits, "SystemExit: 2"),
        (Windowed, "ValueError: it has the window 'all', which is not a number of tokens"),
    ],
)
@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_a_sampler_that_cannot_be_set_up_is_refused(
    monkeypatch: pytest.MonkeyPatch, policy: str, kind: type[Unfit], reason: str
):
    """A strict plan stops the start; a lenient one goes on without it, and the record says so."""
    monkeypatch.setitem(sys.modules, Unfit.__module__, sys.modules[__name__])
    item = PlanItem("sampler", "unfit", f"{Unfit.__module__}:{kind.__name__}", "p", ("worker",))
    export_plan(Plan((item,), on_failure=policy), Run("unfit", 1))
    try:
        if policy == "stop":
            with pytest.raises(StartError, match=f"'unfit' cannot be set up for m: {reason}"):
                HostBatch()
        else:
            assert HostBatch().processor.pipeline.samplers == []
        assert ledger.current()._items["unfit"].state == "refused"
    finally:
        clear_exported_plan()
        ledger.current().forget_items()
