"""How a start flows, on the simulated accelerator: the real engine, forked, scheduling asynchronously, in seconds."""

import json
import shutil
import subprocess
import time

import pytest

from vllm_graft.testing import Session

pytestmark = pytest.mark.engine

REPORT = """
import json
from vllm_graft.ledger import runs
def report():
    rows = [row for view in runs() for row in view.rows()]
    print("ROWS " + json.dumps(rows), flush=True)
"""

GENERATE = (
    REPORT
    + """
from vllm import LLM, SamplingParams
llm = LLM(MODEL, max_model_len=256)
print("TOKENS", len(llm.generate("hi", SamplingParams(max_tokens=5))[0].outputs[0].token_ids))
report()
"""
)


def rows_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    """The processes a script reported, by name."""
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ROWS "))
    return {row["name"]: row for row in json.loads(line[5:]) if row["life"] == "running"}


def states(row: dict[str, object]) -> dict[str, str]:
    """Item to state."""
    return {item["name"]: item["state"] for item in row["items"]}  # type: ignore[attr-defined]


def calls(row: dict[str, object]) -> dict[str, int]:
    """Item to calls."""
    return {item["name"]: item["calls"] for item in row["items"]}  # type: ignore[attr-defined]


def first_steps(row: dict[str, object]) -> int:
    """How often the patch on the worker saw its device initialised."""
    hooks = next(item["hooks"] for item in row["items"] if item["name"] == "on-worker")  # type: ignore[attr-defined]
    return int(hooks["vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"]["calls"])


def test_a_forked_engine_has_a_record_and_counters_of_its_own(simulated: Session):
    """vLLM does not call plugins again in a forked child: it is put right after the fork."""
    rows = rows_of(simulated.script(GENERATE))
    engine = rows["EngineCore"]
    assert engine["start_method"] == "fork"
    assert sorted(engine["roles"]) == ["engine", "worker"]  # type: ignore[call-overload]
    assert states(engine) == {"on-engine": "applied", "on-worker": "applied", "everywhere": "applied"}
    assert calls(engine)["on-engine"] >= 5
    assert first_steps(engine) == 1, "a worker in engine core's process takes its part before it is made"
    front = rows["script.py"]
    assert states(front) == {"everywhere": "applied", "stat-logger-guard": "applied", "request-log": "applied"}
    assert calls(front)["request-log"] >= 1


def test_a_spawned_engine_has_the_same(simulated: Session):
    """The other start method, by vLLM's own variable."""
    simulated.env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    engine = rows_of(simulated.script(GENERATE))["EngineCore"]
    assert engine["start_method"] == "spawn"
    assert first_steps(engine) == 1
    assert states(engine) == {"on-engine": "applied", "on-worker": "applied", "everywhere": "applied"}


def test_a_killed_forked_engine_is_visible(simulated: Session):
    """A process that is gone without a word stays in the records as died."""
    script = GENERATE + (
        "import os, signal, time\n"
        "(engine,) = [row for view in runs() for row in view.rows() if 'engine' in row['roles']]\n"
        "os.kill(engine['pid'], signal.SIGKILL)\n"
        "time.sleep(0.5)\n"
        "print('FOUND', [(finding.code, finding.subject) for view in runs() for finding in view.findings()])\n"
        "os._exit(0)\n"
    )
    done = simulated.script(script)
    engine = rows_of(done)["EngineCore"]
    assert engine["start_method"] == "fork"
    assert f"('S006', 'EngineCore (engine+worker, pid {engine['pid']} on " in done.stdout


def test_an_engine_in_the_same_process_plays_all_roles(simulated: Session):
    """One process, one record, three roles."""
    simulated.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    rows = rows_of(simulated.script(GENERATE))
    assert list(rows) == ["script.py"]
    assert sorted(rows["script.py"]["roles"]) == ["engine", "frontend", "worker"]  # type: ignore[call-overload]
    assert calls(rows["script.py"])["on-engine"] >= 5
    assert first_steps(rows["script.py"]) == 1


def test_the_registry_subprocess_applies_its_part(simulated: Session):
    """vLLM inspects model classes in a program of its own, whose output nobody sees; its cache is kept cold here."""
    simulated.env["VLLM_CACHE_ROOT"] = str(simulated.folder / "cache")
    script = (
        GENERATE
        + "import os, pathlib\n"
        + (
            "home = pathlib.Path(os.environ['GRAFT_STATE_DIR'])\n"
            "for path in home.glob('*/runs/*/[0-9]*.json'):\n"
            "    row = json.loads(path.read_text())\n"
            "    if row['roles'] == ['registry']:\n"
            "        print('REGISTRY', row['name'], row['items'][0]['name'], row['items'][0]['state'])\n"
        )
    )
    done = simulated.script(script)
    rows_of(done)
    assert "REGISTRY registry.py everywhere" in done.stdout


