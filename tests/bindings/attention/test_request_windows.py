"""Windows of single requests: asked for by a key, stamped in engine core, followed by the manager and the tables."""

import sys
from types import SimpleNamespace

import pytest
import torch

from vllm_graft.bindings.attention import layers
from vllm_graft.bindings.attention.backends import Compactor
from vllm_graft.bindings.attention.compaction import StepRows, WindowShape
from vllm_graft.bindings.attention.layers import PlannedLayers, stamp_request
from vllm_graft.bindings.attention.request_windows import (
    STAMP,
    RowWindows,
    follow_windows,
    stamp_window,
    stamped_window,
    validate,
)
from vllm_graft.contracts import KVPolicy, LayerView, Window
from vllm_graft.ledger import Ledger
from vllm_graft.plan import PlanItem
from vllm_graft.plugins.attention.sink_window import SinkWindow
from vllm_graft.testing import Session


def request_of(extra: dict[str, object] | None, salt: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra), cache_salt=salt)


def kv_window(keys) -> int | None:
    return keys.get("kv_window")


class Fixed(KVPolicy):
    """Gives all requests one window."""

    def window(self, layer: LayerView) -> Window:
        return Window(0, 256)


class TestStamp:
    """What engine core writes on a request."""

    def test_a_window_is_stamped_and_salts_the_prefix_cache(self):
        extra = {"kv_window": 256, "other": 1}
        request = request_of(extra, "tenant")
        stamp_window(request, kv_window, ("kv_window",))
        assert stamped_window(request.sampling_params) == 256
        assert request.cache_salt.startswith(f"tenant|{STAMP}=256|")
        assert extra == {"kv_window": 256, "other": 1}, "the caller's own parameters stay as they are"

    def test_no_client_can_write_the_salt_of_a_window(self):
        """A request with full attention would fill the prefix cache for those with a window."""
        asking = request_of({"kv_window": 256})
        stamp_window(asking, kv_window, ("kv_window",))
        forged = request_of({}, f"|{STAMP}=256")
        stamp_window(forged, kv_window, ("kv_window",))
        assert forged.cache_salt != asking.cache_salt
        assert len(asking.cache_salt.rpartition("|")[2]) == 16

    @pytest.mark.parametrize("extra", [None, {}, {"other": 3}])
    def test_a_request_that_asks_for_nothing_is_left_alone(self, extra):
        request = request_of(extra)
        stamp_window(request, kv_window, ("kv_window",))
        assert request == request_of(extra)

    def test_a_stamp_that_a_client_sent_is_taken_off(self):
        """Blocks are freed by it, and it would not be in the salt."""
        request = request_of({STAMP: 64})
        stamp_window(request, kv_window, ("kv_window",))
        assert stamped_window(request.sampling_params) is None
        assert request.cache_salt is None

    @pytest.mark.parametrize("stamp", ["64", [1], True, 0])
    def test_what_is_no_window_is_no_stamp(self, stamp):
        """The scheduler and the workers would end with a TypeError."""
        assert stamped_window(request_of({STAMP: stamp}).sampling_params) is None

    @pytest.mark.parametrize(("policy", "window"), [(SinkWindow(), 256), (Fixed(), None)])
    def test_engine_core_stamps_by_its_own_policy_alone(self, monkeypatch: pytest.MonkeyPatch, policy, window):
        """A policy without ``request_window`` gives no stamp, and leaves none on that a client sent.

        Every request is stamped, so the plan is not read for each; and another engine of this process has its own.
        """
        kind = pytest.importorskip("vllm_graft.bindings.attention.retention").SinkWindowManager
        monkeypatch.setattr(layers, "current", Ledger)
        coordinator = SimpleNamespace(single_type_managers=[kind.__new__(kind)])
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(sliding_window=256))]
        manager = SimpleNamespace(
            coordinator=coordinator, kv_cache_config=SimpleNamespace(kv_cache_groups=groups), block_pool=None
        )
        planned = PlannedLayers()
        planned._planned = lambda: (PlanItem("attention", "p", "m:P", "pkg", ("engine",)), policy)
        planned.prove_managers(manager)
        monkeypatch.setattr(layers, "inherited_plan", lambda: pytest.fail("read again"))
        request = request_of({STAMP: 64, "kv_window": 256})
        stamp_request(manager, request)
        assert stamped_window(request.sampling_params) == window
        assert request.cache_salt is None if window is None else request.cache_salt.startswith(f"|{STAMP}=256|")
        other = request_of({STAMP: 64, "kv_window": 256})
        stamp_request(SimpleNamespace(), other)
        assert other == request_of({STAMP: 64, "kv_window": 256}), "an engine without windows"

    def test_a_policy_cannot_change_the_keys_of_a_request(self, monkeypatch: pytest.MonkeyPatch):
        """Samplers read them in the workers."""

        def empty(keys) -> int:
            keys["ids"].clear()
            keys.clear()
            return 256

        ledger = Ledger()
        ledger.set_item("attention", "p", "applied")
        monkeypatch.setattr(layers, "current", lambda: ledger)
        policy = SimpleNamespace(request_window=empty)
        ask = layers._guarded_window(PlanItem("attention", "p", "m:P", "pkg", ("engine",)), policy)
        request = request_of({"kv_window": 1, "ids": [1, 2]})
        stamp_window(request, ask, ("kv_window",))
        assert request.sampling_params.extra_args == {"kv_window": 1, "ids": [1, 2], STAMP: 256}

    @pytest.mark.parametrize("answer", [0, -5, 2.5, "256", True])
    def test_an_answer_that_is_no_window_costs_the_policy(self, answer):
        with pytest.raises(
            ValueError, match=r"request_window\(\) must return a number of tokens or None, but returned"
        ):
            validate(answer)


