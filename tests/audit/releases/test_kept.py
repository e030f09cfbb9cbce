"""Releases kept on this machine: what is fetched once is there, whatever happened meanwhile."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_graft.audit.releases import kept as rooms
from vllm_graft.audit.releases.index import Index
from vllm_graft.audit.releases.kept import Kept, release
from vllm_graft.errors import ConfigError
from vllm_graft.patching.upstream import Tree

NAME = "vllm-9.1.0-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture
def index(site):
    """An index with one release."""
    site.offer(NAME)
    return site


def digest(source):
    texts = [f"{name}\n{source.read(name).text}" for name in source.modules()]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def test_what_was_read_once_is_read_without_a_server(index, kind, modules):
    """Directory and files; a second reader asks nobody, online or not."""
    first = release("9.1.0")
    assert first.version == "9.1.0"
    assert first.modules() == modules
    core = first.read("vllm.engine.core")
    assert core.text == "class Engine:\n    def step(self): ...\n"
    assert Path(core.path).is_file()
    assert first.read("vllm.nothing") is None
    asked = len(index.seen)
    for offline in (False, True):
        again = release("v9.1.0", offline=offline)
        assert again.modules() == modules
        assert again.read("vllm.engine.core") == core
    assert len(index.seen) == asked


@pytest.mark.parametrize("name", ["9.1", "v9.1.0", "9.1.0+cpu"])
def test_a_release_is_kept_once_however_it_is_written(index, name):
    release("9.1.0").fetch(["vllm.engine.core"])
    asked = len(index.seen)
    assert release(name, offline=True).read("vllm.engine.core") is not None
    assert len(index.seen) == asked


def test_many_are_fetched_at_once(index, modules):
    """The index, its answer on the size, the directory, and one request for all."""
    seen = []
    source = release("9.1.0", progress=lambda done, total: seen.append((done, total)))
    source.fetch([*modules, "vllm.nothing"])
    assert len(index.asked_for_wheels()) == 4
    assert seen[-1][0] == seen[-1][1]
    source.fetch(modules)
    assert len(index.asked_for_wheels()) == 4
    assert digest(release("9.1.0", offline=True)) == digest(source)


def test_more_is_fetched_later_with_the_kept_directory(index):
    """The index is asked where the wheel is now; the directory is not fetched again."""
    release("9.1.0").read("vllm.late")
    index.seen.clear()
    assert release("9.1.0").read("vllm.engine.loop").text
    assert [path for path, _ in index.seen] == ["/simple/vllm/", f"/files/{NAME}"]


def test_offline_says_what_is_missing(index, modules):
    """The release, or modules of it."""
    with pytest.raises(ConfigError, match=r"vLLM 9\.1\.0 is not kept here, and --offline asks no server"):
        release("9.1.0", offline=True)
    assert not index.seen
    release("9.1.0").read("vllm.late")
    source = release("9.1.0", offline=True)
    assert source.read("vllm.late").text
    with pytest.raises(ConfigError, match=r"modules are not kept: vllm\.engine\.core, .*once without --offline"):
        source.read("vllm.engine.core")
    with pytest.raises(ConfigError, match=r"not kept: vllm, vllm\._version, .*vllm\.engine\.loop, and --offline"):
        source.fetch(modules)


def test_a_release_that_does_not_exist_is_told(index):
    """And leaves nothing behind."""
    with pytest.raises(ConfigError, match=r"no wheel of vLLM 9\.2\.0; the nearest is 9\.1\.0"):
        release("9.2")
    with pytest.raises(ConfigError, match=r"'9/../1' is not a version"):
        release("9/../1")
    assert not (rooms.cache_folder() / "wheels").exists()


def test_one_index_serves_several_releases(index):
    """It is asked once."""
    index.offer(NAME, "vllm-9.0.0-py3-none-any.whl")
    shared = Index()
    release("9.1.0", index=shared)
    release("9.0.0", index=shared)
    assert [path for path, _ in index.seen].count("/simple/vllm/") == 1


def test_a_tree_of_the_test_matrix_goes_first(index, tmp_path):
    """Where it is whole; one that lacks a file does not count."""
    tree = rooms.cache_folder() / "sources" / "9.1.0"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm" / "__init__.py").write_text("here = True\n")
    (tree / "whole.json").write_text(json.dumps({"files": 1, "bytes": 12}))
    source = release("9.1.0", offline=True)
    assert isinstance(source, Tree)
    assert source.modules() == ["vllm"]
    assert source.version == "9.1.0"
    assert not index.seen
    (tree / "vllm" / "__init__.py").write_text("")
    assert isinstance(release("9.1.0"), Kept)


@pytest.mark.parametrize("damage", [b"", b"class Engine: ...\n"])
def test_a_damaged_file_is_fetched_again(index, damage):
    """It does not have the checksum of the directory; offline it counts as missing."""
    core = release("9.1.0").read("vllm.engine.core")
    Path(core.path).write_bytes(damage)
    with pytest.raises(ConfigError, match=r"not kept: vllm\.engine\.core"):
        release("9.1.0", offline=True).read("vllm.engine.core")
    assert release("9.1.0").read("vllm.engine.core") == core
    assert release("9.1.0", offline=True).read("vllm.engine.core") == core


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format": 1}\nPK', b'{"format": 99}\n', b"[" * 100_000])
def test_a_damaged_directory_is_fetched_again(index, damage, modules):
    """Or one of another format, or nested more deeply than Python reads."""
    directory = release("9.1.0").folder / "directory"
    directory.write_bytes(damage or directory.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="is not kept here"):
        release("9.1.0", offline=True)
    assert release("9.1.0").modules() == modules
    assert release("9.1.0", offline=True).modules() == modules


def test_another_wheel_of_the_release_replaces_the_first(index, wheel, files):
    """The index may prefer another by now; what is read is all of that one."""
    release("9.1.0").fetch(["vllm.late", "vllm.engine.core"])
    other = "vllm-9.1.0-cp310-cp310-manylinux_2_31_x86_64.whl"
    index.offer(other, data=wheel({**files, "vllm/late.py": b"late = 2\n", "vllm/new.py": b"new = 1\n"}))
    source = release("9.1.0")
    assert source.read("vllm.late").text == "late = True\n"
    assert source.read("vllm.engine.loop").text
    assert source.read("vllm.late").text == "late = 2\n"
    assert source.read("vllm.new").text == "new = 1\n"
    assert release("9.1.0", offline=True).read("vllm.late").text == "late = 2\n"


def test_a_cache_that_cannot_be_written_is_told(index):
    """With the way to another."""
    folder = rooms.cache_folder()
    folder.mkdir()
    (folder / "wheels").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be kept: .*GRAFT_CACHE_DIR"):
        release("9.1.0")


def test_what_a_killed_process_left_goes_after_an_hour(index):
    """A younger part may belong to a process that is at work."""
    parts = release("9.1.0").folder / "parts"
    for name, age in (("old", 4000), ("young", 10)):
        (parts / name).write_bytes(b"part")
        stamp = (parts / name).stat().st_mtime - age
        os.utime(parts / name, (stamp, stamp))
    release("9.1.0").read("vllm.late")
    assert [file.name for file in parts.iterdir()] == ["young"]


KILLED = """
import os, pathlib, sys, time
from vllm_graft.audit.releases.kept import release
where, number = sys.argv[1], int(sys.argv[2])
count = 0
def hang_at(name):
    global count
    count += name == where
    if name == where and count == number:
        print("now", flush=True)
        time.sleep(60)
