"""The figures of real engines and servers: they add up, in the ledger, in status and on ``/metrics``."""

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_graft.cli.status import render
from vllm_graft.testing import ServerProcess, Session

ENGINE = """
import json
from vllm import LLM, SamplingParams
from vllm_graft.ledger import StatisticsReader, current
llm = LLM(MODEL, max_model_len=256, max_num_seqs=2, enable_prefix_caching=False)
engine = llm.llm_engine
tokens = {"class": {}, "tenant": {}}
for number in range(12):
    kinds = {"class": str(number % 3 + 1), "tenant": ["acme", "zeta"][number % 2]}
    params = SamplingParams(max_tokens=number + 1, ignore_eos=True, extra_args={"tenant": kinds["tenant"]})
    engine.add_request(str(number), {"prompt_token_ids": [5] * (7 + number)}, params, priority=number % 3 + 1)
    # The last token of an answer is not computed any further.
    for label, value in kinds.items():
        tokens[label][value] = tokens[label].get(value, 0) + 7 + number + number
done, steps = set(), 0
loads = []
while engine.has_unfinished_requests():
    done |= {output.request_id for output in engine.step() if output.finished}
    loads.append(StatisticsReader(current().home).load())
    if steps == 3:
        engine.abort_request(["11"])
    steps += 1
"""

REPORT = """
import time
home = current().home
until = time.monotonic() + 20
def busy():
    return any(row.waiting or row.running for queue in StatisticsReader(home).queues() for row in queue.rows)
while busy() and time.monotonic() < until:
    time.sleep(0.05)
load = StatisticsReader(home).load()
print("REPORT", json.dumps({
    "rows": [row for queue in StatisticsReader(home).queues() for row in queue.as_dicts()],
    "tokens": tokens, "done": len(done), "load": [load.waiting, load.running],
    "most": max(load.running for load in loads),
}))
"""


def report(session: Session, text: str) -> dict[str, object]:
    done = session.script(text)
    found = re.search(r"^REPORT (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    answer: dict[str, object] = json.loads(found[1])
    return answer


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize(
    ("policy", "labels"), [("priority-fairness", {"class"}), ("tenant-fairness", {"class", "tenant"})]
)
def test_the_figures_of_a_real_engine_add_up(graft: Session, policy: str, labels: set[str], in_process: bool):
    """Read by the front end from the engine's board: who was admitted has ended, and what was served is what ran."""
    pytest.importorskip("vllm")
    graft.simulate()
    graft.plan(f'[defaults]\nscheduler = "{policy}"\n')
    if in_process:
        graft.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    found = report(graft, ENGINE.replace('engine.abort_request(["11"])', "pass") + REPORT)
    rows = found["rows"]
    assert isinstance(rows, list)
    assert {row["label"] for row in rows} == labels
    assert {row["item"] for row in rows} == {policy}
    for label in labels:
        mine = [row for row in rows if row["label"] == label]
        assert {row["value"]: row["tokens"] for row in mine} == found["tokens"][label]  # type: ignore[index]
        assert sum(row["share"] for row in mine) == pytest.approx(1.0, abs=0.001)
        assert sum(row["admitted"] for row in mine) == sum(row["ended"] for row in mine) == found["done"] == 12
        for row in mine:
            assert (row["waiting"], row["running"], row["refused"], row["aborted"]) == (0, 0, 0, 0)
            assert 0.0 <= row["wait_mean_s"] <= row["wait_max_s"]
            assert row["wait_p99_s"] <= row["wait_max_s"]
    assert found["load"] == [0, 0]
    # An engine in a process of its own may be past its fullest moment whenever somebody looks.
    assert found["most"] in ([2] if in_process else [0, 1, 2])


def test_an_aborted_request_was_never_admitted(graft: Session):
    """It is counted apart, and nothing of it stays."""
    pytest.importorskip("vllm")
    graft.simulate()
    graft.plan('[defaults]\nscheduler = "tenant-fairness"\n')
    graft.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the fourth step is the engine's fourth
    rows = report(graft, ENGINE + REPORT)["rows"]
    assert isinstance(rows, list)
    for label in ("class", "tenant"):
        mine = [row for row in rows if row["label"] == label]
        assert sum(row["aborted"] for row in mine) == 1
        assert sum(row["admitted"] for row in mine) == sum(row["ended"] for row in mine) == 11
        assert sum(row["waiting"] + row["running"] for row in mine) == 0


METRIC = re.compile(r"^(vllm_graft_queue_\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)


def metrics_of(server: ServerProcess) -> Counter[tuple[str, str]]:
    """Samples of ours by name and labels; one that shows twice is an error."""
    status, text = server.get("/metrics")
    assert status == 200
    assert "vllm:num_requests_running" in text
    found: Counter[tuple[str, str]] = Counter()
    for name, labels, value in METRIC.findall(text):
        assert (name, labels) not in found
        found[name, labels] = float(value)  # type: ignore[assignment]
    return found


def asked(server: ServerProcess, number: int) -> None:
    """So many requests of two tenants, at once; the server has stepped once more when all have their answers."""

    def ask(index: int) -> int:
        tenant = ["acme", "zeta"][index % 2]
        body = {"prompt": "hi", "max_tokens": 3, "model": "m", "ignore_eos": True, "vllm_xargs": {"tenant": tenant}}
        return server.post("/v1/completions", body)[0]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(number))) == {200}


