"""The layers of the configuration: reading each, checking its keys and types, keeping where every value stands."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vllm_graft import points
from vllm_graft.contracts.item import OptionValue
from vllm_graft.errors import ConfigError, nearest
from vllm_graft.plan.lines import Lines
from vllm_graft.points import PATCHES_VARIABLE, custom_patches

FILE: Final = "graft.toml"
CONFIG_VARIABLE: Final = "GRAFT_CONFIG"

Where = Callable[[tuple[str | int, ...], str | None], str]
"""Says where a key stands: its path inside the layer, and the string in its list if one is meant."""

_ON_FAILURE: Final = ("stop", "warn")
_SETTINGS: Final = ("on_failure", "endpoint", "callers", "unknown_keys", "other_keys")

UNKNOWN_KEYS: Final = ("refuse-similar", "refuse", "pass")
"""What may happen to a request's key that is no planned sampler's; the first is the default."""

Setting = str | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A value and the place that gave it."""

    value: str
    origin: str


@dataclass(slots=True)
class Layer:
    """One source of choices: lists and single names by point key, settings, and options by item name."""

    origin: str
    names: dict[str, list[Named]] = field(default_factory=dict)
    settings: dict[str, tuple[Setting, str]] = field(default_factory=dict)
    options: dict[str, dict[str, tuple[OptionValue, str]]] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)


Values = dict[str, tuple[OptionValue, str]]
"""The values of a table by key, each with the place that gave it."""


@dataclass(slots=True)
class File:
    """What ``graft.toml`` says: the defaults, the profiles in their order, the options.

    ``simulated`` and ``devices`` are for the simulated accelerator, which knows what they may hold.
    """

    path: Path
    defaults: Layer
    profiles: list[Layer]
    simulated: Values = field(default_factory=dict)
    devices: dict[str, Values] = field(default_factory=dict)


def find_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """The configuration file: the one ``GRAFT_CONFIG`` names, else ``graft.toml`` here, else None."""
    named = (os.environ if environ is None else environ).get(CONFIG_VARIABLE, "").strip()
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"there is no file {named}", where=CONFIG_VARIABLE, fix=f"correct or unset {CONFIG_VARIABLE}"
            )
        return path
    here = Path(FILE)
    return here if here.is_file() else None


def read_file(path: Path) -> File:
    """Read and check ``graft.toml``; every fault is an error with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path), fix="make it readable UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        place = f"{path}:{line[1]}" if line else str(path)
        raise ConfigError(f"is not valid TOML: {error}", where=place, fix="correct the syntax there") from error
    except (ValueError, RecursionError) as error:  # Python reads no more than 4300 digits, nor any depth
        raise ConfigError(f"is not valid TOML: {error}", where=str(path), fix="correct the syntax there") from error
    lines = Lines(text)

    def where(key: tuple[str | int, ...], value: str | None) -> str:
        return f"{path}:{lines.of(key, value)}"

    _known(data, ("defaults", "profile", "options", "simulated", "device"), (), where, "table")
    defaults = Layer("[defaults]")
    folder = path.absolute().parent
    _read_choices(defaults, _table(data.get("defaults", {}), ("defaults",), where), ("defaults",), where, folder)
    _read_options(defaults, _table(data.get("options", {}), ("options",), where), ("options",), where)
    devices = _table(data.get("device", {}), ("device",), where)
    return File(
        path,
        defaults,
        _read_profiles(data.get("profile", []), where, folder),
        _read_values(data.get("simulated", {}), ("simulated",), where),
        {name: _read_values(given, ("device", name), where) for name, given in devices.items()},
    )


def from_environment(environ: Mapping[str, str] | None = None) -> Layer | None:
    """Return ``VLLM_CUSTOM_PATCHES`` as a layer; None where it is unset."""
    names = custom_patches(environ)
    if names is None:
        return None
    return Layer(PATCHES_VARIABLE, names={"patches": [Named(name, PATCHES_VARIABLE) for name in names]})


def from_additional_config(given: object) -> Layer | None:
    """The ``graft`` part of vLLM's ``--additional-config`` as a layer; None where there is none."""
    if not isinstance(given, Mapping) or "graft" not in given:
        return None

    def where(key: tuple[str | int, ...], value: str | None) -> str:
        return "--additional-config " + ".".join(str(part) for part in ("graft", *key))

    table = _table(given["graft"], (), where)
    layer = Layer("--additional-config")
    options = _table(table.pop("options", {}), ("options",), where)
    _read_choices(layer, table, (), where, Path.cwd(), extra=("options",))
    _read_options(layer, options, ("options",), where)
    return layer


