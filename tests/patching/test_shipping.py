"""The lock travels with the wheel that the documented pyproject.toml builds; a patch that has lost it is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "patches.md"


def block(language: str) -> str:
    """The first block of the page in a language."""
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def run(*words: str, site: Path | None = None, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "VLLM_CUSTOM_PATCHES": "slow-schedule"}
    if site is not None:
        environ["PYTHONPATH"] = str(site)
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the page, its patch locked and declared so."""
    folder = tmp_path_factory.mktemp("acme")
    (folder / "acme_graft").mkdir()
    (folder / "acme_graft" / "__init__.py").write_text("")
    declared = block("python").replace('name="slow-schedule",', 'name="slow-schedule", locked=True,')
    assert "locked=True" in declared
    (folder / "acme_graft" / "patches.py").write_text(declared)
    (folder / "pyproject.toml").write_text(block("toml"))
    return folder


@pytest.fixture(scope="module")
def wheel(project: Path) -> Path:
    """The wheel that pip builds of it, once it is locked."""
    pip = ("-m", "pip", "--disable-pip-version-check")
    first = run(*pip, "install", "--no-deps", "--no-build-isolation", "--target", "first", ".", cwd=project)
    assert first.returncode == 0, first.stderr
    locked = run("-m", "vllm_graft.cli", "lock", "slow-schedule", site=project / "first", cwd=project)
    assert locked.returncode == 0, locked.stderr
    # The working folder comes first on the path: the lock lies beside the source, where it is committed.
    assert (project / "acme_graft" / "patches.lock").is_file()
    for leftover in ("build", "acme_graft.egg-info", "first"):
        shutil.rmtree(project / leftover, ignore_errors=True)
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", ".", cwd=project)
    assert built.returncode == 0, built.stderr
    (found,) = (project / "dist").glob("*.whl")
    return found


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    """The wheel unpacked, as an installation does it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return tmp_path / "site"


def plan(site: Path) -> tuple[int, str]:
    done = run("-m", "vllm_graft.cli", "plan", "--model", "m", site=site, cwd=site.parent)
    return done.returncode, done.stdout + done.stderr


def test_the_wheel_carries_the_lock(wheel):
    assert "acme_graft/patches.lock" in zipfile.ZipFile(wheel).namelist()


def test_an_installed_patch_is_compared_with_its_lock(site):
    """As it was reviewed it is planned; beside other code it is refused."""
    status, said = plan(site)
    assert (status, "P003" in said) == (0, False), said
    lock = site / "acme_graft" / "patches.lock"
    lock.write_text(re.sub(r"s:[0-9a-f]{16}", f"s:{'0' * 16}", lock.read_text()))
    status, said = plan(site)
    assert status == 1
    assert "upstream's 'schedule' is not what was reviewed" in said


def test_a_lock_that_was_left_behind_is_missed(site):
    (site / "acme_graft" / "patches.lock").unlink()
    status, said = plan(site)
    assert status == 1
    assert "it declares locked=True, but its package's patches.lock has no entry for it" in said
    audited = run("-m", "vllm_graft.cli", "audit", "acme-graft", "--offline", site=site, cwd=site.parent)
    assert audited.returncode == 1
    assert "P224 error: wrap vllm.v1.core.sched.scheduler:Scheduler.schedule" in audited.stdout