def check_metrics(server: ServerProcess, number: int) -> None:
    found = metrics_of(server)
    for tenant in ("acme", "zeta"):
        labels = f'by="tenant",engine="0",value="{tenant}"'
        sample = {name: value for (name, own), value in found.items() if own == labels}
        assert sample["vllm_graft_queue_admitted_total"] == number / 2
        assert sample["vllm_graft_queue_wait_seconds_count"] == number / 2
        assert sample["vllm_graft_queue_token_share"] == pytest.approx(0.5)
        assert found["vllm_graft_queue_wait_seconds_bucket", f'{labels},le="+Inf"'] == number / 2
        assert sample["vllm_graft_queue_tokens_total"] > number / 2


@pytest.mark.parametrize("servers", [1, 2])
def test_a_real_server_shows_its_queues_in_status_and_metrics(graft: Session, servers: int):
    """Once, whichever of its API servers is asked; and none where no scheduler is planned."""
    pytest.importorskip("vllm")
    graft.simulate()
    graft.plan('[defaults]\nscheduler = "tenant-fairness"\n')
    count = ["--api-server-count", str(servers)] if servers > 1 else []
    with graft.server("--served-model-name", "m", *count) as server:
        assert not metrics_of(server)
        asked(server, 20)
        for _ in range(4 * servers):
            check_metrics(server, 20)
        view = server.run_view()
        assert view is not None
        for queues in (view.as_dict()["queues"], json.loads(server.get("/graft/status")[1])["queues"]):
            assert isinstance(queues, list)
            by_tenant = {row["value"]: row for row in queues if row["label"] == "tenant"}
            assert {value: row["ended"] for value, row in by_tenant.items()} == {"acme": 10, "zeta": 10}
        text = render([view.as_dict()])
        assert re.search(r"^tenant-fairness +\d+ +tenant +acme +0 +0 +10 +0 +10 +0 ", text, re.MULTILINE)
        page = server.get("/graft/status", {"Accept": "text/html"})[1]
        assert re.search("<td[^>]*>acme<td>0<td>0<td>10<td>0<td>10<td>0", page)


def test_nothing_is_shown_where_no_scheduler_is_planned(graft: Session):
    """Of the queues; how the planned items stand is shown with any plan."""
    pytest.importorskip("vllm")
    graft.simulate()
    graft.plan('[defaults]\nstats = ["request-log"]\n')
    with graft.server("--served-model-name", "m") as server:
        asked(server, 2)
        assert "vllm_graft_queue" not in server.get("/metrics")[1]
        found = json.loads(server.get("/graft/status")[1])
        assert found["queues"] == []
        assert "Queues" not in server.get("/graft/status", {"Accept": "text/html"})[1]
