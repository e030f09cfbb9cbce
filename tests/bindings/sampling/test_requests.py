"""Requests in the front end: keys with ranges, aliases, names that are close, samplers that cannot be asked for."""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from vllm_graft.bindings.sampling import requests as module
from vllm_graft.bindings.sampling.requests import (
    ProcessorSources,
    PutAsideError,
    SamplerInfo,
    SamplerKeys,
    check,
    check_early,
    describe_samplers,
    list_samplers,
    prepare,
    refuse_beams,
    with_status,
)
from vllm_graft.contracts import Key, Sampler, SamplingStrategy
from vllm_graft.ledger import Ledger
from vllm_graft.plan import Plan, PlanItem, Run, clear_exported_plan, export_plan
from vllm_graft.plan.catalogue import SHIPPED


class Warm(SamplingStrategy):
    """Warms."""

    keys = (
        Key("warm_factor", "float", 0.0, low=0.0, high=2.0, switch=True, aliases=("warmth",), help="how warm"),
        Key("warm_steps", "int", 4, low=1),
        Key("warm_words", "list[str]", ["a"], high=3),
        Key("warm_ids", "list[int]", []),
        Key("warm_mode", "str", "x"),
        Key("warm_on", "bool", False),
    )

    @classmethod
    def check(cls, params):
        if params.get("warm_mode") == "y" and params.get("warm_steps") == 7:
            raise ValueError("warm_mode y takes no 7 warm_steps")
        if params.get("warm_mode") == "boom":
            raise KeyError("boom")


def made(refused: str = "") -> SamplerKeys:
    return SamplerKeys([SamplerInfo("warm", "acme", Warm, Warm.request_keys(), refused)])


GOOD = [
    {"warm_factor": 0.5}, {"warm_factor": 2}, {"warmth": 1.0}, {"warm_steps": 3.0}, {"warm_words": ["x", "y"]},
    {"warm_words": '["x"]'}, {"warm_ids": [1, 2.0]}, {"warm_mode": "z"}, {"warm_on": 1}, {"warm_on": True},
    {"warm_factor": 1, "warmth": 1.0}, {"somebody": 1}, {"tenant": "a", "priority_class": 2},
]  # fmt: skip


@pytest.mark.parametrize("extra", GOOD, ids=str)
def test_good_values_pass(extra: dict[str, object]):
    """Whole numbers may come as 3.0, lists as JSON text, and strangers' keys are none of our business."""
    made().check(extra)


BAD = [
    ({"warm_factor": -1}, "warm_factor must be a number, with a value from 0 to 2, but is -1"),
    ({"warm_factor": 2.5}, "warm_factor must be a number, with a value from 0 to 2, but is 2.5"),
    ({"warm_factor": "0.5"}, "warm_factor must be a number, with a value from 0 to 2, but is '0.5'"),
    ({"warm_factor": float("nan")}, "warm_factor must be a number"),
    ({"warm_factor": True}, "but is True"),
    ({"warmth": 9}, "warmth must be a number, with a value from 0 to 2, but is 9"),
    ({"warm_steps": 0}, "warm_steps must be a whole number, with a value of at least 1, but is 0"),
    ({"warm_steps": 1.5}, "warm_steps must be a whole number"),
    ({"warm_words": ["a"] * 4}, "warm_words must be a list of strings, with a length of at most 3"),
    ({"warm_words": [1]}, "warm_words must be a list of strings"),
    ({"warm_words": "[broken"}, "warm_words must be a list of strings"),
    ({"warm_ids": ["x"]}, "warm_ids must be a list of whole numbers"),
    ({"warm_mode": 3}, "warm_mode must be a string, but is 3"),
    ({"warm_on": 2}, "warm_on must be true or false, but is 2"),
    ({"warm_factor": 1, "warmth": 2}, "warm_factor=1 and warmth=2 conflict: both set warm_factor"),
    ({"warm_mode": "y", "warm_steps": 7}, "warm_mode y takes no 7 warm_steps"),
    ({"warm_mode": "boom"}, "warm_mode: KeyError: 'boom'"),
    (
        {"warm_facter": 1},
        r"warm_facter is not a key of this server's samplers \(did you mean 'warm_factor'\?\); .* `other_keys`",
    ),
    ({"warm_step": 1}, "did you mean 'warm_steps'"),
    ({"warm_factor": 10**400}, "warm_factor holds a whole number that takes more than 64 bits"),
    ({"warm_words": "[" * 100_000}, "warm_words must be a list of strings"),
    ({"warm_words": "x" * 200}, r"but is 'x{50,60}\.\.\.$"),
]


