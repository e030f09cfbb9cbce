"""`vllm-graft lock` and `vllm-graft diff`, on a laid-out package and on the real vLLM."""

import json
import sys
from pathlib import Path

import pytest

from vllm_graft.cli import main
from vllm_graft.patching.lock import Lock
from vllm_graft.testing.packages import lay_out

PATCHES = """
from vllm_graft import VLLMPatch, add, replace, wrap

class Made(VLLMPatch["vllm.made:Thing"], name="made", vllm=">=0.90"):
    @wrap
    def wrapped(self, call):
        return call()

    @replace
    def replaced(self):
        return 2

    @add
    def added(self): ...
"""

UPSTREAM = """
class Thing:
    def wrapped(self):
        return 1

    def replaced(self):
        return 1
"""


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two releases of upstream, and a package with one patch."""
    lay_out(
        tmp_path / "site", "graft-made", {"vllm_graft.plugins": {"made": "graft_made.patches:Made"}}, {"graft_made": ""}
    )
    module = tmp_path / "site" / "graft_made.py"
    module.unlink()
    (tmp_path / "site" / "graft_made").mkdir()
    (tmp_path / "site" / "graft_made" / "__init__.py").write_text("")
    (tmp_path / "site" / "graft_made" / "patches.py").write_text(PATCHES)
    for release, text in (("0.90.0", UPSTREAM), ("0.91.0", UPSTREAM.replace("return 1\n\n", "return 3\n\n"))):
        folder = tmp_path / release / "vllm"
        folder.mkdir(parents=True)
        (folder / "_version.py").write_text(f"__version__ = '{release}'\n")
        (folder / "made.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("graft_made", "graft_made.patches"):
        sys.modules.pop(name, None)


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return json.loads(capsys.readouterr().out)


def test_lock_writes_what_patches_stand_on(trees: Path, capsys: pytest.CaptureFixture[str]):
    """One line for each place and release; what is new or changed is said, and an addition has none."""
    assert main(["lock", "--against", "0.90.0", "--json"]) == 0
    assert [(row["upstream"], row["release"], row["state"]) for row in rows(capsys)] == [
        ("vllm.made:Thing.wrapped", "0.90.0", "new"),
        ("vllm.made:Thing.replaced", "0.90.0", "new"),
    ]
    assert main(["lock", "made", "--against", "0.90.0", "--against", "0.91.0", "--json"]) == 0
    assert [(row["release"], row["state"]) for row in rows(capsys)] == [
        ("0.90.0", "same"),
        ("0.90.0", "same"),
        ("0.91.0", "new"),
        ("0.91.0", "new"),
    ]
    held = Lock.read(trees / "site" / "graft_made" / "patches.lock").patches["made"]
    assert held["vllm.made:Thing.wrapped"]["0.90.0"] != held["vllm.made:Thing.wrapped"]["0.91.0"]
    assert held["vllm.made:Thing.replaced"]["0.90.0"] == held["vllm.made:Thing.replaced"]["0.91.0"]


def test_check_writes_nothing(trees: Path, capsys: pytest.CaptureFixture[str]):
    """For CI: exit status 1 until somebody has locked."""
    assert main(["lock", "--check", "--against", "0.90.0"]) == 1
    assert not (trees / "site" / "graft_made" / "patches.lock").exists()
    assert main(["lock", "--against", "0.90.0"]) == 0
    assert main(["lock", "--check", "--against", "0.90.0"]) == 0
    capsys.readouterr()


def test_a_place_that_upstream_does_not_have(trees: Path, capsys: pytest.CaptureFixture[str]):
    """Exit status 1, and the others are locked."""
    (trees / "0.91.0" / "vllm" / "made.py").write_text(UPSTREAM.replace("def replaced", "def renamed"))
    assert main(["lock", "--against", "0.91.0", "--json"]) == 1
    assert [row["state"] for row in rows(capsys)] == ["new", "not found"]


@pytest.mark.parametrize("there", ["replaced = 5", "@contextmanager\n    def replaced(self): yield 1"])
def test_what_a_start_refuses_is_not_locked(there: str, trees: Path, capsys: pytest.CaptureFixture[str]):
    """Exit status 1, the reason in its row, and a lock that is as it was."""
    assert main(["lock", "--against", "0.90.0"]) == 0
    lock = trees / "site" / "graft_made" / "patches.lock"
    before = lock.read_text()
    module, patches = trees / "0.91.0" / "vllm" / "made.py", trees / "site" / "graft_made" / "patches.py"
    module.write_text(UPSTREAM.replace("def replaced(self):\n        return 1", there))
    patches.write_text(PATCHES.replace("return 2", "yield 2"))
    sys.modules.pop("graft_made.patches")
    capsys.readouterr()
    assert main(["lock", "--against", "0.91.0", "--json"]) == 1
    assert [row["state"] for row in rows(capsys)] == ["refused"]
    assert lock.read_text() == before


def test_what_only_a_trial_shows_is_not_locked(trees: Path, capsys: pytest.CaptureFixture[str]):
    """A dataclass keeps the default of a field, which only the loaded class shows; a missing lock is no obstacle."""
    (trees / "site" / "graft_upstream.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Data:\n    size: int = 1\n    COUNT = 1\n"
    )
    text = PATCHES.replace("vllm.made:Thing", "graft_upstream:Data").replace(', vllm=">=0.90"', ", locked=True")
    patches = trees / "site" / "graft_made" / "patches.py"
    for name, state in (("size", "refused"), ("COUNT", "new")):
        patches.write_text(f"{text.partition('    @wrap')[0]}    {name} = replace(5)\n")
        sys.modules.pop("graft_made.patches", None)
        assert main(["lock", "--json"]) == (state == "refused")
        (row,) = rows(capsys)
        assert row["state"] == state
        assert (trees / "site" / "graft_made" / "patches.lock").exists() == (state == "new")


def test_a_build_that_stands_for_a_release_is_not_tried(
    trees: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A trial judges by the installed version, and without the lock it would refuse every development build."""
    tried: list[str] = []
    monkeypatch.setattr("vllm_graft.cli.lock.try_in_child", lambda name, **_: tried.append(name))
    (trees / "site" / "graft_upstream.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Data:\n    COUNT = 1\n"
    )
    text = PATCHES.replace("vllm.made:Thing", "graft_upstream:Data")
    patches = trees / "site" / "graft_made" / "patches.py"
    patches.write_text(f"{text.partition('    @wrap')[0]}    COUNT = replace(5)\n")
    sys.modules.pop("graft_made.patches", None)
    assert main(["lock", "--as", "0.99.0", "--json"]) == 0
    assert [(row["release"], row["state"]) for row in rows(capsys)] == [("0.99.0", "new")]
    assert tried == []


