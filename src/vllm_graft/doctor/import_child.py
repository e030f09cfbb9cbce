"""The script of a child process of ``imports.py``: import a plugin, call it twice, report. It imports nothing of ours.

Its one argument is a file with a JSON object: the search path, the module, the attribute, and whether to call that. The
report takes its place after each stage, so that a crash shows how far the plugin came.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Final

HEAVY: Final = (
    "torch", "vllm", "transformers", "triton", "ray", "tensorflow", "jax", "flashinfer", "xformers", "pandas",
)  # fmt: skip
"""Packages whose import takes long; that of torch takes 2 s of CPU time, that of transformers 3 s."""


def main() -> None:
    """Import and call the plugin; whatever it raises is part of the report."""
    file = sys.argv[1]
    with open(file, encoding="utf-8") as opened:
        task = json.load(opened)
    here = os.path.dirname(os.path.abspath(__file__))
    before = [place for place in sys.path if os.path.abspath(place or ".") != here]
    sys.path[:] = [*task["path"], *(place for place in before if place not in task["path"])]
    sys.argv = [sys.argv[0]]
    report: dict[str, object] = {"stage": "import"}
    _write(file, report)
    try:
        import importlib

        known = set(sys.modules)
        started = time.perf_counter()
        found: object = importlib.import_module(task["module"])
        for part in task["attribute"].split(".") if task["attribute"] else ():
            found = getattr(found, part)
        report["seconds"] = time.perf_counter() - started
        report["heavy"] = [name for name in HEAVY if name in sys.modules and name not in known]
        report["cuda"] = _has_cuda()
        report["stage"] = "call" if task["call"] else "done"
        _write(file, report)
        if task["call"]:
            found()  # type: ignore[operator]
            report["stage"] = "second call"
            _write(file, report)
            found()  # type: ignore[operator]
            report["stage"] = "done"
            report["cuda"] = _has_cuda()
    except BaseException as error:
        # SystemExit too: vLLM does not catch it, so a plugin that raises it ends the process it is imported in.
        report["error"] = f"{type(error).__name__}: {error}".strip(": ")
    _write(file, report)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit, which would wait for threads that the plugin left running.
    os._exit(0)


def _has_cuda() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return bool(cuda is not None and getattr(cuda, "is_initialized", bool)())


def _write(path: str, report: dict[str, object]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
