"""Requests in the front end: keys with ranges, aliases, names that are close, samplers that cannot be asked for."""

from types import SimpleNamespace

import pytest

from vllm_graft.bindings.sampling.requests import Catalogue, Offered, lift, offered, refuse_beams
from vllm_graft.contracts import Key, Sampler, SamplingStrategy
from vllm_graft.plan import Plan, PlanItem, Run, carry, drop
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


def made(refused: str = "") -> Catalogue:
    return Catalogue([Offered("warm", "acme", Warm, Warm.request_keys(), refused)])


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
    ({"warm_factor": -1}, "warm_factor must be a number, with a value from 0 to 2, and is -1"),
    ({"warm_factor": 2.5}, "warm_factor must be a number, with a value from 0 to 2, and is 2.5"),
    ({"warm_factor": "0.5"}, "warm_factor must be a number, with a value from 0 to 2, and is '0.5'"),
    ({"warm_factor": float("nan")}, "warm_factor must be a number"),
    ({"warm_factor": True}, "and is True"),
    ({"warmth": 9}, "warmth must be a number, with a value from 0 to 2, and is 9"),
    ({"warm_steps": 0}, "warm_steps must be a whole number, with a value of at least 1, and is 0"),
    ({"warm_steps": 1.5}, "warm_steps must be a whole number"),
    ({"warm_words": ["a"] * 4}, "warm_words must be a list of texts, with a length of at most 3"),
    ({"warm_words": [1]}, "warm_words must be a list of texts"),
    ({"warm_words": "[broken"}, "warm_words must be a list of texts"),
    ({"warm_ids": ["x"]}, "warm_ids must be a list of whole numbers"),
    ({"warm_mode": 3}, "warm_mode must be a text, and is 3"),
    ({"warm_on": 2}, "warm_on must be true or false, and is 2"),
    ({"warm_factor": 1, "warmth": 2}, "warm_factor=1 and warmth=2 contradict one another: both are warm_factor"),
    ({"warm_mode": "y", "warm_steps": 7}, "warm_mode y takes no 7 warm_steps"),
    ({"warm_mode": "boom"}, "warm_mode: KeyError: 'boom'"),
    ({"warm_facter": 1}, r"warm_facter is no key of this server's samplers \(did you mean 'warm_factor'\?\)"),
    ({"warm_step": 1}, "did you mean 'warm_steps'"),
    ({"warm_factor": 10**400}, "warm_factor must be a number"),
    ({"warm_words": "[" * 100_000}, "warm_words must be a list of texts"),
    ({"warm_words": "x" * 200}, r"and is 'x{50,60}\.\.\.$"),
]


@pytest.mark.parametrize(("extra", "said"), BAD, ids=[str(extra)[:40] for extra, _ in BAD])
def test_bad_values_name_key_value_and_what_is_allowed(extra: dict[str, object], said: str):
    """Whoever sent it can mend it from the message alone."""
    with pytest.raises(ValueError, match=said):
        made().check(extra)


def test_a_sampler_that_cannot_be_used_refuses_only_those_who_ask_for_it():
    """Clients send every key they know, most of them with the value that means off."""
    catalogue = made(refused="not today")
    catalogue.check({"warm_factor": 0, "warm_steps": 9})
    with pytest.raises(ValueError, match="warm_factor: the sampler 'warm' cannot be used: not today"):
        catalogue.check({"warm_factor": 0.1})


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
    import sys

    monkeypatch.setitem(sys.modules, Picks.__module__, sys.modules[__name__])
    plan = Plan((item("warm", Warm), item("picks", Picks), item("listens", Listens)))
    refused = {each.name: each.refused for each in offered(plan, Run("r", 1, speculative=True))}
    assert refused["warm"] == ""
    assert "picks tokens one at a time" in refused["picks"]
    assert "told each token" in refused["listens"]
    assert not any(each.refused for each in offered(plan, Run("r", 1))[:3])


def test_top_level_keys_are_lifted_and_xargs_count_more(monkeypatch: pytest.MonkeyPatch):
    """Clients of other servers send samplers' keys beside temperature; vLLM drops them without a word."""
    import sys

    monkeypatch.setitem(sys.modules, Warm.__module__, sys.modules[__name__])
    carry(Plan((item("warm", Warm),)), Run("lift", 1))
    try:
        params = SimpleNamespace(extra_args={"warm_steps": 2})
        lift({"warm_factor": 0.5, "warm_steps": 9, "warm_wodrs": ["x"], "min_tokens_to_keep": 1}, params)
        assert params.extra_args == {"warm_factor": 0.5, "warm_steps": 2, "warm_wodrs": ["x"]}
        untouched = SimpleNamespace(extra_args=None)
        lift({"unrelated": 1}, untouched)
        lift({"warm_factor": None, "warm_wodrs": [], "warm_moed": None}, untouched)
        lift(None, untouched)
        assert untouched.extra_args is None
    finally:
        drop()


