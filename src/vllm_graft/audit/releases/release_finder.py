"""Choose where a release's sources come from: the catalogue, the installed vLLM, a folder, a wheel or the index."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final

from vllm_graft.audit.releases import wheels
from vllm_graft.audit.releases.catalogue import Catalogue
from vllm_graft.audit.releases.package_index import PackageIndex, number_of
from vllm_graft.audit.releases.release import Release
from vllm_graft.audit.releases.source_release import SourceRelease, fetch
from vllm_graft.audit.releases.wheels import FetchProgress
from vllm_graft.errors import ConfigError
from vllm_graft.sources.origins import Installed, Source

INSTALLED: Final = "installed"
LATEST: Final = "latest"


def same_release(name: str, other: str) -> bool:
    """Return whether two versions are of one release, however they are written, ignoring the local build tag."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(Version(name).public) == Version(Version(other).public)
    except InvalidVersion:
        return name == other


def is_older(version: str, other: str) -> bool:
    """Return whether a release is older than another, ignoring the local build tag; False if one has no number."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) < Version(Version(other).public)
    except InvalidVersion:
        return False


class ReleaseFinder:
    """Finds releases by name: a number, "installed", "latest"."""

    def __init__(
        self, catalogue: Catalogue | None = None, *, offline: bool = False, progress: FetchProgress | None = None
    ) -> None:
        self.catalogue = catalogue if catalogue is not None else Catalogue.shipped()
        self._offline = offline
        self._progress = progress
        self._index = PackageIndex()
        self._sources: dict[str, SourceRelease | None] = {}

    def add(self, source: Source) -> Release:
        """Add a release from a wheel or a folder, under the version that it states."""
        version = source.version or "unknown"
        held = self._sources[version] = SourceRelease(source, version)
        return held

    def release(self, name: str) -> Release:
        """Return a release; ConfigError if it is not available."""
        if name == INSTALLED:
            source = Installed()
            if source.read("vllm") is None:
                raise ConfigError("vLLM is not installed here", fix="name a release: --against 0.32.0")
            if source.version in self.catalogue.releases:
                return self.catalogue.release(source.version)
            return self.add(source)
        if name == LATEST:
            version = self.catalogue.releases[-1] if self._offline else self._index.versions()[-1]
        else:
            # However it is written: 0.32, v0.32.0, 0.32.0+cpu.
            alike = (known for known in self.catalogue.releases if same_release(name, known))
            version = next(alike, "") or number_of(name)
        if self._sources.get(version) is None and version in self.catalogue.releases:
            return self.catalogue.release(version)
        found = self._source(version)
        assert found is not None
        return found

    def newest_within(self, specifier: str) -> str | None:
        """Return the newest release in a range: of the catalogue, else of the index or the cache; None for none."""
        from packaging.specifiers import SpecifierSet

        allowed = SpecifierSet(specifier)

        def newest(versions: Iterable[str]) -> str | None:
            return next(reversed([one for one in versions if allowed.contains(one, prereleases=False)]), None)

        if found := newest(self.catalogue.releases):
            return found
        if not self._offline:
            with contextlib.suppress(ConfigError):
                return newest(self._index.versions())
        return newest(wheels.cached_versions())

    def older_than(self, release: Release) -> list[Release]:
        """Return the releases of the catalogue that are older than one, the newest first."""
        known = [self.catalogue.release(version) for version in reversed(self.catalogue.releases)]
        return [one for one in known if is_older(one.version, release.version)]

    def prefetch(self, release: Release, modules: Iterable[str]) -> None:
        """Fetch modules of a remote release together."""
        if isinstance(release, SourceRelease):
            fetch(release.source, modules)

    def text(self, version: str, module: str, qualname: str) -> str | None:
        """Return the source of a name in a release; None if it has none or the release cannot be read."""
        if version not in self._sources:
            try:
                self._source(version)
            except ConfigError:
                self._sources[version] = None
        source = self._sources[version]
        found = source.definition(module, qualname) if source is not None and qualname else None
        return found.text if found is not None else None

    @property
    def unread(self) -> list[str]:
        """The releases whose sources were needed and are not available."""
        return [version for version, source in self._sources.items() if source is None]

    def _source(self, version: str) -> SourceRelease | None:
        installed = Installed()
        if self._sources.get(version) is None and installed.version and same_release(installed.version, version):
            # It is on the disk: no server is needed.
            self._sources[version] = SourceRelease(installed, version)
        if self._sources.get(version) is None:
            source = wheels.open_release(version, offline=self._offline, progress=self._progress, index=self._index)
            self._sources[version] = SourceRelease(source, version)
        return self._sources[version]
