"""One test's worth of vLLM: a plan, a state folder, three ways to run the real engine, assertions on its records."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_graft import sockets
from vllm_graft.errors import SetupError
from vllm_graft.launcher.models import tiny_model
from vllm_graft.launcher.server import ServerProcess, free_port
from vllm_graft.ledger import ProcessView, RunView, runs
from vllm_graft.ledger.folder import home_in
from vllm_graft.points import Role
from vllm_graft.simulator.workload.player import set_environment
from vllm_graft.testing import zygote
from vllm_graft.testing.packages import lay_out, python_path

if TYPE_CHECKING:
    from vllm import LLM

_ENVIRONMENT: Final[Mapping[str, str | None]] = {
    # GiB: plenty for the tiny model, which most machines have to spare.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GRAFT_CHECK_KV": None,
    "GRAFT_DISABLE": None,
    "GRAFT_PLAN": None,
    "GRAFT_RUN": None,
    "GRAFT_SIMULATE": None,
    "GRAFT_SIMULATED_ACCEPTANCE": None,
    "GRAFT_SIMULATED_KV_BYTES": None,
    "GRAFT_SIMULATED_OUTPUT_TOKENS": None,
    "GRAFT_SIMULATED_SPEED": None,
    "VLLM_CUSTOM_PATCHES": None,
    # A value of the developer's own shell would leave graft out.
    "VLLM_PLUGINS": None,
}

_SMALL: Final = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")


class Session:
    """The object that the fixture ``graft`` hands to a test.

    folder: the test's working folder, with ``graft.toml``, logs and laid-out packages
    env:    the environment everything started here gets, besides this process's own; None removes a name
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.state = home_in(folder / "state")
        self.config = folder / "graft.toml"
        self.env: dict[str, str | None] = {
            **_ENVIRONMENT,
            "GRAFT_CONFIG": None,
            "GRAFT_STATE_DIR": str(folder / "state"),
            "PYTHONPATH": python_path(self.site),
        }
        self._sockets = sockets.make(os.environ)
        if self._sockets is not None:
            self.env[sockets.VARIABLE] = str(self._sockets)
        self._servers: list[ServerProcess] = []

    def plan(self, text: str) -> None:
        """Write ``graft.toml``."""
        self.config.write_text(text, encoding="utf-8")
        self.env["GRAFT_CONFIG"] = str(self.config)

    def package(
        self, name: str, entry_points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str] | None = None
    ) -> None:
        """Lay out a distribution that everything started here sees as installed."""
        lay_out(self.site, name, entry_points, modules)

    def simulate(self, device: str = "instant", speed: float | str = 1) -> None:
        """Run everything started from here on on the simulated accelerator, on a modelled device if one is named.

        With ``speed="virtual"`` the engine is put into the process that makes it, which is the only one of ``script``.
        """
        self.env["GRAFT_SIMULATE"] = device
        self.env["GRAFT_SIMULATED_SPEED"] = str(speed)
        if speed == "virtual":
            self.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    def server(
        self, *arguments: str, model: str | Path | None = None, program: Sequence[str] | None = None
    ) -> ServerProcess:
        """Return a server with the plan, not started yet; it is stopped when the test ends."""
        chosen = str(model if model is not None else tiny_model())
        port = [] if "--port" in arguments else ["--port", str(free_port())]
        small = [] if model is not None else list(_SMALL)
        log = self.folder / f"server-{len(self._servers)}.log"
        made = ServerProcess(
            [chosen, *small, "--host", "127.0.0.1", *port, *arguments],
            env=self.env,
            log=log,
            cwd=self.folder,
            program=program,
            popen=zygote.ForkedPopen,
        )
        self._servers.append(made)
        return made

    def script(self, text: str, *, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run a Python program in a process of its own, with the plan; ``MODEL`` in it is the tiny model's folder."""
        program = self.folder / "script.py"
        head = f"MODEL = {str(tiny_model())!r}\n"
        # vLLM's spawned children import the main module again, so what the script does must be guarded.
        body = "def main():\n" + "".join(f"    {line}\n" for line in text.strip("\n").splitlines())
        program.write_text(f'{head}{body}\nif __name__ == "__main__":\n    main()\n', encoding="utf-8")
        environment = {name: value for name, value in {**os.environ, **self.env}.items() if value is not None}
        return zygote.run(
            [sys.executable, str(program)],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @contextmanager
    def llm(self, **arguments: Any) -> Iterator[LLM]:
        """Make vLLM's ``LLM`` in this very process, with the plan; everything is put back afterwards."""
        with set_environment(self.env):
            from vllm_graft.boot.doors import enter
            from vllm_graft.boot.process import process

            entered, active = process.entered, process.engine.active()
            loaded = False
            try:
                platforms = sys.modules.get("vllm.platforms")
                chosen = vars(platforms).get("_current_platform") if platforms is not None else None
                simulated = self.env.get("GRAFT_SIMULATE") is not None
                if chosen is not None and simulated != ("Simulated" in type(chosen).__name__):
                    raise SetupError(
                        f"vLLM has already settled on {type(chosen).__name__} in this process",
                        where="Session.llm",
                        fix="use Session.script or Session.server, which start processes of their own",
                    )
                from vllm import LLM, plugins

                loaded = plugins.plugins_loaded
                # vLLM calls its plugins once in a process, which may have been in an earlier test.
                enter()
                small = {"model": str(tiny_model()), "dtype": "float32", "enforce_eager": True, "max_model_len": 256}
                made = LLM(**{**small, **arguments})
                try:
                    yield made
                finally:
                    made.llm_engine.engine_core.shutdown()
            finally:
                process.drop_plan()
                if not entered:
                    process.uninstall(active)
                    if (found := sys.modules.get("vllm.plugins")) is not None:
                        # vLLM calls its plugins again where it had not done so before.
                        setattr(found, "plugins_loaded", loaded)  # noqa: B010 - unknown to a type checker

    def views(self) -> list[RunView]:
        """Return the records of servers that run, and of those that crashed."""
        return runs(self.state)

    def close(self) -> None:
        """Stop every server the test left running, and remove their sockets."""
        for server in self._servers:
            server.stop()
        sockets.remove(self._sockets)


def assert_active(view: RunView | None, item: str, *, roles: Iterable[Role] | None = None) -> list[ProcessView]:
    """Assert that an item is active in every living process that needs it, and that each of the roles has one.

    Returns those processes. Without ``roles``, the roles are the ones the plan gives the item.
    """
    assert view is not None, "the server left no record: it ran without a plan, or with another state folder"
    planned = next((planned for planned in view.plan if planned.name == item), None)
    assert planned is not None, f"{item!r} is not in the plan: {[planned.name for planned in view.plan]}"
    wanted = set(planned.roles if roles is None else roles)
    living = [process for process in view.processes if process.life in ("running", "unknown")]
    found = [process for process in living if wanted.intersection(process.record.roles)]
    for process in found:
        state = process.record.item(item)
        place = f"{process.record.name} (pid {process.record.pid})"
        assert state is not None, f"{item!r} is not known in {place}"
        assert state.state in ("applied", "armed"), f"{item!r} is {state.state} in {place}: {state.reason}"
    seen = {role for process in found for role in process.record.roles}
    missing = wanted - seen - ({"registry"} if roles is None else set())
    assert not missing, f"no process with the role {sorted(missing)} recorded anything"
    return found


def assert_called(view: RunView | None, item: str, *, at_least: int = 1) -> int:
    """Assert that an item's hooks were called, over all processes together; return how often."""
    assert view is not None, "the server left no record: it ran without a plan, or with another state folder"
    calls = sum(process.calls(item) for process in view.processes)
    assert calls >= at_least, f"{item!r} was called {calls} times, at least {at_least} expected"
    return calls
