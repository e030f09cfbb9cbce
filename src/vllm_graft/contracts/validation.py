"""Validate the class of an item before it is instantiated: its methods, their signatures, its request keys.

An author's mistake would otherwise show with the first request, in a worker, as a sampler that was put aside.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_graft.contracts.attention import AttentionKernel, KVPolicy
from vllm_graft.contracts.balancing import ExpertBalancer
from vllm_graft.contracts.item import Item, OptionValue
from vllm_graft.contracts.models import ModelPlugin
from vllm_graft.contracts.policy import SchedulingPolicy
from vllm_graft.contracts.request_keys import KINDS, Key
from vllm_graft.contracts.routing import MoeRouter
from vllm_graft.contracts.sampling import STAGES, OptInSampler, Sampler, SamplingStrategy, Truncation
from vllm_graft.contracts.scheduling import AdmissionQueue
from vllm_graft.contracts.stats import StatSink
from vllm_graft.errors import nearest

REQUIRED: Final[Mapping[type[Item], Sequence[str]]] = {
    Truncation: ("open(slot, params)", "threshold(stats, rows)"),
    SamplingStrategy: ("open(slot, params)", "step(logits, rows)"),
    Sampler: ("sample(logits, params)",),
    AdmissionQueue: ("push(request)", "peek()", "pop()", "remove(request)"),
    SchedulingPolicy: ("schedule(waiting, running, kv_cache)",),
    StatSink: ("finished(requests, batch)",),
    ExpertBalancer: ("place(experts)",),
    AttentionKernel: ("forward(query, key, value, kv_cache, batch)",),
    KVPolicy: (),
    ModelPlugin: (),
    MoeRouter: ("route(hidden, logits, top_k)",),
}
"""The methods that a class must implement, by its contract; of two that fit the first one counts."""

OPTIONAL: Final[Mapping[type[Item], Sequence[str]]] = {
    SamplingStrategy: ("sampled(tokens, rows)",),
    OptInSampler: ("setup(model)",),
    AdmissionQueue: (
        "check_slots(slots)", "put_back(request)", "served(request, tokens)", "ended(request)", "admit(request, load)",
        "ready()", "labels(request)", "rank(request)",
    ),
    StatSink: ("close()",),
    KVPolicy: ("window(layer)", "evict(request)", "scores_layer(layer)", "request_window(keys)"),
    AttentionKernel: ("store(key, value, kv_cache, slots)",),
    ModelPlugin: ("check(model)",),
}  # fmt: skip
"""The methods that a class may override, with the arguments that it is called with."""

_ON_EVERY_CLASS: Final = ("check_options(options)", "check_machine(options)")
"""The methods of any item that are called on the class itself, before an instance is made."""

_ON_THE_CLASS: Final = ("check(params)", "is_requested(params)")
"""The methods of a sampler that are called on the class itself, in the front end."""

_EXCLUSIVE: Final = (
    (AdmissionQueue, SchedulingPolicy),
    (SamplingStrategy, Sampler),
    (AttentionKernel, KVPolicy),
)
"""Contracts of one point: a class that implements both would be used as one of them."""

PROVIDED: Final = ("tokenizer", "model")
"""Parameters of a sampler's constructor that get the model's tokenizer and its ``ServedModel``."""

RESERVED: Final = frozenset(
    """
    add_generation_prompt add_special_tokens allowed_token_ids background bad_words cache_salt chat_template
    chat_template_kwargs continue_final_message detokenize documents ec_transfer_params echo enable_response_messages
    extra_args flat_logprobs frequency_penalty ignore_eos include include_reasoning include_stop_str_in_output input
    instructions kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_completion_tokens
    max_output_tokens max_tokens max_tool_calls media_io_kwargs messages metadata min_p min_tokens mm_payload
    mm_processor_kwargs model n output_kind output_text_buffer_length parallel_tool_calls presence_penalty
    previous_input_messages previous_response_id priority prompt prompt_cache_key prompt_embeds prompt_logprob_start
    prompt_logprob_token_ids prompt_logprobs reasoning reasoning_effort repetition_detection repetition_penalty
    request_id response_format return_assistant_tokens_mask return_mm_kwargs return_prompt_text return_token_ids
    return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed service_tier session_id skip_clone
    skip_reading_prefix_cache skip_special_tokens spaces_between_special_tokens stop stop_token_ids store stream
    stream_interval stream_options structured_outputs suffix temperature text thinking_token_budget tool_choice tools
    top_k top_logprobs top_p trace_decode_token_ids truncate_prompt_tokens truncation truncation_side use_beam_search
    user vllm_xargs watermarking
    """.split()  # noqa: SIM905
)
"""The fields of vLLM's SamplingParams and of its chat, completion and responses requests, 0.26.0 to 0.32.0: at the top
level of a body such a name is vLLM's, and a sampler would never see it."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in a class, as the end of a sentence that begins with its name, and the next step."""

    what: str
    fix: str