class TestRowWindows:
    """The rows of a step in a worker."""

    def test_rows_follow_their_requests(self):
        shape, rows = WindowShape.fit(16, 640, 16), RowWindows()
        new = [SimpleNamespace(req_id=name, sampling_params=request_of(extra).sampling_params)
               for name, extra in (("a", None), ("b", {STAMP: 256}))]  # fmt: skip
        runner = SimpleNamespace()
        follow_windows(runner, SimpleNamespace(finished_req_ids=(), scheduled_new_reqs=new))
        rows.arrange(runner, ["b", "a"])
        # A captured batch has more rows than there are requests.
        assert rows.before(shape, 3, torch.device("cpu")).tolist() == [192, 576, 576]
        rows.arrange(SimpleNamespace(), ["b", "a"])
        assert rows.before(shape, 2, torch.device("cpu")) is None, "another engine of this process"
        rows.arrange(runner, ["a"])
        assert rows.before(shape, 1, torch.device("cpu")) is None
        follow_windows(runner, SimpleNamespace(finished_req_ids=("b",), scheduled_new_reqs=[]))
        rows.arrange(runner, ["b"])
        assert rows.before(shape, 1, torch.device("cpu")) is None


class TestKernels:
    """The kernel of single tokens, which on a GPU is compiled once with windows of single requests and once without."""

    @pytest.mark.parametrize(("possible", "launched"), [(True, [[576, 576], None, None]), (False, [None, None])])
    def test_both_are_compiled_in_the_first_step(self, monkeypatch: pytest.MonkeyPatch, possible: bool, launched):
        """The step is one of vLLM's own, before it serves; later ones launch one kernel."""
        pytest.importorskip("vllm")
        found = []

        def compact(lengths, blocks, compacted, tables, block_size, shape, sliding, before):
            found.append(None if before is None else [shape.before] * len(before))
            assert before is None or before.dtype == torch.int32

        kernels = SimpleNamespace(compact_single_tokens=compact)
        monkeypatch.setitem(sys.modules, "vllm_graft.bindings.attention.triton_kernels", kernels)
        rows, device = RowWindows(), torch.device("meta")
        rows.possible = possible
        engine = SimpleNamespace(
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=4),
            scheduler_config=SimpleNamespace(max_num_seqs=2),
        )
        spec = SimpleNamespace(block_size=16, shape=WindowShape.fit(16, 640, 16))
        compactor = Compactor(spec, ["l.0"], engine, device, rows)
        step = StepRows(*(torch.zeros(size, dtype=torch.int32, device=device) for size in (3, 2, (2, 40))))
        for _ in range(2):
            compactor._compact_single_tokens(step)
        assert found == launched

    @pytest.mark.parametrize(("policy", "possible"), [(SinkWindow(), True), (KVPolicy(), False)])
    def test_one_is_enough_for_a_policy_without_windows_of_single_requests(self, policy: KVPolicy, possible: bool):
        planned, engine = PlannedLayers(), SimpleNamespace(parallel_config=SimpleNamespace())
        planned._planned = lambda: (PlanItem("attention", "p", "m:P", "pkg", ("worker",)), policy)
        planned._note_answer = lambda item, window: None
        layer = LayerView("model.layers.0.self_attn.attn", 0, 2, 512, 4, 2, 32, 16, 2048)
        planned.adapt_spec(layer, SimpleNamespace(block_size=16), engine)
        assert planned.row_windows.possible is possible


class TestShape:
    def test_a_narrowed_window_has_two_steps_at_least_and_is_never_wider(self):
        shape = WindowShape.fit(4, 1000, 32)
        assert [shape.narrowed(tokens).before for tokens in (1, 128, 200, 300, 4000)] == [64, 64, 128, 192, 896]

    def test_a_whole_window_leaves_out_nothing(self):
        shape = WindowShape.whole(4, 1000, 32)
        assert all(shape.gap(position) == 0 for position in range(1000))


class TestKeys:
    """``kv_window`` of ``sink-window`` in the front end."""

    @pytest.mark.parametrize("value", [127, 4097, 0, 300.0, "256", True, None])
    def test_a_value_outside_of_the_range_is_refused_with_the_range(self, value):
        with pytest.raises(ValueError, match="kv_window must be a whole number of tokens from 128 to 4096, but is"):
            SinkWindow.check_request({"kv_window": value}, SinkWindow.options)

    def test_others_pass(self):
        for value in (128, 4096):
            SinkWindow.check_request({"kv_window": value}, SinkWindow.options)


