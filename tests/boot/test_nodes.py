"""A server over two nodes: every engine of both is asked, and a node with another plan or none is named.

Each node has a network, a host name, shared memory and records of its own. Where this machine allows no namespaces
(no root, no ``ip``), the second node is a process of the same host with records of its own.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_graft.boot.proof import unmanaged_ranks
from vllm_graft.errors import StartError
from vllm_graft.launcher.server import free_port
from vllm_graft.testing import ServerProcess, Session, zygote

ENTER = 'hostname "$0" && mount -t tmpfs shm /dev/shm && exec "$@"'
"""Run in a new UTS and mount namespace: give the node a name and shared memory of its own, then start the program."""


@dataclass
class Network:
    """What two nodes need to reach each other: addresses, interfaces, and the zygote of the second node's processes."""

    address: tuple[str, str] = ("127.0.0.1", "127.0.0.1")
    interface: tuple[str, str] = ("lo", "lo")
    node: zygote.ZygoteClient | None = None
    host: str = os.uname().nodename


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two network namespaces joined by a veth pair; one host where that is not allowed."""
    name, subnet = f"graft{os.getpid()}", f"10.77.{os.getpid() % 250}"
    made = [
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b netns {name}",
        f"ip address add {subnet}.1/24 dev {name}a",
        f"ip link set {name}a up",
        f"ip -n {name} address add {subnet}.2/24 dev {name}b",
        f"ip -n {name} link set {name}b up",
        f"ip -n {name} link set lo up",
        f"ip netns exec {name} unshare -u -m sh -c true",
    ]
    try:
        if shutil.which("ip") and all(
            subprocess.run(line.split(), capture_output=True, check=False).returncode == 0 for line in made
        ):
            enter = ("ip", "netns", "exec", name, "unshare", "-u", "-m", "sh", "-c", ENTER, "node-b")
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            node, process = zygote.start(zygote.dependencies(env), env, enter)
            yield Network((f"{subnet}.1", f"{subnet}.2"), (f"{name}a", f"{name}b"), node, "node-b")
            node.close()
            process.wait()
        else:
            yield Network()
    finally:
        if shutil.which("ip"):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def second_node(
    folder: Path, network: Network, plan: str, *arguments: str, headless: bool = True
) -> Iterator[ServerProcess]:
    """A node with a plan of its own, and with no front end unless told otherwise."""
    (folder / "node-b").mkdir()
    session = Session(folder / "node-b")
    prepare(session, network, 1, plan)
    server = session.server(*(["--headless"] if headless else []), *arguments)
    try:
        with zygote.used(network.node) if network.node else nullcontext():
            server.start()
        yield server
    finally:
        session.close()


def prepare(session: Session, network: Network, node: int, plan: str) -> Session:
    """Give a node its plan and its place in the network."""
    session.plan(plan)
    session.simulate()
    session.env["VLLM_HOST_IP"] = network.address[node]
    session.env["GLOO_SOCKET_IFNAME"] = network.interface[node]
    return session


@pytest.mark.server
def test_data_parallel_engines_of_another_node_are_asked(graft: Session, network: Network, tmp_path: Path):
    """Each engine's processes are in the status, and those of a node with another plan are named with both hashes."""
    port = str(free_port())
    parallel = ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    parallel += ["--data-parallel-address", network.address[0], "--data-parallel-rpc-port", port]
    prepare(graft, network, 0, '[defaults]\nscheduler = "priority-fairness"\non_failure = "warn"\n')
    other = '[defaults]\nscheduler = "tenant-fairness"\n'
    with (
        second_node(tmp_path, network, other, *parallel, "--data-parallel-start-rank", "1"),
        graft.server(*parallel) as server,
    ):
        found = json.loads(server.get("/graft/status")[1])
        engines = {row["name"]: row for row in found["processes"] if "engine" in row["roles"]}
        assert set(engines) == {"EngineCore_DP0", "EngineCore_DP1"}
        assert engines["EngineCore_DP1"]["host"] == network.host
        plans = {engine["plan"] for engine in engines.values()}
        assert len(plans) == 2
        apart = [row for row in found["findings"] if row["code"] == "S021" and "EngineCore_DP1" in row["subject"]]
        assert len(apart) == 1, found["findings"]
        assert "has another plan" in apart[0]["what"]
        assert all(plan in apart[0]["what"] for plan in plans)
        assert network.host in apart[0]["where"]
        assert "priority-fairness" in apart[0]["what"]


@pytest.mark.server
def test_a_node_without_a_plan_stops_the_start(graft: Session, network: Network, tmp_path: Path):
    """The last line says which process of which node runs without the plan; no traceback of an attribute."""
    port = str(free_port())
    nodes = ["--nnodes", "2", "--master-addr", network.address[0], "--master-port", port]
    nodes += ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
    prepare(graft, network, 0, '[defaults]\npatches = ["async-history"]\n')
    with second_node(tmp_path, network, "[defaults]\n", *nodes, "--node-rank", "1"):
        server = graft.server(*nodes, "--node-rank", "0")
        with pytest.raises(StartError):
            server.start().wait_healthy()
    said = server.tail(1000)
    errors = [line for line in said.splitlines() if "vllm_graft.errors.StartError: " in line]
    assert errors, said[-4000:]
    error = errors[-1]
    assert f"on {network.host}) runs without a plan" in error
    assert "lacks async-history" in error
    assert "Next: start every node with the same" in error
    assert "AttributeError" not in said