def test_names_of_vllms_own_processors_are_left_to_them():
    """An OCR model's own keys pass where no-repeat-ngram is not loaded; others are refused as the client said them."""
    catalogue = Catalogue(offered(Plan((PlanItem("sampler", "dry", SHIPPED["dry"], "vllm-graft", ("worker",)),)), None))
    catalogue.check({"ngram_size": 20, "window_size": 90, "whitelist_token_ids": [1]})
    with pytest.raises(ValueError, match="no_repeat_ngram_size: the sampler 'no-repeat-ngram' cannot be used"):
        catalogue.check({"no_repeat_ngram_size": 3})
    with pytest.raises(
        ValueError, match="nsigma: the sampler 'top-n-sigma' cannot be used: this server does not load it"
    ):
        catalogue.check({"nsigma": 1.0})


def everything() -> Catalogue:
    names = [name for name, target in SHIPPED.items() if ".samplers." in target]
    items = tuple(PlanItem("sampler", name, SHIPPED[name], "vllm-graft", ("worker",)) for name in names)
    return Catalogue(offered(Plan(items), None))


STRANGERS = """
    messages temperature top_p top_k min_p top_a tfs_z typical_p mirostat_mode mirostat_tau mirostat_eta rep_pen
    rep_pen_range repetition_penalty repeat_last_n penalty_last_n penalty_range smoothing_factor smoothing_curve
    dynatemp_min dynatemp_max dynatemp_range dynatemp_exponent skew n_predict n_probs cache_prompt samplers
    sampler_order sampler_priority sampler_seed dry_max_ngram dry_max_occurrences dry_early_exit_match_len grammar
    json_schema json_mode guided_json response_format structured_outputs encoder_no_repeat_ngram_size max_ngram_size
    ban_eos_token epsilon_cutoff eta_cutoff penalty_alpha truncation_length custom_token_bans banned_strings
    prompt_token_ids stop_token_ids allowed_token_ids logprob_token_ids return_token_ids kv_transfer_params vllm_xargs
    thinking_token_budget adaptive_target adaptive_decay repetition_detection chat_template_kwargs cache_salt
    mm_processor_kwargs sliding_window loop_detect_window add_generation_prompt
""".split()  # noqa: SIM905


def test_keys_that_other_servers_clients_send_are_no_mistakes():
    """They are close to one of ours at most by accident."""
    known = everything()
    assert [name for name in STRANGERS if name in known.names or known.close(name)] == []
    # Aphrodite's clients send this one empty; with something in it, somebody asks for what we do not have.
    assert known.lifted({"dry_sequence_breaker_ids": []}) == {}
    with pytest.raises(ValueError, match="did you mean 'dry_sequence_breakers'"):
        known.check(known.lifted({"dry_sequence_breaker_ids": [7]}))


def test_a_request_with_very_many_keys_costs_little():
    """Names are compared in the process that serves everybody."""
    import time

    known, started = everything(), time.process_time()
    known.lifted({f"dry_zzz{number:06d}q": 1 for number in range(100_000)} | {"dry_base" * 500_000: 1})
    assert time.process_time() - started < 1
    assert "dry_base" in known.lifted({f"x{number}": 1 for number in range(1000)} | {"dry_base": 2.0})


def test_beam_search_refuses_who_asks_for_a_sampler(monkeypatch: pytest.MonkeyPatch):
    """vLLM makes requests of its own for it, which carry no keys."""
    import sys

    monkeypatch.setitem(sys.modules, Warm.__module__, sys.modules[__name__])
    carry(Plan((item("warm", Warm),)), Run("beams", 1))
    try:
        refuse_beams(None, None)
        refuse_beams({"warm_factor": 0, "unrelated": 1}, {"warm_steps": 2})
        for top_level, xargs in (({"warm_factor": 0.5}, None), (None, {"warm_factor": 0.5})):
            with pytest.raises(ValueError, match="warm_factor: the sampler 'warm' cannot be used: beam search"):
                refuse_beams(top_level, xargs)
    finally:
        drop()
