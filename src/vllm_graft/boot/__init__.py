"""What vLLM calls, and what happens then: this process's role, the plan, the patches, the record.

- ``register``  the general plugin: vLLM calls it once in every process it starts (not again in a forked child)
- ``platform``  the platform plugin: None unless the simulated accelerator is asked for

Both must be cheap and silent where nothing is planned: they run in every vLLM process of every user who merely has
the package installed.
"""

from __future__ import annotations

import os

SIMULATE_VARIABLE = "GRAFT_SIMULATE"
"""Set to 1 or to the name of a device, vLLM runs on the simulated accelerator."""

DISABLE_VARIABLE = "GRAFT_DISABLE"
"""Set to 1, the package does nothing: the stock server."""


def register() -> None:
    """The entry point ``graft`` of ``vllm.general_plugins``."""
    from vllm_graft.boot.process import enter

    enter()


def platform() -> str | None:
    """The entry point ``graft`` of ``vllm.platform_plugins``: the simulated platform where it is asked for."""
    if disabled() or not _asked(SIMULATE_VARIABLE):
        return None
    return "vllm_graft.simulator.platform.SimulatedPlatform"


def disabled() -> bool:
    """Whether ``GRAFT_DISABLE`` turns the package off."""
    return _asked(DISABLE_VARIABLE)


def _asked(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "false", "no")