@pytest.mark.parametrize(("extra", "said"), BAD, ids=[str(extra)[:40] for extra, _ in BAD])
def test_bad_values_name_key_value_and_what_is_allowed(extra: dict[str, object], said: str):
    """Whoever sent it can fix it from the message alone."""
    with pytest.raises(ValueError, match=said):
        made().check(extra)


def test_a_sampler_that_cannot_be_used_refuses_only_those_who_ask_for_it():
    """Clients send every key they know, most of them with the value that means off."""
    keys = made(refused="not today")
    keys.check({"warm_factor": 0, "warm_steps": 9})
    with pytest.raises(ValueError, match="warm_factor: the sampler 'warm' cannot be used: not today"):
        keys.check({"warm_factor": 0.1})


class Picks(Sampler):
    """Picks."""

    keys = (Key("picks", "bool", False, switch=True),)


class Listens(SamplingStrategy):
    """Listens."""

    keys = (Key("listens", "bool", False, switch=True),)

    def sampled(self, tokens, rows):
        """Told."""


def item(name: str, kind: type) -> PlanItem:
    return PlanItem("sampler", name, f"{kind.__module__}:{kind.__qualname__}", "acme", ("worker",))


def test_drafts_leave_out_who_works_token_by_token(monkeypatch: pytest.MonkeyPatch):
    """With speculative decoding several tokens are picked at a time."""
    monkeypatch.setitem(sys.modules, Picks.__module__, sys.modules[__name__])
    plan = Plan((item("warm", Warm), item("picks", Picks), item("listens", Listens)))
    refused = {each.name: each.refused for each in list_samplers(plan, Run("r", 1, speculative=True))}
    assert refused["warm"] == ""
    assert "picks tokens one at a time" in refused["picks"]
    assert "told each token" in refused["listens"]
    assert not any(each.refused for each in list_samplers(plan, Run("r", 1))[:3])


class Request:
    """A request of vLLM's as far as the front end reads it."""

    def __init__(self, **top_level: object) -> None:
        self.model_extra = top_level or None


class Parameters(SimpleNamespace):
    """Sampling parameters of vLLM's: a struct whose fields are known."""

    __struct_fields__ = ("top_k", "extra_args")


def params(top_k: int = 0, **extra: object) -> Parameters:
    return Parameters(top_k=top_k, extra_args=extra or None)


@pytest.fixture
def warm_plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process carries a plan with one sampler."""
    monkeypatch.setitem(sys.modules, Warm.__module__, sys.modules[__name__])
    export_plan(Plan((item("warm", Warm),)), Run("requests", 1))
    yield
    clear_exported_plan()


@pytest.mark.usefixtures("warm_plan")
def test_top_level_keys_are_lifted_and_xargs_count_more():
    """Clients of other servers send samplers' keys beside temperature; vLLM drops them without a word."""
    made = params(warm_steps=2)
    prepare(Request(warm_factor=0.5, warm_steps=9, min_tokens_to_keep=1), made)
    assert made.extra_args == {"warm_factor": 0.5, "warm_steps": 2}
    with pytest.raises(ValueError, match="did you mean 'warm_words'"):
        prepare(Request(warm_wodrs=["x"]), params())
    for nothing in (Request(unrelated=1), Request(warm_factor=None, warm_wodrs=[], warm_moed=None), Request()):
        untouched = params()
        prepare(nothing, untouched)
        assert untouched.extra_args is None


