"""Mistakes of authors: what is wrong with a class is said before anything is made of it."""

import abc
import inspect

import pytest

from vllm_graft.contracts import (
    AdmissionQueue,
    AttentionKernel,
    Key,
    KVPolicy,
    ModelPlugin,
    MoeRouter,
    Sampler,
    SamplingStrategy,
    SchedulingPolicy,
    StatSink,
    Truncation,
)
from vllm_graft.contracts.validation import OPTIONAL, REQUIRED, RESERVED, find_mistake, shared_key, source_location
from vllm_graft.plan.catalogue import SHIPPED, load

ON = (Key("on", "bool", False, switch=True),)


class Whole(SamplingStrategy):
    """Nothing is wrong with it."""

    keys = ON

    def open(self, slot, params):
        return True

    def step(self, logits, rows):
        """Change nothing."""


def strategy(**changed: object) -> type:
    """A strategy that differs from a good one."""
    return type("Changed", (Whole,), changed)


def without(contract: type, **methods: object) -> type:
    return type("Partial", (contract,), methods)


def nothing(self, *args):
    """Do nothing."""


@pytest.mark.parametrize(
    ("kind", "default"),
    [("bool", False), ("int", 0), ("float", 0.0), ("str", ""), ("list[str]", []), ("list[int]", []), ("any", 0)],
)
def test_a_key_without_a_default_has_an_empty_one_of_its_type(kind, default):
    """So a class that declares none is no mistake, and a strategy is given what it expects."""
    key = Key("style", kind)
    assert (type(key.default), key.default) == (type(default), default)
    assert find_mistake(without(SamplingStrategy, keys=(key,), open=nothing, step=nothing)) is None
    assert Key("style", kind, None).default is None


MISSING = [
    (without(SamplingStrategy, keys=ON, open=nothing), "step(logits, rows)"),
    (without(SamplingStrategy, keys=ON, step=nothing), "open(slot, params)"),
    (without(Truncation, keys=ON, open=nothing), "threshold(stats, rows)"),
    (without(Truncation, keys=ON, threshold=nothing), "open(slot, params)"),
    (without(Sampler, keys=ON), "sample(logits, params)"),
    (without(AdmissionQueue, push=nothing, peek=nothing, pop=nothing), "remove(request)"),
    (without(AdmissionQueue, push=nothing, pop=nothing, remove=nothing), "peek()"),
    (without(SchedulingPolicy), "schedule(waiting, running, kv_cache)"),
    (without(StatSink), "finished(requests, batch)"),
]


@pytest.mark.parametrize(("kind", "method"), MISSING, ids=[method for _, method in MISSING])
def test_a_method_that_is_missing(kind: type, method: str):
    """Its name and arguments are what the author has to write."""
    mistake = find_mistake(kind)
    assert mistake is not None
    assert f"has no method {method}" in mistake.what
    assert mistake.fix == f"implement {method}"


async def never_awaited(self, logits, rows):
    """A coroutine."""


def instance_check(self, params):
    """Not on the class."""


def needs_path(self, options, path):
    """A constructor that nobody can call."""


WRONG = [
    (strategy(step=lambda self, logits: None), "is called as step(logits, rows) and cannot take that"),
    (strategy(open=lambda self: None), "is called as open(slot, params) and cannot take that"),
    (strategy(step=never_awaited), "has step(logits, rows) as a coroutine or generator"),
    (strategy(step=3), "has something other than a method under the name step"),
    (strategy(setup=lambda self: None), "is called as setup(model)"),
    (strategy(sampled=lambda self, tokens: None), "is called as sampled(tokens, rows)"),
    (strategy(check=instance_check), "has check(params) as an instance method"),
    (strategy(__init__=needs_path), "has a constructor that also needs path"),
    (strategy(keys=()), "declares no keys, so no request could ask for it"),
    (strategy(keys="force"), "has keys that are not a list of Key or names: 'force'"),
    (strategy(keys=(3,)), "has keys that are not a list of Key or names"),
    (strategy(keys={"force": 0.5}), "has keys that are not a list of Key or names: {'force': 0.5}"),
    (strategy(keys=(key for key in ON)), "has keys that are not a list of Key or names: <generator"),
    (strategy(keys=(Key("x", default={1}),)), "has the key 'x' with the default {1}, which no request could carry"),
    (strategy(keys=(Key("x", "flaot"),)), "has the key 'x' of the type 'flaot' (did you mean 'float'?)"),
    (strategy(keys=(Key("top_k", "int", 0),)), "has a key 'top_k', which is a field of vLLM's own requests"),
    (strategy(keys=(Key("x", aliases=("temperature",)),)), "has a key 'temperature', which is a field of vLLM's own"),
    (strategy(keys=(Key("x"), Key("y", aliases=("x",)))), "has the key 'x' twice"),
    (strategy(keys=(Key("x", "int", "many"),)), "has the key 'x' with the default 'many', which is not a whole number"),
    (strategy(keys=(Key("x", "int", 1, low=5, high=2),)), "has the key 'x' with low 5 above high 2"),
    (strategy(keys=(Key("x", "int", 9, low=0, high=5),)), "has the key 'x' with the default 9, but it must be a whole"),
    (strategy(keys=(Key("x", "list[str]", ["a", "b"], high=1),)), "has the key 'x' with the default ['a', 'b'], but"),
    (strategy(keys=("",)), "has a key without a name"),
    (strategy(window="64"), "has the window '64', which is not a number of tokens"),
    (strategy(window=-1), "has the window -1, which is not a number of tokens"),
    (strategy(stage="penalties"), "has the stage 'penalties' (did you mean 'penalty'?)"),
]