def test_a_server_on_the_simulated_platform_forks_or_spawns_and_serves(simulated: Session):
    """The API server with the simulated device: every process in the ledger, status from inside."""
    with simulated.server("--served-model-name", "m") as server:
        body = {"prompt": "hi", "max_tokens": 5, "model": "m"}
        assert server.post("/v1/completions", body)[0] == 200
        found = json.loads(server.get("/graft/status")[1])
        assert found["findings"] == []
        roles = {role for process in found["processes"] for role in process["roles"]}
        assert roles - {"registry"} == {"frontend", "engine", "worker"}


def test_the_launcher_of_several_api_servers_is_watched(simulated: Session):
    """It makes no engine client; its record is written again with the others where a cleaner removed all of them."""
    with simulated.server("--api-server-count", "2") as server:
        view = server.run_view()
        assert view is not None
        assert view.home is not None
        running = sorted(each.record.name for each in view.processes if each.life == "running")
        assert {"vllm", "ApiServer_0", "ApiServer_1"} <= set(running)
        # Moved first: the server may write a record into the folder while it is being emptied.
        shutil.rmtree(view.home.rename(simulated.config.with_name("removed")))
        deadline, names = time.monotonic() + 60, []
        while names != running and time.monotonic() < deadline:
            time.sleep(0.5)
            again = server.run_view()
            names = sorted(each.record.name for each in again.processes if each.life == "running") if again else []
        assert names == running
        assert again is not None
        assert (again.plan.hash, again.findings()) == (view.plan.hash, [])


def test_without_the_endpoint_the_comparison_stays(simulated: Session):
    """endpoint = false takes the route away, not the proof."""
    simulated.plan('[defaults]\npatches = ["on-engine"]\nendpoint = false\n')
    with simulated.server() as server:
        assert server.get("/graft/status")[0] == 404
        view = server.run_view()
        assert view is not None
        assert view.findings() == []


def test_additional_config_and_profiles_reach_every_process(simulated: Session):
    """No file at all: the plan comes with the arguments."""
    simulated.config.unlink()
    simulated.env["GRAFT_CONFIG"] = None
    script = GENERATE.replace(
        "max_model_len=256", "max_model_len=256, additional_config={'graft': {'patches': ['on-engine']}}"
    )
    rows = rows_of(simulated.script(script))
    assert states(rows["EngineCore"]) == {"on-engine": "applied"}
    assert states(rows["script.py"]) == {}


def test_the_seeds_variable_names_patches_without_a_warning(simulated: Session):
    """VLLM_CUSTOM_PATCHES is no unknown variable to vLLM, even when unknown ones are fatal."""
    simulated.env["VLLM_CUSTOM_PATCHES"] = "on-engine, everywhere"
    script = GENERATE.replace("max_model_len=256", "max_model_len=256, fail_on_environ_validation=True")
    done = simulated.script(script)
    assert states(rows_of(done)["EngineCore"]) == {"on-engine": "applied", "everywhere": "applied"}
    assert "Unknown vLLM environment variable" not in done.stdout + done.stderr


def test_the_users_own_worker_extension_is_kept(simulated: Session):
    """Ours is composed with it."""
    script = GENERATE.replace("max_model_len=256", "max_model_len=256, worker_extension_cls='boot_patches.Extension'")
    done = simulated.script(script + "print('THEIRS', llm.collective_rpc('users_own'))\n")
    assert states(rows_of(done)["EngineCore"])["on-worker"] == "applied"
    assert "THEIRS ['users own']" in done.stdout