@pytest.mark.usefixtures("warm_plan")
def test_a_request_is_checked_once_however_many_prompts_it_has(monkeypatch: pytest.MonkeyPatch):
    """vLLM makes parameters for each prompt, and asks its processors about each of them again."""
    looks: list[object] = []
    checked = SamplerKeys.check
    monkeypatch.setattr(SamplerKeys, "check", lambda self, extra: (looks.append(extra), checked(self, extra)))
    request = Request(warm_factor=0.5)
    for _ in range(300):
        made = params(somebody=1)
        prepare(request, made)
        check(made)
        assert made.extra_args == {"warm_factor": 0.5, "somebody": 1}
    assert len(looks) == 1
    prepare(Request(warm_factor=0.5), params())
    assert len(looks) == 2


@pytest.mark.usefixtures("warm_plan")
def test_numbers_of_vllms_own_that_no_engine_can_be_sent():
    """vLLM 0.32 fails on them with a 500 and no word."""
    with pytest.raises(
        ValueError, match="top_k holds a whole number that takes more than 64 bits, so it cannot be sent"
    ):
        prepare(Request(), params(top_k=2**64))
    prepare(Request(), params(top_k=2**63))


def nested(depth: int, inside: object) -> dict[str, object]:
    return functools.reduce(lambda inner, _: {"properties": inner}, range(depth), {"x": inside})


HALF, GREAT = "\ud800", 2**64
OWN_FIELDS: list[tuple[str, Callable[[object], object], object, object]] = [
    ("stop_token_ids", lambda value: [1, value], 2, GREAT),
    ("stop_token_ids", lambda value: [1, value], 2, -GREAT),
    ("allowed_token_ids", lambda value: [*range(200_000), value], 2, GREAT),
    ("logit_bias", lambda value: {1: 0.5, value: 1.0}, 2, GREAT),
    ("stop", lambda value: ["a", value], "\U0001f600é\0", HALF),
    ("bad_words", lambda value: [value], "\U0001f600", HALF),
    ("structured_outputs", lambda value: schema(json={"maximum": value}), 2**64 - 1, GREAT),
    ("structured_outputs", lambda value: schema(json={"enum": [1.5, None, value]}), True, GREAT),
    ("structured_outputs", lambda value: schema(json={value: 1}), "title", HALF),
    ("structured_outputs", lambda value: schema(json=nested(200, value)), 3, GREAT),
    ("structured_outputs", lambda value: schema(regex=value), "a+", HALF),
]


def schema(**fields: object) -> object:
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(**fields)  # type: ignore[arg-type]