@pytest.mark.parametrize(("kind", "said"), WRONG, ids=[said[:50] for _, said in WRONG])
def test_a_class_that_cannot_work(kind: type, said: str):
    """Each with a next step."""
    mistake = find_mistake(kind)
    assert mistake is not None
    assert said in mistake.what
    assert mistake.fix


def test_a_switch_may_be_off_at_a_default_out_of_range():
    """0 for "off" where 1 to 9 are allowed: a request says so by leaving the key out."""
    assert find_mistake(strategy(keys=(Key("x", "int", 0, low=1, high=9, switch=True),))) is None
    assert find_mistake(strategy(keys=(Key("x", "int", 0, low=1, high=9),))) is not None


def test_what_fulfils_its_contract_passes():
    """Arguments have the author's own names, and defaults; a constructor may take the tokenizer."""

    class Own(Whole):
        """Other names, more arguments."""

        def __init__(self, tokenizer, model, options=None, more=1):
            super().__init__(options)

        def step(self, scores, own_rows, extra=None):
            """Change nothing."""

        @staticmethod
        def setup(model):
            """Static."""

        @classmethod
        def check(cls, params):
            """On the class."""

    computed = strategy(window=property(lambda self: 64))
    for kind in (Whole, Own, computed, strategy(open=nothing, step=nothing), strategy(keys=("bare",))):
        assert find_mistake(kind) is None
    assert find_mistake(without(Sampler, sample=nothing), {"every_request": True}) is None
    assert find_mistake(int) is None


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_has_no_mistake(name: str):
    """The rules hold for our own."""
    if ".patches." not in SHIPPED[name]:
        assert find_mistake(load(SHIPPED[name], name, "vllm-graft")) is None


def test_the_place_of_a_class_is_its_file_and_line():
    """Where the author looks; for a class without a source its module."""
    line = inspect.getsourcelines(Whole)[1]
    assert source_location(Whole) == f"{__file__}:{line}"
    assert source_location(int) == "builtins"


def test_two_samplers_with_one_key():
    """By its name or by an alias."""
    one, other = (Key("x", aliases=("y",)),), (Key("z"), Key("y"))
    assert shared_key({"one": one, "other": other}) == ("y", "one", "other")
    assert shared_key({"one": one, "other": (Key("z"),)}) is None


def test_the_tables_name_methods_of_the_contracts():
    """A method that a contract renames must be renamed here."""
    for contract, methods in (*REQUIRED.items(), *OPTIONAL.items()):
        for method in methods:
            parameters = list(inspect.signature(getattr(contract, method.partition("(")[0])).parameters)
            assert f"{method.partition('(')[0]}({', '.join(parameters[1:])})" == method


