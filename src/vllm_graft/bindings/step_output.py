"""Values that a worker sends to engine core beside the output of a step."""

from __future__ import annotations

from typing import Any


def attach(output: Any, name: str, value: object) -> bool:
    """Put an attribute on the output of a step, which vLLM pickles to engine core; return False if there is none."""
    if output is None:
        return False
    # With asynchronous scheduling the output is a future; the ModelRunnerOutput that it will return is in it.
    inner = getattr(output, "_model_runner_output", None) or getattr(output, "model_runner_output", None)
    setattr(inner if inner is not None else output, name, value)
    return True
