"""What is simulated, and how fast: the ``[simulated]`` table of ``graft.toml``, and a variable over each of its keys.

    [simulated]
    device = "H200"            # GRAFT_SIMULATE; or "instant", or the NAME of a [device.NAME] table
    speed = 1                  # GRAFT_SIMULATED_SPEED; a factor over real time, or "virtual"
    output_tokens = 0          # GRAFT_SIMULATED_OUTPUT_TOKENS; mean length of an answer, 0 for no end but max_tokens
    acceptance = 0.7           # GRAFT_SIMULATED_ACCEPTANCE; the share of draft tokens that are right
    kv_bytes = 0               # GRAFT_SIMULATED_KV_BYTES; 0 for what the device has left

They are resolved where vLLM makes its configuration and travel with it, so that every process of a server has the
same ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.errors import ConfigError, nearest
from vllm_graft.plan.layers import find_file, read_file
from vllm_graft.plugins.platforms.simulated.devices import INSTANT, Device, find

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VIRTUAL: Final = "virtual"
"""The speed of a simulation whose clock jumps from step to step."""

KEY: Final = "graft_simulated"
"""Where the settings travel in vLLM's ``additional_config``."""

VARIABLES: Final[Mapping[str, str]] = {
    "device": "GRAFT_SIMULATE",
    "speed": "GRAFT_SIMULATED_SPEED",
    "output_tokens": "GRAFT_SIMULATED_OUTPUT_TOKENS",
    "acceptance": "GRAFT_SIMULATED_ACCEPTANCE",
    "kv_bytes": "GRAFT_SIMULATED_KV_BYTES",
}
"""The variable over each key of ``[simulated]``."""


_NO_NAMES: Final = ("1", "true", "yes", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class Settings:
    """One resolved simulation."""

    name: str = INSTANT
    """The device's name."""
    named: bool = False
    """Whether anybody named it."""
    device: Device | None = None
    """Its numbers; None where steps take no time."""
    speed: float = 1.0
    """Modelled seconds per second of real time; infinite in virtual time."""
    output_tokens: float = 0.0
    """The mean length of an answer; 0 for no natural end."""
    acceptance: float = 0.7
    """The share of draft tokens that are right."""
    kv_bytes: int = 0
    """The KV cache's size where it is given; 0 where the device's memory decides."""

    @property
    def virtual(self) -> bool:
        """Whether time is virtual."""
        return math.isinf(self.speed)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """The settings that ``as_dict`` gave."""
        device = data.get("device")
        return cls(**{**data, "device": Device(**device) if device is not None else None})


def resolve_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process's file and environment; a ConfigError says which value is wrong, and where."""
    environ = os.environ if environ is None else environ
    path = find_file()
    file = read_file(path) if path is not None else None
    given: dict[str, tuple[object, str]] = {}
    for key, (value, origin) in (file.simulated if file is not None else {}).items():
        if key not in VARIABLES:
            raise ConfigError(
                f"the simulation has no setting {key!r}{nearest(key, VARIABLES)}",
                where=origin,
                fix="correct the name or take the line out",
            )
        given[key] = (value, origin)
    for key, variable in VARIABLES.items():
        text = environ.get(variable, "").strip()
        # GRAFT_SIMULATE=1 asks for the platform and leaves the device to the file; 0 asks for neither.
        if text and not (key == "device" and text.lower() in _NO_NAMES):
            given[key] = (text, variable)
    name, where = _name(given)
    return Settings(
        name=name,
        named="device" in given,
        device=find(name, file.devices if file is not None else {}, where),
        speed=_speed(*given.get("speed", (1.0, ""))),
        output_tokens=_number(given, "output_tokens", 0.0, _at_least_zero, "a number, 0 or more"),
        acceptance=_number(given, "acceptance", 0.7, lambda number: 0 <= number <= 1, "a number from 0 to 1"),
        kv_bytes=int(_number(given, "kv_bytes", 0, _whole, "a whole number of bytes, 0 or more")),
    )


def settings_of(vllm_config: VllmConfig) -> Settings:
    """The settings that travel with a configuration; where there are none yet, this process's, put there."""
    extra = vllm_config.additional_config
    if isinstance(extra, dict):
        if KEY not in extra:
            extra[KEY] = resolve_settings().as_dict()
        return Settings.from_dict(extra[KEY])
    return resolve_settings()


def _name(given: Mapping[str, tuple[object, str]]) -> tuple[str, str]:
    value, origin = given.get("device", (INSTANT, ""))
    if not isinstance(value, str):
        raise ConfigError(f"device must be a name, and is {value!r}", where=origin, fix="give a name in quotes")
    return value, origin


def _speed(value: object, origin: str) -> float:
    if isinstance(value, str) and value.lower() == VIRTUAL:
        return math.inf
    number = _as_number(value)
    if number is None or not 0 < number < math.inf:
        raise ConfigError(
            f"speed must be a number above 0 or {VIRTUAL!r}, and is {value!r}",
            where=origin,
            fix="give 1 for real time, 10 for ten times as fast",
        )
    return number


def _number(
    given: Mapping[str, tuple[object, str]], key: str, default: float, fits: Callable[[float], bool], wanted: str
) -> float:
    value, origin = given.get(key, (default, ""))
    number = _as_number(value)
    if number is None or not fits(number):
        raise ConfigError(f"{key} must be {wanted}, and is {value!r}", where=origin, fix="correct the value")
    return number


def _as_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _at_least_zero(number: float) -> bool:
    return number >= 0


def _whole(number: float) -> bool:
    return number >= 0 and number == int(number)
