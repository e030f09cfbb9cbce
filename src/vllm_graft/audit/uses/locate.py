"""Finding what is to be read: a distribution, something importable, a file or a folder. Nothing is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name

from vllm_graft.audit.uses.files import SourceFile, files_below, is_test, source_file
from vllm_graft.audit.uses.requirements import UPSTREAM, Required, read_project
from vllm_graft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Located:
    """The files of one package, its version, and what it requires of vLLM."""

    package: str
    files: list[SourceFile]
    version: str = ""
    required: Required | None = None
    tests: int = 0


def locate(what: str | Path, *, tests: bool = False) -> Located:
    """The package that ``what`` names; ConfigError where there is none, or none with a source.

    Its tests are left out and counted, unless ``tests`` asks for them: they are no part of what it does to vLLM.
    """
    if isinstance(what, str) and canonicalize_name(what) in UPSTREAM:
        raise ConfigError(f"{what!r} is vLLM itself", where="the package to read", fix="name a package that uses vLLM")
    found = _named(what) if isinstance(what, str) else None
    if found is None:
        found = _path(Path(what).expanduser())
    if found is None:
        raise ConfigError(
            f"there is no {str(what)!r}: no installed distribution, nothing to import, no file and no folder",
            where=f"this environment, and {Path.cwd()}",
            fix="install it here, or name its folder",
        )
    if not found.files:
        raise ConfigError(
            "there is no Python source in it, and compiled code cannot be read",
            where=str(what),
            fix="name a folder with its sources, such as an unpacked source distribution",
        )
    kept = [file for file in found.files if tests or not is_test(PurePosixPath(file.shown))]
    # A folder of nothing but tests was meant.
    return replace(found, files=kept, tests=len(found.files) - len(kept)) if kept else found


def _named(name: str) -> Located | None:
    """An installed distribution by its name, or what ``import name`` would load."""
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return _importable(name)
    files = _distributed(distribution) or [file for top in _tops(distribution) for file in _modules(top) or ()]
    return Located(name, files, distribution.version, _required(distribution))


def _required(distribution: metadata.Distribution) -> Required | None:
    return Required.find(distribution.requires or (), "METADATA")


def _distributed(distribution: metadata.Distribution) -> list[SourceFile]:
    """The files that its record lists; an editable installation lists none of its own."""
    base = Path(str(distribution.locate_file("")))
    listed = [Path(str(file)) for file in distribution.files or () if file.suffix == ".py"]
    inside = [base / path for path in listed if ".." not in path.parts and not path.name.startswith("__editable__")]
    return [source_file(path, base) for path in sorted(inside) if path.is_file()]


def _tops(distribution: metadata.Distribution) -> Iterable[str]:
    """The names that it may be imported by, as its metadata tells."""
    listed = (distribution.read_text("top_level.txt") or "").split()
    named = [point.value.partition(":")[0].partition(".")[0] for point in distribution.entry_points]
    return dict.fromkeys([*listed, *named, canonicalize_name(distribution.metadata["Name"]).replace("-", "_")])


def _importable(name: str) -> Located | None:
    files = _modules(name) if all(part.isidentifier() for part in name.split(".")) else None
    if files is None:
        return None
    top = name.partition(".")[0]
    for distributed in metadata.packages_distributions().get(top, [top]):
        try:
            known = metadata.distribution(distributed)
        except metadata.PackageNotFoundError:
            continue
        return Located(name, files, known.version, _required(known))
    return Located(name, files)


def _modules(name: str) -> list[SourceFile] | None:
    """The files of an importable module or package, none of them for compiled code; None where there is no such."""
    top, *rest = name.split(".")
    try:
        # For a top-level name this imports nothing; below it, importlib would import what is above.
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        path = Path(spec.origin or "")
        return [source_file(path, path.parent)] if path.suffix == ".py" and not rest else []
    found: list[SourceFile] = []
    for root in map(Path, spec.submodule_search_locations):
        inner = root.joinpath(*rest)
        if inner.is_dir():
            found += files_below(inner, root.parent)
        elif inner.with_suffix(".py").is_file():
            found.append(source_file(inner.with_suffix(".py"), root.parent))
    return found


def _path(path: Path) -> Located | None:
    path = path.resolve()
    if path.is_file():
        return Located(path.name, [source_file(path, path.parent)] if path.suffix == ".py" else [])
    if not path.is_dir():
        return None
    project = read_project(path)
    return Located(path.name, files_below(path, path.parent), project.version, project.required)
