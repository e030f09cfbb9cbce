"""Workloads: how files are read, how descriptions become requests, and how results become figures. No vLLM here."""

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.simulator.workload import Prefix, Result, Spread, Workload, WorkloadReport, WorkloadRequest, read
from vllm_graft.simulator.workload.requests import build_prompt, generate, invent_tokens
from vllm_graft.splitmix import splitmix64

LINE = {"at": 0.5, "prompt_tokens": 20, "max_tokens": 4}


def lines(tmp_path: Path, *rows: object) -> Path:
    """A file with a row on each line; a string stands for itself."""
    file = tmp_path / "load.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


class TestLines:
    def test_a_line_is_a_request(self, tmp_path: Path):
        full = {
            **LINE,
            "id": "a",
            "group": "chat",
            "priority": -2,
            "prefix": {"name": "system", "tokens": 16},
            "extra": {"tenant": "x"},
            "ignore_eos": False,
        }
        (request,) = read(lines(tmp_path, full))
        assert request == WorkloadRequest(
            0.5, 4, 20, None, None, "a", "chat", -2, Prefix("system", 16), {"tenant": "x"}, ignore_eos=False
        )

    def test_requests_are_in_the_order_of_arrival_and_named_by_their_line(self, tmp_path: Path):
        rows = [{**LINE, "at": at} for at in (2, 1, 1)]
        assert [(each.at, each.id) for each in read(lines(tmp_path, *rows, ""))] == [
            (1, "000001"),
            (1, "000002"),
            (2, "000000"),
        ]

    def test_a_workload_written_down_is_the_same_one(self, tmp_path: Path):
        first = generate(
            "prompt=9\noutput=5\n[workload]\nrequests=20\nrate=3\n[[prefix]]\nname='p'\ntokens=4\nshare=0.5"
        )
        second = read(lines(tmp_path, *first.lines()))
        assert second.requests == first.requests

    @pytest.mark.parametrize(
        ("row", "says"),
        [
            ("{", "is not JSON"),
            ("[1]", "a request must be a table"),
            ({"prompt_tokens": 1, "max_tokens": 1}, "a request lacks 'at'"),
            ({**LINE, "at": -1}, "at must be a number, at least 0, but is -1"),
            ({**LINE, "at": math.nan}, "at must be a number, but is nan"),
            ({**LINE, "at": True}, "at must be a number, but is True"),
            ({**LINE, "at": "now"}, "at must be a number, but is 'now'"),
            ({"at": 0, "prompt_tokens": 1}, "a request lacks 'max_tokens'"),
            ({**LINE, "max_tokens": 0}, "max_tokens must be a whole number, at least 1, but is 0"),
            ({**LINE, "max_tokens": 1.5}, "max_tokens must be a whole number"),
            ({"at": 0, "max_tokens": 1}, "a request has no prompt"),
            ({**LINE, "prompt": "hi"}, "a request has prompt_tokens and prompt"),
            ({"at": 0, "max_tokens": 1, "prompt": ""}, "prompt must be a string that is not empty"),
            ({"at": 0, "max_tokens": 1, "prompt_token_ids": []}, "must be a list of whole numbers"),
            ({"at": 0, "max_tokens": 1, "prompt_token_ids": [1, -1]}, "must be a list of whole numbers"),
            ({**LINE, "prefix": {"name": "p", "tokens": 21}}, "the prefix has 21 tokens and the whole prompt 20"),
            ({**LINE, "prefix": "p"}, "a prefix must be a table"),
            ({**LINE, "prefix": {"name": "p"}}, "a prefix lacks 'tokens'"),
            ({"at": 0, "max_tokens": 1, "prompt": "x", "prefix": {"name": "p", "tokens": 1}}, "an invented prompt"),
            ({**LINE, "extra": 3}, "extra must be a table"),
            ({**LINE, "group": 3}, "group must be a string"),
            ({**LINE, "priority": 1.5}, "priority must be a whole number, but is 1.5"),
            (
                {**LINE, "priority": 2**63},
                "priority must be a whole number of 64 bits at most, but is 92233720368547758",
            ),
            ({**LINE, "priority": -(2**63) - 1}, "priority must be a whole number of 64 bits at most"),
            ({**LINE, "extra": {"a": [{"b": 10**30}]}}, "extra must be a table whose whole numbers have 64 bits"),
            ({**LINE, "at": math.inf}, "at must be a number, at most 1e+09, but is inf"),
            ({**LINE, "at": 10**400}, "at must be a number, at most 1e+09, but is 1000"),
            ({**LINE, "at": -(10**400)}, "at must be a number, at least 0, but is -1000"),
            ({"at": 0, "max_tokens": 1, "prompt_token_ids": [2**31]}, "whole numbers from 0 to 2147483647"),
            ('{"at": 1, "prompt_tokens": 2, "max_tokens": 3, "at": 4}', "the key 'at' is given twice"),
            (
                '{"at": 1, "prompt_tokens": 2, "max_tokens": 3, "extra": {"a": [{"b": 1, "b": 1}]}}',
                "the key 'b' is given",
            ),
            (f'{{"at": {"1" * 5000}}}', "is not JSON: Exceeds the limit (4300 digits)"),
            ("[" * 100_000, "is not JSON: maximum recursion depth exceeded"),
            ({**LINE, "ignore_eos": 1}, "ignore_eos must be true or false"),
            ({**LINE, "prio": 1}, "a request has no key 'prio' (did you mean 'priority'?)"),
        ],
    )
    def test_a_fault_names_its_line(self, tmp_path: Path, row: object, says: str):
        file = lines(tmp_path, LINE, "", row)
        with pytest.raises(ConfigError) as caught:
            read(file)
        assert caught.value.where == f"{file}:3"
        assert says in caught.value.what
        assert caught.value.fix

    def test_the_numbers_that_vllm_can_send_are_taken(self, tmp_path: Path):
        rows = [{**LINE, "priority": 2**63 - 1, "extra": {"a": 2**64 - 1}}, {**LINE, "priority": -(2**63), "at": 1e9}]
        first, second = read(lines(tmp_path, *rows))
        assert (first.priority, first.extra, second.priority, second.at) == (2**63 - 1, {"a": 2**64 - 1}, -(2**63), 1e9)

    def test_a_deep_value_is_read(self, tmp_path: Path):
        deep = "[" * 700 + "]" * 700
        (request,) = read(lines(tmp_path, json.dumps(LINE)[:-1] + f', "extra": {{"a": {deep}}}}}'))
        assert request.extra["a"]

    def test_two_lines_cannot_have_one_id(self, tmp_path: Path):
        with pytest.raises(ConfigError, match=r"load.jsonl:2: the id 'a' is taken"):
            read(lines(tmp_path, {**LINE, "id": "a"}, {**LINE, "id": "a"}))

    @pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
    def test_a_file_without_requests_is_refused(self, tmp_path: Path, content: bytes):
        (tmp_path / "w.jsonl").write_bytes(content)
        with pytest.raises(ConfigError, match=r"no requests|not UTF-8"):
            read(tmp_path / "w.jsonl")

    def test_no_file_is_refused(self, tmp_path: Path):
        for path in (tmp_path, tmp_path / "none.jsonl"):
            with pytest.raises(ConfigError, match="cannot be read"):
                read(path)

    def test_a_file_without_end_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("vllm_graft.simulator.workload.requests._MAX_FILE_CHARS", 1000)
        with pytest.raises(ConfigError, match="/dev/zero: the workload has more than 1000 characters"):
            read("/dev/zero")


