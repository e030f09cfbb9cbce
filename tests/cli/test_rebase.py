"""`vllm-graft rebase`, on laid-out releases of upstream and copies of their functions."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_graft import cli, versions
from vllm_graft.testing.packages import lay_out

OLD = '''
class Queue:
    def put(self, item, front=False):
        """Put it in."""
        if item in self.items:
            return False

        # The usual way.
        self.items.append(item)
        self.count += 1
        return True

    def drop(self, item):
        self.items.remove(item)
        self.gone.append(item)
        self.count -= 1

    def size(self):
        return self.count
'''
NEW = OLD.replace("            return False\n", "            return monotonic() < 0\n").replace(
    "self.count -= 1", "self.count = len(self.items)"
)
RELEASES = {"0.90.0": OLD, "0.91.0": OLD.replace("front=False", "first=False"), "0.92.0": NEW}

PATCHES = '''\
from vllm_graft import VLLMPatch, add, replace, wrap

BEFORE = 1

class Made(VLLMPatch["vllm.made:Queue"], name="made", vllm=">=0.90"):
    @replace
    def put(self, item, front=False):
        """Ours."""
        if item in self.items:
            return False

        # The usual way.
        self.items.insert(0 if front else len(self.items), item)
        self.count += 1
        return True

    @replace
    def drop(self, item):
        self.items.remove(item)
        self.gone.append(item)
        self.count -= self.weight

    @replace
    def size(self):
        return 7

    @wrap
    def wrapped(self, call):
        return call()

    @add
    def added(self): ...

    def new(self):
        return 1

AFTER = 2
'''


def mark(tree: Path) -> None:
    """Say of a tree that it is whole, as whoever fetches one does."""
    sizes = [file.stat().st_size for file in tree.rglob("*.py")]
    (tree / "whole.json").write_text(json.dumps({"files": len(sizes), "bytes": sum(sizes)}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Three releases that were fetched before, none that is installed, and a package with a patch."""
    monkeypatch.setattr(versions, "vllm_version", lambda: None)
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    for release, text in RELEASES.items():
        package = tmp_path / "sources" / release / "vllm"
        package.mkdir(parents=True)
        (package / "made.py").write_text(text)
        mark(package.parent)
    offered = {"vllm_graft.plugins": {"made": "graft_copies:Made"}}
    lay_out(tmp_path / "site", "graft-copies", offered, {"graft_copies": PATCHES})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("graft_copies", None)


