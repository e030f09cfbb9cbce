"""The devices that can be simulated: a few numbers each, from the data sheet and from one calibration.

``compute``, ``weights``, ``kv``, ``layer_us`` and ``request_us`` were fitted to the steps of an H200 under vLLM 0.32.0
(``benchmarks/calibration.py`` prints fit and error). The other devices have their own peaks and borrow these five:
expect the right shape of a curve from them, not its exact height. ``launch_ms`` and ``eager_ms`` belong to the host,
not to the device; they are 0 until you measure yours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from vllm_graft.errors import ConfigError, nearest
from vllm_graft.fields import Fields

INSTANT: Final = "instant"
"""The device without numbers: a step takes no time, and a variable sets the size of the KV cache."""

BASE: Final = "based_on"
"""The key of a ``[device.NAME]`` table that names the device whose numbers fill the gaps."""


@dataclass(frozen=True, slots=True)
class Device:
    """The numbers of one accelerator, in the units of a data sheet (GB are 10^9 bytes)."""

    memory_gb: float
    """Memory, as the driver reports it."""
    bandwidth_gb_s: float
    """Peak bandwidth of that memory."""
    tflops: float
    """Peak 16-bit arithmetic, without sparsity."""
    link_gb_s: float
    """Bandwidth to a neighbour, one direction."""
    link_us: float = 8.0
    """The latency of an exchange with a neighbour."""
    host_gb_s: float = 25.0
    """Bandwidth to the host's memory, over which weights go to sleep and wake."""
    compute: float = 0.631
    """The share of the peak arithmetic that matrix products and attention reach."""
    weights: float = 0.957
    """The share of the peak bandwidth at which weights are read."""
    kv: float = 0.945
    """The share of the peak bandwidth at which the KV cache is read."""
    layer_us: float = 51.8
    """The rest of a layer's cost: launches, norms, everything small."""
    request_us: float = 6.62
    """The rest of a request's cost per step: logits, sampling, its row of the block table."""
    launch_ms: float = 0.0
    """The least time of a step with prompts in it: the host needs it for the launch."""
    eager_ms: float = 0.0
    """The least time of a step too large for vLLM's CUDA graphs, which is launched operation by operation."""
    reserve_gb: float = 1.35
    """Memory that is not for weights, activations or KV cache: the driver's context, graphs, workspaces."""

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

_MAY_BE_ZERO: Final = ("link_us", "layer_us", "request_us", "launch_ms", "eager_ms", "reserve_gb")
_SHARES: Final = ("compute", "weights", "kv")

DeviceTable = Mapping[str, tuple[object, str]]
"""A ``[device.NAME]`` table: value and origin by key."""


def find_device(name: str, tables: Mapping[str, DeviceTable], where: str) -> Device | None:
    """Return the device of that name, from ``graft.toml`` or shipped; None for the instant one."""
    if name.lower() == INSTANT:
        return None
    own = {key.lower(): key for key in tables}
    if name.lower() in own:
        return _read_device(own[name.lower()], tables[own[name.lower()]])
    shipped = {key.lower(): device for key, device in DEVICES.items()}
    if name.lower() not in shipped:
        known = [*DEVICES, *tables, INSTANT]
        raise ConfigError(
            f"there is no device {name!r}{nearest(name, known)}; known are {', '.join(known)}",
            where=where,
            fix=f"name one of them, or describe yours in graft.toml under [device.{name}]",
        )
    return shipped[name.lower()]


def _read_device(name: str, table: DeviceTable) -> Device:
    origins = {key: origin for key, (_, origin) in table.items()}
    first = next(iter(origins.values()), f"[device.{name}]")
    values = {key: value for key, (value, _) in table.items()}
    table_fields = Fields(values, f"[device.{name}]", lambda key: origins.get(key or "", first))
    names = [field.name for field in fields(Device)]
    table_fields.only((*names, BASE))
    numbers: dict[str, float] = {}
    for key in (key for key in names if key in values):
        least, most, wanted = 1e-9, sys.float_info.max, "a number above 0"
        if key in _SHARES:
            most, wanted = 1.0, "a number above 0 and at most 1"
        elif key in _MAY_BE_ZERO:
            least, wanted = 0.0, "a number, 0 or more"
        numbers[key] = table_fields.number(key, least=least, most=most, wanted=wanted)
    if BASE in values:
        if values[BASE] not in DEVICES:
            raise table_fields.wrong(
                BASE,
                f"{BASE} of the device {name!r} must be a device that ships, but is {values[BASE]!r}",
                f"name one of {', '.join(DEVICES)}",
            )
        return replace(DEVICES[str(values[BASE])], **numbers)
    missing = [name for name in ("memory_gb", "bandwidth_gb_s", "tflops", "link_gb_s") if name not in numbers]
    if missing:
        raise table_fields.wrong(
            None,
            f"the device {name!r} lacks {', '.join(missing)}",
            f'add them, or {BASE} = "H100" to take them from a device that ships',
        )
    return Device(**numbers)
