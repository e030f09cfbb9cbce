"""For all tests: which of them start vLLM, in which order files are run, and the same surroundings in every worker."""

import os
import sys

import pytest

STARTERS = {"graft", "program", "vllm_child", "planned_module"}
"""Fixtures that start vLLM, or with which a test does."""


def pytest_configure() -> None:
    # pytest-xdist gives its workers the size of a terminal, to which commands under test would fit their tables.
    if "PYTEST_XDIST_WORKER" in os.environ:
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)


def pytest_collection_finish() -> None:
    # Tests write a module twice within a second, and the bytecode of the first would be taken for the second.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def starts_vllm(item: pytest.Item) -> bool:
    """Tell whether a test starts vLLM, in a process of its own or in this one."""
    if any(item.get_closest_marker(name) for name in ("server", "engine")):
        return True
    return bool(STARTERS & set(getattr(item, "fixturenames", ())))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests that start vLLM")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files that start vLLM first: the short ones fill the gaps when two workers near the end."""
    starting = [item for item in items if starts_vllm(item)]
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=starting)
        items[:] = [item for item in items if not starts_vllm(item)]
        return
    files = {item.path for item in starting}
    items.sort(key=lambda item: item.path not in files)
