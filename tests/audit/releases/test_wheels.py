"""A wheel on a server, read by ranges."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_graft.audit.releases import wheels
from vllm_graft.audit.releases.package_index import PackageIndex, client
from vllm_graft.audit.releases.wheels import CachedWheel, RemoteWheel, open_release
from vllm_graft.errors import ConfigError
from vllm_graft.sources import Tree

PATH = "/files/vllm-9.1.0-py3-none-any.whl"


@pytest.fixture
def read(site, wheel):
    """Puts a wheel on the server and opens it."""

    def put(data=None, **given):
        site.files[PATH] = wheel() if data is None else data
        return RemoteWheel(f"{site.url}{PATH}", version="9.1.0", http=client(), **given)

    return put


def test_modules_are_read_as_they_are(read, kind, files, modules):
    """Names, texts with the line ends of Python, and packages; what is not there is None."""
    opened = read()
    assert opened.modules() == modules
    core = opened.read("vllm.engine.core")
    assert core.text == "class Engine:\n    def step(self): ...\n"
    assert not core.is_package
    assert core.path.endswith(f"{PATH}/vllm/engine/core.py")
    assert opened.read("vllm.engine").is_package
    assert opened.read("vllm.engine.loop").text.startswith("# é\n")
    assert opened.read("vllm.nothing") is None
    assert opened.read("torch") is None
    assert dict(opened.each(modules))["vllm.late"] == files["vllm/late.py"]


def test_few_requests_and_few_bytes(read, site, monkeypatch, modules):
    """The directory once, neighbours together, what lies far apart apart; compiled code is not fetched."""
    monkeypatch.setattr(wheels, "TAIL", 2000)
    opened = read()
    assert opened.modules()
    assert opened.requests == 2
    opened.fetch(modules)
    opened.fetch(modules)
    assert [opened.read(name).text for name in modules]
    assert opened.requests == 4
    assert opened.requests == len(site.seen)
    assert 2000 < opened.bytes < 5000
    assert opened.read("vllm").text
    assert opened.requests == 4


def test_a_size_that_the_index_knows_saves_a_request(read, wheel):
    """And a wheel of another size is not the one that the index speaks of."""
    data = wheel()
    opened = read(data, size=len(data))
    assert opened.modules()
    assert opened.requests == 1
    for size in (len(data) - 7, len(data) + 7):
        with pytest.raises(ConfigError, match=f"it has {len(data)} bytes instead of {size}"):
            read(data, size=size).modules()
    with pytest.raises(ConfigError, match=r"cut short or damaged"):
        read(data, size=len(data) + wheels.TAIL * 2).modules()


@pytest.mark.parametrize("tail", [64, 300, 1 << 20])
def test_a_directory_of_any_size_is_found(read, wheel, monkeypatch, modules, tail):
    """Also one that is larger than what is asked for first, and one with a comment behind it."""
    monkeypatch.setattr(wheels, "TAIL", tail)
    assert read(wheel(comment=b"made by hand")).modules() == modules


def test_zip64_is_read(read, monkeypatch, files, modules):
    """The forms for archives over 4 GB, here forced by a limit that is low."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(data)
    assert b"PK\x06\x06" in held.getvalue()
    monkeypatch.undo()
    opened = read(held.getvalue())
    assert opened.modules() == modules
    assert opened.read("vllm.late").text == "late = True\n"


def test_progress_goes_up_to_the_whole(read, monkeypatch, modules):
    """Bytes that came, and all that will."""
    monkeypatch.setattr(wheels, "TAIL", 2000)
    seen = []
    opened = read(progress=lambda done, total: seen.append((done, total)))
    opened.fetch(modules)
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {seen[-1][0]}


def test_a_server_without_ranges_is_refused(read, site, kind):
    """The wheel is not downloaded for that; the next step says what to do instead."""
    site.ranges = False
    opened = read()
    with pytest.raises(ConfigError, match=r"only as a whole, not by ranges.*pip download --no-deps vllm==9\.1\.0"):
        opened.modules()
    assert opened.bytes == 0


@pytest.mark.parametrize(("status", "what"), [(403, "denies"), (404, "not have it"), (429, "too many"), (503, "503")])
def test_a_server_that_refuses_is_told(read, site, kind, status, what):
    """With what to do."""
    site.statuses[PATH] = status
    with pytest.raises(ConfigError, match=rf"{what}.*--wheel"):
        read().modules()


@pytest.mark.parametrize("cut", [1, 30, 4000, 600_000])
def test_a_truncated_wheel_is_refused(read, wheel, cut):
    """Wherever it was cut."""
    with pytest.raises(ConfigError, match=r"the wheel on the server is cut short or damaged"):
        read(wheel()[:-cut]).modules()


