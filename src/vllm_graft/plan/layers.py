"""Read graft.toml and the other layers of the configuration, with the place of every value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vllm_graft import points
from vllm_graft.contracts.item import OptionValue
from vllm_graft.errors import ConfigError
from vllm_graft.fields import Fields, parse_toml
from vllm_graft.plan.toml_lines import TomlLines
from vllm_graft.points import PATCHES_VARIABLE, custom_patches

FILE: Final = "graft.toml"
CONFIG_VARIABLE: Final = "GRAFT_CONFIG"

KeyPath = tuple[str | int, ...]
"""The path of a key inside a layer."""

Where = Callable[[KeyPath, str | None], str]
"""Returns the place of a key, or of one string in its list."""

_ON_FAILURE: Final = ("stop", "warn")
_SETTINGS: Final = ("on_failure", "endpoint", "callers", "unknown_keys", "other_keys")

UNKNOWN_KEYS: Final = ("refuse-similar", "refuse", "pass")
"""The ways to treat a request's key that no planned sampler has; the first is the default."""

Setting = str | bool | tuple[str, ...]
OptionValues = dict[str, tuple[OptionValue, str]]
"""The values of a table by key, each with the place that gave it."""

Options = dict[str, OptionValues]
"""The options of each item, by its name."""

_PLAIN: Final = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Choice:
    """A value and the place that gave it."""

    value: str
    origin: str


@dataclass(slots=True)
class Layer:
    """One source of choices: lists and single names by point key, settings, and options by item name."""

    origin: str
    names: dict[str, list[Choice]] = field(default_factory=dict)
    settings: dict[str, tuple[Setting, str]] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    models: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ConfigFile:
    """The content of ``graft.toml``: the defaults, the profiles in their order, the options.

    ``simulated`` and ``devices`` are for the simulated accelerator, which validates them.
    """

    path: Path
    defaults: Layer
    profiles: list[Layer]
    simulated: OptionValues = field(default_factory=dict)
    devices: dict[str, OptionValues] = field(default_factory=dict)


class _Table(Fields):
    """One table of a layer; ``path`` is where it is in there."""

    def __init__(self, values: object, path: KeyPath, where: Where, word: str = "key") -> None:
        self._path, self._place, self._word = path, where, word
        super().__init__(values, "", self.place)

    def place(self, key: str | None = None, value: str | None = None) -> str:
        """Return the place of a key, of one string in its list, or of the whole table."""
        return self._place(self._path if key is None else (*self._path, key), value)

    def inner(self, key: str) -> _Table:
        """Return a table in this one; empty if there is none."""
        return _Table(self._values.get(key, {}), (*self._path, key), self._place)

    def no_table(self, value: object) -> ConfigError:
        name = next((part for part in reversed(self._path) if isinstance(part, str)), "graft")
        return self.wrong(None, f"`{name}` must be a table, but is {value!r}", "correct the value")

    def unknown(self, key: str, hint: str) -> ConfigError:
        return self.wrong(key, f"unknown {self._word} {key!r}{hint}", "correct the name or remove the line")

    def unfit(self, key: str, value: object, wanted: str) -> ConfigError:
        return self.wrong(key, f"`{key}` must be {wanted}, but is {value!r}", "correct the value")

    def values(self, *, tables: bool = False) -> OptionValues:
        """Return the values of all keys, each with its place; ``tables`` allows tables among them."""
        found: OptionValues = {}
        for key in self:
            value = self.raw(key)
            held = list(value.values()) if isinstance(value, Mapping) else []
            parts = [part for each in held for part in (each if isinstance(each, list) else [each])]
            if isinstance(value, _PLAIN):
                found[key] = value, self.place(key)
            elif isinstance(value, list) and all(isinstance(part, str) for part in value):
                found[key] = value, self.place(key)
            elif tables and isinstance(value, Mapping) and all(isinstance(part, _PLAIN) for part in parts):
                found[key] = dict(value), self.place(key)
            else:
                wanted = "a string, number, true/false or list of strings"
                raise self.unfit(key, value, f"{wanted}, or a table of these" if tables else wanted)
        return found


