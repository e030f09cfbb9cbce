"""The wording of a refused start."""

from vllm_graft.boot.startup_error import as_error
from vllm_graft.findings import Finding


def test_every_fault_is_named_once_in_the_error_that_stops_a_start():
    """The worst first; the same fault of several processes is one."""
    found = [
        Finding("S003", "warning", "patch c", "is late: because", "EngineCore", "move it"),
        Finding("S002", "error", "patch a", "is refused: no", "Worker 0", "fix it"),
        Finding("S002", "error", "patch a", "is refused: no", "Worker 1", "fix it"),
        Finding("S002", "error", "patch b", "is refused: never", "Worker 0", "leave it out"),
    ]
    assert str(as_error(found)) == (
        "Worker 0: patch a is refused: no. Next: fix it. Also patch b is refused: never. Next: leave it out. "
        "Also EngineCore: patch c is late: because. Next: move it"
    )
