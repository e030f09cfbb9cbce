"""``vllm-graft model``: make the embedded model, or check it, and say where it is."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from vllm_graft.launcher import models

HELP = "make or check the embedded model and print its folder"

_WIDTH = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "--tiny", action="store_true", help="the random two-layer model instead of SmolLM2-135M-Instruct"
    )
    parser.add_argument("--verify", action="store_true", help="compare the checksum of every file, not only its size")
    parser.add_argument("--json", action="store_true", help="print a list with one row instead of the bare path")


def run(args: argparse.Namespace) -> int:
    """Print the model's folder, made first where it is missing or damaged; nothing else goes to standard output."""
    prepare = models.tiny_model if args.tiny else models.embedded_model
    folder = prepare(ProgressLine(), verify=args.verify)
    print(json.dumps([_row(folder, args.verify)], indent=2) if args.json else folder)
    return 0


def _row(folder: Path, verified: bool) -> dict[str, object]:
    files = [file for file in folder.iterdir() if file.is_file()]
    return {
        "name": folder.name,
        "path": str(folder),
        "checked": "sha256" if verified else "size",
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


class ProgressLine:
    """Shows progress on standard error: a bar that redraws itself on a terminal, elsewhere one line per step."""

    def __init__(self) -> None:
        self._step = ""

    def __call__(self, step: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` is behind us in this step."""
        if sys.stderr.isatty():
            filled = _WIDTH * done // total
            bar = "#" * filled + "." * (_WIDTH - filled)
            print(
                f"\r{step} [{bar}] {100 * done // total:3} %",
                end="\n" if done == total else "",
                file=sys.stderr,
                flush=True,
            )
        elif step != self._step:
            print(f"{step} ...", file=sys.stderr, flush=True)
        self._step = step
