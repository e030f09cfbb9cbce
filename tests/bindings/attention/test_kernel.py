"""Attention kernels: the tutorial's against vLLM's own, which layers are refused, and what a failure does."""

import importlib
import inspect
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_graft.bindings.attention.kernel import KernelMetadata, LayerKernel, kernel_backend
from vllm_graft.bindings.attention.kernel_layers import unserved
from vllm_graft.bindings.attention.kernel_trial import try_kernel
from vllm_graft.bindings.attention.layer_budget import DeviceTimer, LayerBudget
from vllm_graft.bindings.attention.patches import PlannedKernels, RefusedKernels
from vllm_graft.contracts import AttentionBatch, AttentionKernel, LayerView
from vllm_graft.errors import ServingError, StartError
from vllm_graft.ledger import Ledger
from vllm_graft.patching import Engine
from vllm_graft.plan import PlanItem
from vllm_graft.testing import Session

torch = pytest.importorskip("torch")

PAGE = Path(__file__).parents[3] / "docs" / "tutorial" / "first-attention-kernel.md"
TUTORIAL = re.search(r"^```python\n(.+?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
ITEM = PlanItem("attention", "plain", "acme_attention:PlainAttention", "acme", ("worker",), {}, "graft.toml:2")

VARIANTS = '''

class Windowed(PlainAttention):
    """Sees a window of the model's own."""

    windows = True

    def attend(self, query, keys, values):
        length, tokens = keys.shape[1], len(query)
        if self.layer.window is None:
            return super().attend(query, keys, values)
        rows = []
        for token in range(tokens):
            end = length - tokens + token + 1
            seen = slice(max(0, end - self.layer.window), end)
            rows.append(super().attend(query[token : token + 1], keys[:, seen], values[:, seen]))
        return torch.cat(rows)


class Wrong(PlainAttention):
    """Forgets all tokens but one."""

    def forward(self, query, key, value, kv_cache, batch):
        return super().forward(query, key, value, kv_cache, batch)[:1]


class Late(PlainAttention):
    """Fails at a length that no trial has."""

    def forward(self, query, key, value, kv_cache, batch):
        if batch.max_length > 140:
            raise RuntimeError("too long for me")
        return super().forward(query, key, value, kv_cache, batch)
'''


def tutorial_class(name: str = "PlainAttention") -> type[AttentionKernel]:
    scope: dict[str, object] = {"__name__": "acme_attention"}
    exec(TUTORIAL + VARIANTS, scope)
    return scope[name]


def view(**changed: object) -> LayerView:
    facts = {"name": "model.layers.0.attn", "index": 0, "layers": 1, "window": None, "heads": 4, "kv_heads": 2}
    return LayerView(**{**facts, "head_size": 8, "block_size": 16, "max_tokens": 64, **changed})


def kernel_of(kind: type[AttentionKernel], **changed: object) -> AttentionKernel:
    made = kind()
    made.layer, made.scale = view(**changed), 0.5
    return made


class TestTrial:
    """What is tried at the start, on numbers made up."""

    def tried(self, forward: object = None, **methods: object) -> None:
        kind = tutorial_class() if forward is None else type("Tried", (AttentionKernel,), {"forward": forward})
        try_kernel(kernel_of(type("Changed", (kind,), methods)), torch.float32, torch.device("cpu"))

    def test_a_good_kernel_passes_and_leaves_the_random_numbers_of_the_server_alone(self):
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        self.tried()
        assert torch.equal(torch.rand(3), expected)

    def test_it_meets_prompts_parts_of_prompts_and_single_tokens(self):
        met = []

        def forward(self, query, key, value, kv_cache, batch):
            met.append((batch.starts.diff().tolist(), batch.lengths.tolist(), batch.max_query, batch.max_length))
            assert key.shape == value.shape == (len(query), 2, 8)
            return query

        self.tried(forward)
        assert met == [([17, 3, 1], [17, 21, 16], 17, 21), ([1, 1, 1], [1, 16, 17], 1, 17)]

    @pytest.mark.parametrize(
        ("forward", "reason"),
        [
            (lambda self, *args: None, "returned nothing instead of a tensor"),
            (lambda self, query, *args: query.flatten(1), r"returned the shape \[21, 32\] for a query of \[21, 4, 8\]"),
            (lambda self, query, *args: query[:1], r"returned the shape \[1, 4, 8\]"),
            (lambda self, query, *args: query / 0, "returned NaN or infinity"),
            (lambda self, query, *args: query.to("meta"), "returned a tensor on meta for a query on cpu"),
        ],
    )
    def test_an_answer_that_is_none_is_refused(self, forward, reason):
        with pytest.raises(StartError, match=reason):
            self.tried(forward)

    def test_what_the_kernel_raises_is_raised(self):
        def store(self, key, value, kv_cache, slots):
            raise KeyError("slots")

        with pytest.raises(KeyError, match="slots"):
            self.tried(store=store)


class TestLayerKernel:
    """The calls of one layer's kernel."""

    def called(self, forward: object) -> tuple[LayerKernel, Ledger]:
        ledger = Ledger()
        ledger.set_item("attention", "plain", "applied")
        return LayerKernel(
            kernel_of(type("Called", (AttentionKernel,), {"forward": forward})), ITEM, "l.0", ledger
        ), ledger

    def test_each_call_is_counted_and_timed(self):
        layer, ledger = self.called(lambda self, query, *args: query + 1)
        query, output = torch.zeros(2, 4, 8), torch.empty(2, 4, 8)
        layer.forward(query, query, query, query, None, output)
        assert torch.equal(output, query + 1)
        reading = ledger.hook("plain", "forward").reading()
        assert (reading.calls, reading.errors) == (1, 0)

    def test_a_layer_of_a_decode_step_is_held_to_the_bytes_that_it_reads(self):
        """Steps with prompts are not: they are bound by arithmetic."""
        layer, ledger = self.called(lambda self, query, *args: query + 1)
        layer.kernel.layer = SimpleNamespace(window=None, kv_heads=2, head_size=8)
        layer.budget = LayerBudget("plain", ledger, bandwidth=1e9)
        query, cache = torch.zeros(2, 4, 8), torch.zeros(9, 2, 16, 16)
        noted = []
        layer.budget.note = lambda took, read: noted.append(read)
        layer.budget._timer = DeviceTimer(layer.budget.note)
        for longest in (1, 7):
            batch = AttentionBatch(None, torch.tensor([100, 28]), None, longest, 100)
            layer.forward(query, query, query, cache, batch, torch.empty(2, 4, 8))
        assert noted == [128 * 2 * 2 * 8 * 4 + 2 * query.numel() * 4]

    @pytest.mark.parametrize(
        ("forward", "reason"),
        [
            (lambda self, *args: 1 / 0, "ZeroDivisionError: division by zero"),
            (lambda self, query, *args: query[:1], "returned the shape"),
        ],
    )
    def test_a_failure_names_the_kernel_and_the_layer(self, forward, reason):
        """A tensor with one row would otherwise be spread over all."""
        layer, _ = self.called(forward)
        query = torch.zeros(2, 4, 8)
        with pytest.raises(ServingError, match=rf"l\.0: attention 'plain' \(from graft.toml:2\) failed.+{reason}"):
            layer.forward(query, query, query, query, None, torch.empty(2, 4, 8))


class TestInterface:
    """The three classes against the interfaces of the installed vLLM: in the matrix, of each release."""

    def backend(self, **capabilities: object) -> type:
        kind = type("Checked", (tutorial_class(),), capabilities)
        return kernel_backend(kind, lambda spec, names: None)

    def test_nothing_is_left_abstract(self):
        backend = self.backend()
        for kind in (backend, backend.get_builder_cls(), backend.get_impl_cls()):
            assert not inspect.isabstract(kind), sorted(kind.__abstractmethods__)

    def test_every_method_takes_what_upstreams_takes(self):
        backend = self.backend()
        for kind in (backend, backend.get_builder_cls(), backend.get_impl_cls()):
            upstream = kind.__mro__[1]
            shared = [
                name for name, value in vars(kind).items() if inspect.isroutine(value) and hasattr(upstream, name)
            ]
            assert shared
            for name in shared:
                theirs = inspect.signature(getattr(upstream, name)).parameters.values()
                positional = [each.name for each in theirs if each.kind is each.POSITIONAL_OR_KEYWORD]
                keywords = {"kernel": None} if (kind, name) == (backend.get_impl_cls(), "__init__") else {}
                inspect.signature(getattr(kind, name)).bind(*positional, **keywords)

    def test_both_names_are_members_of_vllms_table(self):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        assert {"CPU_ATTN", "CUSTOM", self.backend().get_name()} <= set(AttentionBackendEnum.__members__)

    def test_it_says_what_the_kernel_serves(self):
        from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf

        backend = self.backend(block_multiple=32, head_sizes=(64, 128), windows=True, dtypes=("bfloat16",))
        (size,) = backend.get_supported_kernel_block_sizes()
        assert isinstance(size, MultipleOf)
        assert size.base == 32
        assert backend.supports_block_size(64)
        assert not backend.supports_block_size(16)
        assert backend.supports_head_size(64)
        assert not backend.supports_head_size(80)
        assert backend.supports_sliding_window()
        assert backend.supported_dtypes == [torch.bfloat16]
        assert self.backend().get_builder_cls()._cudagraph_support is AttentionCGSupport.NEVER
        graphs = self.backend(cuda_graphs=True).get_builder_cls()._cudagraph_support
        assert graphs is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def test_layers_take_a_backend_and_pass_on_what_they_do_not_know(self):
        """All the arguments that decide whether a layer can have a kernel are there by their names."""
        from vllm.model_executor.layers.attention.attention import Attention

        parameters = inspect.signature(Attention.__init__).parameters
        assert set(plain_layer()) <= set(parameters)
        assert parameters["extra_impl_args"].kind is inspect.Parameter.VAR_KEYWORD

    @pytest.mark.parametrize("patch", [PlannedKernels, RefusedKernels])
    def test_the_constructors_of_layers_can_be_wrapped(self, patch):
        engine = Engine()
        module, _, name = str(patch.declaration.target).partition(":")
        kind = getattr(importlib.import_module(module), name)
        stock = kind.__init__
        engine.apply([patch])
        try:
            assert [hook.state for hook in engine.report()] == ["applied"]
            assert "prefix" in inspect.signature(stock).parameters
        finally:
            engine.revert(patch)
        assert kind.__init__ is stock

    def test_a_step_goes_through_builder_and_implementation(self):
        """Two requests, one of which decodes; their tokens are padded, as in a captured graph."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        backend, ledger = self.backend(), Ledger()
        kernel = kernel_of(tutorial_class())
        implementation = backend.get_impl_cls()(4, 8, 0.5, 2, kernel=LayerKernel(kernel, ITEM, "l.0", ledger))
        builder = backend.get_builder_cls()(None, ["l.0"], None, torch.device("cpu"))
        starts = torch.tensor([0, 3, 4], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([3, 1], dtype=torch.int32),
            num_reqs=2,
            num_actual_tokens=4,
            max_query_len=3,
            max_seq_len=3,
            block_table_tensor=torch.tensor([[1, 0], [2, 0]], dtype=torch.int32),
            slot_mapping=torch.tensor([16, 17, 18, 32, -1]),
        )
        metadata = builder.build(0, common)
        assert isinstance(metadata, KernelMetadata)
        query, key, value = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
        cache = torch.zeros(3, 2, 16, 16)
        implementation.do_kv_cache_update(None, key, value, cache, common.slot_mapping)
        output = torch.full((5, 4, 8), 9.0)
        implementation.forward(None, query, key, value, cache, metadata, output)
        for rows in (slice(0, 3), slice(3, 4)):
            parts = [
                part[rows].transpose(0, 1).repeat_interleave(4 // part.shape[1], 0) for part in (query, key, value)
            ]
            expected = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=0.5)
            assert torch.allclose(output[rows], expected.transpose(0, 1), atol=1e-5)
        assert torch.equal(output[4], torch.full((4, 8), 9.0)), "padding is left alone"
        assert torch.equal(implementation.forward(None, query, key, value, cache, None, output), torch.zeros(5, 4, 8))

    def test_attention_to_later_tokens_is_refused(self):
        builder = self.backend().get_builder_cls()(None, ["l.0"], None, torch.device("cpu"))
        with pytest.raises(ServingError, match="attention to later tokens, which kernels do not serve"):
            builder.build(0, SimpleNamespace(causal=False))


def plain_layer(**changed: object) -> dict[str, object]:
    """The arguments of a layer that every kernel can serve."""
    names = (
        "alibi_slopes use_alibi_sqrt logits_soft_cap per_layer_sliding_window kv_sharing_target_layer_name head_size_v"
    )
    cache = SimpleNamespace(cache_dtype="auto", sliding_window=None)
    plain = {"attn_backend": None, "attn_type": "decoder", "head_size": 64, "extra_impl_args": {}, "prefix": "l.0"}
    return {**dict.fromkeys(names.split()), **plain, "cache_config": cache, "quant_config": None, **changed}


PLAIN_ENGINE = {"dtype": "float32", "mm_prefix": False, "context_parallel": 1, "batch_invariant": False}


def fp8(**cache: object) -> SimpleNamespace:
    return SimpleNamespace(**{"cache_dtype": "fp8", "sliding_window": None, **cache})


@pytest.mark.parametrize(
    ("layer", "engine", "reason"),
    [
        ({}, {}, ""),
        ({"attn_type": "encoder_only"}, {}, "kernels are for plain causal self-attention"),
        ({"attn_backend": int}, {}, "the model chooses int for it"),
        ({"alibi_slopes": [1.0]}, {}, "it has ALiBi"),
        ({"use_alibi_sqrt": True}, {}, "it has ALiBi"),
        ({"logits_soft_cap": 50.0}, {}, "its scores are capped at 50"),
        ({"logits_soft_cap": 0.0}, {}, ""),
        ({"extra_impl_args": {"sinks": object()}}, {}, "it has learned sinks"),
        ({"extra_impl_args": {"sinks": None}}, {}, ""),
        ({"extra_impl_args": {"chunk_lookback": 1}}, {}, "the model gives it chunk_lookback"),
        ({"head_size_v": 32}, {}, "its keys have 64 numbers but its values 32"),
        ({"head_size_v": 64}, {}, ""),
        ({"kv_sharing_target_layer_name": "l.1"}, {}, "it shares the KV cache of l.1"),
        ({"cache_config": fp8()}, {}, "its KV cache is fp8 and its queries float32"),
        ({"cache_config": None, "quant_config": SimpleNamespace(kv_cache_scheme={})}, {}, "its KV cache is fp8"),
        ({"cache_config": fp8(cache_dtype="float32")}, {}, ""),
        ({"per_layer_sliding_window": 128}, {}, "a sliding window of 128 tokens, but PlainAttention serves none"),
        ({"cache_config": fp8(cache_dtype="auto", sliding_window=64)}, {}, "it has a sliding window of 64 tokens"),
        ({}, {"mm_prefix": True}, "its model attends to images in both directions"),
        ({}, {"context_parallel": 2}, "context parallelism"),
        ({}, {"batch_invariant": True}, "VLLM_BATCH_INVARIANT is set"),
        ({}, {"dtype": "float64"}, "it computes in float64, but PlainAttention serves float32, float16, bfloat16"),
    ],
)  # fmt: skip
def test_a_layer_that_needs_more_than_the_kernel_has_is_refused_by_name(layer, engine, reason):
    found = unserved(tutorial_class(), "Attention", plain_layer(**layer), {**PLAIN_ENGINE, **engine})
    assert reason in found if reason else not found


def test_what_a_kernel_declares_is_compared_with_the_layer():
    picky = type("Picky", (tutorial_class("Windowed"),), {"head_sizes": (128,), "dtypes": ("bfloat16",)})
    windowed = plain_layer(per_layer_sliding_window=128)
    assert "heads have 64 numbers, but Picky serves 128" in unserved(
        picky, "Attention", windowed, {**PLAIN_ENGINE, "dtype": "bfloat16"}
    )
    assert "computes in float32, but Picky serves bfloat16" in unserved(picky, "Attention", windowed, PLAIN_ENGINE)
    assert not unserved(tutorial_class("Windowed"), "Attention", windowed, PLAIN_ENGINE)


@pytest.mark.parametrize("kind", ["MLAAttention", "CrossAttention", "ChunkedLocalAttention"])
def test_layers_of_other_kinds_are_refused(kind):
    """Some have other arguments altogether."""
    assert f"a layer of the kind {kind}" in unserved(tutorial_class(), kind, {"prefix": "l.0"}, PLAIN_ENGINE)


GENERATE = """
import json, random
from vllm import LLM, SamplingParams
llm = LLM(MODEL, dtype="float32", enforce_eager=True, max_model_len=512, block_size=32, max_num_batched_tokens=96{more})
numbers = random.Random(1)
prompts = [dict(prompt_token_ids=[numbers.randrange(5, 250) for _ in range(size)]) for size in (3, 33, 150, 300)]
params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
rounds = []
for _ in range(2):
    answers = llm.generate(prompts, params, use_tqdm=False)
    rounds.append([list(answer.outputs[0].token_ids) for answer in answers])
cached = [answer.num_cached_tokens for answer in answers]
from vllm_graft.ledger import runs
items = [
    dict(roles=each.record.roles, state=item.state, reason=item.reason, hooks=[hook.name for hook in item.hooks])
    for view in runs() for each in view.processes for item in each.record.items
]
print(json.dumps(dict(rounds=rounds, cached=cached, items=items)))
"""

FAIL = """
import json
from vllm import LLM, SamplingParams
from vllm_graft.ledger import current
llm = LLM(MODEL, dtype="float32", enforce_eager=True, max_model_len=512, block_size=32)
try:
    llm.generate(dict(prompt_token_ids=[7] * 150), SamplingParams(max_tokens=4), use_tqdm=False)
    error = ""
except Exception as failure:
    error = str(failure)
print(json.dumps(dict(error=error, recorded=current().record.last_error)))
"""


def plan_kernel(session: Session, name: str, *, more: str = "") -> None:
    """Lay out the tutorial's package with the variants, and plan one of its kernels."""
    session.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    entries = {"plain": "acme_attention:PlainAttention"}
    entries |= {each.lower(): f"acme_attention:{each}" for each in ("Windowed", "Wrong", "Late")}
    session.package("acme-attention", {"vllm_graft.plugins": entries}, {"acme_attention": TUTORIAL + VARIANTS})
    session.plan(f'[defaults]\nattention = "{name}"\n{more}')


def generated(session: Session, more: str = "") -> dict:
    return printed(session, GENERATE.format(more=more))


def printed(session: Session, script: str) -> dict:
    """What a script printed in JSON; its workers print more when they end."""
    done = session.script(script)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def failed(session: Session, more: str = "") -> str:
    """The end of a script that did not start, or did not go on."""
    done = session.script(GENERATE.format(more=more))
    assert done.returncode != 0
    return done.stderr[-6000:]


@pytest.mark.engine
@pytest.mark.compiled
class TestEngine:
    """A real engine on a CPU."""

    @pytest.mark.parametrize(("name", "more"), [("plain", ""), ("windowed", ", hf_overrides=dict(sliding_window=64)")])
    def test_tokens_are_those_of_vllms_own_kernel(self, graft: Session, name, more):
        """Prompts read in parts beside others that decode, and again with the prefix cache; with a window too."""
        plan_kernel(graft, name)
        ours = generated(graft, more)
        graft.env["GRAFT_DISABLE"] = "1"
        stock = generated(graft, more)
        assert ours["rounds"] == stock["rounds"]
        assert ours["rounds"][0] == ours["rounds"][1]
        assert ours["cached"] == stock["cached"]
        assert max(ours["cached"]) >= 256
        (item,) = ours["items"]
        assert item["state"] == "applied"
        layers = "2 layers: model.layers.0.self_attn.attn to model.layers.1.self_attn.attn"
        assert item["hooks"] == ["forward", "store", layers]

    @pytest.mark.slow
    @pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="vLLM binds each worker to a core of its own")
    def test_two_workers_have_half_of_the_heads_each(self, graft: Session):
        plan_kernel(graft, "plain")
        single = generated(graft)
        graft.env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        double = generated(graft, ", tensor_parallel_size=2")
        assert double["rounds"] == single["rounds"]
        # The front end and engine core have no part of it.
        assert [(item["roles"], item["state"]) for item in double["items"]] == [(["worker"], "applied")] * 2

    def test_a_window_that_it_does_not_serve_stops_the_start(self, graft: Session):
        plan_kernel(graft, "plain")
        said = failed(graft, ", hf_overrides=dict(sliding_window=64)")
        assert "model.layers.0.self_attn.attn: attention 'plain' (from " in said
        assert (
            "cannot be used: it has a sliding window of 64 tokens, but PlainAttention serves none. Next: plan a kernel"
            in said
        )

    def test_a_lenient_plan_goes_on_with_vllms_kernel(self, graft: Session):
        plan_kernel(graft, "plain", more='on_failure = "warn"\n')
        found = generated(graft, ", hf_overrides=dict(sliding_window=64)")
        (item,) = found["items"]
        assert item["state"] == "refused"
        assert "sliding window of 64" in item["reason"]
        assert len(found["rounds"][0][0]) == 24

    def test_one_that_fails_its_trial_stops_the_start(self, graft: Session):
        plan_kernel(graft, "wrong")
        said = failed(graft)
        assert "attention 'wrong' (from " in said
        assert "it failed when it was tried on a small batch: forward() returned the shape [1, 4, 32]" in said

    def test_one_that_fails_while_serving_ends_the_engine_and_is_named(self, graft: Session):
        plan_kernel(graft, "late")
        found = printed(graft, FAIL)
        assert "model.layers.0.self_attn.attn: attention 'late' (from " in found["error"]
        assert "failed, and no other kernel can read its KV cache: RuntimeError: too long for me" in found["error"]
        assert "late: failed in model.layers.0.self_attn.attn, which ends the engine" in found["recorded"]
