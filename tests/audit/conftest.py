"""Releases made of a few lines, for tests: the same through a source and through a catalogue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from vllm_graft.audit.releases.catalogue import Catalogue, CatalogueBuilder
from vllm_graft.audit.releases.release import Release
from vllm_graft.audit.releases.source_release import SourceRelease
from vllm_graft.audit.report import audit
from vllm_graft.audit.uses import read
from vllm_graft.sources.origins import ModuleText


class Made:
    """A source that holds the modules it is given."""

    def __init__(self, version: str, **modules: str) -> None:
        self.version = version
        self._modules = {"vllm": "", **{f"vllm.{name}": text for name, text in modules.items()}}

    def modules(self) -> list[str]:
        return list(self._modules)

    def read(self, module: str) -> ModuleText | None:
        text = self._modules.get(module)
        return ModuleText(f"{module}.py", text, module == "vllm") if text is not None else None


def releases(way: str, folder: Path, *made: Made) -> list[Release]:
    """Releases read as they are, or out of a catalogue that was built of them and written."""
    if way == "source":
        return [SourceRelease(each) for each in made]
    builder = CatalogueBuilder()
    for each in made:
        builder.add(each.version, each)
    builder.write(folder / "catalogue.xz")
    catalogue = Catalogue.read(folder / "catalogue.xz")
    return [catalogue.release(each.version) for each in made]


@pytest.fixture
def make() -> type[Made]:
    """make("1.0", module="its text", ...): a source of vLLM."""
    return Made


@pytest.fixture
def held(tmp_path: Path) -> Callable[..., list[Release]]:
    """held("source" or "catalogue", *made): the releases that are judged."""
    return lambda way, *made: releases(way, tmp_path, *made)


@pytest.fixture(params=["source", "catalogue"])
def findings(request, make, held, tmp_path):
    """findings(package, old, new) -> (code, level, line) of each; old and new are vllm.m, or modules by name."""

    def run(package, old, new):
        file = tmp_path / "plugin.py"
        file.write_text(dedent(package).lstrip("\n"), encoding="utf-8")
        texts = [text if isinstance(text, dict) else {"m": text} for text in (old, new)]
        texts = [{name: dedent(text) for name, text in each.items()} for each in texts]
        base, *against = held(request.param, make("0.1.0", **texts[0]), make("0.2.0", **texts[1]))
        report = audit([read(file)], base, against)
        return [(one.code, one.level, int(one.where.rpartition(":")[2])) for one in report.findings]

    return run