@pytest.mark.server
@pytest.mark.parametrize("kind", ["nnodes", "data-parallel"])
def test_a_node_with_another_plan_stops_the_start(graft: Session, network: Network, tmp_path: Path, kind: str):
    """Workers of one engine on two nodes, or an engine on each: the last line names the node and both plans."""
    address, port = network.address[0], str(free_port())
    common = ["--nnodes", "2", "--master-addr", address, "--master-port", port, "--tensor-parallel-size", "2"]
    common += ["--distributed-executor-backend", "mp"]
    first, second = ["--node-rank", "0"], ["--node-rank", "1"]
    if kind == "data-parallel":
        common = ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
        common += ["--data-parallel-address", address, "--data-parallel-rpc-port", port]
        first, second = [], ["--data-parallel-start-rank", "1"]
    prepare(graft, network, 0, '[defaults]\npatches = ["async-history"]\nscheduler = "priority-fairness"\n')
    other = '[defaults]\npatches = ["async-history", "cpu-seeds"]\nscheduler = "tenant-fairness"\n'
    with second_node(tmp_path, network, other, *common, *second):
        server = graft.server(*common, *first)
        with pytest.raises(StartError):
            server.start().wait_healthy()
    said = server.tail(1000)
    errors = [line for line in said.splitlines() if "vllm_graft.errors.StartError: " in line]
    assert errors, said[-4000:]
    error = errors[-1]
    assert f"on {network.host}) has another plan" in error
    assert "Next: start every node with the same" in error


@pytest.mark.server
def test_a_node_notices_requests_from_a_front_end_without_a_plan(graft: Session, network: Network, tmp_path: Path):
    """The front end is stock vLLM and asks nobody; the engine of the other node says so with its first request."""
    parallel = ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    parallel += ["--data-parallel-address", network.address[0], "--data-parallel-rpc-port", str(free_port())]
    prepare(graft, network, 0, "[defaults]\n")
    planned = '[defaults]\nscheduler = "priority-fairness"\n'
    with (
        second_node(tmp_path, network, planned, *parallel, "--data-parallel-start-rank", "1") as node,
        graft.server(*parallel, "--served-model-name", "m") as server,
    ):
        assert server.get("/graft/status")[0] == 404
        deadline = time.monotonic() + 60
        while "S024" not in node.tail(1000) and time.monotonic() < deadline:
            assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2, "model": "m"})[0] == 200
        view = node.run_view()
        said = node.tail(1000)
    assert view is not None
    (engine,) = [row for row in view.rows() if "engine" in row["roles"]]  # type: ignore[operator]
    assert "S024" in str(engine["last_error"])
    assert f"plan {view.plan.hash}: requests arrive from a front end without a plan" in said
    assert said.count("requests arrive from a front end") == 1


@pytest.mark.server
def test_each_front_end_of_a_hybrid_balance_names_the_ranks_of_the_other(
    graft: Session, network: Network, tmp_path: Path
):
    """Two front ends, one for each node's engines: neither can ask the other's.

    vLLM 0.32 takes a node with a single engine for one behind an external balance, and refuses that for this model.
    """
    parallel = ["--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-hybrid-lb"]
    parallel += ["--data-parallel-address", network.address[0], "--data-parallel-rpc-port", str(free_port())]
    plan = '[defaults]\nscheduler = "priority-fairness"\n'
    prepare(graft, network, 0, plan)
    with (
        second_node(tmp_path, network, plan, *parallel, "--data-parallel-start-rank", "2", headless=False) as node,
        graft.server(*parallel, "--data-parallel-start-rank", "0") as server,
    ):
        found = json.loads(server.get("/graft/status")[1])
        assert {row["name"] for row in found["processes"] if "engine" in row["roles"]} == {
            "EngineCore_DP0",
            "EngineCore_DP1",
        }
        (finding,) = found["findings"]
        assert (finding["code"], finding["level"]) == ("S025", "warning")
        assert finding["subject"] == "data-parallel ranks 2, 3"
        assert "S025 warning: data-parallel ranks 2, 3" in server.tail(1000)
        deadline = time.monotonic() + 60
        while "S025" not in node.tail(1000) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert "data-parallel ranks 0, 1: " in next(line for line in node.tail(1000).splitlines() if "S025" in line)


def test_ranks_of_another_front_end_are_named():
    """With external or hybrid load balancing a front end manages some of the engines, and can ask no others."""
    ranks = [rank.to_bytes(2, "little") for rank in range(4)]
    assert unmanaged_ranks(4, ranks) is None
    assert unmanaged_ranks(1, ranks[:1]) is None
    found = unmanaged_ranks(4, ranks[1:2])
    assert found is not None
    assert (found.code, found.subject) == ("S025", "data-parallel ranks 0, 2, 3")