write, replace = pathlib.Path.write_bytes, os.replace
def half(self, data):
    write(self, data[:len(data) // 2])
    hang_at("write")
    return write(self, data)
def slow(old, new):
    hang_at("replace")
    replace(old, new)
pathlib.Path.write_bytes, os.replace = half, slow
source = release("9.1.0")
source.fetch(source.modules())
"""


@pytest.mark.parametrize(
    ("where", "number", "left"), [("write", 1, None), ("write", 4, 2), ("replace", 1, None), ("replace", 3, 1)]
)
def test_a_process_killed_while_it_writes_leaves_a_usable_cache(index, modules, where, number, left):
    """Half of a file, or a whole one not yet in its place: nobody takes it for the real thing."""
    child = subprocess.Popen([sys.executable, "-c", KILLED, where, str(number)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "now\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    folder = rooms.cache_folder() / "wheels" / "9.1.0"
    assert len(list((folder / "parts").iterdir())) == 1
    if left is None:
        with pytest.raises(ConfigError, match="is not kept here"):
            release("9.1.0", offline=True)
    else:
        assert len(list((folder / "files").rglob("*.py"))) == left
        assert release("9.1.0", offline=True).modules() == modules
    source = release("9.1.0")
    source.fetch(modules)
    assert source.read("vllm.engine.core").text == "class Engine:\n    def step(self): ...\n"
    assert digest(release("9.1.0", offline=True)) == digest(source)


TOGETHER = """
import hashlib, sys
from vllm_graft.audit.releases.kept import release
print("ready", flush=True)
sys.stdin.readline()
source = release("9.1.0")
source.fetch(source.modules())
texts = [f"{name}\\n{source.read(name).text}" for name in source.modules()]
print(hashlib.sha256("\\n".join(texts).encode()).hexdigest())
"""


def test_several_processes_fill_one_cache_at_once(index):
    """All read the same, and it stays."""
    children = [
        subprocess.Popen([sys.executable, "-c", TOGETHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    said = {child.communicate(timeout=60)[0] for child in children}
    assert said == {f"{digest(release('9.1.0', offline=True))}\n"}
    assert not list((rooms.cache_folder() / "wheels" / "9.1.0" / "parts").iterdir())