def test_reserved_names_are_those_of_the_installed_vllm():
    """Every field of its sampling parameters and requests."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.sampling_params import SamplingParams

    requests = (ChatCompletionRequest, CompletionRequest, ResponsesRequest)
    fields = {name for kind in requests for name in kind.model_fields} | set(SamplingParams.__struct_fields__)
    assert {name for name in fields if not name.startswith("_")} <= RESERVED


def kernel(**changed: object) -> type:
    """A kernel that differs from a good one."""
    return without(AttentionKernel, **{"forward": lambda self, query, key, value, kv_cache, batch: query, **changed})


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"dtypes": "float32"}, "has the dtypes 'float32'"),
        ({"dtypes": ()}, "has the dtypes ()"),
        ({"dtypes": ("fp8",)}, "has the dtypes ('fp8',)"),
        ({"head_sizes": 64}, "has the head sizes 64"),
        ({"head_sizes": ("64",)}, "has the head sizes ('64',)"),
        ({"block_multiple": 0}, "has the block multiple 0"),
        ({"block_multiple": "16"}, "has the block multiple '16'"),
        ({"forward": AttentionKernel.forward}, "has no method forward(query, key, value, kv_cache, batch)"),
        (
            {"forward": lambda self, query, key, value: query},
            "is called as forward(query, key, value, kv_cache, batch)",
        ),
        ({"store": lambda self, key, value: None}, "is called as store(key, value, kv_cache, slots)"),
    ],
)
def test_a_kernel_says_what_it_serves_in_values_that_can_be_compared(changed, what):
    mistake = find_mistake(kernel(**changed))
    assert mistake is not None
    assert what in mistake.what
    assert find_mistake(kernel(dtypes=["float32"], head_sizes=[64], block_multiple=32)) is None


class Queue(AdmissionQueue):
    """Nothing is wrong with it."""

    push = peek = pop = remove = nothing


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            abc.ABCMeta("Half", (StatSink,), {"finished": nothing, "other": abc.abstractmethod(lambda self: None)}),
            "is abstract, so that no instance can be made: other",
        ),
        (
            type("Both", (Queue, SchedulingPolicy), {"schedule": nothing}),
            "is both AdmissionQueue and SchedulingPolicy, of which only the first would be called",
        ),
        (strategy(keys=(Key("on", aliases="off"),)), "with the aliases 'off', which are not a list of names"),
        (strategy(keys=(Key("on", "float", low="3"),)), "with the limit '3', which is not a number"),
        (strategy(keys=(Key("on", "float", high=float("nan")),)), "with the limit nan, which is not a number"),
        (strategy(row_budget_us="x"), "has the row_budget_us 'x', which is not a time"),
        (
            without(StatSink, finished=nothing, check_options=nothing),
            "has check_options(options) as an instance method",
        ),
        (
            without(StatSink, finished=nothing, check_machine=nothing),
            "has check_machine(options) as an instance method",
        ),
    ],
)
def test_what_would_fail_at_the_start_or_never_be_called(kind: type, said: str):
    """`plan` says it, with the next step."""
    mistake = find_mistake(kind)
    assert mistake is not None
    assert said in mistake.what
    assert mistake.fix


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({}, "has neither window(layer) nor evict(request)"),
        ({"window": lambda self: None}, "is called as window(layer)"),
        ({"evict": lambda self, request: (), "keys": "kv_keep"}, "has the keys 'kv_keep'"),
        ({"evict": lambda self, request: (), "keys": (1,)}, "has the keys (1,)"),
        ({"evict": lambda self, request: (), "keys": None}, "has the keys None"),
    ],
)
def test_a_policy_has_something_to_decide_and_lists_its_keys(changed, what):
    mistake = find_mistake(without(KVPolicy, **changed))
    assert mistake is not None
    assert what in mistake.what
    assert find_mistake(without(KVPolicy, evict=lambda self, request: (), keys=["kv_keep"])) is None


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"architectures": ()}, "has the architectures ()"),
        ({"architectures": "AcmeForCausalLM"}, "has the architectures 'AcmeForCausalLM'"),
        ({"model": ""}, "has the model '', which names no class"),
        ({"model": "acme.net.AcmeForCausalLM"}, "has the model 'acme.net.AcmeForCausalLM'"),
        ({"model": "acme-net:AcmeForCausalLM"}, "has the model 'acme-net:AcmeForCausalLM'"),
        ({"config": "acme"}, "has the config 'acme', which names no class"),
        ({"weights": ["model."]}, "has the weights ['model.']"),
        ({"weights": {"": "model."}}, "has the weights {'': 'model.'}"),
        ({"check": lambda self: None}, "is called as check(model)"),
    ],
)
def test_a_model_plugin_names_its_class(changed, what):
    good = {"architectures": ("AcmeForCausalLM",), "model": "acme.net:AcmeForCausalLM", "weights": {"a.": None}}
    assert find_mistake(without(ModelPlugin, **good)) is None
    mistake = find_mistake(without(ModelPlugin, **{**good, **changed}))
    assert mistake is not None
    assert what in mistake.what


@pytest.mark.parametrize("kind", [ModelPlugin, MoeRouter])
def test_an_option_of_ones_own_does_not_lose_the_common_one(kind):
    made = without(kind, options={"own": 1})
    assert made.options == {**kind.options, "own": 1}
    assert len(made.options) == 2
