"""A package written on the spot, and what is found in it."""

from textwrap import dedent

import pytest

from vllm_graft.audit.uses import read


@pytest.fixture
def write(tmp_path):
    """Write the modules of a package ``plug``, by their paths without ``.py``."""

    def write(text="", **modules):
        folder = tmp_path / "plug"
        for name, source in {"__init__": "", "main": text, **modules}.items():
            path = folder / f"{name.replace('__', '/') if not name.startswith('__') else name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(source).lstrip("\n"), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def uses(write):
    """The uses in such a package."""
    return lambda text="", **modules: list(read(write(text, **modules)).uses)


@pytest.fixture
def puts(uses):
    """Way and name of what such a package changes in vLLM."""
    return lambda text="", **modules: [(use.way, use.name) for use in uses(text, **modules) if use.changes_vllm]


@pytest.fixture
def imports(uses):
    """Line and name of what such a package imports or mentions in its module ``main``."""
    return lambda text="", **modules: [
        (use.line, use.name) for use in uses(text, **modules) if use.way == "import" and use.file == "plug/main.py"
    ]