def test_an_empty_or_other_file_is_refused(read):
    """A page in place of a wheel, or nothing."""
    for data in (b"", b"<html>Welcome to the hotel</html>"):
        with pytest.raises(ConfigError, match=r"cut short or damaged"):
            read(data).modules()


def test_a_member_that_is_not_what_the_directory_says_is_refused(read, wheel, files):
    """By its checksum; the others can be read."""
    data = bytearray(wheel({**files, "vllm/late.py": bytes(range(256))}))
    at = data.index(b"vllm/late.py") + len("vllm/late.py") + 20
    data[at] ^= 0xFF
    opened = read(bytes(data))
    assert opened.read("vllm.engine.core").text
    with pytest.raises(ConfigError, match=r"vllm/late.py is not what its directory says"):
        opened.read("vllm.late")


def test_a_connection_that_breaks_is_tried_again_once(read, site, kind, modules):
    """Then it is told."""
    opened = read()
    assert opened.modules()
    site.break_off = 1
    opened.fetch(modules)
    assert opened.read("vllm.late").text
    again = read()
    assert again.modules()
    site.break_off = 99
    with pytest.raises(ConfigError, match=r"breaks off: .*--wheel"):
        again.fetch(modules)


def test_a_server_that_is_gone_is_told(kind, site):
    """Connection refused."""
    with pytest.raises(ConfigError, match=r"breaks off: .*[Cc]onnection refused"):
        RemoteWheel("http://127.0.0.1:9/vllm.whl", http=client()).modules()


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
    first = open_release("9.1.0")
    assert first.version == "9.1.0"
    assert first.modules() == modules
    core = first.read("vllm.engine.core")
    assert core.text == "class Engine:\n    def step(self): ...\n"
    assert Path(core.path).is_file()
    assert first.read("vllm.nothing") is None
    asked = len(index.seen)
    for offline in (False, True):
        again = open_release("v9.1.0", offline=offline)
        assert again.modules() == modules
        assert again.read("vllm.engine.core") == core
    assert len(index.seen) == asked


@pytest.mark.parametrize("name", ["9.1", "v9.1.0", "9.1.0+cpu"])
def test_a_release_is_kept_once_however_it_is_written(index, name):
    open_release("9.1.0").fetch(["vllm.engine.core"])
    asked = len(index.seen)
    assert open_release(name, offline=True).read("vllm.engine.core") is not None
    assert len(index.seen) == asked


def test_many_are_fetched_at_once(index, modules):
    """The index, its answer on the size, the directory, and one request for all."""
    seen = []
    source = open_release("9.1.0", progress=lambda done, total: seen.append((done, total)))
    source.fetch([*modules, "vllm.nothing"])
    assert len(index.asked_for_wheels()) == 4
    assert seen[-1][0] == seen[-1][1]
    source.fetch(modules)
    assert len(index.asked_for_wheels()) == 4
    assert digest(open_release("9.1.0", offline=True)) == digest(source)


def test_more_is_fetched_later_with_the_kept_directory(index):
    """The index is asked where the wheel is now; the directory is not fetched again."""
    open_release("9.1.0").read("vllm.late")
    index.seen.clear()
    assert open_release("9.1.0").read("vllm.engine.loop").text
    assert [path for path, _ in index.seen] == ["/simple/vllm/", f"/files/{NAME}"]


def test_offline_says_what_is_missing(index, modules):
    """The release, or modules of it."""
    with pytest.raises(ConfigError, match=r"vLLM 9\.1\.0 is not in the local cache, and --offline contacts no server"):
        open_release("9.1.0", offline=True)
    assert not index.seen
    open_release("9.1.0").read("vllm.late")
    source = open_release("9.1.0", offline=True)
    assert source.read("vllm.late").text
    missing = r"modules are not in the local cache: vllm\.engine\.core, .*once without --offline"
    with pytest.raises(ConfigError, match=missing):
        source.read("vllm.engine.core")
    missing = r"not in the local cache: vllm, vllm\._version, .*vllm\.engine\.loop, and --offline"
    with pytest.raises(ConfigError, match=missing):
        source.fetch(modules)


def test_a_release_that_does_not_exist_is_told(index):
    """And leaves nothing behind."""
    with pytest.raises(ConfigError, match=r"no wheel of vLLM 9\.2\.0; the nearest is 9\.1\.0"):
        open_release("9.2")
    with pytest.raises(ConfigError, match=r"'9/../1' is not a version"):
        open_release("9/../1")
    assert not (wheels.cache_folder() / "wheels").exists()


def test_one_index_serves_several_releases(index):
    """It is asked once."""
    index.offer(NAME, "vllm-9.0.0-py3-none-any.whl")
    shared = PackageIndex()
    open_release("9.1.0", index=shared)
    open_release("9.0.0", index=shared)
    assert [path for path, _ in index.seen].count("/simple/vllm/") == 1


