"""The command ``vllm-graft``: one module per command, each with ``HELP``, ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Final

from vllm_graft.errors import GraftError

COMMANDS: Final = (
    "demo", "serve", "simulate", "status", "plan", "doctor", "audit", "lock", "diff", "rebase", "items", "points",
    "model",
)  # fmt: skip
"""Every command, in the order the help shows them; each is a module of this package."""

_IMPORTING: Final = ("plan", "lock", "diff", "rebase", "items")
"""The commands that import items of other packages into their own process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, or list them if none is named; an error of ours is one paragraph on stderr and status 2."""
    from vllm_graft import __version__

    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="vllm-graft", description="Extend vLLM without forking it: contracts, patches, and proof of what runs."
    )
    parser.add_argument("--version", action="version", version=f"vllm-graft {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    # The other commands are loaded for the list of them only.
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        module = importlib.import_module(f"{__name__}.{name}")
        # No abbreviations: `serve` hands unknown arguments to vLLM, and ours must not swallow one of them.
        command = commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(command)
    args, rest = parser.parse_known_args(words)
    if rest and not getattr(args, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command is None:
        parser.print_help()
        return 0
    args.rest = rest
    args.ends_process = argv is None
    if args.ends_process:
        _prepare_output()
    if args.ends_process and args.command in _IMPORTING:
        from vllm_graft.plan.import_checkpoint import checkpoint

        checkpoint.start()
    try:
        status = int(importlib.import_module(f"{__name__}.{args.command}").run(args))
        sys.stdout.flush()
        return status
    except GraftError as error:
        print(f"vllm-graft: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # A plugin's module may raise it, too, and status 130 alone says nothing.
        print("vllm-graft: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"vllm-graft: the output cannot be written: {error}. Next: free space on its disk", file=sys.stderr)
        if args.ends_process:
            # Python writes what is left once more when it ends, and would show that error too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def _prepare_output() -> None:
    """Have output that is closed go nowhere, and escape what an output's encoding does not have."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the rest of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