@pytest.mark.usefixtures("warm_plan")
@pytest.mark.parametrize(("name", "made", "good", "bad"), OWN_FIELDS, ids=[name for name, *_ in OWN_FIELDS])
def test_what_vllms_own_fields_hold_is_refused_only_where_it_cannot_be_sent(
    name: str, made: Callable[[object], object], good: object, bad: object
):
    """By vLLM's own parameters and its own encoder."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.serial_utils import MsgpackEncoder

    sent = SamplingParams(**{name: made(good)})  # type: ignore[arg-type]
    prepare(Request(), sent)
    MsgpackEncoder().encode(sent)
    refused = SamplingParams(**{name: made(bad)})  # type: ignore[arg-type]
    with pytest.raises((OverflowError, UnicodeEncodeError)):
        MsgpackEncoder().encode(refused)
    with pytest.raises(ValueError, match=f"^{name} .*, so it cannot be sent to the engine"):
        prepare(Request(), refused)


class Tool(BaseModel):
    name: str = "a"
    schema_: object = None


class Body(BaseModel):
    """A request as vLLM declares its own."""

    model_config = {"extra": "allow"}
    prompt: object = ""
    request_id: str = ""
    metadata: dict[str, str] | None = None
    tools: list[Tool] = []
    vllm_xargs: dict[str, str] | None = None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_id", "a\ud800"),
        ("metadata", {"a": "\udfff"}),
        ("metadata", {"\udfff": "a"}),
        ("tools", [Tool(), Tool(name="\ud800")]),
        ("tools", [Tool(schema_={"enum": [1, "\ud800"]})]),
        ("unknown", ["\ud800"]),
        ("unknown\ud800", "\ud800"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_wherever_vllm_would_send_it(name: str, value: object):
    """To the engine, or back to the client: vLLM fails with a 500, or in the middle of a stream."""
    with pytest.raises(ValueError, match=r"contains an unpaired surrogate, so it cannot be sent$") as refused:
        prepare(Body.model_construct({name}, **{name: value}), params())
    str(refused.value).encode()


def test_texts_that_can_be_sent_pass():
    """The prompt is the tokenizer's; a number in a tool's schema may be of any size."""
    fine = {"request_id": "\U0001f600", "tools": [Tool(schema_={"maximum": 2**70})], "prompt": "\ud800"}
    prepare(Body(**fine), params())  # type: ignore[arg-type]


def test_vllms_own_fields_are_looked_at_once_per_request(monkeypatch: pytest.MonkeyPatch):
    """A large schema with 300 prompts is walked through once."""
    looks: list[object] = []
    monkeypatch.setattr(
        "vllm_graft.bindings.sampling.requests.find_unsendable", lambda value, **how: looks.append(value)
    )
    request = Request()
    for _ in range(300):
        prepare(request, params(top_k=7))
    assert looks == [7]
    looks.clear()
    body = Body(tools=[Tool(name="\ud800")])
    for _ in range(300):
        prepare(body, params(top_k=7))
    assert looks == [body.tools, 7]


@pytest.mark.usefixtures("warm_plan")
def test_an_engine_client_checks_before_it_is_iterated():
    """Its generator would raise when the answer has begun."""
    client = SimpleNamespace(generate=lambda prompt, sampling_params, request_id, **more: "generator")
    check_early(client)
    assert client.generate("x", params(warm_factor=0.5), "1") == "generator"
    for call in (lambda bad: client.generate("x", bad, "1"), lambda bad: client.generate("x", sampling_params=bad)):
        with pytest.raises(ValueError, match="warm_factor must be a number"):
            call(params(warm_factor=9))
    half = "request_id contains an unpaired surrogate, so it cannot be sent"
    for args, kwargs in ((("x", params(), "\ud800"), {}), (("x", None), {"request_id": "\ud800"})):
        with pytest.raises(ValueError, match=half):
            client.generate(*args, **kwargs)
    assert client.generate({"cache_salt": "x"}, params(), "1", priority=-3, session_id=None) == "generator"
    with pytest.raises(ValueError, match="priority holds a whole number that takes more than 64 bits"):
        client.generate("x", params(), "1", priority=-(2**70))
    with pytest.raises(ValueError, match="cache_salt contains an unpaired surrogate"):
        client.generate({"cache_salt": "\ud800"}, params(), "1")


UNSENDABLE = [
    ({"warm_steps": 2**64}, "warm_steps holds a whole number that takes more than 64 bits"),
    ({"somebody": -(2**64)}, "somebody holds a whole number that takes more than 64 bits"),
    ({"warm_ids": [1, 2**70]}, "warm_ids holds a whole number"),
    ({"warm_words": ["a\ud800"]}, "warm_words contains an unpaired surrogate"),
    ({"warm_words": r'["\ud800"]'}, "warm_words contains an unpaired surrogate"),
    ({"warm_ids": "[18446744073709551616]"}, "warm_ids holds a whole number that takes more than 64 bits"),
    ({"some\ud800body": 1}, r"'some\\ud800body' contains an unpaired surrogate"),
    ({"somebody": {"a": ["\udfff"]}}, "somebody contains an unpaired surrogate"),
    ({"somebody": functools.reduce(lambda inner, _: [inner], range(900), 1)}, "somebody is nested more than 64 levels"),
]


@pytest.mark.parametrize(("extra", "said"), UNSENDABLE, ids=range(len(UNSENDABLE)))
def test_what_cannot_be_sent_to_an_engine_is_refused(extra: dict[str, object], said: str):
    """Whose key it ever is: vLLM would fail with a 500 and no word."""
    with pytest.raises(ValueError, match=said) as refused:
        made().check(extra)
    str(refused.value).encode()


def test_a_value_too_large_to_be_shown_is_refused_all_the_same():
    """Its own message must not fail, and does not spell out what it then cuts off."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    key = Warm.request_keys()[0]
    with pytest.raises(ValueError, match=r"but is \[\[\[\[\.\.\.\]\]\]\]$"):
        key.read(deep)

    class Shown(int):
        count = 0

        def __repr__(self):
            Shown.count += 1
            return "1"

    with pytest.raises(ValueError, match=r"but is \[\[1, 1, [1, ]+\.\.\.$"):
        key.read([[Shown()] * 1000] * 1000)
    assert Shown.count <= 400
    with pytest.raises(ValueError, match="but is a list too large to show"):
        key.read([10**5000])
    with pytest.raises(ValueError, match=r"but is {'a': \[1, 'x'\]}$"):
        key.read({"a": [1, "x"]})


