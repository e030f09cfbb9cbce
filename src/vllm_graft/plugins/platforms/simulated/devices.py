"""The devices that can be simulated: a few numbers each, from the data sheet and from one calibration.

``compute``, ``weights``, ``kv``, ``layer_us`` and ``request_us`` were fitted to steps that an H200 took under vLLM
0.32.0 (``benchmarks/calibration.py`` prints fit and error). Other devices have their own peaks and borrow these five:
expect the right shape of a curve from them, not its exact height. ``launch_ms`` and ``eager_ms`` belong to the host
and not to the device: nothing, until you measure yours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from vllm_graft.errors import ConfigError, nearest

INSTANT: Final = "instant"
"""The device without a model: a step takes no time and the KV cache is as large as a variable says."""

BASE: Final = "based_on"
"""The key of a ``[device.NAME]`` table that names the device whose numbers fill the gaps."""


@dataclass(frozen=True, slots=True)
class Device:
    """What one accelerator can do, in the units of a data sheet (GB are 10^9 bytes)."""

    memory_gb: float
    """Memory, as the driver reports it."""
    bandwidth_gb_s: float
    """Peak bandwidth of that memory."""
    tflops: float
    """Peak 16-bit arithmetic, without sparsity."""
    link_gb_s: float
    """Bandwidth to a neighbour, one direction."""
    link_us: float = 8.0
    """What any exchange with a neighbour costs at least."""
    host_gb_s: float = 25.0
    """Bandwidth to the host's memory: what putting weights to sleep and waking them takes."""
    compute: float = 0.631
    """The share of the peak arithmetic that matrix products and attention reach."""
    weights: float = 0.957
    """The share of the peak bandwidth at which weights are read."""
    kv: float = 0.945
    """The share of the peak bandwidth at which the KV cache is read."""
    layer_us: float = 51.8
    """What a layer costs besides: launches, norms, everything small."""
    request_us: float = 6.62
    """What a request costs besides, each step: logits, sampling, its row of the block table."""
    launch_ms: float = 0.0
    """What a step with prompts in it takes at least, because the host has that much to do to launch it."""
    eager_ms: float = 0.0
    """The same of a step that is too large for vLLM's CUDA graphs, hence launched operation by operation."""
    reserve_gb: float = 1.35
    """Memory that neither weights, activations nor the KV cache get: the driver's context, graphs, workspaces."""

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes."""
        return int(self.memory_gb * 1e9)


DEVICES: Final[Mapping[str, Device]] = {
    "H200": Device(memory_gb=150.75, bandwidth_gb_s=4800, tflops=989, link_gb_s=450),
    "H100": Device(memory_gb=85.52, bandwidth_gb_s=3350, tflops=989, link_gb_s=450),
    "A100": Device(memory_gb=85.9, bandwidth_gb_s=2039, tflops=312, link_gb_s=300),
    "L40S": Device(memory_gb=48.31, bandwidth_gb_s=864, tflops=362, link_gb_s=32, link_us=20.0),
}
"""The devices that ship: SXM modules of 141, 80 and 80 GB, and the 48 GB card, whose neighbours are on PCIe."""

_MAY_BE_NOTHING: Final = ("link_us", "layer_us", "request_us", "launch_ms", "eager_ms", "reserve_gb")

Table = Mapping[str, tuple[object, str]]
"""A ``[device.NAME]`` table: value and origin by key."""


def find(name: str, tables: Mapping[str, Table], where: str) -> Device | None:
    """The device of that name, of ``graft.toml`` or shipped; None for the instant one."""
    if name.lower() == INSTANT:
        return None
    own = {key.lower(): key for key in tables}
    if name.lower() in own:
        return _from_table(own[name.lower()], tables[own[name.lower()]])
    shipped = {key.lower(): device for key, device in DEVICES.items()}
    if name.lower() not in shipped:
        known = [*DEVICES, *tables, INSTANT]
        raise ConfigError(
            f"there is no device {name!r}{nearest(name, known)}; known are {', '.join(known)}",
            where=where,
            fix=f"name one of them, or describe yours in graft.toml under [device.{name}]",
        )
    return shipped[name.lower()]


def _from_table(name: str, table: Table) -> Device:
    names = [field.name for field in fields(Device)]
    base, numbers = _base(name, table), {}
    for key, (value, origin) in table.items():
        if key == BASE:
            continue
        if key not in names:
            raise ConfigError(
                f"a device has no {key!r}{nearest(key, names)}", where=origin, fix="correct the name or take it out"
            )
        numbers[key] = _number(key, value, origin)
    if base is not None:
        return replace(base, **numbers)
    missing = [name for name in ("memory_gb", "bandwidth_gb_s", "tflops", "link_gb_s") if name not in numbers]
    if missing:
        origin = next(iter(table.values()))[1] if table else f"[device.{name}]"
        raise ConfigError(
            f"the device {name!r} lacks {', '.join(missing)}",
            where=origin,
            fix=f'add them, or {BASE} = "H100" to take them from a device that ships',
        )
    return Device(**numbers)


def _base(name: str, table: Table) -> Device | None:
    if BASE not in table:
        return None
    value, origin = table[BASE]
    if not isinstance(value, str) or value not in DEVICES:
        raise ConfigError(
            f"{BASE} of the device {name!r} must be a device that ships, and is {value!r}",
            where=origin,
            fix=f"name one of {', '.join(DEVICES)}",
        )
    return DEVICES[value]


def _number(key: str, value: object, origin: str) -> float:
    share = key in ("compute", "weights", "kv")
    smallest = 0.0 if key in _MAY_BE_NOTHING else 1e-9
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (smallest <= number < math.inf) or (share and number > 1):
        wanted = (
            "a number above 0 and at most 1" if share else "a number above 0" if smallest else "a number, 0 or more"
        )
        raise ConfigError(f"{key} must be {wanted}, and is {value!r}", where=origin, fix="correct the value")
    return float(number)