def test_the_hash_of_the_patches_is_in_vllms_compile_key(simulated: Session):
    """A graph compiled with a patch is not loaded without it; nothing of ours besides changes the key."""
    script = """
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=MODEL, max_model_len=256).create_engine_config()
factors = envs.compile_factors()
print("KEY", {name: factors.get(name) for name in sorted(factors) if "GRAFT" in name or "CUSTOM_PATCHES" in name})
"""

    def key(text: str) -> str:
        simulated.plan(text)
        done = simulated.script(script)
        assert done.returncode == 0, done.stderr[-2000:]
        return next(line for line in done.stdout.splitlines() if line.startswith("KEY"))

    one = key('[defaults]\npatches = ["on-engine"]\n')
    again = key('[defaults]\npatches = ["on-engine"]\nendpoint = false\nstats = ["request-log"]\n')
    other = key('[defaults]\npatches = ["everywhere"]\n')
    assert one == again
    assert one != other
    assert "GRAFT_PATCHSET" in one


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_process_has_the_same_hash_in_its_compile_key(simulated: Session, method: str):
    """The worker compiles, and it may be in another process than the one that resolved the plan."""
    simulated.env["VLLM_WORKER_MULTIPROC_METHOD"] = method
    script = GENERATE.replace("max_model_len=256", "max_model_len=256, worker_extension_cls='boot_patches.Extension'")
    done = simulated.script(
        script
        + "from vllm import envs\n"
        + "print('KEYS', envs.compile_factors()['GRAFT_PATCHSET'], *llm.collective_rpc('compile_key'))\n"
    )
    assert rows_of(done)["EngineCore"]["start_method"] == method
    _, here, *there = next(line for line in done.stdout.splitlines() if line.startswith("KEYS")).split()
    assert len(here) == 16
    assert there == [here]


def test_a_patch_for_other_models_is_left_out_and_said_so(simulated: Session):
    """Also where nothing else is planned; under a name that it is for, the same model has it."""
    simulated.plan('[defaults]\npatches = ["of-large"]\n')
    done = simulated.script(GENERATE)
    assert rows_of(done) == {}
    assert "vllm-graft: of-large is for the models *70B*, but this is " in done.stdout + done.stderr
    named = GENERATE.replace("max_model_len=256", "max_model_len=256, served_model_name='org/Model-70B'")
    engine = rows_of(simulated.script(named))["EngineCore"]
    assert calls(engine)["of-large"] >= 5


def test_without_a_plan_nothing_of_ours_shows(simulated: Session):
    """Merely installed: no record, no extension, no line in the log."""
    simulated.config.unlink()
    simulated.env["GRAFT_CONFIG"] = None
    done = simulated.script(
        GENERATE + "print('EXT', llm.llm_engine.vllm_config.parallel_config.worker_extension_cls)\n"
    )
    assert rows_of(done) == {}
    assert "EXT \n" in done.stdout or "EXT None" in done.stdout
    assert "vllm-graft:" not in done.stdout + done.stderr


OVERWRITE = """
def register():
    import multiprocessing
    if not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    import threading, time
    def later():
        from vllm.v1.worker.worker_base import WorkerWrapperBase
        before = WorkerWrapperBase.execute_model
        while "graft" not in str(vars(WorkerWrapperBase).keys()):
            time.sleep(0.01)
        WorkerWrapperBase.execute_model = lambda *args, **kwargs: before(*args, **kwargs)
    threading.Thread(target=later, daemon=True).start()
"""


def test_a_stranger_who_sets_a_patched_attribute_stops_the_start(simulated: Session):
    """What runs is his code; the server does not serve as if it were the patch."""
    simulated.env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    simulated.package("stranger", {"vllm.general_plugins": {"stranger": "stranger:register"}}, {"stranger": OVERWRITE})
    done = simulated.script(GENERATE)
    assert done.returncode != 0
    assert "is overwritten: vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model was set to" in done.stderr
    assert "by other code, over what patch 'on-worker' put there" in done.stderr
    assert "Next: leave out the other package's change, or the patch" in done.stderr


OVERWRITE_ENGINE = """
def register():
    import multiprocessing
    if not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    import threading, time
    def later():
        from vllm.v1.core.sched.scheduler import Scheduler
        while "graft" not in str(vars(Scheduler).keys()):
            time.sleep(0.01)
        ours = Scheduler.schedule
        Scheduler.schedule = lambda *args, **kwargs: ours(*args, **kwargs)
    threading.Thread(target=later, daemon=True).start()
"""


def test_a_stranger_in_an_engine_core_of_its_own_process_stops_the_start_too(simulated: Session):
    """With workers elsewhere nobody else could tell."""
    simulated.env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    files = {"stranger": OVERWRITE_ENGINE}
    simulated.package("stranger", {"vllm.general_plugins": {"a_stranger": "stranger:register"}}, files)
    done = simulated.script(GENERATE.replace("max_model_len=256", "max_model_len=256, tensor_parallel_size=2"))
    assert done.returncode != 0
    assert "is overwritten: vllm.v1.core.sched.scheduler:Scheduler.schedule was set to" in done.stderr
