"""Applying a patch for trial in a process of its own, where reading cannot tell whether a start would take it.

The process imports the target's module, applies the patch to it through the engine that a start uses, and ends.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from vllm_graft.errors import PatchError

_LIMIT: Final = 300
"""Seconds; importing vLLM takes a dozen on an idle machine."""

_RESULT: Final = "vllm-graft trial: "
"""What the line with the result begins with: vLLM prints lines of its own."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trial: refused with ``what`` and ``fix``, or not possible for the reason in ``failed``."""

    what: str = ""
    fix: str = ""
    failed: str = ""


def attempt(target: str) -> Outcome:
    """Apply a patch, named by "module:Class" as its entry point does, in a child process."""
    command = [sys.executable, "-m", "vllm_graft.patching.trial", target]
    # The patch was found on the path of this process, which is not always that of a new one.
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Outcome(failed=str(error))
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if not lines:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Outcome(failed=last)
    return Outcome(**json.loads(lines[-1].removeprefix(_RESULT)))


def run(target: str) -> Outcome:
    """Apply the patch here."""
    from vllm_graft.patching.declare import declared
    from vllm_graft.patching.engine import Engine

    module, _, name = target.partition(":")
    patch = declared(getattr(importlib.import_module(module), name))
    try:
        if patch.declaration.target.given is None:
            importlib.import_module(patch.declaration.target.module)
    except Exception as error:  # whatever the module's own code raises
        return Outcome(failed=f"{patch.declaration.target.module} cannot be imported: {error!r}")
    try:
        Engine().apply([patch])
    except PatchError as error:
        return Outcome(what=error.what, fix=error.fix)
    return Outcome()


if __name__ == "__main__":
    found = run(sys.argv[1])
    print(_RESULT + json.dumps({"what": found.what, "fix": found.fix, "failed": found.failed}), flush=True)
