"""Made-up modules to patch, and engines that put everything back at the end of a test."""

import importlib
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from vllm_graft import versions
from vllm_graft.patching import Engine
from vllm_graft.patching import engine as engine_module
from vllm_graft.patching import manager as manager_module

_numbers = itertools.count()


@pytest.fixture
def engine() -> Iterator[Engine]:
    one = Engine()
    yield one
    one.revert_all()


@pytest.fixture
def fresh_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A default engine of the test's own, and names of its own."""
    one = Engine()
    monkeypatch.setattr(engine_module, "_default", one)
    monkeypatch.setattr(manager_module, "_registered", {})
    yield one
    one.revert_all()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a module and return its name; it is not imported."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write_module(source: str, inside: str = "") -> str:
        name = f"made_up_{next(_numbers)}"
        folder = tmp_path / inside.replace(".", "/") if inside else tmp_path
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        names.append(f"{inside}.{name}" if inside else name)
        return names[-1]

    yield write_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def make(write: Callable[[str], str]) -> Callable[[str], ModuleType]:
    """Write a module and import it."""
    return lambda source: importlib.import_module(write(source))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Say which vLLM is installed."""
    return lambda version: monkeypatch.setattr(versions, "vllm_version", lambda: version)
