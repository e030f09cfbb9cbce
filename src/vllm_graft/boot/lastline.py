"""The last line of a failed start: what our records know, said after vLLM's own traceback.

When a child of vLLM's fails, the front end ends with "see root cause above", hundreds of lines below it. The child
has recorded what it refused and why; this repeats it as the last line, whatever way the front end ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from vllm_graft.errors import GraftError, StartError, join
from vllm_graft.findings import Finding, worst_first
from vllm_graft.ledger import folder, reading


def install(run: str) -> None:
    """Follow the program's own exception hook with our line, once per process."""
    before = sys.excepthook

    def after(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, GraftError) or _in_chain(error):
            return
        found = start_error(run)
        if found is not None:
            print(f"vllm-graft: {found}", file=sys.stderr, flush=True)

    sys.excepthook = after


def start_error(run: str) -> StartError | None:
    """What the processes of a run recorded that explains a failed start, or None."""
    state = folder.state_folder()
    view = reading.read_run(folder.run_folder(state, run), queues=False) if state is not None else None
    if view is None or not view.plan.strict:
        return None
    found = [finding for finding in reading.missing(_without_life(view.rows()), view.plan) if _explains(finding)]
    return as_error(found) if found else None


def start_error_of(pid: int) -> StartError | None:
    """The same for the run that a process started."""
    state = folder.state_folder()
    homes = folder.run_folders(state) if state is not None else ()
    found = [home.name for home in homes if home.name.startswith(f"{pid}-")]
    return start_error(found[-1]) if found else None


def as_error(findings: Sequence[Finding]) -> StartError:
    """One or more findings as the error that stops the start: the worst first, and every fault named once."""
    # Eight workers that refuse one patch have one fault.
    faults: dict[tuple[str, str], Finding] = {}
    for finding in worst_first(findings):
        faults.setdefault((finding.subject, finding.what), finding)
    return join([StartError(f"{each.subject} {each.what}", where=each.where, fix=each.fix) for each in faults.values()])


def _explains(finding: Finding) -> bool:
    # What was not yet loaded or in use when the start failed is a consequence, not the cause.
    return finding.level == "error" and finding.code not in ("S001", "S007", "S008")


def _without_life(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    # A child that refused has ended by now, and what it recorded is what is wanted.
    return [{**row, "life": "unknown"} for row in rows]


def _in_chain(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, GraftError):
            return seen is error
        seen = seen.__cause__
    return False