SCRIPT = """
drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
ways = {"blocks of 32": dict()}
if not PLANNED:
    ways["preempted"] = dict()
if DRAFTS:
    ways["drafts"] = dict(speculative_config=drafts, block_size=64)
long, short = prompts((500, 150))
asked = [(long, None), (long, 128), (long, 300), (short, 128), (long, None), (short, None)]
found = {}

def ask(llm):
    params = [
        SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, extra_args=dict(kv_window=own) if own else None)
        for _, own in asked
    ]
    outputs = llm.generate([dict(prompt_token_ids=prompt) for prompt, _ in asked], params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs], [each.num_cached_tokens for each in outputs]

for name, arguments in ways.items():
    llm = engine(max_num_batched_tokens=300, **arguments)
    scheduler = core(llm).scheduler
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    held = {}
    def watch(request_id, *args, original=manager.remove_skipped_blocks, held=held, manager=manager, **kwargs):
        original(request_id, *args, **kwargs)
        mine = sum(block is not manager._null_block for block in manager.req_to_blocks.get(request_id, ()))
        own = (manager.request.sampling_params.extra_args or {}).get("kv_window", 0)
        held[own] = max(held.get(own, 0), mine)
    manager.remove_skipped_blocks = watch
    def schedule(*args, scheduler=scheduler, original=scheduler.schedule, steps=[0]):
        steps[0] += 1
        if steps[0] % 25 == 0:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return original(*args)
    if name == "preempted":
        scheduler.schedule = schedule
    first, _ = ask(llm)
    second, cached = ask(llm)
    size = arguments.get("block_size", 32)
    pool = scheduler.kv_cache_manager.block_pool
    found[name] = dict(
        equal=[
            reference(prompt, answer, size, windows=None if own or PLANNED else set(), window=own or PLANNED or 128)
            for (prompt, own), answer in zip(asked, first)
        ],
        differ=first[0] != first[1] and first[1] != first[2], again=first == second, cached=cached, held=held,
        left=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), freed=manager.freed,
    )
    del llm
print(json.dumps(found))
"""

SESSION = """
import time
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import RequestStatus
llm = engine()
one, two = prompts((400, 90))

def turn(name, tokens, own):
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, extra_args=dict(kv_window=own) if own else None
    )
    request = EngineCoreRequest(
        request_id=name, prompt_token_ids=list(tokens), mm_features=None, sampling_params=params, pooling_params=None,
        arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None, resumable=True,
    )
    core(llm).add_request(*core(llm).preprocess_add_request(request))
    found = []
    while len(found) < 40:
        outputs, _ = core(llm).step_fn()
        found += [token for each in outputs.values() for output in each.outputs for token in output.new_token_ids]
    return found

found = {}
for name, (first, second) in dict(narrower=(None, 128), wider=(128, 384), without=(128, None)).items():
    # The last token of a turn is dropped.
    asked = one + turn(name, one, first)[:-1] + two
    answer = turn(name, two, second)
    core(llm).scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    (other,), _ = answers(llm, [asked])
    found[name] = [
        reference(asked, answer, 32, windows=None if first else set(), window=first or 128),
        reference(asked, other, 32, windows=set()),
    ]
print(json.dumps(found))
"""


@pytest.mark.engine
@pytest.mark.compiled
class TestEngine:
    """A real engine with both kinds of requests in one batch."""

    @pytest.mark.parametrize(("default", "planned"), [("full", 0), ("window", 384)])
    def test_tokens_are_those_of_each_requests_own_mask(
        self, run, graft: Session, no_drafts: str, default: str, planned: int
    ):
        """With prompts in parts, preemption and drafts; and again from a prefix cache that keeps windows apart."""
        graft.plan(
            '[defaults]\nattention = "sink-window"\n[options.sink-window]\nsink_tokens = 4\nwindow = 384\n'
            f'default = "{default}"\n'
        )
        drafts = not planned and not no_drafts
        found = run(graft, f"PLANNED, DRAFTS = {planned}, {drafts}\n{SCRIPT}")
        assert len(found) == (1 if planned else 2) + drafts
        for name, facts in found.items():
            assert facts["equal"] == [1.0] * 6, (name, facts)
            assert facts["again"], (name, facts)
            assert facts["differ"], name
            assert facts["left"] == 0, name
            assert facts["freed"] > 0, name
        plain = found["blocks of 32"]
        assert min(plain["cached"]) > 0
        # Sinks, two steps of 64 tokens, and the tokens of the step; others hold everything.
        assert plain["held"]["128"] < plain["held"]["300"] < plain["held"]["0"]

    def test_a_session_keeps_the_window_of_its_first_turn(self, run, graft: Session):
        """Its blocks were freed by that window; and other requests find none in the prefix cache that have a window."""
        graft.plan(
            '[defaults]\nattention = "sink-window"\n[options.sink-window]\nsink_tokens = 4\nwindow = 384\n'
            'default = "full"\n'
        )
        graft.env["GRAFT_CHECK_KV"] = "1"
        assert run(graft, SESSION) == {name: [1.0, 1.0] for name in ("narrower", "wider", "without")}