def find_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the configuration file: the one ``GRAFT_CONFIG`` names, else ``graft.toml`` here, else None."""
    named = (os.environ if environ is None else environ).get(CONFIG_VARIABLE, "").strip()
    if named:
        path = Path(named).expanduser()
        if not os.path.isfile(path):
            raise ConfigError(
                f"there is no file {named}", where=CONFIG_VARIABLE, fix=f"correct or unset {CONFIG_VARIABLE}"
            )
        return path
    here = Path(FILE)
    if os.path.isfile(here):
        return here
    # Such as a link to a volume that is not mounted: without an error the server would run without its plan.
    if os.path.lexists(here):
        what = "is a link to nothing" if here.is_symlink() and not os.path.exists(here) else "is not a regular file"
        raise ConfigError(what, where=str(here.absolute()), fix="put the file in its place, or remove it")
    return None


def read_file(path: Path) -> ConfigFile:
    """Read and check ``graft.toml``; every fault is an error with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path), fix="make it readable UTF-8 text") from error
    data = parse_toml(text, str(path))
    lines = TomlLines(text)

    def where(key: KeyPath, value: str | None) -> str:
        return f"{path}:{lines.of(key, value)}"

    table = _Table(data, (), where, "table")
    table.only(("defaults", "profile", "options", "simulated", "device"))
    folder = path.absolute().parent
    defaults = _read_layer("[defaults]", table.inner("defaults"), table.inner("options"), folder)
    profiles = data.get("profile", [])
    if not isinstance(profiles, list):
        raise table.wrong("profile", "profiles are an array of tables", "write [[profile]], not [profile]")
    layers = []
    for at, row in enumerate(profiles):
        profile = _Table(row, ("profile", at), where)
        globs = [profile.raw("model")] if isinstance(profile.raw("model"), str) else profile.raw("model")
        if not isinstance(globs, list) or not globs or not all(isinstance(glob, str) and glob for glob in globs):
            what = "a profile needs `model`: a glob over the model's name, or a list of them"
            raise profile.wrong("model", what, 'add a line such as model = "*70B*"')
        origin, options = f"[[profile]] {profile.place()}", profile.inner("options")
        layers.append(_read_layer(origin, profile, options, folder, ("model", "options")))
        layers[-1].models = globs
    simulated, devices = table.inner("simulated").values(), table.inner("device")
    return ConfigFile(path, defaults, layers, simulated, {name: devices.inner(name).values() for name in devices})


def from_environment(environ: Mapping[str, str] | None = None) -> Layer | None:
    """Return ``VLLM_CUSTOM_PATCHES`` as a layer; None if it is unset."""
    names = custom_patches(environ)
    if names is None:
        return None
    return Layer(PATCHES_VARIABLE, names={"patches": [Choice(name, PATCHES_VARIABLE) for name in names]})


def from_additional_config(config: object) -> Layer | None:
    """Return the ``graft`` part of vLLM's ``--additional-config`` as a layer; None if there is none."""
    if not isinstance(config, Mapping) or "graft" not in config:
        return None

    def where(key: KeyPath, value: str | None) -> str:
        return "--additional-config " + ".".join(str(part) for part in ("graft", *key))

    table = _Table(config["graft"], (), where)
    return _read_layer("--additional-config", table, table.inner("options"), Path.cwd(), ("options",))


def _read_layer(origin: str, table: _Table, options: _Table, folder: Path, extra: tuple[str, ...] = ()) -> Layer:
    """Read one layer; files are relative to ``folder``, and the keys ``extra`` are left to the caller."""
    layer = Layer(origin)
    keys = points.keys()
    if "options" in table and "options" not in extra:
        raise table.wrong("options", "options of items have a table of their own", "write [options.NAME] for them")
    table.only((*keys, *_SETTINGS, *extra))
    for key in table:
        value = table.raw(key)
        if key in keys and keys[key].is_list:
            layer.names[key] = [Choice(name.strip(), table.place(key, name)) for name in table.names(key)]
        elif key in keys and not isinstance(value, str):
            raise table.unfit(key, value, "one name")
        elif key in keys:
            layer.names[key] = [Choice(str(value).strip(), table.place(key))]
        elif key in _SETTINGS:
            layer.settings[key] = (_read_setting(table, key, folder), table.place(key))
    layer.options = {item: options.inner(item).values(tables=True) for item in options}
    return layer


def _read_setting(table: _Table, key: str, folder: Path) -> Setting:
    if key in ("on_failure", "unknown_keys"):
        return table.choice(key, _ON_FAILURE if key == "on_failure" else UNKNOWN_KEYS)
    if key == "other_keys":
        return tuple(table.names(key))
    value = table.raw(key)
    if key == "endpoint" and isinstance(value, bool):
        return value
    if key == "callers" and isinstance(value, str):
        return str(folder / Path(value).expanduser()) if value else ""
    raise table.unfit(key, value, "true or false" if key == "endpoint" else "the name of a file")
