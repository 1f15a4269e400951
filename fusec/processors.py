"""Kinds of processors, and devices, by name.

Kernels for a kind of processor are built on any machine of its architecture. The target "cpu" is no
kind: it is the processor of the machine that builds. These are the levels of x86-64 in its psABI,
and tiles beyond; each includes the ones before it::

    cpu:avx2    x86-64-v3    vectors of 8 f32      Intel since 2013, AMD since 2017
    cpu:avx512  x86-64-v4    vectors of 16         Intel's servers since 2017, AMD since 2022
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Bf16 = Literal["tiles", "pairs", "widened"]
"""How a CPU multiplies bf16: by tiles (AMX), pairs of terms at twice the rate of f32, or as f32."""


@dataclass(frozen=True, slots=True)
class Processor:
    """A kind of processor, for which any machine of its architecture builds kernels.

    Attributes:
        features: what kernels may use, the architecture first, as ``cpu_features`` returns it.
        flags: with which a C++ compiler uses these features and no others.
        lanes: f32 elements of a vector register.
        bf16: how it multiplies bf16.
    """

    features: str
    flags: tuple[str, ...]
    lanes: int
    bf16: Bf16 = "widened"


_V2 = "x86_64 popcnt sse4_1 sse4_2 ssse3"
_V3 = f"{_V2} abm avx avx2 bmi1 bmi2 f16c fma movbe"
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"
_TILES = "avx512_bf16 amx_bf16 amx_int8 amx_tile"
PROCESSORS = {
    "cpu:sse4": Processor(_V2, ("-march=x86-64-v2",), 4),
    "cpu:avx2": Processor(_V3, ("-march=x86-64-v3",), 8),
    "cpu:avx512": Processor(_V4, ("-march=x86-64-v4",), 16),
    "cpu:amx": Processor(
        f"{_V4} {_TILES}",
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        16,
        bf16="tiles",
    ),
}
"""By the name of the target."""
DEVICES = {
    "sm_80": ("a100", "a30", "ampere"),
    "sm_90": ("h100", "h200", "gh200", "hopper"),
    "sm_100": ("b200", "gb200", "b100", "blackwell"),
    "sm_120": ("rtx5090", "5090", "rtx5080", "5080", "rtx6000"),
    "gfx942": ("mi300", "mi300x", "mi300a", "mi325x"),
    "gfx950": ("mi350", "mi350x", "mi355x"),
}
"""Target of a GPU -> common names of its devices."""
EMULATED = ("sm_90", "sm_80", "sm_100", "sm_120")
"""GPUs whose PTX the emulator knows, the usual one first."""


def target_called(device: str) -> str | None:
    """Return the target of a device by a common name, "sm_90" for "H100"; or None."""
    plain = device.lower().replace(" ", "").replace("-", "").replace("_", "")
    plain = plain.removeprefix("nvidia").removeprefix("amd")
    return next((target for target, names in DEVICES.items() if plain in names), None)