def test_a_tree_of_the_test_matrix_goes_first(index, tmp_path):
    """Where it is whole; one that lacks a file does not count."""
    tree = wheels.cache_folder() / "sources" / "9.1.0"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm" / "__init__.py").write_text("here = True\n")
    (tree / "whole.json").write_text(json.dumps({"files": 1, "bytes": 12}))
    source = open_release("9.1.0", offline=True)
    assert isinstance(source, Tree)
    assert source.modules() == ["vllm"]
    assert source.version == "9.1.0"
    assert not index.seen
    (tree / "vllm" / "__init__.py").write_text("")
    assert isinstance(open_release("9.1.0"), CachedWheel)


@pytest.mark.parametrize("damage", [b"", b"class Engine: ...\n"])
def test_a_damaged_file_is_fetched_again(index, damage):
    """It does not have the checksum of the directory; offline it counts as missing."""
    core = open_release("9.1.0").read("vllm.engine.core")
    Path(core.path).write_bytes(damage)
    with pytest.raises(ConfigError, match=r"not in the local cache: vllm\.engine\.core"):
        open_release("9.1.0", offline=True).read("vllm.engine.core")
    assert open_release("9.1.0").read("vllm.engine.core") == core
    assert open_release("9.1.0", offline=True).read("vllm.engine.core") == core


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format": 1}\nPK', b'{"format": 99}\n', b"[" * 100_000])
def test_a_damaged_directory_is_fetched_again(index, damage, modules):
    """Or one of another format, or nested more deeply than Python reads."""
    directory = open_release("9.1.0").folder / "directory"
    directory.write_bytes(damage or directory.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="is not in the local cache"):
        open_release("9.1.0", offline=True)
    assert open_release("9.1.0").modules() == modules
    assert open_release("9.1.0", offline=True).modules() == modules


def test_another_wheel_of_the_release_replaces_the_first(index, wheel, files):
    """The index may prefer another by now; what is read is all of that one."""
    open_release("9.1.0").fetch(["vllm.late", "vllm.engine.core"])
    other = "vllm-9.1.0-cp310-cp310-manylinux_2_31_x86_64.whl"
    index.offer(other, data=wheel({**files, "vllm/late.py": b"late = 2\n", "vllm/new.py": b"new = 1\n"}))
    source = open_release("9.1.0")
    assert source.read("vllm.late").text == "late = True\n"
    assert source.read("vllm.engine.loop").text
    assert source.read("vllm.late").text == "late = 2\n"
    assert source.read("vllm.new").text == "new = 1\n"
    assert open_release("9.1.0", offline=True).read("vllm.late").text == "late = 2\n"


def test_a_cache_that_cannot_be_written_is_told(index):
    """With the way to another."""
    folder = wheels.cache_folder()
    folder.mkdir()
    (folder / "wheels").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be cached: .*GRAFT_CACHE_DIR"):
        open_release("9.1.0")


def test_what_a_killed_process_left_goes_after_an_hour(index):
    """A younger part may belong to a process that is at work."""
    parts = open_release("9.1.0").folder / "parts"
    for name, age in (("old", 4000), ("young", 10)):
        (parts / name).write_bytes(b"part")
        stamp = (parts / name).stat().st_mtime - age
        os.utime(parts / name, (stamp, stamp))
    open_release("9.1.0").read("vllm.late")
    assert [file.name for file in parts.iterdir()] == ["young"]


KILLED = """
import os, pathlib, sys, time
from vllm_graft.audit.releases.wheels import open_release
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
source = open_release("9.1.0")
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
    folder = wheels.cache_folder() / "wheels" / "9.1.0"
    assert len(list((folder / "parts").iterdir())) == 1
    if left is None:
        with pytest.raises(ConfigError, match="is not in the local cache"):
            open_release("9.1.0", offline=True)
    else:
        assert len(list((folder / "files").rglob("*.py"))) == left
        assert open_release("9.1.0", offline=True).modules() == modules
    source = open_release("9.1.0")
    source.fetch(modules)
    assert source.read("vllm.engine.core").text == "class Engine:\n    def step(self): ...\n"
    assert digest(open_release("9.1.0", offline=True)) == digest(source)


TOGETHER = """
import hashlib, sys
from vllm_graft.audit.releases.wheels import open_release
print("ready", flush=True)
sys.stdin.readline()
source = open_release("9.1.0")
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
    assert said == {f"{digest(open_release('9.1.0', offline=True))}\n"}
    assert not list((wheels.cache_folder() / "wheels" / "9.1.0" / "parts").iterdir())