def find_mistake(kind: type, options: Mapping[str, OptionValue] | None = None) -> Mistake | None:
    """Return the first mistake in the class of an item; None if it fulfils its contract."""
    return next(_mistakes(kind, options or {}), None)


def find_option_mistake(kind: type) -> Mistake | None:
    """Return the first mistake in the options that a class declares; None if each has a default that can be set."""
    declared: object = kind.options if issubclass(kind, Item) else {}
    if not isinstance(declared, Mapping):
        return Mistake(f"has options that are not a table: {declared!r}", 'write options = {"name": default}')
    for name, default in declared.items():
        if not isinstance(name, str) or not name:
            return Mistake(f"has an option named {name!r}", "use a non-empty string")
        if not _is_option_value(default):
            what = f"has the option {name!r} with the default {default!r}, which no configuration file can hold"
            return Mistake(what, "make it a string, number, true or false, a list of strings, or a table of these")
    return None


def _is_option_value(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    return all(isinstance(each, str) for each in value) if isinstance(value, list) else _is_plain(value)


def _is_plain(value: object) -> bool:
    return all(isinstance(each, bool | int | float | str) for each in (value if isinstance(value, list) else [value]))


def find_window_mistake(window: object) -> Mistake | None:
    """Return the mistake in the ``window`` of a sampler, which may be set on the class or by its constructor."""
    if isinstance(window, int) and not isinstance(window, bool) and window >= 0:
        return None
    return Mistake(f"has the window {window!r}, which is not a number of tokens", "make it a whole number, such as 64")


def source_location(kind: type) -> str:
    """Return the file and line of a class; its module if there is no source."""
    try:
        file = inspect.getsourcefile(kind) or ""
        return f"{file}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return kind.__module__


def _mistakes(kind: type, options: Mapping[str, OptionValue]) -> Iterator[Mistake]:
    contract = next((each for each in REQUIRED if issubclass(kind, each)), None)
    if contract is None:
        return
    for method in REQUIRED[contract]:
        yield from _method(kind, contract, method, required=True)
    yield from _whole(kind)
    for method in _ON_EVERY_CLASS:
        yield from _method(kind, Item, method, on_class=True)
    for base, methods in OPTIONAL.items():
        for method in methods if issubclass(kind, base) else ():
            yield from _method(kind, base, method)
    yield from _constructor(kind)
    if issubclass(kind, OptInSampler):
        yield from _keys(kind, options)
        for method in _ON_THE_CLASS:
            yield from _method(kind, OptInSampler, method, on_class=True)
    if issubclass(kind, AttentionKernel):
        yield from _capabilities(kind)
    if issubclass(kind, ModelPlugin):
        yield from _named_classes(kind)
    if issubclass(kind, KVPolicy):
        yield from _method(kind, KVPolicy, "check_request(keys, options)", on_class=True)
        yield from _retention(kind)
    if issubclass(kind, SamplingStrategy) and kind.stage not in STAGES:
        yield Mistake(f"has the stage {kind.stage!r}{nearest(str(kind.stage), STAGES)}", "name one of the stages")


def _whole(kind: type) -> Iterator[Mistake]:
    """Check that there can be instances, and that they have one part to play in their point."""
    if inspect.isabstract(kind):
        names = ", ".join(sorted(getattr(kind, "__abstractmethods__", ())))
        yield Mistake(f"is abstract, so that no instance can be made: {names}", f"implement {names}")
    for one, other in _EXCLUSIVE:
        if {one, other} <= set(kind.__mro__):
            what = f"is both {one.__name__} and {other.__name__}, of which only the first would be called"
            yield Mistake(what, "make two classes of it")


def _method(
    kind: type, contract: type, written: str, *, required: bool = False, on_class: bool = False
) -> Iterator[Mistake]:
    """Check a method against its call, written as ``name(arguments)``."""
    name, _, inside = written.rstrip(")").partition("(")
    arguments = [each.strip() for each in inside.split(",") if each.strip()]
    own = inspect.getattr_static(kind, name)
    if own is inspect.getattr_static(contract, name):
        if required:
            yield Mistake(f"has no method {written}, which every {contract.__name__} must have", f"implement {written}")
        return
    called = getattr(kind, name)
    if not callable(called):
        yield Mistake(f"has something other than a method under the name {name}", f"make it {written}")
        return
    bound = not isinstance(own, staticmethod | classmethod)
    if on_class and bound:
        what = f"has {written} as an instance method, but it is called on the class"
        yield Mistake(what, f"put @classmethod above {name}")
        return
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called) or inspect.isgeneratorfunction(called):
        yield Mistake(f"has {written} as a coroutine or generator, which is never awaited", "make it a plain method")
        return
    try:
        # Bound here and not called: importing a plugin must not run it.
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return  # compiled code without a signature
    try:
        signature.bind(*(["self"] if bound else []), *arguments)
    except TypeError as error:
        yield Mistake(f"is called as {written} and cannot take that: {error}", f"declare it as {written}")


