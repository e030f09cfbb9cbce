"""``vllm-graft model``: make or check the embedded model, and print its folder."""

from __future__ import annotations

import argparse
import json

from vllm_graft.cli.printing import ProgressLine
from vllm_graft.launcher import models

HELP = "make or check the embedded model and print its folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--tiny", action="store_true", help="the random two-layer model instead of SmolLM2-135M-Instruct"
    )
    parser.add_argument("--verify", action="store_true", help="compare the checksum of every file, not only its size")
    parser.add_argument("--json", action="store_true", help="print a list with one row instead of the bare path")


def run(args: argparse.Namespace) -> int:
    """Print the model's folder, and make the model first if it is missing or damaged."""
    prepare = models.tiny_model if args.tiny else models.embedded_model
    folder = prepare(ProgressLine(), verify=args.verify)
    if not args.json:
        print(folder)
        return 0
    files = [file for file in folder.iterdir() if file.is_file()]
    row = {
        "name": folder.name,
        "path": str(folder),
        "checked": "sha256" if args.verify else "size",
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }
    print(json.dumps([row], indent=2))
    return 0
