"""Patched modules under torch.compile: one graph, the patched result, and proof of having been traced."""

import pytest

from vllm_graft.patching import VLLMPatch, replace, wrap

torch = pytest.importorskip("torch")


class Inner(torch.nn.Module):
    def forward(self, x):
        return x * 2


class Sub(Inner): ...


class Outer(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


class ByCall(VLLMPatch[Inner]):
    @wrap
    def forward(self, call, x):
        return call(x) + 10


class ByName(VLLMPatch[Inner]):
    @wrap
    def forward(self, x):
        return self._original_forward(x) + 100


class Instead(VLLMPatch[Inner]):
    @replace
    def forward(self, x):
        return x * 3


class Inherited(VLLMPatch[Sub]):
    @wrap
    def forward(self, call, x):
        return call(x) + 1000


class Packed(VLLMPatch[Inner]):
    @wrap
    def forward(self, call, *args, **kwargs):
        return call(*args, **kwargs) + 10000


class Named(VLLMPatch[Inner]):
    @wrap
    def forward(self, call, x, *, scale=1, **others):
        return call(x, **others) * scale


@pytest.mark.parametrize(
    ("patches", "kind", "result", "hits"),
    [
        ([ByCall], Inner, 13, [1]),
        ([ByName], Inner, 103, [1]),
        ([Instead], Inner, 4, [1]),
        ([Inherited], Sub, 1003, [1]),
        ([Packed], Inner, 10003, [1]),
        ([Named], Inner, 3, [1]),
        ([Packed, Named], Inner, 10003, [1, 1]),
        ([Instead, ByCall, ByName, Inherited], Sub, 1114, [1, 1, 1, 1]),
    ],
)
def test_a_patched_module_is_one_graph(engine, patches, kind, result, hits):
    """No graph break and no recompilation, although hits are counted: they are counted while tracing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine.apply(patches)
    compiled = torch.compile(Outer(kind()), fullgraph=True, backend="eager")
    assert [compiled(torch.ones(1)).item() for _ in range(5)] == [result] * 5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [state.hits for state in engine.report()] == hits


def test_reverting_is_seen(engine):
    """A graph traced with a patch is not used once the patch is gone."""
    torch._dynamo.reset()
    engine.apply([ByCall])
    compiled = torch.compile(Outer(Inner()), fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 13
    engine.revert(ByCall)
    assert compiled(torch.ones(1)).item() == 3


@pytest.mark.parametrize("patches", [[ByCall], [ByName], [Instead], [Packed], [Instead, ByCall, ByName, Packed, Named]])
def test_the_module_that_is_compiled_is_patched_itself(engine, patches):
    """Compiled and not, the answers are the same, and what is traced is counted once."""
    torch._dynamo.reset()
    engine.apply(patches)
    inner = Inner()
    compiled = torch.compile(inner, fullgraph=True, backend="eager")
    traced = [compiled(torch.ones(1)).item() for _ in range(5)]
    assert [state.hits for state in engine.report()] == [1] * len(patches)
    assert traced == [inner(torch.ones(1)).item()] * 5


def test_functions_of_modules(engine, make):
    """``call`` of a function is the function beneath, which the tracer follows like any other."""
    torch._dynamo.reset()
    module = make("def double(x): return x * 2")

    class Function(VLLMPatch[module]):
        @wrap
        def double(call, x):
            return call(x) + 10

    engine.apply([Function])
    compiled = torch.compile(lambda x: module.double(x), fullgraph=True, backend="eager")
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [12] * 3
    assert [state.hits for state in engine.report()] == [1]