def _capabilities(kind: type[AttentionKernel]) -> Iterator[Mistake]:
    known = AttentionKernel.dtypes
    dtypes: object = kind.dtypes
    sizes: object = kind.head_sizes
    if isinstance(dtypes, str) or not isinstance(dtypes, Collection) or not dtypes or not set(dtypes) <= set(known):
        yield Mistake(f"has the dtypes {dtypes!r}", f"list some of {', '.join(known)}")
    if not isinstance(sizes, Collection) or not all(_is_count(size) for size in sizes):
        yield Mistake(f"has the head sizes {sizes!r}", "list whole numbers, or none for any size")
    if not _is_count(kind.block_multiple):
        yield Mistake(f"has the block multiple {kind.block_multiple!r}", "make it a whole number, such as 16")


def _retention(kind: type[KVPolicy]) -> Iterator[Mistake]:
    keys: object = kind.keys
    # A bare string would be read as its letters, and no request would ever have one of them.
    if isinstance(keys, str) or not isinstance(keys, Collection) or not all(isinstance(key, str) for key in keys):
        yield Mistake(f"has the keys {keys!r}", 'list names, such as `keys = ("kv_keep",)`')
    if kind.window is KVPolicy.window and kind.evict is KVPolicy.evict:
        yield Mistake("has neither window(layer) nor evict(request), so it frees nothing", "implement one of the two")


