"""Peaks of machines as makers publish them, and the ridge points that follow. The table is hardware.json.

A sheet's figures "with sparsity" are those of products whose weights have two zeros in four: dense ones, which are all
that engines compute, reach half of them. What a step gets of a peak is its efficiency: `EFFICIENCY`, until a machine is
measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from twostroke.protocol.errors import ConfigError

GIB = 2**30
Number = Literal["fp32", "bf16", "fp8", "int8", "fp4"]
"""Number format of a product. fp16 is as fast as bf16."""


@dataclass(frozen=True)
class Hardware:
    """One GPU, or the part of a host that one worker has."""

    name: str
    title: str  # for people
    memory_bytes: int
    read_bytes_per_s: float  # of its memory
    flops_per_s: Mapping[Number, float]  # dense; a multiplication and an addition are two
    link_bytes_per_s: float  # to GPUs of the same machine, in one direction
    usd_per_hour: float  # an assumption, no quote: prices move by the month, so name yours
    source: str
    is_gpu: bool = True
    kernel_s: float = 1e-5  # of a sum over ranks, whatever its size
    sparse_speedup: float = 1.0  # of products by weights with two zeros in four, in any number but fp32

    @property
    def native(self) -> Number:
        """The number of unquantised weights and activations: CPUs without bf16 widen to fp32."""
        return "bf16" if "bf16" in self.flops_per_s else "fp32"

    @property
    def itemsize(self) -> float:
        """Bytes of the native number."""
        return 2.0 if self.native == "bf16" else 4.0

    def peak(self, number: Number | None = None, *, is_sparse: bool = False) -> float:
        """Operations a second. None: in its native numbers."""
        number = number or self.native
        return self.flops_per_s[number] * (self.sparse_speedup if is_sparse and number != "fp32" else 1.0)

    def ridge(self, number: Number | None = None, *, is_sparse: bool = False) -> float:
        """Operations a byte from which on computing takes longer than reading (Williams et al., CACM 2009).

        None: of its native numbers.
        """
        return self.peak(number, is_sparse=is_sparse) / self.read_bytes_per_s


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
"""Efficiency for Llama-3.1-8B on an H100 as docs/results/index.md predicts it: 0.7 of the 798 TFLOP/s and 0.8 of the
3.0 TB/s that its own kernels reach. No GPU has confirmed it."""


def read_efficiency(text: str | None) -> Efficiency:
    """Return what `--efficiency COMPUTE,READ` says; None: the default. Raises ConfigError."""
    if text is None:
        return EFFICIENCY
    try:
        compute, read = map(float, text.split(","))
    except ValueError:
        raise ConfigError(f"--efficiency {text}: write COMPUTE,READ, as in 0.55,0.72") from None
    return Efficiency(compute, read)


def read_hardware(content: bytes, source: str) -> dict[str, Hardware]:
    """Return a file's rows by name, or the one that it has. Raises ConfigError, which names the field that is wrong."""
    try:
        found = msgspec.json.decode(content, type=list[Hardware] | Hardware)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: {error}") from error
    rows = {one.name: one for one in (found if isinstance(found, list) else [found])}
    for one in rows.values():
        figures = (one.memory_bytes, one.read_bytes_per_s, one.link_bytes_per_s, *one.flops_per_s.values())
        if min(figures) <= 0 or not {"bf16", "fp32"} & one.flops_per_s.keys():
            raise ConfigError(f"{source}: all figures are to be above 0, and flops_per_s has fp32 or bf16")
    return rows


_FILE = Path(__file__).with_name("hardware.json")
HARDWARE: Mapping[str, Hardware] = read_hardware(_FILE.read_bytes(), str(_FILE))


def known_hardware(name: str) -> Hardware:
    """The table's, or a file's that `twostroke bench hardware` wrote. Raises ConfigError."""
    if name in HARDWARE:
        return HARDWARE[name]
    if not name.endswith(".json"):
        raise ConfigError(
            f"--gpu {name}: no such GPU in the table; there are {', '.join(HARDWARE)}, and files of `bench machine`"
        )
    try:
        (found,) = read_hardware(Path(name).read_bytes(), f"--gpu {name}").values()
    except (OSError, ConfigError, ValueError) as error:
        raise ConfigError(f"--gpu {name}: {error}; make it by `twostroke bench machine --hardware {name}`") from error
    return found
