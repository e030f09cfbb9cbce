"""A package index on this machine: a server that gives ranges, and wheels made for the occasion."""

import io
import json
import os
import re
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm_graft.audit.releases import package_index

FILES = {
    "vllm/__init__.py": b"from vllm.engine import Engine\n",
    "vllm/_version.py": b"__version__ = version = '9.1.0'\n",
    "vllm/engine/__init__.py": b"from vllm.engine.core import Engine\n",
    "vllm/engine/core.py": b"class Engine:\r\n    def step(self): ...\r\n",
    "vllm/engine/loop.py": b"# \xc3\xa9\n" + b"x = 1\n" * 500,
    "vllm/_C.abi3.so": os.urandom(600_000),
    "vllm/late.py": b"late = True\n",
    "vllm/tools/not-a-module.py": b"",
    "vllm-9.1.0.dist-info/METADATA": b"Name: vllm\n",
}
MODULES = ["vllm", "vllm._version", "vllm.engine", "vllm.engine.core", "vllm.engine.loop", "vllm.late"]


def make_wheel(files=None, comment=b""):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (files or FILES).items():
            archive.writestr(name, data)
        archive.comment = comment
    return held.getvalue()


@dataclass
class Site:
    """What the server has, how it behaves, and what it was asked for."""

    url: str = ""
    files: dict = field(default_factory=dict)
    kinds: dict = field(default_factory=dict)
    statuses: dict = field(default_factory=dict)
    headers: dict = field(default_factory=dict)
    ranges: bool = True
    break_off: int = 0
    needs: str = ""
    seen: list = field(default_factory=list)

    @property
    def simple(self):
        return f"{self.url}/simple"

    def offer(self, *names, data=None, sizes=False, yanked=()):
        """Put wheels on the index, which is in HTML or, with sizes, in JSON."""
        data = make_wheel() if data is None else data
        for name in names:
            self.files[f"/files/{name}"] = data
        if sizes:
            rows = [{"filename": n, "url": f"../../files/{n}", "size": len(data), "yanked": n in yanked} for n in names]
            self.files["/simple/vllm/"] = json.dumps({"files": rows}).encode()
            self.kinds["/simple/vllm/"] = "application/vnd.pypi.simple.v1+json"
            return
        mark = {True: ' data-yanked="broken"', False: ""}
        lines = [f'<a href="../../files/{n}#sha256=0"{mark[n in yanked]}>{n}</a><br/>' for n in names]
        self.files["/simple/vllm/"] = f"<!DOCTYPE html><body>{''.join(lines)}</body>".encode()
        self.kinds["/simple/vllm/"] = "text/html"

    def asked_for_wheels(self):
        return [path for path, _ in self.seen if path.endswith(".whl")]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        site = self.server.site
        site.seen.append((self.path, self.headers.get("Range", "")))
        data = site.files.get(self.path)
        status = site.statuses.get(self.path, 200 if data is not None else 404)
        if site.needs and self.headers.get("Authorization") != site.needs:
            status = 401
        if status != 200:
            self.answer(status, b"no", site.headers)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked or not site.ranges:
            self.answer(200, data, {"Content-Type": site.kinds.get(self.path, "application/octet-stream")})
            return
        first, last = int(asked[1]), int(asked[2])
        if first >= len(data):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        body = data[first : last + 1]
        self.answer(206, body, {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(data)}"})

    def answer(self, status, body, headers):
        site = self.server.site
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if site.break_off and status == 206 and len(body) > 10:
            site.break_off -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        # Who asked may have hung up on a whole wheel.
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Who asked may hang up."""


@pytest.fixture
def server():
    """A server that gives ranges."""
    made = Server(("127.0.0.1", 0), Handler)
    made.site = Site(f"http://127.0.0.1:{made.server_address[1]}")
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made.site
    made.shutdown()
    made.server_close()


@pytest.fixture
def site(server, monkeypatch, tmp_path):
    """The only index that pip knows of, and an empty cache."""
    for name in list(os.environ):
        if name.upper().startswith("PIP_") or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(package_index, "PAUSE_S", 0)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", server.simple)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
    return server


@pytest.fixture(params=["PipClient", "PlainClient"])
def kind(request, monkeypatch):
    """Either client; both must do the same."""
    if request.param == "PlainClient":

        def broken():
            raise AttributeError("pip is built differently")

        monkeypatch.setattr(package_index, "PipClient", broken)
        # All that these tests set is in the environment, and running pip takes a second.
        monkeypatch.setattr(package_index, "_from_files", dict)
    return request.param


@pytest.fixture
def wheel():
    """Makes the bytes of a wheel."""
    return make_wheel


@pytest.fixture
def files():
    """What the wheel has."""
    return dict(FILES)


@pytest.fixture
def modules():
    """Which modules that is."""
    return list(MODULES)