def test_releases_out_of_range_and_builds_of_no_release(trees: Path, capsys: pytest.CaptureFixture[str]):
    """A patch is not locked where it is not meant to run; a development build needs a name."""
    version = trees / "0.90.0" / "vllm" / "_version.py"
    version.write_text("__version__ = '0.89.0'\n")
    assert main(["lock", "--against", "0.90.0", "--json"]) == 0
    assert [row["state"] for row in rows(capsys)] == ["out of range"]
    version.write_text("__version__ = '0.1.dev1+gabc'\n")
    assert main(["lock", "--against", "0.90.0"]) == 2
    assert "0.90.0: it is vLLM 0.1.dev1+gabc, which is not a release. Next: say with --as" in capsys.readouterr().err
    assert main(["lock", "--against", "0.90.0", "--as", "0.92.0", "--json"]) == 0
    assert {row["release"] for row in rows(capsys)} == {"0.92.0"}


def test_diff_shows_what_changed(trees: Path, capsys: pytest.CaptureFixture[str]):
    """As a unified diff for a person; exit status 1 where something differs."""
    assert main(["lock", "--against", "0.90.0"]) == 0
    capsys.readouterr()
    assert main(["diff", "made", "--to", "0.90.0"]) == 0
    assert "Thing.wrapped: as reviewed in 0.90.0" in capsys.readouterr().out
    assert main(["diff", "made", "--to", "0.91.0"]) == 1
    shown = capsys.readouterr().out
    assert "vllm.made:Thing.wrapped: changed in its body from 0.90.0 to 0.91.0" in shown
    assert "-        return 1\n+        return 3\n" in shown
    assert "vllm.made:Thing.replaced: as reviewed in 0.90.0" in shown
    assert main(["diff", "made", "--from", "0.91.0", "--to", "0.90.0", "--json"]) == 1
    assert [row["state"] for row in rows(capsys)] == [
        "changed in its body from 0.91.0 to 0.90.0",
        "the same in 0.91.0 and 0.90.0",
    ]


def test_mistakes(trees: Path, capsys: pytest.CaptureFixture[str]):
    """Each says what there is instead."""
    for words, expected in (
        (["lock", "maid"], "there is no item 'maid' (did you mean 'made'?)"),
        (["lock", "request-log"], "'request-log' is not a patch but a RequestLog"),
        (["lock", "--against", "elsewhere"], "'elsewhere' is not a file, a folder or a release"),
        (["diff", "made", "--from", "elsewhere"], "name a wheel, a folder that holds vllm/, or a release"),
    ):
        assert main(words) == 2
        assert expected in capsys.readouterr().err


def test_the_patches_that_ship_are_locked(capsys: pytest.CaptureFixture[str]):
    """Against the installed vLLM: what was read is what is there."""
    from vllm_graft.plan.catalogue import SHIPPED

    names = [name for name, target in SHIPPED.items() if ".patches." in target]
    assert main(["lock", "--check", "--json", *names]) == 0
    assert {row["state"] for row in rows(capsys)} <= {"same", "out of range"}
