"""How a server is asked: what asking leaves behind in the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from packaging.version import Version

from vllm_graft.audit.releases import package_index
from vllm_graft.audit.releases.package_index import PackageIndex, PipSettings, nearest_version
from vllm_graft.errors import ConfigError


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python has no distutils any more, and pip leaves it alone")
def test_after_pips_session_was_used_setuptools_can_still_be_imported():
    """torch imports it, and stops at an assertion where stdlib's distutils is in its way."""
    code = (
        "from vllm_graft.audit.releases.package_index import PipClient\n"
        "PipClient()\n"
        "import setuptools, distutils.core\n"
        "assert 'setuptools' in distutils.core.__file__\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


X86 = "vllm-9.1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
ARM = "vllm-9.1.0-cp38-abi3-manylinux_2_28_aarch64.whl"
RC = "vllm-9.2.0rc1-py3-none-any.whl"
OLD = "vllm-9.0.0-py3-none-any.whl"
SDIST = "vllm-9.3.0.tar.gz"


@pytest.mark.parametrize("sizes", [False, True], ids=["html", "json"])
def test_releases_are_listed_in_order_and_wheels_found(site, kind, sizes):
    """Both forms of an index page; source archives do not count, pre-releases only on request."""
    site.offer(ARM, X86, RC, OLD, SDIST, "vllm-not-a-version.whl", sizes=sizes)
    index = PackageIndex()
    assert index.versions() == ["9.0.0", "9.1.0"]
    assert index.versions(pre=True) == ["9.0.0", "9.1.0", "9.2.0rc1"]
    link = index.wheel("v9.1")
    assert (link.filename, link.version, link.url) == (X86, "9.1.0", f"{site.url}/files/{X86}")
    assert link.size == (len(site.files[f"/files/{X86}"]) if sizes else None)
    assert index.wheel("9.2.0rc1").filename == RC
    assert type(index.client).__name__ == kind
    assert [path for path, _ in site.seen] == ["/simple/vllm/"]


@pytest.mark.parametrize("sizes", [False, True], ids=["html", "json"])
def test_a_withdrawn_wheel_is_the_last_choice(site, sizes):
    """It is taken where the release has no other, and not listed then."""
    site.offer(X86, ARM, OLD, sizes=sizes, yanked=(X86, OLD))
    assert PackageIndex().wheel("9.1.0").filename == ARM
    assert PackageIndex().wheel("9.0.0").filename == OLD
    assert PackageIndex().versions() == ["9.1.0"]


def test_a_local_build_stands_in_for_its_release(site):
    """An index of hardware builds has 9.1.0+cu129 only; the plain one goes first where both are there."""
    local = "vllm-9.1.0+cu129-cp38-abi3-manylinux1_x86_64.whl"
    site.offer(local)
    assert PackageIndex().wheel("9.1.0").filename == local
    assert PackageIndex().wheel("9.1.0+cu129").filename == local
    assert PackageIndex().versions() == ["9.1.0"]
    site.offer(local, ARM)
    assert PackageIndex().wheel("9.1.0").filename == ARM


def test_a_release_that_does_not_exist_names_the_nearest_and_the_newest(site):
    """The next step is in the message."""
    site.offer(X86, OLD, "vllm-9.7.0-py3-none-any.whl")
    with pytest.raises(ConfigError, match=r"no wheel of vLLM 9\.1\.5; the nearest is 9\.1\.0, the newest 9\.7\.0"):
        PackageIndex().wheel("9.1.5")
    with pytest.raises(ConfigError, match=r"'nine' is not a version"):
        PackageIndex().wheel("nine")


def test_the_nearest_shares_most_of_the_number():
    """And is rather below than above."""
    versions = ["0.9.2", "0.26.0", "0.27.0", "0.27.1", "1.0.0"]
    near = {text: nearest_version(Version(text), versions) for text in ("0.27.3", "0.28.0", "0.10", "2.0", "0.26.5")}
    assert near == {"0.27.3": "0.27.1", "0.28.0": "0.27.0", "0.10": "0.9.2", "2.0": "1.0.0", "0.26.5": "0.26.0"}


@pytest.mark.parametrize(
    ("status", "what", "fix"),
    [
        (403, "denies access (HTTP 403)", "the index, user or proxy that may read it"),
        (404, "does not have it (HTTP 404)", "set PIP_INDEX_URL to an index that has vllm"),
        (429, "too many requests from here (HTTP 429)", "wait 17 s and try again"),
        (500, "answers with HTTP 500", "try again later"),
        (502, "answers with HTTP 502", "try again later"),
        (503, "answers with HTTP 503", "try again later"),
    ],
)
def test_an_index_that_refuses_is_told_with_the_next_step(site, kind, status, what, fix):
    """Neither a traceback nor an empty list; a wheel by hand is always a way."""
    site.statuses["/simple/vllm/"] = status
    site.headers["Retry-After"] = "17" if status == 429 else "0"
    with pytest.raises(ConfigError) as caught:
        PackageIndex().versions()
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert "--wheel" in caught.value.fix
    assert caught.value.where == f"{site.simple}/vllm/"


def test_no_network_is_told_with_the_next_step(site, kind, monkeypatch, caplog):
    """Nobody listens there; pip's own warnings do not reach the terminal."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ConfigError, match=r"cannot be reached: .*[Cc]onnection refused.*HTTPS_PROXY") as caught:
        PackageIndex().versions()
    assert "object at" not in str(caught.value)
    assert not caplog.records


def test_one_index_that_fails_does_not_hide_the_others(site, kind, monkeypatch):
    """Where the release is on none that answers, the one that did not is named."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{site.url}/nothing {site.simple}/")
    site.offer(X86)
    index = PackageIndex()
    assert index.wheel("9.1.0").filename == X86
    with pytest.raises(ConfigError, match=r"1 of 3 indexes did not answer: http://127.0.0.1:9/.*refused"):
        index.wheel("9.9.9")


