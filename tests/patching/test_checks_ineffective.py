"""What Python would let be set without effect: refused with the way that works, on vLLM's own classes."""

import importlib

import pytest

from vllm_graft.errors import TargetError
from vllm_graft.patching import VLLMPatch, add, replace


def value(target, attribute, mark=replace):
    """A patch that sets one plain value on a class of vLLM's."""
    module, _, name = target.partition(":")
    kind = getattr(importlib.import_module(module), name)
    return type(VLLMPatch)(
        "Setting", (VLLMPatch[kind],), {attribute: mark(1), "__module__": __name__, "__qualname__": "Setting"}
    )


@pytest.mark.parametrize(
    ("target", "attribute", "what", "fix"),
    [
        ("vllm.v1.request:RequestStatus", "WAITING", "is an Enum: a value set on it is not a member", "patch the code"),
        (
            "vllm.v1.engine:EngineCoreRequest",
            "priority",
            "is a field of the msgspec struct EngineCoreRequest",
            "keep state of your own in a table by request id",
        ),
        (
            "vllm.v1.core.kv_cache_utils:KVCacheBlock",
            "ref_cnt",
            "is a field of the class with __slots__ KVCacheBlock",
            "keep state of your own in a table by request id",
        ),
        (
            "vllm.config:CacheConfig",
            "gpu_memory_utilization",
            "a field of the dataclass CacheConfig, whose __init__ keeps the default it was made with",
            "wrap '__init__'",
        ),
    ],
)
def test_values_that_were_captured(engine, target, attribute, what, fix):
    """A member, a field of fixed layout, a field's default."""
    with pytest.raises(TargetError) as caught:
        engine.apply([value(target, attribute)])
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_new_field_of_a_pydantic_configuration(engine):
    """vLLM's configurations forbid what they do not know; options of one's own have another way."""
    with pytest.raises(TargetError, match=r"is a pydantic class: what is set on it later is not a field") as caught:
        engine.apply([value("vllm.config:CacheConfig", "graft_extra", add)])
    assert "--additional-config" in caught.value.fix


def test_a_captured_validator(engine):
    """pydantic calls the function it captured, whatever stands on the class."""
    from vllm.config import CacheConfig

    name = next(iter(CacheConfig.__pydantic_decorators__.field_validators))
    patch = type(VLLMPatch)(
        "Checking",
        (VLLMPatch[CacheConfig],),
        {name: replace(classmethod(lambda cls, given: given)), "__module__": __name__, "__qualname__": "Checking"},
    )
    with pytest.raises(TargetError, match=rf"'{name}' is a validator that pydantic captured when CacheConfig was made"):
        engine.apply([patch])


def test_a_post_init_that_nobody_calls(engine):
    """A dataclass asks once, when it is made, whether there is one."""
    from vllm.config import CacheConfig, ParallelConfig

    class Late(VLLMPatch[CacheConfig]):
        @add
        def __post_init__(self): ...

    assert not hasattr(CacheConfig, "__post_init__"), "this release has one; choose another class for the test"
    with pytest.raises(TargetError, match=r"was made without one: its __init__ never calls it. Next: wrap '__init__'"):
        engine.apply([Late])

    class Existing(VLLMPatch[ParallelConfig]):
        def __post_init__(self):
            self._original___post_init__()
            self.__dict__["graft_seen"] = True

    engine.apply([Existing])
    assert ParallelConfig().__dict__["graft_seen"]


def test_compiled_operations(engine):
    """Neither the table of operations nor one of them has Python code."""
    import torch

    class Table(VLLMPatch[torch.ops.aten], name="table"):
        def add(call, *args):
            return call(*args)

    with pytest.raises(TargetError, match=r"compiled operations.*Next: register an implementation with torch.library"):
        engine.apply([Table])


def test_one_compiled_operation(engine, make):
    """Nor does a name that a module binds to one."""
    module = make("import torch\nmultiply = torch.ops.aten.mul\n")

    class One(VLLMPatch[module]):
        def multiply(call, *args):
            return call(*args)

    with pytest.raises(TargetError, match=r"'multiply' is a compiled operation of torch"):
        engine.apply([One])


def test_methods_of_fixed_layouts_can_be_patched(engine):
    """Only the fields are fixed."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    class Louder(VLLMPatch[KVCacheBlock]):
        def __repr__(self):
            return "patched"

    engine.apply([Louder])
    assert repr(KVCacheBlock(block_id=1)) == "patched"
