"""Planned architectures on the simulated accelerator: registered in every process, or refused with the reason."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm_graft.testing import Session, tiny_model

pytestmark = pytest.mark.engine

PLUGINS = """
from vllm_graft.contracts import ModelPlugin


class Acme(ModelPlugin):
    architectures = ("AcmeForCausalLM", "OldAcmeForCausalLM")
    model = "acme_net:AcmeForCausalLM"
    config = "acme_config:AcmeConfig"

    def check(self, model):
        if model.config["rms_norm_eps"] > 1:
            raise ValueError(f"an epsilon of {model.config['rms_norm_eps']} makes no sense")


class Twin(ModelPlugin):
    architectures = ("AcmeForCausalLM",)
    model = "acme_net:AcmeForCausalLM"


class Rival(ModelPlugin):
    architectures = ("LlamaForCausalLM",)
    model = "acme_net:AcmeForCausalLM"


class Partial(ModelPlugin):
    architectures = ("AcmeForCausalLM",)
    model = "acme_partial:Partial"


class Broken(ModelPlugin):
    architectures = ("AcmeForCausalLM",)
    model = "acme_broken:AcmeForCausalLM"


class Settled(ModelPlugin):
    architectures = ("AcmeForCausalLM",)
    model = "acme_net:AcmeForCausalLM"
    config = "acme_config:TakenConfig"
"""

MODULES = {
    "acme_plugins": PLUGINS,
    "acme_net": """
from vllm.model_executor.models.llama import LlamaForCausalLM


class AcmeForCausalLM(LlamaForCausalLM):
    pass
""",
    "acme_config": """
from transformers import LlamaConfig


class AcmeConfig(LlamaConfig):
    model_type = "acme"


class TakenConfig(LlamaConfig):
    model_type = "llama"
""",
    "acme_partial": """
from torch import nn


class Partial(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return input_ids
""",
    "acme_broken": "import acme_kernels_that_nobody_built\n",
}

GENERATE = """
import json
from vllm import LLM, SamplingParams
from vllm_graft.ledger import runs
llm = LLM({model!r}, max_model_len=512, skip_tokenizer_init=True{more})
params = SamplingParams(max_tokens=5, detokenize=False)
print("TOKENS", len(llm.generate([dict(prompt_token_ids=[5] * 40)], params)[0].outputs[0].token_ids))
print("ROWS " + json.dumps([row for view in runs() for row in view.rows()]), flush=True)
"""


@pytest.fixture
def acme(graft: Session) -> Session:
    """A session on the simulated accelerator, with the plugins laid out."""
    kinds = ("Acme", "Twin", "Rival", "Partial", "Broken", "Settled")
    entries = {kind.lower(): f"acme_plugins:{kind}" for kind in kinds}
    graft.package("acme-models", {"vllm_graft.plugins": entries}, MODULES)
    graft.simulate()
    return graft


def model(session: Session, **changed: object) -> Path:
    """The tiny model's files with another configuration."""
    folder = session.folder / "model"
    shutil.copytree(tiny_model(), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changed}), encoding="utf-8")
    return folder


def acme_model(session: Session, **changed: object) -> Path:
    return model(session, architectures=["AcmeForCausalLM"], **changed)


def rows_of(session: Session, folder: Path, more: str = "") -> list[dict[str, Any]]:
    done = session.script(GENERATE.format(model=str(folder), more=more))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "TOKENS 5" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("ROWS "))
    found: list[dict[str, Any]] = json.loads(line.removeprefix("ROWS "))
    return found


def in_worker(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The states in the process that has the worker; another one has been there if vLLM had to inspect the class."""
    (row,) = (row for row in rows if "worker" in row["roles"])
    return [(item["state"], item["reason"]) for item in row["items"]]


def refused(session: Session, folder: Path, more: str = "") -> str:
    session.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = session.script(GENERATE.format(model=str(folder), more=more))
    assert done.returncode != 0, done.stdout[-2000:]
    return done.stderr[-6000:]


def test_an_architecture_and_its_configuration_are_registered_in_every_process(acme: Session):
    """With two workers; vLLM inspects the class in a subprocess, which has the plan too."""
    acme.plan('[defaults]\nmodels = ["acme"]\n')
    # vLLM remembers what it has inspected.
    acme.env["VLLM_CACHE_ROOT"] = str(acme.folder / "cache")
    rows = rows_of(acme, acme_model(acme, model_type="acme"), ", tensor_parallel_size=2")
    states = {row["name"]: [(each["state"], each["reason"]) for each in row["items"]] for row in rows}
    assert [row["roles"] for row in rows if row["name"] == "registry.py"] == [["registry"]]
    assert len(states) == 5, states
    assert set(map(tuple, states.values())) == {(("applied", "registered"),)}


def test_a_model_of_another_architecture_is_served_as_ever(acme: Session):
    acme.plan('[defaults]\nmodels = ["acme"]\n')
    acme.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    assert in_worker(rows_of(acme, tiny_model())) == [("applied", "registered")]


def test_an_architecture_that_vllm_has_is_refused_unless_the_plan_says_which_wins(acme: Session):
    acme.plan('[defaults]\nmodels = ["rival"]\n')
    said = refused(acme, tiny_model())
    assert "the model 'rival' registers LlamaForCausalLM, which is already there as vllm." in said
    assert "llama:LlamaForCausalLM. Next: rename the architecture" in said
    assert "set `replace = true` under [options.rival] to have acme_net:AcmeForCausalLM" in said
    acme.plan('[defaults]\nmodels = ["rival"]\n[options.rival]\nreplace = true\n')
    assert in_worker(rows_of(acme, tiny_model())) == [("applied", "registered")]


@pytest.mark.parametrize(
    ("names", "changed", "words"),
    [
        (
            ["partial"],
            {},
            (
                "the class of the model 'partial' (from ",
                "lacks what this vLLM calls on a model: embed_input_ids, compute_logits, load_weights. Next: implement",
                "acme_partial:Partial",
            ),
        ),
        (
            ["broken"],
            {},
            ("the model 'broken' (from ", "acme_broken:AcmeForCausalLM", "No module named 'acme_kernels_that_nobody"),
        ),
        (["acme"], {"model_type": "acme", "rms_norm_eps": 2.0}, ("it refuses this model: an epsilon of 2.0 makes no",)),
        (["twin", "acme"], {}, ("the models 'twin' and 'acme' both register AcmeForCausalLM",)),
        (["settled"], {}, ("registers the model_type 'llama', which is already there. Next: use another",)),
    ],
)  # fmt: skip
def test_what_cannot_work_stops_the_start_with_the_reason(acme: Session, names, changed, words):
    acme.plan(f"[defaults]\nmodels = {names}\n")
    said = refused(acme, acme_model(acme, **changed))
    for word in words:
        assert word in said


def test_workers_that_do_not_divide_the_heads_are_refused_by_vllm_before_anything_starts(acme: Session):
    acme.plan('[defaults]\nmodels = ["acme"]\n')
    said = refused(acme, acme_model(acme, model_type="acme"), ", tensor_parallel_size=3")
    assert "attention heads (4) must be divisible by tensor parallel size (3)" in said


def test_a_planned_router_is_left_out_with_a_reason(acme: Session):
    acme.plan('[defaults]\nrouter = "expert-mask"\n')
    acme.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    assert in_worker(rows_of(acme, tiny_model())) == [("skipped", "the simulated accelerator computes no experts")]