def test_an_answer_that_is_no_index_is_told(site):
    """A proxy's page, for example, whatever type it says it has."""
    site.offer(X86, sizes=True)
    site.files["/simple/vllm/"] = b"<html>Welcome to the hotel</html>"
    with pytest.raises(ConfigError, match="cannot be understood"):
        PackageIndex().versions()
    site.kinds["/simple/vllm/"] = "text/html"
    with pytest.raises(ConfigError, match="lists no wheel of vllm"):
        PackageIndex().versions()


def test_an_index_in_a_folder_needs_no_server(site, kind, monkeypatch, tmp_path, wheel):
    """As pip reads one; and a page from the network cannot name this machine's files."""
    page = tmp_path / "simple" / "vllm" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../{X86}">{X86}</a>')
    (tmp_path / X86).write_bytes(wheel())
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    assert PackageIndex().wheel("9.1.0").url == (tmp_path / X86).as_uri()
    site.files["/simple/vllm/"] = f'<a href="{(tmp_path / X86).as_uri()}">{X86}</a>'.encode()
    monkeypatch.setenv("PIP_INDEX_URL", site.simple)
    with pytest.raises(ConfigError, match="lists no wheel"):
        PackageIndex().versions()


def test_a_password_is_used_and_never_shown(site, kind, monkeypatch):
    """Neither in a link nor in an error."""
    monkeypatch.setenv("PIP_INDEX_URL", site.simple.replace("//", "//me:s%40cret@"))
    site.needs = "Basic bWU6c0BjcmV0"
    site.offer(X86)
    index = PackageIndex()
    assert index.wheel("9.1.0").url == f"{site.url}/files/{X86}"
    assert index.client.get(index.wheel("9.1.0").url, {}).status == 200
    with pytest.raises(ConfigError) as caught:
        index.wheel("9.9")
    assert "cret" not in str(caught.value)


def test_netrc_is_read(site, kind, monkeypatch, tmp_path):
    """As pip does."""
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password s@cret\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    site.needs = "Basic bWU6c0BjcmV0"
    site.offer(X86)
    assert PackageIndex().versions() == ["9.1.0"]


def test_no_index_is_told(site, kind, monkeypatch):
    """pip may be set to use none."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="pip is set to use no index"):
        PackageIndex().versions()


def test_settings_come_from_pips_files_and_the_environment(site, monkeypatch, tmp_path):
    """The environment counts for more; without any, pip names its usual index."""
    conf = tmp_path / "pip.conf"
    conf.write_text(
        "[global]\nindex-url = http://files.invalid/simple\nextra-index-url =\n  http://a.invalid\n  http://b.invalid\n"
        "proxy = http://proxy.invalid:1\n[install]\nindex-url = http://other.invalid/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(conf))
    extra = ("http://a.invalid", "http://b.invalid")
    both = PipSettings.read()
    assert (both.indexes, both.proxy) == ((site.simple, *extra), "http://proxy.invalid:1")
    monkeypatch.delenv("PIP_INDEX_URL")
    assert PipSettings.read().indexes == ("http://files.invalid/simple", *extra)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (usual,) = PipSettings.read().indexes
    assert re.fullmatch(r"https://\S+/simple", usual)


def test_without_any_pip_an_index_is_asked_for(site, monkeypatch):
    """Only pip knows the address of the usual one."""

    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setattr(package_index, "_from_files", dict)
    monkeypatch.setattr(package_index.importlib, "import_module", lambda name: 1 / 0 if "pip" not in name else object())
    with pytest.raises(ConfigError, match="set PIP_INDEX_URL"):
        PipSettings.read()


def test_a_proxy_is_used(site, kind, monkeypatch):
    """Our server plays it: it is asked for the whole address."""
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
    monkeypatch.setenv("PIP_PROXY", site.url)
    site.offer(X86)
    site.files["http://index.invalid/simple/vllm/"] = site.files["/simple/vllm/"]
    site.kinds["http://index.invalid/simple/vllm/"] = "text/html"
    assert PackageIndex().wheel("9.1.0").url == f"http://index.invalid/files/{X86}"


def test_pip_is_used_where_it_can_be(site):
    """It has the user's keyring and certificates, and some indexes answer nobody else."""
    assert type(package_index.client()).__name__ == "PipClient"
