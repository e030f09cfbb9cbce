"""Which model is simulated: a ``config.json``, a folder that has one, or the name of a shape that ships.

The shapes that ship are the facts of well-known models' ``config.json``; nothing of a model is needed but those.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_graft.errors import ConfigError, nearest
from vllm_graft.plugins.platforms.simulated.reader import NotModelled
from vllm_graft.plugins.platforms.simulated.shape import Shape, shape_of

FILE: Final = "config.json"

_SHIPPED: Final = Path(__file__).parent / "model_configs"
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class Model:
    """A model to simulate."""

    name: str
    """The name of a shipped shape, or what was given."""
    file: Path
    """Its ``config.json``."""
    config: dict[str, Any]

    @property
    def shape(self) -> Shape | None:
        """None where only vLLM can tell, which fills in what a published file may leave out.

        Raises ConfigError for a kind of model that is not modelled.
        """
        return _shape(self.config, str(self.file))

    @property
    def folder(self) -> Path:
        """The folder that vLLM is given."""
        return self.file.parent

    @property
    def shipped(self) -> bool:
        """Whether it is one of the shapes that ship."""
        return self.folder.parent == _SHIPPED

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer lies beside it."""
        return any((self.folder / name).is_file() for name in _TOKENIZERS)


def shipped() -> list[str]:
    """The names of the shapes that ship."""
    return sorted(folder.name for folder in _SHIPPED.iterdir() if (folder / FILE).is_file())


def find_model(given: str) -> Model:
    """The model of that name or path; a ConfigError says what is wrong with it."""
    path = _path(given)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path), fix="make it readable UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where=str(path), fix="give a model's config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"is no JSON object but {type(config).__name__}", where=str(path), fix="give a model's config.json"
        )
    if not config.get("architectures"):
        raise ConfigError(
            "architectures: is missing, and vLLM chooses the model's class by it",
            where=str(path),
            fix="give the config.json of a decoder model, as it was published",
        )
    model = Model(given, path, config)
    with contextlib.suppress(NotModelled):  # the device 'instant' takes those too; a modelled one asks again
        _ = model.shape
    return model


def _shape(config: dict[str, Any], where: str) -> Shape | None:
    """The shape, or None where the file leaves to vLLM's own defaults what is needed for it."""
    try:
        return shape_of(config, where)
    except ConfigError as error:
        if error.what.endswith("is missing") and config.get("model_type"):
            return None
        raise


def _path(given: str) -> Path:
    if given.lower() in shipped():
        return _SHIPPED / given.lower() / FILE
    path = Path(given).expanduser().absolute()
    if path.is_file():
        return path
    if (path / FILE).is_file():
        return path / FILE
    if path.is_dir():
        raise ConfigError(f"the folder has no {FILE}", where=str(path), fix=f"put the model's {FILE} there")
    raise ConfigError(
        f"there is neither a file or folder {given!r} nor a shape of that name{nearest(given, shipped())}",
        where="--model",
        fix=f"give a {FILE}, a folder that has one, or one of {', '.join(shipped())}",
    )