def test_names_of_vllms_own_processors_are_left_to_them():
    """An OCR model's own keys pass where no-repeat-ngram is not loaded; others are refused as the client said them."""
    keys = SamplerKeys(
        list_samplers(Plan((PlanItem("sampler", "dry", SHIPPED["dry"], "vllm-graft", ("worker",)),)), None)
    )
    keys.check({"ngram_size": 20, "window_size": 90, "whitelist_token_ids": [1]})
    with pytest.raises(ValueError, match="no_repeat_ngram_size: the sampler 'no-repeat-ngram' cannot be used"):
        keys.check({"no_repeat_ngram_size": 3})
    with pytest.raises(
        ValueError, match="nsigma: the sampler 'top-n-sigma' cannot be used: this server does not load it"
    ):
        keys.check({"nsigma": 1.0})


def shipped(*names: str) -> Plan:
    return Plan(tuple(PlanItem("sampler", name, SHIPPED[name], "vllm-graft", ("worker",)) for name in names))


def everything() -> SamplerKeys:
    names = [name for name, target in SHIPPED.items() if ".samplers." in target]
    return SamplerKeys(list_samplers(shipped(*names), None))


def test_other_packages_keys_pass():
    """A word of one of our keys is no misspelling of it; nor is a key of a sampler that is not loaded."""
    for name in ("threshold", "probability", "my_threshold", "size", "window", "multiplier", "base", "my_base"):
        everything().check({name: 0.5})
    only_dry = SamplerKeys(list_samplers(shipped("dry"), None))
    only_dry.check({"xtc_treshold": 0.5, "sigma": 1.0})
    with pytest.raises(ValueError, match="did you mean 'dry_multiplier'"):
        only_dry.check({"dryMultiplier": 0.5})


def test_the_plan_says_how_strict_the_server_is():
    """By the setting ``unknown_keys``, and by name."""
    rows = list_samplers(shipped("dry"), None)
    lax = SamplerKeys(rows, unknown="pass")
    lax.check({"dry_bsae": 2.0, "xtc_threshold": 0.1, "whatever": 1})
    with pytest.raises(ValueError, match="dry_base must be a number"):
        lax.check({"dry_base": "x"})
    strict = SamplerKeys(rows, unknown="refuse", others=["tenant"])
    strict.check({"dry_base": 2.0, "tenant": "a", "kv_transfer_params": {"x": 1}})
    for name in ("whatever", "w" * 1000):
        with pytest.raises(ValueError, match=r"is not a key of this server's samplers; .* `other_keys`"):
            strict.check({name: 1})
    assert strict.pick_top_level({"whatever": 1, "nothing": None}) == {"whatever": 1}
    named = SamplerKeys(rows, others=["dry_bsae", "top_n_sigma"])
    named.check({"dry_bsae": 1, "top_n_sigma": 5})


