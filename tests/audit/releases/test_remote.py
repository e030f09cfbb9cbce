"""A wheel on a server, read by ranges."""

import io
import zipfile

import pytest

from vllm_graft.audit.releases import remote as rooms
from vllm_graft.audit.releases.client import client
from vllm_graft.audit.releases.remote import Remote
from vllm_graft.errors import ConfigError

PATH = "/files/vllm-9.1.0-py3-none-any.whl"


@pytest.fixture
def read(site, wheel):
    """Puts a wheel on the server and opens it."""

    def put(data=None, **given):
        site.files[PATH] = wheel() if data is None else data
        return Remote(f"{site.url}{PATH}", version="9.1.0", asked=client(), **given)

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
    monkeypatch.setattr(rooms, "TAIL", 2000)
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
        read(data, size=len(data) + rooms.TAIL * 2).modules()


@pytest.mark.parametrize("tail", [64, 300, 1 << 20])
def test_a_directory_of_any_size_is_found(read, wheel, monkeypatch, modules, tail):
    """Also one that is larger than what is asked for first, and one with a comment behind it."""
    monkeypatch.setattr(rooms, "TAIL", tail)
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
    monkeypatch.setattr(rooms, "TAIL", 2000)
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


@pytest.mark.parametrize(("status", "what"), [(403, "refuses"), (404, "not have it"), (429, "too many"), (503, "503")])
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
        Remote("http://127.0.0.1:9/vllm.whl", asked=client()).modules()
