"""The wording of a refused start, as one error made of what the processes of a run recorded.

When a child fails, vLLM's front end ends with "see root cause above", hundreds of lines below that cause. The child has
recorded what it refused and why, so the front end can repeat it as its own last line, whatever way it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from vllm_graft.errors import GraftError, StartError, join
from vllm_graft.findings import Finding, worst_first
from vllm_graft.ledger import comparison, folder, reading


def install_last_line(run: str) -> None:
    """Have an uncaught exception followed by the recorded reason, after the program's own exception hook."""
    before = sys.excepthook

    def after(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        # Our own error has stated the reason itself.
        if not isinstance(error, GraftError) and (reason := recorded_error(run)) is not None:
            print(f"vllm-graft: {reason}", file=sys.stderr, flush=True)

    sys.excepthook = after


def recorded_error(run: str) -> StartError | None:
    """Return what the processes of a run recorded that explains a failed start; None if nothing does."""
    state = folder.state_folder()
    view = reading.read_run(folder.run_folder(state, run), queues=False) if state is not None else None
    if view is None or not view.plan.strict:
        return None
    for row in (rows := view.rows()):
        # A child that refused has ended by now, and its record is the one that counts.
        row["life"] = "unknown"
    # What was not yet loaded or in use when the start failed (S001, S007, S008) is a consequence, not the cause.
    found = [
        finding
        for finding in comparison.missing(rows, view.plan)
        if finding.level == "error" and finding.code not in ("S001", "S007", "S008")
    ]
    return as_error(found) if found else None


def recorded_error_of(pid: int) -> StartError | None:
    """Return the recorded error of the latest run that a process started; None if there is none."""
    state = folder.state_folder()
    homes = folder.run_folders(state) if state is not None else ()
    found = [home.name for home in homes if home.name.startswith(f"{pid}-")]
    return recorded_error(found[-1]) if found else None


def as_error(findings: Sequence[Finding]) -> StartError:
    """Join findings into the error that stops the start: the worst first, and every fault named once."""
    # Eight workers that refuse one patch have one fault.
    faults: dict[tuple[str, str], Finding] = {}
    for finding in worst_first(findings):
        faults.setdefault((finding.subject, finding.what), finding)
    return join([StartError(f"{each.subject} {each.what}", where=each.where, fix=each.fix) for each in faults.values()])