def test_a_name_that_the_users_own_processor_reads_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has the name as a text in its source."""
    (tmp_path / "own_processor.py").write_text('def read(params):\n    return params.extra_args["dry_bsae"]\n')
    monkeypatch.syspath_prepend(tmp_path)
    mine = SamplerKeys(
        list_samplers(shipped("dry"), None), mentions=ProcessorSources(["own_processor:Mine", "gone.module:X", ""])
    )
    mine.check({"dry_bsae": 1})
    with pytest.raises(ValueError, match="did you mean 'dry_base'"):
        mine.check({"dry_bse": 1})


def test_a_sampler_that_was_put_aside_is_no_fault_of_the_request():
    """Who asks for it is told; an API server answers with a 503. Everybody else is served."""
    failed = {"dry": "RuntimeError: no such table"}
    known = SamplerKeys(list_samplers(shipped("dry", "xtc"), None), put_aside=lambda: failed)
    known.check({"dry_multiplier": 0, "xtc_probability": 0.5})
    with pytest.raises(PutAsideError, match=r"dry_multiplier: the sampler 'dry' .* put aside .*no such table"):
        known.check({"dry_multiplier": 1})
    with pytest.raises(Exception, match="put aside") as refused:
        with_status(known.check, {"dry_multiplier": 1})
    assert not isinstance(refused.value, ValueError)
    assert 503 in vars(refused.value).values()
    failed.clear()
    known.check({"dry_multiplier": 1})


def test_keys_that_requests_have_by_default():
    """A plan's defaults count in what is checked together, and are listed."""
    options = {"defaults": {"warm_factor": 0.5, "warm_mode": "y"}}
    plan = Plan((PlanItem("sampler", "warm", f"{__name__}:Warm", "acme", ("worker",), options),))
    sys.modules.setdefault(Warm.__module__, sys.modules[__name__])
    rows = list_samplers(plan, None)
    known = SamplerKeys(rows)
    known.check({"warm_steps": 3})
    with pytest.raises(ValueError, match="warm_mode y takes no 7 warm_steps"):
        known.check({"warm_steps": 7})
    (row,) = describe_samplers(plan, None)["samplers"]
    assert row["defaults"] == {"warm_factor": 0.5, "warm_mode": "y"}
    assert row["every_request"] is True
    assert not describe_samplers(shipped("dry"), None)["samplers"][0]["every_request"]
    (failed,) = describe_samplers(plan, None, {"warm": "raised"})["samplers"]
    assert failed["refused"] == "it was put aside: raised"


STRANGERS = """
    messages temperature top_p top_k min_p top_a tfs_z typical_p mirostat_mode mirostat_tau mirostat_eta rep_pen
    rep_pen_range repetition_penalty repeat_last_n penalty_last_n penalty_range smoothing_factor smoothing_curve
    dynatemp_min dynatemp_max dynatemp_range dynatemp_exponent skew n_predict n_probs cache_prompt samplers
    sampler_order sampler_priority sampler_seed dry_max_ngram dry_max_occurrences dry_early_exit_match_len grammar
    json_schema json_mode guided_json response_format structured_outputs encoder_no_repeat_ngram_size max_ngram_size
    ban_eos_token epsilon_cutoff eta_cutoff penalty_alpha truncation_length custom_token_bans banned_strings
    prompt_token_ids stop_token_ids allowed_token_ids logprob_token_ids return_token_ids kv_transfer_params vllm_xargs
    thinking_token_budget adaptive_target adaptive_decay repetition_detection chat_template_kwargs cache_salt
    sigma mm_processor_kwargs sliding_window loop_detect_window add_generation_prompt
""".split()  # noqa: SIM905


def test_keys_that_other_servers_clients_send_are_no_mistakes():
    """They are close to one of ours at most by accident."""
    known = everything()
    assert [name for name in STRANGERS if name in known.names or known.complaint(name)] == []
    # Aphrodite's clients send this one empty; with something in it, somebody asks for what we do not have.
    assert known.pick_top_level({"dry_sequence_breaker_ids": []}) == {}
    with pytest.raises(ValueError, match="did you mean 'dry_sequence_breakers'"):
        known.check(known.pick_top_level({"dry_sequence_breaker_ids": [7]}))