BURST = """
[workload]
seed = 7
seconds = 600

[[phase]]
seconds = 45
rate = 21

[[phase]]
seconds = 105
rate = 9

[prompt]
mean = 320
sigma = 0.9
min = 8
max = 1500

[output]
mean = 220
sigma = 0.7
min = 8
max = 500

[[group]]
name = "gold"
share = 1
priority = 1
extra = { tenant = "g" }

[[group]]
name = "bulk"
share = 3
priority = 5
output = 12

[[prefix]]
name = "system"
tokens = 64
share = 0.5

[[prefix]]
name = "tools"
tokens = 300
share = 0.25
group = "gold"
"""


class TestDescription:
    def test_the_same_description_gives_the_same_requests(self):
        assert generate(BURST).requests == generate(BURST).requests
        assert generate(BURST).requests != generate(BURST.replace("seed = 7", "seed = 8")).requests

    def test_arrivals_follow_the_phases(self):
        moments = [request.at for request in generate(BURST)]
        assert moments == sorted(moments)
        assert moments[-1] <= 600
        bursts = sum(at % 150 < 45 for at in moments)
        assert bursts == pytest.approx(4 * 45 * 21, rel=0.06)
        assert len(moments) - bursts == pytest.approx(4 * 105 * 9, rel=0.06)

    def test_lengths_groups_and_prefixes_have_their_shares(self):
        requests = generate(BURST).requests
        bare = [each.prompt_tokens - (each.prefix.tokens if each.prefix else 0) for each in requests]
        assert min(bare) >= 8
        assert max(bare) <= 1500
        assert sum(bare) / len(bare) == pytest.approx(310, rel=0.05)
        gold = [each for each in requests if each.group == "gold"]
        assert len(gold) / len(requests) == pytest.approx(0.25, abs=0.02)
        assert {(each.priority, each.extra["tenant"]) for each in gold} == {(1, "g")}
        names = Counter(each.prefix.name if each.prefix else "" for each in gold)
        assert names["system"] / len(gold) == pytest.approx(0.5, abs=0.04)
        assert names["tools"] / len(gold) == pytest.approx(0.25, abs=0.04)
        assert {each.max_tokens for each in requests if each.group == "bulk"} == {12}
        assert not any(each.prefix and each.prefix.name == "tools" for each in requests if each.group == "bulk")

    def test_a_change_of_lengths_leaves_the_arrivals_alone(self):
        changed = generate(BURST.replace("mean = 220", "mean = 120"))
        assert [each.at for each in changed] == [each.at for each in generate(BURST)]

    def test_other_arrivals(self):
        at_once = generate("prompt=5\noutput=5\n[workload]\narrivals='at-once'\nrequests=3")
        assert [each.at for each in at_once] == [0, 0, 0]
        even = generate("prompt=5\noutput=5\n[workload]\narrivals='even'\nrate=4\nseconds=1")
        assert [each.at for each in even] == [0.25, 0.5, 0.75, 1.0]
        quiet = "prompt=5\noutput=5\n[workload]\narrivals='even'\nrequests=4\n[[phase]]\nseconds=2\nrate=1\n"
        gaps = generate(quiet + "[[phase]]\nseconds=10\nrate=0\n")
        assert [each.at for each in gaps] == [1, 2, 13, 14]

    def test_poisson_gaps_have_the_spread_of_their_mean(self):
        moments = [each.at for each in generate("prompt=5\noutput=5\n[workload]\nrate=10\nrequests=5000")]
        gaps = [after - before for before, after in pairwise(moments)]
        mean = sum(gaps) / len(gaps)
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert mean == pytest.approx(0.1, rel=0.05)
        assert spread == pytest.approx(mean, rel=0.05)

    HEAD = "prompt = 5\noutput = 5\n[workload]\nrequests = 2\nrate = 1\n"

    @pytest.mark.parametrize(
        ("text", "line", "says"),
        [
            ("[workload\n", 1, "is not valid TOML"),
            ("prompt = 5\noutput = 5\n[worklod]\n", 3, "has no key 'worklod' (did you mean 'workload'?)"),
            ("prompt = 5\noutput = 5\n[workload]\nrat = 1\n", 4, "[workload] has no key 'rat'"),
            ("prompt = 5\noutput = 5\n[workload]\nrate = 1\n", 3, "the workload has no end"),
            ("prompt = 5\noutput = 5\n[workload]\nrequests = 1\n", 3, "[workload] lacks 'rate'"),
            ("output = 5\n[workload]\nrequests = 1\nrate = 1\n", 1, "the workload lacks prompt, the lengths"),
            ("prompt = 0\n", 1, "tokens must be a whole number, at least 1, but is 0"),
            ("[prompt]\nsigma = 1\n", 1, "[prompt] lacks 'mean'"),
            ("[prompt]\nmean = 1\nmin = 5\nmax = 3\n", 4, "max is 3, below min, 5"),
            ("[prompt]\nmean = 10\nstd = 3\n", 3, "[prompt] has no key 'std'"),
            ("[prompt]\nmean = 3000\nmax = 100\n", 2, "mean is 3000, above max, 100"),
            ("[prompt]\nmin = 8\nmean = 2.5\nmax = 100\n", 3, "mean is 2.5, below min, 8"),
            ("[prompt]\nmean = 1e308\nsigma = 2\n", 2, "mean must be a number, at most 1e+07, but is 1e+308"),
            (HEAD.replace("rate = 1", f"rate = 1{'0' * 400}"), 5, "rate must be a number, at most 1e+09, but is 1000"),
            (HEAD.replace("rate = 1", f"rate = 0x{'f' * 5000}"), 5, "at most 1e+09, but is too long to be shown"),
            (HEAD + f"seed = 1{'0' * 30}\n", 6, "seed must be a whole number of 64 bits at most"),
            (HEAD + "[phase]\nseconds = 1\n", 6, "phase is an array of tables"),
            (HEAD + "[[phase]]\nseconds = 1\nrate = 1\n", 5, "there are phases, which have rates of their own"),
            (HEAD.replace("rate = 1\n", "") + "[[phase]]\nseconds = 1\nrate = 0\n", 3, "no phase has a rate above 0"),
            (HEAD.replace("rate = 1", "arrivals = 'burst'"), 5, "arrivals must be one of"),
            (HEAD.replace("rate = 1", "rate = 1\narrivals = 'at-once'"), 5, "rate has no meaning"),
            (
                HEAD.replace("rate = 1", "arrivals = 'at-once'") + "[[phase]]\nseconds = 1\nrate = 1\n",
                3,
                "phases have no meaning if all arrive at once",
            ),
            ("prompt = 99999999999\n", 1, "tokens must be at most 10000000"),
            (HEAD + "[[group]]\nshare = 1\n", 6, "[[group]] lacks 'name'"),
            (HEAD + "[[group]]\nname = 'a'\n[[group]]\nname = 'a'\n", 9, "two of [[group]] are named 'a'"),
            (HEAD + "[[group]]\nname = 'a'\nshare = 0\n", 8, "share must be a number"),
            (HEAD + "[[prefix]]\nname = 'a'\ntokens = 1\ngroup = 'x'\n", 9, "there is no group 'x'"),
            (HEAD + "[[prefix]]\nname='a'\ntokens=1\n[[prefix]]\nname='b'\ntokens=1\n", 6, "sum to 2"),
        ],
    )
    def test_a_fault_names_its_line(self, tmp_path: Path, text: str, line: int, says: str):
        file = tmp_path / "w.toml"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            read(file)
        assert says in caught.value.what
        assert caught.value.where == f"{file}:{line}"
        assert caught.value.fix

    @pytest.mark.parametrize("value", ["1" * 5000, "[" * 5000])
    def test_what_python_cannot_read_is_an_error_of_the_file(self, value: str):
        with pytest.raises(ConfigError, match=r"w.toml: is not valid TOML: (Exceeds the limit|maximum recursion)"):
            generate(f"prompt = {value}", "w.toml")

    def test_a_mean_may_be_one_of_the_bounds(self):
        text = "output = 5\n[workload]\nrequests = 2\nrate = 1\n[prompt]\nmean = 7\nmin = 7\nmax = 7\nsigma = 1\n"
        assert [each.prompt_tokens for each in generate(text)] == [7, 7]

    def test_the_widest_lengths_can_be_drawn(self):
        text = "output = 5\n[workload]\nrequests = 1000\nrate = 1\n[prompt]\nmean = 10_000_000\nsigma = 2\n"
        assert max(each.prompt_tokens for each in generate(text)) == 10_000_000

    def test_a_slip_of_the_pen_does_not_fill_the_memory(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("vllm_graft.simulator.workload.requests.MAX_REQUESTS", 1000)
        with pytest.raises(ConfigError, match="that makes more than 1000 requests"):
            generate("prompt = 5\noutput = 5\n[workload]\nrate = 1e9\nseconds = 10\n")


class TestPrompts:
    def test_invented_tokens_follow_from_the_name(self):
        assert invent_tokens("a", 50, 1000) == invent_tokens("a", 80, 1000)[:50]
        assert invent_tokens("a", 50, 1000) != invent_tokens("b", 50, 1000)
        assert max(invent_tokens("a", 5000, 17)) == 16
        assert invent_tokens("a", 0, 17) == []

    def test_the_sequence_is_the_one_of_the_simulated_tokens(self):
        key = int.from_bytes(__import__("hashlib").blake2b(b"a", digest_size=8).digest(), "little")
        assert invent_tokens("a", 3, 2**40) == [splitmix64(key, index) % 2**40 for index in range(3)]

    def test_a_prefix_is_shared_and_the_rest_is_not(self):
        first, second = (
            build_prompt(WorkloadRequest(0, 1, prompt_tokens=20, id=name, prefix=Prefix("p", 16)), 1000)[
                "prompt_token_ids"
            ]
            for name in "ab"
        )
        assert first[:16] == second[:16]
        assert first[16:] != second[16:]
        assert len(first) == 20

    def test_a_prompt_that_is_given_stays_as_it_is(self):
        assert build_prompt(WorkloadRequest(0, 1, prompt="hi"), 10) == {"prompt": "hi"}
        assert build_prompt(WorkloadRequest(0, 1, prompt_token_ids=(3, 4)), 10) == {"prompt_token_ids": [3, 4]}


def result(name: str, at: float, **given: object) -> Result:
    usual = {
        "group": "",
        "priority": 0,
        "state": "done",
        "reason": "length",
        "prompt_tokens": 10,
        "output_tokens": 5,
        "scheduled_at": at + 1,
        "first_token_at": at + 2,
        "finished_at": at + 4,
        "token_ids": (1, 2, 3, 4, 5),
    }
    return Result(id=name, at=at, **{**usual, **given})


class TestReport:
    def test_the_times_of_a_request(self):
        one = result("a", 3.0)
        assert (one.queue_s, one.ttft_s, one.e2e_s, one.tpot_s) == (1, 2, 4, 0.5)
        assert result("a", 0.0, output_tokens=1).tpot_s is None
        lost = Result("a", "", 0, 1.0, "rejected", "too long")
        assert (lost.queue_s, lost.ttft_s, lost.e2e_s, lost.tpot_s) == (None, None, None, None)

    def test_a_spread_is_what_numpy_says(self):
        import numpy as np

        values = [5.0, 1.0, 3.0, 2.0, 8.0, 13.0, 0.5]
        spread = Spread.of([*values, None])
        assert spread is not None
        assert spread.mean == pytest.approx(np.mean(values))
        assert [spread.p50, spread.p90, spread.p99] == pytest.approx(list(np.quantile(values, [0.5, 0.9, 0.99])))
        assert spread.max == 13
        assert Spread.of([None]) is None

    def test_figures_are_of_what_was_served(self):
        rows = (result("a", 1.0, group="x"), result("b", 5.0, group="y"), Result("c", "y", 0, 6.0, "rejected", "long"))
        facts = WorkloadReport(rows, modelled_s=9.0, wall_s=3.0, device_busy_s=4.0).as_dict()
        assert (facts["requests"], facts["done"], facts["rejected"], facts["aborted"]) == (3, 2, 1, 0)
        assert facts["makespan_s"] == 8.0
        assert facts["output_tokens_per_s"] == 10 / 8
        assert facts["device_busy_share"] == 0.5
        assert facts["modelled_per_wall"] == 3.0
        assert facts["reasons"] == {"long": 1}
        assert facts["groups"]["y"]["requests"] == 2
        assert facts["groups"]["y"]["ttft_s"]["max"] == 2.0
        json.dumps(facts)

    def test_a_run_without_a_token_has_figures_too(self):
        facts = WorkloadReport((Result("c", "", 0, 6.0, "rejected", "long"),)).as_dict()
        assert facts["makespan_s"] == 0
        assert facts["ttft_s"] is None
        json.dumps(facts)

    def test_the_digest_is_of_results_and_not_of_wording(self):
        def digest(*rows: Result) -> str:
            return WorkloadReport(rows).digest

        base = digest(result("a", 1.0))
        assert base == digest(result("a", 1.0))
        assert base != digest(result("a", 1.0, token_ids=(1, 2, 3, 4, 6)))
        assert base != digest(result("a", 1.0, first_token_at=3.000001))
        assert digest(Result("a", "", 0, 1.0, "rejected", "x")) == digest(Result("a", "", 0, 1.0, "rejected", "y"))

    def test_a_row_of_the_file_has_no_tokens_but_their_hash(self):
        row = result("a", 1.0).as_dict()
        assert row["ttft_s"] == 2.0
        assert len(row["tokens"]) == 16
        json.dumps(row)


class TestWorkload:
    def test_names_are_unique(self):
        with pytest.raises(ConfigError, match="two requests have the id 'a'"):
            Workload([WorkloadRequest(0, 1, 1, id="a"), WorkloadRequest(0, 1, 1, id="a")])

    def test_text_is_noticed(self):
        assert not Workload([WorkloadRequest(0, 1, 1)]).has_text
        assert Workload([WorkloadRequest(0, 1, 1), WorkloadRequest(0, 1, prompt="hi")]).has_text
