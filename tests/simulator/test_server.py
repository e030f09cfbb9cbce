"""vLLM's API server on the simulated accelerator."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from vllm_graft.launcher.models import tiny_model
from vllm_graft.testing import zygote


@pytest.fixture
def server(tmp_path, surroundings):
    """The address of vLLM's API server on the simulated accelerator, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model())]
    command += ["--served-model-name", "tiny", "--port", str(port), "--max-model-len", "256"]
    with (tmp_path / "log").open("w+") as log:
        process = zygote.ForkedPopen(command, env=surroundings, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", process, tmp_path / "log")
            yield f"http://127.0.0.1:{port}", process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)


def wait_until_healthy(address, process, log):
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2)
        except OSError:
            time.sleep(0.3)
        else:
            return
    raise AssertionError(log.read_text())


def complete(address, **body):
    """A completion's status and text."""
    content = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 8, **body}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.server
@pytest.mark.slow
def test_the_api_server_streams_scores_and_ends(server):
    address, process = server
    status, text = complete(address, stream=True, stream_options={"include_usage": True})
    *_, usage, end = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert (status, end, json.loads(usage)["usage"]["completion_tokens"]) == (200, "[DONE]", 8)
    status, text = complete(address, logprobs=2, prompt_logprobs=1, echo=True)
    scores = json.loads(text)["choices"][0]["logprobs"]
    assert (status, len(scores["tokens"])) == (200, 13)
    assert all(value <= 0 for value in scores["token_logprobs"][1:])
    status, text = complete(address, stop=["no such text"], logit_bias={"258": 100})
    assert (status, json.loads(text)["choices"][0]["finish_reason"]) == (200, "stop")
    process.terminate()
    assert process.wait(30) == 0