def _read_profiles(given: object, where: Where, folder: Path) -> list[Layer]:
    if not isinstance(given, list):
        raise ConfigError(
            "profiles are an array of tables", where=where(("profile",), None), fix="write [[profile]], not [profile]"
        )
    profiles = []
    for index, row in enumerate(given):
        path = ("profile", index)
        table = _table(row, path, where)
        layer = Layer(f"[[profile]] {where(path, None)}")
        layer.models = _globs(table.pop("model", None), path, where)
        options = _table(table.pop("options", {}), (*path, "options"), where)
        _read_choices(layer, table, path, where, folder, extra=("model", "options"))
        _read_options(layer, options, (*path, "options"), where)
        profiles.append(layer)
    return profiles


def _globs(given: object, path: tuple[str | int, ...], where: Where) -> list[str]:
    globs = [given] if isinstance(given, str) else given
    if isinstance(globs, list) and globs and all(isinstance(glob, str) and glob for glob in globs):
        return globs
    raise ConfigError(
        "a profile needs `model`: a glob over the model's name, or a list of them",
        where=where((*path, "model"), None),
        fix='add a line such as model = "*70B*"',
    )


def _read_choices(
    layer: Layer,
    table: dict[str, object],
    path: tuple[str | int, ...],
    where: Where,
    folder: Path,
    extra: tuple[str, ...] = (),
) -> None:
    """The keys of one layer; files are named as seen from ``folder``."""
    keys = points.keys()
    _known(table, (*keys, *_SETTINGS, *extra), path, where, "key")
    for key, value in table.items():
        at = (*path, key)
        if key in keys:
            layer.names[key] = _names(value, keys[key], at, where)
        elif key == "on_failure":
            if value not in _ON_FAILURE:
                raise _wrong(at, value, '"stop" or "warn"', where)
            layer.settings[key] = (str(value), where(at, None))
        elif key == "endpoint":
            if not isinstance(value, bool):
                raise _wrong(at, value, "true or false", where)
            layer.settings[key] = (value, where(at, None))
        elif key == "callers":
            if not isinstance(value, str):
                raise _wrong(at, value, "the name of a file", where)
            layer.settings[key] = (str(folder / Path(value).expanduser()) if value else "", where(at, None))
        elif key == "unknown_keys":
            if value not in UNKNOWN_KEYS:
                raise _wrong(at, value, " or ".join(f'"{each}"' for each in UNKNOWN_KEYS), where)
            layer.settings[key] = (str(value), where(at, None))
        elif key == "other_keys":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise _wrong(at, value, "a list of names", where)
            layer.settings[key] = (tuple(value), where(at, None))


def _names(value: object, point: points.Point, at: tuple[str | int, ...], where: Where) -> list[Named]:
    if point.many:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _wrong(at, value, "a list of names", where)
        return [Named(name.strip(), where(at, name)) for name in value]
    if not isinstance(value, str):
        raise _wrong(at, value, "one name", where)
    return [Named(value.strip(), where(at, None))]


def _read_options(layer: Layer, table: dict[str, object], path: tuple[str | int, ...], where: Where) -> None:
    for item, given in table.items():
        layer.options[item] = _read_values(given, (*path, item), where, tables=True)


def _read_values(given: object, path: tuple[str | int, ...], where: Where, *, tables: bool = False) -> Values:
    return {
        name: (_option(value, (*path, name), where, tables=tables), where((*path, name), None))
        for name, value in _table(given, path, where).items()
    }


def _option(value: object, at: tuple[str | int, ...], where: Where, *, tables: bool) -> OptionValue:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return value
    if tables and isinstance(value, Mapping) and all(_in_table(part) for part in value.values()):
        return dict(value)
    wanted = "a string, number, true/false or list of strings"
    raise _wrong(at, value, f"{wanted}, or a table of these" if tables else wanted, where)


def _in_table(value: object) -> bool:
    """Whether a value may stand in an option that is a table."""
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, bool | int | float | str) for item in items)


def _table(given: object, path: tuple[str | int, ...], where: Where) -> dict[str, object]:
    if not isinstance(given, Mapping):
        raise _wrong(path, given, "a table", where)
    return dict(given)


def _known(
    table: Mapping[str, object], allowed: tuple[str, ...], path: tuple[str | int, ...], where: Where, word: str
) -> None:
    for key in table:
        if key not in allowed:
            raise ConfigError(
                f"unknown {word} {key!r}{nearest(key, allowed)}",
                where=where((*path, key), None),
                fix="correct the name or take the line out",
            )


def _wrong(at: tuple[str | int, ...], value: object, wanted: str, where: Where) -> ConfigError:
    name = next((str(part) for part in reversed(at) if isinstance(part, str)), "graft")
    return ConfigError(f"`{name}` must be {wanted}, and is {value!r}", where=where(at, None), fix="correct the value")
