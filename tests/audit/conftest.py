"""Releases made of a few lines, for tests: the same through a source and through a catalogue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_graft.audit.releases.catalogue import Catalogue, CatalogueBuilder
from vllm_graft.audit.releases.release import Release
from vllm_graft.audit.releases.source_release import SourceRelease
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
