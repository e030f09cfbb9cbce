"""Files of our own: where the cache is, and replacing a file as a whole."""

import os
from pathlib import Path

import pytest

from vllm_graft.files import cache_folder, replace_file


class TestCacheFolder:
    def test_the_variable_of_ours_wins(self, monkeypatch):
        monkeypatch.setenv("GRAFT_CACHE_DIR", "/somewhere/models")
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert cache_folder() == Path("/somewhere/models")

    def test_then_the_desktop_standard(self, monkeypatch):
        monkeypatch.delenv("GRAFT_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert cache_folder() == Path("/elsewhere/vllm-graft")

    def test_then_the_home_folder(self, monkeypatch):
        monkeypatch.delenv("GRAFT_CACHE_DIR", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert cache_folder() == Path.home() / ".cache" / "vllm-graft"


class TestReplaceFile:
    def test_a_new_file_has_the_permissions_of_any_other(self, tmp_path: Path):
        (tmp_path / "usual").touch()
        replace_file(tmp_path / "new", b"x")
        assert (tmp_path / "new").read_bytes() == b"x"
        assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode

    def test_permissions_and_links_stay(self, tmp_path: Path):
        file, link = tmp_path / "file", tmp_path / "link"
        file.write_bytes(b"old")
        file.chmod(0o640)
        link.symlink_to(file)
        replace_file(link, b"new")
        assert link.is_symlink()
        assert file.read_bytes() == b"new"
        assert file.stat().st_mode & 0o777 == 0o640

    def test_a_failure_leaves_the_old_file_and_no_other(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        file = tmp_path / "file"
        file.write_bytes(b"old")

        def full(source: str, target: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            replace_file(file, b"new")
        assert file.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [file]

    def test_the_unfinished_file_is_in_the_scratch_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "scratch").mkdir()
        seen: list[Path] = []
        real = os.replace

        def watch(source: str, target: Path) -> None:
            seen.append(Path(source).parent)
            real(source, target)

        monkeypatch.setattr(os, "replace", watch)
        replace_file(tmp_path / "file", b"x", scratch=tmp_path / "scratch")
        assert seen == [tmp_path / "scratch"]
        assert (tmp_path / "file").read_bytes() == b"x"
