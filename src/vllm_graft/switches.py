"""The environment variables that turn vllm-graft off, and which plugins vLLM loads."""

from __future__ import annotations

import os
from collections.abc import Mapping

DISABLE_VARIABLE = "GRAFT_DISABLE"
"""Set to 1, the package does nothing: the stock server."""

PLUGINS_VARIABLE = "VLLM_PLUGINS"
"""vLLM's own list of the plugins that it loads; unset, it loads all."""


def is_set(variable: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a variable is set to something else than "off"."""
    value = (os.environ if environ is None else environ).get(variable, "")
    return value.strip().lower() not in ("", "0", "false", "no")


def disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``GRAFT_DISABLE`` turns the package off."""
    return is_set(DISABLE_VARIABLE, environ)


def allowed_plugins(environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the names in ``VLLM_PLUGINS`` as vLLM splits them, blanks included; None where it is not set."""
    # vLLM's envs.py does not strip, and takes an empty value for a list of one empty name.
    listed = (os.environ if environ is None else environ).get(PLUGINS_VARIABLE)
    return None if listed is None else tuple(listed.split(","))
