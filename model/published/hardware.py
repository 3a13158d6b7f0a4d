"""What machines can do: peaks that makers publish, dense, and the ridge points that follow.

A sheet's figures "with sparsity" are twice the dense ones, and no dense product reaches them. What a step gets of a
peak is its efficiency: `EFFICIENCY`, until a machine is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from twostroke.protocol.errors import ConfigError

GIB = 2**30
Number = Literal["fp32", "bf16", "fp8", "int8", "fp4"]
"""What a product multiplies in."""


@dataclass(frozen=True)
class Hardware:
    """One GPU, or the part of a host that one worker has."""

    name: str
    title: str  # for people
    memory_bytes: int
    read_bytes_per_s: float  # of its memory
    flops_per_s: Mapping[Number, float]  # a multiplication and an addition are two
    link_bytes_per_s: float  # to GPUs of the same machine, in one direction
    usd_per_hour: float  # an assumption, no quote: prices move by the month, so name yours
    source: str
    is_gpu: bool = True
    kernel_s: float = 1e-5  # of a sum over ranks, whatever its size

    @property
    def native(self) -> Number:
        """What it multiplies unquantised weights in, and holds activations in: CPUs without bf16 widen to fp32."""
        return "bf16" if "bf16" in self.flops_per_s else "fp32"

    @property
    def itemsize(self) -> float:
        """Bytes of such a number."""
        return 2.0 if self.native == "bf16" else 4.0

    def ridge(self, number: Number | None = None) -> float:
        """Operations a byte from which on computing takes longer than reading (Williams et al., CACM 2009).

        None: of its native numbers.
        """
        return self.flops_per_s[number or self.native] / self.read_bytes_per_s


@dataclass(frozen=True)
class Efficiency:
    """The part of a peak that whole steps get."""

    compute: float
    read: float
    host_s: float = 1e-3  # of a step, in which the device waits

    def __post_init__(self) -> None:
        if not (0 < self.compute <= 1 and 0 < self.read <= 1):
            raise ConfigError(f"efficiency: {self.compute:g} and {self.read:g} are to be above 0 and at most 1")


PEAK = Efficiency(1.0, 1.0, 0.0)
EFFICIENCY = Efficiency(compute=0.55, read=0.72)
"""Of Llama-3.1-8B on an H100 as docs/performance-log.md predicts it: 0.7 of the 798 TFLOP/s and 0.8 of the 3.0 TB/s
that its own kernels reach. No GPU has confirmed it."""

_A100 = "NVIDIA A100 Tensor Core GPU datasheet, 2021"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet, 2023: half of the figures with sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet, 2024: half of the figures with sparsity"
_B200 = "NVIDIA HGX B200 datasheet, 2024: an eighth of the board, half of the figures with sparsity"

HARDWARE: Mapping[str, Hardware] = {
    one.name: one
    for one in (
        Hardware(
            *("a100-40gb", "A100 40 GB SXM", 40 * GIB, 1.555e12),
            flops_per_s={"bf16": 312e12, "int8": 624e12},
            link_bytes_per_s=300e9,
            usd_per_hour=1.3,
            source=_A100,
        ),
        Hardware(
            *("a100-80gb", "A100 80 GB SXM", 80 * GIB, 2.039e12),
            flops_per_s={"bf16": 312e12, "int8": 624e12},
            link_bytes_per_s=300e9,
            usd_per_hour=1.8,
            source=_A100,
        ),
        Hardware(
            *("h100-80gb", "H100 80 GB SXM", 80 * GIB, 3.35e12),
            flops_per_s={"bf16": 989.5e12, "fp8": 1979e12, "int8": 1979e12},
            link_bytes_per_s=450e9,
            usd_per_hour=3.0,
            source=_H100,
        ),
        Hardware(
            *("h200", "H200 SXM", 141 * GIB, 4.8e12),
            flops_per_s={"bf16": 989.5e12, "fp8": 1979e12, "int8": 1979e12},
            link_bytes_per_s=450e9,
            usd_per_hour=3.8,
            source=_H200,
        ),
        Hardware(
            *("b200", "B200 SXM", 180 * GIB, 8e12),
            flops_per_s={"bf16": 2250e12, "fp8": 4500e12, "fp4": 9000e12},
            link_bytes_per_s=900e9,
            usd_per_hour=6.0,
            source=_B200,
        ),
        Hardware(
            *("l4", "L4", 24 * GIB, 0.3e12),
            flops_per_s={"bf16": 121e12, "fp8": 242.5e12, "int8": 242.5e12},
            link_bytes_per_s=32e9,
            usd_per_hour=0.7,
            source="NVIDIA L4 Tensor Core GPU datasheet, 2023: half of the figures with sparsity; PCIe 4.0 x16",
        ),
        Hardware(
            *("l40s", "L40S", 48 * GIB, 0.864e12),
            flops_per_s={"bf16": 362.05e12, "fp8": 733e12, "int8": 733e12},
            link_bytes_per_s=32e9,
            usd_per_hour=1.0,
            source="NVIDIA L40S datasheet, 2023; PCIe 4.0 x16",
        ),
        Hardware(
            *("mi300x", "MI300X", 192 * GIB, 5.3e12),
            flops_per_s={"bf16": 1307.4e12, "fp8": 2614.9e12, "int8": 2614.9e12},
            link_bytes_per_s=448e9,
            usd_per_hour=2.5,
            source="AMD Instinct MI300X data sheet, 2023; seven Infinity Fabric links of 64 GB/s a direction",
        ),
    )
}


def hardware_of(name: str) -> Hardware:
    """The table's, or a file's that `twostroke bench hardware` wrote. Raises ConfigError."""
    if name in HARDWARE:
        return HARDWARE[name]
    if not name.endswith(".json"):
        raise ConfigError(
            f"--gpu {name}: no such GPU in the table; there are {', '.join(HARDWARE)}, and files of `bench hardware`"
        )
    try:
        found = msgspec.json.decode(Path(name).read_bytes(), type=Hardware)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--gpu {name}: {error}; make it by `twostroke bench hardware --output {name}`") from error
    figures = (found.memory_bytes, found.read_bytes_per_s, found.link_bytes_per_s, *found.flops_per_s.values())
    if min(figures) <= 0 or not {"bf16", "fp32"} & found.flops_per_s.keys():
        raise ConfigError(f"--gpu {name}: all figures are to be above 0, and flops_per_s has fp32 or bf16")
    return found