def test_a_request_with_very_many_keys_costs_little():
    """Names are compared in the process that serves everybody: a bounded number of them, each once."""
    known, started = everything(), time.process_time()
    many = {f"dry_zzz{number:06d}q": 1 for number in range(100_000)} | {"dry_base" * 500_000: 1}
    known.pick_top_level(many)
    known.check({f"dry_penalty_xast{number:04d}": 1 for number in range(500)})
    assert time.process_time() - started < 1
    assert known._cached_complaint.cache_info().currsize <= 200
    assert "dry_base" in known.pick_top_level({f"x{number}": 1 for number in range(1000)} | {"dry_base": 2.0})


@pytest.mark.usefixtures("warm_plan")
def test_beam_search_refuses_who_asks_for_a_sampler():
    """vLLM makes requests of its own for it, which carry no keys."""
    refuse_beams(None, None)
    refuse_beams({"warm_factor": 0, "unrelated": 1}, {"warm_steps": 2})
    for top_level, xargs in (({"warm_factor": 0.5}, None), (None, {"warm_factor": 0.5})):
        with pytest.raises(ValueError, match="warm_factor: the sampler 'warm' cannot be used: beam search"):
            refuse_beams(top_level, xargs)


class Unprintable(ValueError):
    """An exception whose message cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("on purpose")


class Unspeakable(Exception):
    """An exception that ends the process of whoever wants to know its message."""

    def __str__(self) -> str:
        raise SystemExit(3)


class Undecided:
    """An answer that is neither true nor false, as an array may be."""

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")


def test_an_answer_that_is_neither_true_nor_false_is_a_400(monkeypatch: pytest.MonkeyPatch):
    """vLLM would answer with a 500."""
    monkeypatch.setattr(Warm, "is_requested", staticmethod(lambda params: Undecided()))
    with pytest.raises(ValueError, match=r"^warm_factor: RuntimeError: ambiguous$"):
        made().check({"warm_factor": 0.5})


@pytest.mark.parametrize("method", ["check", "is_requested"])
@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (SystemExit(3), "warm_factor: SystemExit: 3"),
        (KeyboardInterrupt(), "warm_factor: KeyboardInterrupt: "),
        (RuntimeError("boom"), "warm_factor: RuntimeError: boom"),
        (Unprintable(), "(its message cannot be shown: str() raised RuntimeError)"),
        (Unspeakable(), "warm_factor: Unspeakable: (its message cannot be shown: str() raised SystemExit)"),
        (ValueError("half \ud800"), "half \\ud800"),
        (ValueError("x" * 10_000), "x" * 1000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_author_s_check_raises_is_the_request_s_400(
    method: str, failure: BaseException, said: str, monkeypatch: pytest.MonkeyPatch
):
    """An API server serves everybody: it neither ends nor answers with a 500, and what it sends can be encoded."""

    def fail(params: object) -> None:
        raise failure

    monkeypatch.setattr(Warm, method, staticmethod(fail))
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - its whole text is compared
        made().check({"warm_factor": 0.5})
    assert str(refused.value) == said


def test_a_key_without_a_limit_is_valid_json():
    """``GET /graft/samplers`` and ``items --json`` show it; JSON has no infinity."""
    key = Key("far", "float", float("inf"), low=float("-inf"), high=float("inf"))
    shown = json.loads(json.dumps(key.as_dict(), allow_nan=False))
    assert (shown["default"], shown["min"], shown["max"]) == ("inf", None, None)


def test_a_check_that_holds_the_server_up_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It runs on the event loop, and no guard can end it."""

    def sleep(params: object) -> None:
        time.sleep(0.15)

    monkeypatch.setattr(Warm, "check", staticmethod(sleep))
    monkeypatch.setattr(module, "_slow", set())
    monkeypatch.setattr(module, "current", lambda: ledger)
    ledger = Ledger()
    for _ in range(2):
        made().check({"warm_factor": 0.5})
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if "blocking this API server's event loop" in record.getMessage()
    ]
    assert "warm: sleep took 0." in line
