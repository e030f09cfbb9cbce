"""The patch lora-path-guard on vLLM's real resolver, alone and behind the real API server."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_graft.launcher.models import tiny_model
from vllm_graft.patching import Engine
from vllm_graft.plugins.patches.lora_path_guard import LoraPathGuard
from vllm_graft.testing import Session, assert_active

INSIDE = ["own", "team/own", "team/../own", "./own", "linked", "own/"]
OUTSIDE = ["../outside/own", "team/../../outside/own", "{outside}/own", "escaping", "escaping-folder/own"]
NOWHERE = ["nobody", "own\0", "own\ud800", "../lora-of-others/own"]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A resolver's folder ``lora`` with adapters and links in it, and ``outside`` beside it."""
    return lay_adapters(tmp_path, "base")


def lay_adapters(folder: Path, base: str) -> Path:
    config = json.dumps({"peft_type": "LORA", "base_model_name_or_path": base, "r": 8})
    for place in ("lora/own", "lora/team/own", "outside/own"):
        (folder / place).mkdir(parents=True)
        (folder / place / "adapter_config.json").write_text(config, encoding="utf-8")
    (folder / "lora" / "linked").symlink_to("own")
    (folder / "lora" / "escaping").symlink_to(folder / "outside" / "own")
    (folder / "lora" / "escaping-folder").symlink_to(folder / "outside")
    return folder


@pytest.fixture
def guard() -> Iterator[None]:
    """The patch, in this process."""
    engine = Engine()
    engine.apply([LoraPathGuard])
    yield
    engine.revert(LoraPathGuard)


def resolved(folders: Path, name: str) -> object:
    """What vLLM's resolver makes of a name."""
    from vllm.plugins.lora_resolvers.filesystem_resolver import FilesystemResolver

    resolver = FilesystemResolver(str(folders / "lora"))
    return asyncio.run(resolver.resolve_lora("base", name.format(outside=folders / "outside")))


@pytest.mark.parametrize("name", OUTSIDE)
def test_without_the_guard_a_name_leaves_the_folder(folders: Path, name: str):
    """What stock vLLM does."""
    assert resolved(folders, name) is not None


@pytest.mark.usefixtures("guard")
@pytest.mark.parametrize("name", [*OUTSIDE, *NOWHERE])
def test_a_name_that_leaves_the_folder_is_no_adapter(folders: Path, name: str):
    """Upwards, absolute, or by a link; nor is what cannot be a path at all, and none of it raises."""
    assert resolved(folders, name) is None


@pytest.mark.usefixtures("guard")
@pytest.mark.parametrize("name", INSIDE)
def test_every_other_name_is_resolved_as_before(folders: Path, name: str):
    """Links and detours that stay in the folder, and a folder that is itself reached by a link, are fine."""
    found = resolved(folders, name)
    assert (found.lora_name, found.lora_path) == (name, f"{folders / 'lora'}/{name}")  # type: ignore[attr-defined]
    (folders / "elsewhere").mkdir()
    (folders / "elsewhere" / "lora").symlink_to(folders / "lora")
    assert resolved(folders / "elsewhere", name) is not None


def behind_a_server(graft: Session) -> tuple[str, ...]:
    lay_adapters(graft.folder, str(tiny_model()))
    graft.simulate()
    graft.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    graft.env["VLLM_LORA_RESOLVER_CACHE_DIR"] = str(graft.folder / "lora")
    return ("--served-model-name", "m", "--enable-lora", "--max-loras", "2")


def asked(name: str) -> dict[str, object]:
    return {"prompt": "hi", "max_tokens": 3, "model": name}


@pytest.mark.server
def test_without_the_guard_a_request_reaches_an_adapter_outside(graft: Session):
    """What stock vLLM does: anyone who may send requests chooses a folder of the machine."""
    with graft.server(*behind_a_server(graft)) as server:
        assert server.post("/v1/completions", asked("../outside/own"))[0] == 200


@pytest.mark.server
def test_with_the_guard_the_request_is_answered_and_the_server_lives(graft: Session):
    """404, as for any adapter that does not exist; adapters of the folder are served."""
    graft.plan('[defaults]\npatches = ["lora-path-guard"]\n')
    with graft.server(*behind_a_server(graft)) as server:
        for name in OUTSIDE:
            status, body = server.post("/v1/completions", asked(name.format(outside=graft.folder / "outside")))
            assert (status, json.loads(body)["error"]["type"]) == (404, "NotFoundError")
        assert server.post("/v1/completions", asked("team/own"))[0] == 200
        assert server.post("/v1/completions", asked("m"))[0] == 200
        assert server.health() == 200
        assert_active(server.run_view(), "lora-path-guard")
        assert "lora-path-guard: the adapter '../outside/own' lies outside of" in server.tail(200)