def _named_classes(kind: type[ModelPlugin]) -> Iterator[Mistake]:
    architectures: object = kind.architectures
    named = isinstance(architectures, Collection) and not isinstance(architectures, str)
    if not named or not architectures or not all(isinstance(each, str) and each for each in kind.architectures):
        yield Mistake(
            f"has the architectures {architectures!r}", 'list names, such as `architectures = ("AcmeForCausalLM",)`'
        )
    for attribute, target in (("model", kind.model), ("config", kind.config)):
        needed = attribute == "model" or target != ""
        parts = target.split(":") if isinstance(target, str) else []
        if needed and not (len(parts) == 2 and all(part.isidentifier() for part in (*parts[0].split("."), parts[1]))):
            yield Mistake(
                f"has the {attribute} {target!r}, which names no class", f'write `{attribute} = "module:Class"`'
            )
    weights: object = kind.weights
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and name and (new is None or isinstance(new, str)) for name, new in weights.items()
    ):
        yield Mistake(
            f"has the weights {weights!r}", 'map beginnings of names, as {"transformer.": "model.", "rotary.": None}'
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _constructor(kind: type) -> Iterator[Mistake]:
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    provided = PROVIDED if issubclass(kind, OptInSampler) else ()
    first = next((each.name for each in positional if each.name not in provided), None)
    missing = [name for name in needed if name not in provided and name != first]
    if missing:
        yield Mistake(
            f"has a constructor that also needs {', '.join(missing)}, but is constructed with its options alone",
            "take one argument, `options=None`, and declare the rest in `options`",
        )


def _keys(kind: type[OptInSampler], options: Mapping[str, OptionValue]) -> Iterator[Mistake]:
    keys = kind.keys
    # A table's values would be lost, and a generator can be read only once.
    listed = isinstance(keys, Collection) and not isinstance(keys, str | Mapping)
    if not listed or not all(isinstance(key, Key | str) for key in keys):
        what = f"has keys that are not a list of Key or names: {keys!r}"
        yield Mistake(what, 'write keys = (Key("name", "float", 0.0),)')
        return
    if not keys and not options.get("every_request"):
        yield Mistake(
            "declares no keys, so no request could ask for it",
            "add keys = (Key(...),), or set every_request = true under its options",
        )
    budget: object = kind.row_budget_us
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget < math.inf:
        yield Mistake(f"has the row_budget_us {budget!r}, which is not a time", "give it in microseconds, such as 20.0")
    # A property has its value with the instance, which is checked once it is set up.
    if not hasattr(kind.window, "__get__") and (mistake := find_window_mistake(kind.window)):
        yield mistake
    seen: set[str] = set()
    for key in kind.request_keys():
        yield from _key(key, seen)


def _key(key: Key, seen: set[str]) -> Iterator[Mistake]:
    if not isinstance(key.name, str) or not key.name:
        yield Mistake(f"has a key without a name: {key!r}", "name it")
        return
    if key.kind not in KINDS:
        what = f"has the key {key.name!r} of the type {key.kind!r}{nearest(str(key.kind), KINDS)}"
        yield Mistake(what, f"give it one of the types {', '.join(KINDS)}")
        return
    aliases: object = key.aliases
    if not isinstance(aliases, list | tuple) or not all(isinstance(name, str) and name for name in aliases):
        what = f"has the key {key.name!r} with the aliases {aliases!r}, which are not a list of names"
        yield Mistake(what, 'write aliases=("other_name",)')
        return
    for limit in (key.low, key.high):
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit != limit):
            yield Mistake(f"has the key {key.name!r} with the limit {limit!r}, which is not a number", "make it one")
            return
    for name in (key.name, *key.aliases):
        if name in RESERVED:
            yield Mistake(f"has a key {name!r}, which is a field of vLLM's own requests", "choose another name")
        if name in seen:
            yield Mistake(f"has the key {name!r} twice", "remove one of the two")
        seen.add(name)
    default = f"has the key {key.name!r} with the default {key.default!r}"
    if key.default is not None and not key.takes(key.default):
        yield Mistake(f"{default}, which is not {key.words}", "give the default the type of the key")
    elif not _is_json(key.default):
        yield Mistake(f"{default}, which no request could carry", "make it a value that JSON can hold")
    if key.low is not None and key.high is not None and key.low > key.high:
        yield Mistake(f"has the key {key.name!r} with low {key.low!r} above high {key.high!r}", "swap the two")
    elif not key.switch and key.default is not None and not key.in_range(key.default):
        # Another key may ask for the sampler, which then gets this default. A switch is off at its default, so its
        # default may well be out of range: 0 for "off" where 1 to 9 are allowed.
        fix = "widen low and high, or give it a default between them"
        yield Mistake(f"{default}, but it must be {key.allowed}", fix)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def shared_key(kinds: Mapping[str, Collection[Key]]) -> tuple[str, str, str] | None:
    """Find a key that two samplers declare: its name and theirs; None if each has its own."""
    owners: dict[str, str] = {}
    for owner, keys in kinds.items():
        for name in (name for key in keys for name in (key.name, *key.aliases)):
            if owners.setdefault(name, owner) != owner:
                return name, owners[name], owner
    return None
