"""A planned model on a real engine: built by the worker, its weights' names mapped, and named where they do not fit."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from vllm_graft.testing import Session, tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.compiled]

MODULES = {
    "acme_plugins": """
from vllm_graft.contracts import ModelPlugin


class Acme(ModelPlugin):
    architectures = ("AcmeForCausalLM",)
    model = "acme_net:AcmeForCausalLM"
    weights = {"transformer.": "model.", "transformer.head.": "lm_head.", "trainer.": None}
""",
    "acme_net": """
from vllm.model_executor.models.llama import LlamaForCausalLM


class AcmeForCausalLM(LlamaForCausalLM):
    pass
""",
}

GENERATE = """
import json
from vllm import LLM, SamplingParams
from vllm_graft.ledger import runs
errors, tokens = [], []
for folder in {folders!r}:
    try:
        llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=256, skip_tokenizer_init=True{more})
    except Exception as error:
        errors.append(str(error))
        continue
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    tokens = list(llm.generate([dict(prompt_token_ids=[5, 80, 31, 7])], params)[0].outputs[0].token_ids)
rows = [row for view in runs() for row in view.rows() if "worker" in row["roles"]]
print(json.dumps(dict(errors=errors, tokens=tokens, items=[item for row in rows for item in row["items"]])))
"""

Weights = dict[str, Any]


def renamed(weights: Weights) -> Weights:
    """The weights under the names of a trainer that calls things otherwise."""
    found = {
        name.replace("model.", "transformer.").replace("lm_head.", "transformer.head."): weight
        for name, weight in weights.items()
    }
    return {**found, "trainer.steps": next(iter(weights.values()))[:1]}


def model(folder: Path, change: Callable[[Weights], Weights], **config: object) -> Path:
    """The tiny model as an AcmeForCausalLM, with other weights."""
    shutil.copytree(tiny_model(), folder)
    known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made = {**known, "architectures": ["AcmeForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(made), encoding="utf-8")
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def ran(session: Session, *folders: Path, more: str = "", inside: bool = True) -> dict[str, Any]:
    session.package("acme-models", {"vllm_graft.plugins": {"acme": "acme_plugins:Acme"}}, MODULES)
    session.plan('[defaults]\nmodels = ["acme"]\n')
    session.env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if inside else "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if inside else "0|1",
        "OMP_NUM_THREADS": "1",
    }
    done = session.script(GENERATE.format(folders=[str(folder) for folder in folders], more=more))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def test_the_worker_builds_the_class_and_the_weights_find_their_places(graft: Session):
    found = ran(graft, model(graft.folder / "renamed", renamed))
    assert found["errors"] == []
    (item,) = found["items"]
    assert (item["state"], item["reason"]) == ("applied", "built acme_net:AcmeForCausalLM for AcmeForCausalLM")
    graft.env["GRAFT_DISABLE"] = "1"
    assert ran(graft, tiny_model())["tokens"] == found["tokens"]


def test_weights_that_do_not_fit_are_named(graft: Session):
    """One start after the other in a program that goes on, as a notebook does."""

    def missing(weights: Weights) -> Weights:
        return {name: weight for name, weight in renamed(weights).items() if "layers.1.mlp.down_proj" not in name}

    def extra(weights: Weights) -> Weights:
        return {**renamed(weights), "transformer.layers.1.mlp.bonus.weight": weights["model.norm.weight"]}

    def misshapen(weights: Weights) -> Weights:
        name = "transformer.layers.1.mlp.down_proj.weight"
        return {**renamed(weights), name: renamed(weights)[name][:, :-1].copy()}

    folders = [model(graft.folder / each.__name__, each) for each in (missing, extra, misshapen)]
    errors = ran(graft, *folders)["errors"]
    assert len(errors) == 3
    for folder, error in zip(folders, errors, strict=True):
        assert error.startswith(f"{folder}: the model 'acme' (from ")
        assert "Next: correct the class, its `weights` or the checkpoint; or remove 'acme' from the plan" in error
    assert "the checkpoint has nothing for model.layers.1.mlp.down_proj.weight. Next: " in errors[0]
    assert (
        "cannot be loaded at the weight transformer.layers.1.mlp.bonus.weight of the shape [64], read as" in errors[1]
    )
    assert (
        "cannot be loaded at the weight transformer.layers.1.mlp.down_proj.weight of the shape [64, 127], read as "
        "model.layers.1.mlp.down_proj.weight: "
    ) in errors[2]


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="vLLM binds each worker to a core of its own")
def test_a_number_of_workers_that_does_not_divide_a_layer_is_named(graft: Session):
    def odd(weights: Weights) -> Weights:
        cut = {name: weight for name, weight in weights.items() if ".mlp." not in name}
        for name in weights.keys() - cut.keys():
            cut[name] = weights[name][:, :127].copy() if "down" in name else weights[name][:127].copy()
        return renamed(cut)

    folder = model(graft.folder / "odd", odd, intermediate_size=127)
    (error,) = ran(graft, folder, more=", tensor_parallel_size=2", inside=False)["errors"]
    assert "the model 'acme' (from " in error
    assert "cannot be loaded, with 2 workers for each layer: AssertionError" in error
    assert "or choose a --tensor-parallel-size that divides its layers" in error
