"""Our part when vLLM starts: two entry points, and what follows from them in each process.

    doors.py          every place where vLLM hands us control
    start.py          the front end: resolve the plan, carry it, add it to vLLM's arguments
    process.py        the plan of this process, and how it takes effect
    proof.py          how engines and workers prove what is active, and the comparison with the plan
    startup_error.py  the wording of a refused start
    clients.py        the engine client and our endpoint plugin
    loops.py          the loops of engine cores and workers, watched
    role.py, env.py   the role of this process; our environment variables
    platforms.py      platform plugins that raised
    launch.py         the program behind ``vllm-graft serve``

Both entry points must be cheap and silent if nothing is planned: they run in every vLLM process of every user who
has the package installed.
"""

from __future__ import annotations

from vllm_graft.switches import disabled, is_set

SIMULATE_VARIABLE = "GRAFT_SIMULATE"
"""If it is set to 1 or to the name of a device, vLLM runs on the simulated accelerator."""


def register() -> None:
    """Handle vLLM's call of the entry point ``graft`` of ``vllm.general_plugins``, once in every process it starts."""
    # Late, because vLLM imports this package for the platform plugin too, while it is being imported itself.
    from vllm_graft.boot.doors import enter

    enter()


def platform() -> str | None:
    """Return the simulated platform if ``GRAFT_SIMULATE`` is set: the entry point of ``vllm.platform_plugins``."""
    if disabled() or not is_set(SIMULATE_VARIABLE):
        return None
    return "vllm_graft.simulator.platform.SimulatedPlatform"
