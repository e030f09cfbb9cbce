"""The settings of a simulation: the ``[simulated]`` table of ``graft.toml``, and a variable over each of its keys.

    [simulated]
    device = "H200"            # GRAFT_SIMULATE; or "instant", or the NAME of a [device.NAME] table
    speed = 1                  # GRAFT_SIMULATED_SPEED; a factor over real time, or "virtual"
    output_tokens = 0          # GRAFT_SIMULATED_OUTPUT_TOKENS; mean length of an answer, 0 for no end but max_tokens
    acceptance = 0.7           # GRAFT_SIMULATED_ACCEPTANCE; the share of draft tokens that are right
    kv_bytes = 0               # GRAFT_SIMULATED_KV_BYTES; 0 for what the device has left

They are resolved where vLLM makes its configuration and travel with it, so that all processes of a server agree.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.errors import ConfigError
from vllm_graft.fields import Fields
from vllm_graft.plan.layers import find_file, read_file
from vllm_graft.simulator.devices import INSTANT, Device, find_device

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VIRTUAL: Final = "virtual"
"""The speed of a simulation whose clock jumps from step to step."""

KEY: Final = "graft_simulated"
"""The key of the settings in vLLM's ``additional_config``."""

VARIABLES: Final[Mapping[str, str]] = {
    "device": "GRAFT_SIMULATE",
    "speed": "GRAFT_SIMULATED_SPEED",
    "output_tokens": "GRAFT_SIMULATED_OUTPUT_TOKENS",
    "acceptance": "GRAFT_SIMULATED_ACCEPTANCE",
    "kv_bytes": "GRAFT_SIMULATED_KV_BYTES",
}
"""The variable over each key of ``[simulated]``."""

_MAX_FLOAT: Final = sys.float_info.max
_BYTES: Final = "a whole number of bytes, 0 or more"
_SWITCH_WORDS: Final = ("1", "true", "yes", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """One resolved simulation."""

    name: str = INSTANT
    """The device's name."""
    named: bool = False
    """True if the file or the environment names it."""
    device: Device | None = None
    """Its numbers; None if steps take no time."""
    speed: float = 1.0
    """Modelled seconds per second of real time; infinite in virtual time."""
    output_tokens: float = 0.0
    """The mean length of an answer; 0 for no natural end."""
    acceptance: float = 0.7
    """The share of draft tokens that are right."""
    kv_bytes: int = 0
    """The KV cache's size if it is given; 0 if the device's memory decides."""

    @property
    def virtual(self) -> bool:
        """True if time is virtual."""
        return math.isinf(self.speed)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SimulationSettings:
        """Build the settings from ``as_dict``."""
        device = data.get("device")
        return cls(**{**data, "device": Device(**device) if device is not None else None})


class _SettingFields(Fields):
    texts = True


def resolve_settings(environ: Mapping[str, str] | None = None) -> SimulationSettings:
    """Read the settings of this process's file and environment; a ConfigError names the wrong value and its place."""
    environ = os.environ if environ is None else environ
    path = find_file()
    file = read_file(path) if path is not None else None
    given: dict[str, tuple[object, str]] = dict(file.simulated) if file is not None else {}
    for key, variable in VARIABLES.items():
        text = environ.get(variable, "").strip()
        # GRAFT_SIMULATE=1 asks for the platform and leaves the device to the file; 0 asks for neither.
        if text and not (key == "device" and text.lower() in _SWITCH_WORDS):
            given[key] = (text, variable)
    values = {key: value for key, (value, _) in given.items()}
    fields = _SettingFields(values, "[simulated]", lambda key: given[key][1] if key in given else "[simulated]")
    fields.only(VARIABLES)
    name, origin = given.get("device", (INSTANT, ""))
    if not isinstance(name, str):
        raise fields.wrong("device", f"device must be a name, but is {name!r}", "give a name in quotes")
    kv_bytes = fields.number("kv_bytes", 0.0, most=_MAX_FLOAT, wanted=_BYTES)
    if kv_bytes != int(kv_bytes):
        raise fields.unfit("kv_bytes", values["kv_bytes"], _BYTES)
    device = find_device(name, file.devices if file is not None else {}, origin)
    speed, raw_speed = math.inf, fields.raw("speed")
    if not isinstance(raw_speed, str) or raw_speed.lower() != VIRTUAL:
        try:
            speed = fields.number("speed", 1.0, least=sys.float_info.min, most=_MAX_FLOAT)
        except ConfigError as error:
            what = f"speed must be a number above 0 or {VIRTUAL!r}, but is {raw_speed!r}"
            raise ConfigError(what, where=error.where, fix="give 1 for real time, 10 for ten times as fast") from None
    return SimulationSettings(
        name=name,
        named="device" in given,
        device=device,
        speed=speed,
        output_tokens=fields.number("output_tokens", 0.0, most=_MAX_FLOAT, wanted="a number, 0 or more"),
        acceptance=fields.number("acceptance", 0.7, most=1.0, wanted="a number from 0 to 1"),
        kv_bytes=int(kv_bytes),
    )


def carried_settings(vllm_config: VllmConfig) -> SimulationSettings:
    """Return the settings that travel with a configuration; if there are none yet, put this process's there."""
    extra = vllm_config.additional_config
    if isinstance(extra, dict):
        if KEY not in extra:
            extra[KEY] = resolve_settings().as_dict()
        return SimulationSettings.from_dict(extra[KEY])
    return resolve_settings()
