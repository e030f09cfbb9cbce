"""Hooks for all tests: the quick run without processes, the order of files, and equal surroundings in every worker."""

import os
import sys

import pytest

STARTERS = {"graft", "program", "vllm_child", "planned_module"}
"""Fixtures that start vLLM, or with which a test does."""

PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out tests that start a process, and slow ones")
    parser.addoption("--soak", action="store_true", help="run the soak tests, and no others")


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist gives its workers the size of a terminal, to which commands under test would fit their tables.
    if "PYTEST_XDIST_WORKER" in os.environ:
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)
    if config.getoption("--quick"):
        config.pluginmanager.register(ProcessGuard(), "process-guard")


class ProcessGuard:
    """Skip a test, in the quick run, at the moment it starts a process.

    A list of such tests would go stale. Where skipping half-way does harm, for example because another thread then
    keeps a lock, the test has the marker ``process`` and is left out.
    """

    def __init__(self) -> None:
        self.armed = False
        sys.addaudithook(self.on_event)

    def on_event(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.armed and event in PROCESS_EVENTS and not importing():
            pytest.skip("starts a process; `make test` runs it")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        self.armed = True
        try:
            return (yield)
        finally:
            self.armed = False


def importing() -> bool:
    """Tell whether a module is being imported; vLLM and torch start short processes then, for instance ``lscpu``."""
    frame = sys._getframe()
    while frame and frame.f_code.co_name != "_find_and_load":
        frame = frame.f_back
    return frame is not None


def pytest_collection_finish() -> None:
    # Tests write a module twice within a second, and the bytecode of the first would be taken for the second.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def starts_vllm(item: pytest.Item) -> bool:
    """Tell whether a test starts vLLM, in a process of its own or in this one."""
    if any(item.get_closest_marker(name) for name in ("server", "engine")):
        return True
    return bool(STARTERS & set(getattr(item, "fixturenames", ())))


def is_quick(item: pytest.Item) -> bool:
    """Tell whether a test belongs to the quick run."""
    return not starts_vllm(item) and not any(item.get_closest_marker(name) for name in ("process", "slow"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose tests, and put files that start vLLM first: short ones fill the gaps when two workers near the end."""
    soak = config.getoption("--soak")
    chosen = [item for item in items if soak == bool(item.get_closest_marker("soak"))]
    if config.getoption("--quick"):
        chosen = [item for item in chosen if is_quick(item)]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen
    files = {item.path for item in items if starts_vllm(item)}
    items.sort(key=lambda item: item.path not in files)
