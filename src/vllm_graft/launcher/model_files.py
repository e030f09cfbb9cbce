"""The files of a Llama model's folder: how they are written, and the manifest that reveals damage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.floating]
    Weights: TypeAlias = dict[str, Array]

MANIFEST = "graft-model.json"

# Raised whenever the files made here change, so that folders made by an older release are made again.
RECIPE = 1


def find_damage(folder: Path, *, checksums: bool = False) -> list[str]:
    """Compare a model's folder with its manifest; return one clause per fault."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        recipe = manifest["recipe"]
        files = [(name, int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [f"{MANIFEST} is missing or unreadable"]
    if recipe != RECIPE:
        return [f"it was made by another release of vllm-graft (recipe {recipe}, now {RECIPE})"]
    faults = []
    for name, size, checksum in files:
        file = folder / name
        if not file.is_file():
            faults.append(f"{file.name} is missing")
        elif file.stat().st_size != size:
            faults.append(f"{file.name} has {file.stat().st_size} bytes instead of {size}")
        elif checksums and sha256(file) != checksum:
            faults.append(f"{file.name} has another checksum")
    return faults


def sha256(file: Path) -> str:
    """Return the checksum of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """List the size and checksum of every file in ``folder``."""
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(folder.iterdir())}
    _write_json(folder / MANIFEST, {"recipe": RECIPE, "files": files})


def write_weights(folder: Path, weights: Weights) -> None:
    """Write the tensors as one safetensors file."""
    from safetensors.numpy import save_file

    # transformers refuses a safetensors file that does not name the framework it is for.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes files that only their owner can read; a cache may be shared between users.
    (folder / "model.safetensors").chmod(0o644)


def write_config(folder: Path, **values: object) -> None:
    """Write config.json with these values, and the generation_config.json that repeats the token ids among them."""
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    biases = {"attention_bias": False, "mlp_bias": False}
    _write_json(folder / "config.json", {**fixed, **biases, **values})
    ids = {name: value for name, value in values.items() if name.endswith("_token_id")}
    _write_json(folder / "generation_config.json", ids)


def write_tokenizer(
    folder: Path,
    *,
    vocabulary: dict[str, int],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str],
    roles: Mapping[str, str],
    chat_template: str,
    context: int,
) -> None:
    """Write a byte-level BPE tokenizer that splits digits; ``roles`` maps ``bos_token`` and its like to tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        # This class takes tokenizer.json unchanged; the class of a model family would replace parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "additional_special_tokens": [token for token in special if token not in roles.values()],
        "chat_template": chat_template,
    }
    _write_json(folder / "tokenizer_config.json", {**settings, **roles})


def _write_json(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