@pytest.fixture
def rebase(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command: its exit status, and what it said on both streams."""

    def run(*words: str) -> tuple[int, str, str]:
        status = cli.main(["rebase", *words, "--offline"])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_it_prints_the_function(rebase: Callable[..., tuple[int, str, str]], folder: Path):
    """The text on one stream, what was found on the other; the file is as it was."""
    status, out, err = rebase("made", "put", "--to", "0.92.0")
    assert status == 0
    assert out == "".join(PATCHES.splitlines(keepends=True)[5:15]).replace("return False", "return monotonic() < 0")
    assert (
        "vllm.made:Queue.put: copied from 0.90.0: 2 of 6 lines differ; no conflicts onto 0.92.0, 1 of upstream's" in err
    )
    assert "it now uses monotonic, which" in err
    assert "no older release can be read here; if it is from one, name that with --from" in err
    assert (folder / "site" / "graft_copies.py").read_text() == PATCHES


def test_all_replacements_as_json(rebase: Callable[..., tuple[int, str, str]]):
    """One row each; a function that only the patch has is none, nor is one that is no copy."""
    status, out, err = rebase("made", "--to", "0.92.0", "--json")
    rows = json.loads(out)
    assert status == 1
    assert [(row["upstream"], row["from"], row["differing"], row["conflicts"]) for row in rows] == [
        ("vllm.made:Queue.put", "0.90.0", 2, []),
        ("vllm.made:Queue.drop", "0.90.0", 2, [5]),
    ]
    assert [row["new_names"] for row in rows] == [["monotonic"], []]
    assert {row["form"] for row in rows} == {"text"}
    assert not any(row["written"] for row in rows)
    assert "vllm.made:Queue.new: upstream has none" in err
    assert "graft_copies.py:23: it is not a copy of vllm.made:Queue.size in any release that can be read" in err


def test_write(rebase: Callable[..., tuple[int, str, str]], folder: Path):
    """It takes the place of the old one, and nothing else changes."""
    file = folder / "site" / "graft_copies.py"
    file.chmod(0o640)
    status, out, err = rebase("made", "put", "--to", "0.92.0", "--write")
    assert (status, out) == (0, "")
    assert file.read_text() == PATCHES.replace("return False", "return monotonic() < 0")
    assert f"written to {file}:6" in err
    assert file.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in file.parent.iterdir() if path.name.startswith(".")} == set()


def test_write_with_conflicts(rebase: Callable[..., tuple[int, str, str]], folder: Path):
    """Markers go into the file, with exit status 1 and the line of each, also below what was written before."""
    file = folder / "site" / "graft_copies.py"
    (folder / "sources" / "0.92.0" / "vllm" / "made.py").write_text(
        NEW.replace("        # The usual", "\n        # The usual")
    )
    mark(folder / "sources" / "0.92.0")
    status, _, err = rebase("made", "--to", "0.92.0", "--write")
    assert status == 1
    lines = file.read_text().splitlines()
    assert lines[21] == "<<<<<<< made"
    assert f"conflict at {file}:22" in err
    assert [line for line in lines if line.startswith(("|||||||", ">>>>>>>"))] == [
        "||||||| vLLM 0.90.0",
        ">>>>>>> vLLM 0.92.0",
    ]
    assert lines[0] == PATCHES.splitlines()[0]
    assert lines[-1] == "AFTER = 2"


def test_a_function_in_a_file(rebase: Callable[..., tuple[int, str, str]], folder: Path):
    """Code that knows nothing of this package; its encoding and line ends stay."""
    file = folder / "mine.py"
    text = f"# -*- coding: latin-1 -*-\nname = 'é'\nclass Mine:\n{OLD.split('Queue:')[1][1:].replace('+= 1', '+= 2')}"
    file.write_bytes(text.replace("\n", "\r\n").encode("latin-1"))
    words = ("mine.py:Mine.put", "--upstream", "vllm.made:Queue.put", "--to", "0.92.0")
    assert rebase(*words)[0] == 0
    assert rebase(*words, "--write")[0] == 0
    changed = text.replace("return False", "return monotonic() < 0")
    assert file.read_bytes() == changed.replace("\n", "\r\n").encode("latin-1")


@pytest.mark.parametrize(
    "head",
    [
        "from vllm.made import Queue\nclass Mine(Queue):\n",
        "import vllm.made as m\nclass Between(m.Queue):\n    pass\nclass Mine(Between):\n",
        "from vllm.made import Queue\nclass Mine:\n{body}\nQueue.put = Mine.put\n",
    ],
)
def test_what_a_method_is_a_copy_of_shows_in_its_class(
    rebase: Callable[..., tuple[int, str, str]], folder: Path, head: str
):
    """The base class has the method, or the method is put in its place."""
    body = OLD.split("Queue:")[1][1:].replace("+= 1", "+= 2")
    (folder / "mine.py").write_text(head.format(body=body) if "{body}" in head else head + body)
    status, out, err = rebase("mine.py:Mine.put", "--to", "0.92.0")
    assert status == 0
    assert "vllm.made:Queue.put: copied from 0.90.0" in err
    assert "self.count += 2" in out
    assert "monotonic() < 0" in out


def test_a_method_that_two_bases_may_have_is_not_guessed(rebase: Callable[..., tuple[int, str, str]], folder: Path):
    text = "from vllm.made import Queue\nfrom vllm.other import Other\nclass Mine(Queue, Other):\n"
    (folder / "mine.py").write_text(f"{text}    def put(self, item):\n        return 5\n")
    status, _, err = rebase("mine.py:Mine.put", "--to", "0.92.0")
    assert status == 2
    assert "it may be a copy of vllm.made:Queue.put or of vllm.other:Other.put" in err
    assert "--upstream" in err


def test_without_ruff_it_says_that_comments_are_lost(
    rebase: Callable[..., tuple[int, str, str]], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    body = OLD.split("Queue:")[1][1:].replace("+= 1", "+= 2").replace("        ", "       ")
    (folder / "mine.py").write_text(f"from vllm.made import Queue\nclass Mine(Queue):\n{body}")
    status, out, err = rebase("mine.py:Mine.put", "--to", "0.92.0")
    assert "# The usual way." in out
    assert "it is formatted by ruff, comments are kept" in err
    monkeypatch.setattr("vllm_graft.audit.rebase._ruff", lambda: None)
    again, out, err = rebase("mine.py:Mine.put", "--to", "0.92.0")
    assert (status, again) == (0, 0)
    assert "comments and line breaks are lost; with ruff installed they are kept: pip install ruff" in err


def test_the_release_it_is_from(rebase: Callable[..., tuple[int, str, str]], folder: Path):
    """Any source may be named; the reviewed ones that cannot be read are said."""
    err = rebase("made", "put", "--from", "0.91.0", "--to", "0.92.0")[2]
    assert "copied from 0.91.0: 4 of 6 lines differ" in err
    assert "no older release" not in err
    lock = folder / "site" / "graft_copies.patches.lock"
    lock.write_text('[made."vllm.made:Queue.put"]\n"0.80.0" = "s:0000000000000000 b:0000000000000000"\n')
    assert "vLLM 0.80.0, 0.26.0" in rebase("made", "put", "--to", "0.92.0")[2]


def test_several_bodies(rebase: Callable[..., tuple[int, str, str]], folder: Path):
    """The one that is for the release it is carried to, or else for the one it is from."""
    both = PATCHES.replace("    @replace\n    def put", '    @replace(vllm=">=0.92")\n    def put').replace(
        "    @replace\n    def drop(self, item):\n",
        '    @replace(vllm="<0.92")\n    def put(self, item, front=False):\n',
    )
    (folder / "site" / "graft_copies.py").write_text(both)
    assert ">=0.92" in rebase("made", "put", "--to", "0.92.0")[1]
    (folder / "site" / "graft_copies.py").write_text(both.replace(">=0.92", ">=0.93").replace("<0.92", "<0.91"))
    sys.modules.pop("graft_copies")
    status, _, err = rebase("made", "put", "--to", "0.92.0", "--from", "0.91.0")
    assert status == 2
    assert "several bodies of 'put', and none is for 0.92.0 or 0.91.0" in err


def test_mistakes(rebase: Callable[..., tuple[int, str, str]], folder: Path):
    """Each says what to do instead."""
    (folder / "mine.py").write_text("class Mine:\n    x = 1\n    def other(self):\n        return 5\n")
    (folder / "torn.py").write_text("<<<<<<< mine\n")
    upstream = ("--upstream", "vllm.made:Queue.put", "--to", "0.92.0")
    for words, expected in (
        (("maid", "--to", "0.92.0"), "there is no item 'maid' (did you mean 'made'?)"),
        (("made", "putt", "--to", "0.92.0"), "it does not replace 'putt' (did you mean 'put'?)"),
        (("made", "size", "--to", "0.92.0"), "Next: name the release that it was taken from with --from"),
        (("made", "wrapped", "--to", "0.92.0"), "a wrap holds no copy of upstream's"),
        (("made", *upstream), "--upstream: a patch itself declares what it replaces"),
        (("made", "--to", "elsewhere"), "'elsewhere' is not a file, a folder or a release"),
        (("mine.py:Mine.other", "--to", "0.92.0"), "nothing says what it is a copy of"),
        (("mine.py:Mine.other", "--upstream", "vllm.made.Queue.put", "--to", "0.92.0"), "does not separate the module"),
        (("mine.py", *upstream), "mine.py: no function in it is named. Next: name one: mine.py:Class.method"),
        (("mine.py:", *upstream), "mine.py: no function in it is named"),
        (("mine.py:Mine.put", *upstream), "mine.py: Mine.put is not there"),
        (("mine.py:Mine.x", *upstream), "mine.py: Mine.x is not a function"),
        (("mine.py:Mine.other", *upstream), "it is not a copy of vllm.made:Queue.put in any release that can be read"),
        (("gone.py:Mine.put", *upstream), "gone.py: it cannot be read"),
        (("torn.py:Mine.put", *upstream), "torn.py: it is not valid Python"),
        (
            ("mine.py:Mine.other", "--upstream", "vllm.made:Queue.gone", "--to", "0.92.0"),
            "vLLM 0.92.0 has no Queue.gone in vllm.made",
        ),
    ):
        status, _, err = rebase(*words)
        assert status == 2
        assert expected in err


def test_a_body_with_a_range_is_carried_from_a_folder(rebase: Callable[..., tuple[int, str, str]], folder: Path):
    """A folder is no number of a release that a range could include: the release it is carried to decides."""
    source = str(folder / "sources" / "0.90.0")
    ranged = PATCHES.replace("    @replace\n    def put", '    @replace(vllm=">=0.92")\n    def put')
    (folder / "site" / "graft_copies.py").write_text(ranged)
    status, out, err = rebase("made", "put", "--to", "0.92.0", "--from", source)
    assert (status, ">=0.92" in out) == (0, True), err
    sys.modules.pop("graft_copies")
    both = ranged.replace(
        "    @replace\n    def drop(self, item):\n", '    @replace(vllm="<0.92")\n    def put(self):\n'
    )
    (folder / "site" / "graft_copies.py").write_text(both)
    status, out, err = rebase("made", "put", "--to", "0.92.0", "--from", source)
    assert (status, ">=0.92" in out) == (0, True), err
