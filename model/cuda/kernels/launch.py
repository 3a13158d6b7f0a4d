"""Parameters of launches besides the shapes: the GPU's class, sizes derived from head dimension and dtype, and
programmatic dependent launch.

Dependent launch sets a kernel of a decode step up while the one before it still runs. Without it each of a step's nine
kernels a layer begins when the last program of the one before has ended: a microsecond or two in which the GPU loads
nothing. With it the programs of the next kernel are there already, and wait for the memory of the one before. NVIDIA's
CUDA programming guide describes it; GPUs have it from sm_90 on.

A dependent kernel calls `await_inputs` first in every program, before it touches memory or ends. Each kernel then ends
after the one before it, and others may follow that are launched in the ordinary way."""

import math
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = math.log2(math.e)
"""Factor of natural exponents where 2 is raised to their power."""


class Architecture(Enum):
    """GPUs grouped by what the launch tables care about: matrix instruction and shared memory a program may use."""

    HOPPER = "hopper"  # 227 KiB, asynchronous warpgroup matrix instructions; data-centre Blackwell runs the same tables
    AMPERE = "ampere"  # 163 KiB (A100)
    SMALL = "small"  # 99 KiB: Turing's successors for desktops and inference (sm_86, sm_89, sm_120)


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """The GPU that kernels are launched on."""

    architecture: Architecture
    multiprocessors: int
    has_fp8: bool = True  # sm_89 and later
    is_sm90: bool = False  # what FlashAttention-3 is compiled for

    @classmethod
    def of(cls, capability: tuple[int, int], multiprocessors: int) -> "GpuTarget":
        """The target of a compute capability such as (9, 0).

        Raises ValueError below 8.0: bf16 matrix instructions and asynchronous copies start there.
        """
        if capability < (8, 0):
            raise ValueError(f"compute capability {capability[0]}.{capability[1]} is below 8.0, the least supported")
        if capability in ((8, 0), (8, 7)):
            return cls(Architecture.AMPERE, multiprocessors, has_fp8=False)
        if capability[0] in (9, 10):
            return cls(Architecture.HOPPER, multiprocessors, is_sm90=capability[0] == 9)
        return cls(Architecture.SMALL, multiprocessors, has_fp8=capability >= (8, 9))

    @classmethod
    def of_device(cls, device: torch.device) -> "GpuTarget":
        """The target of a CUDA device at hand."""
        properties = torch.cuda.get_device_properties(device)
        return cls.of((properties.major, properties.minor), properties.multi_processor_count)


H100 = GpuTarget(Architecture.HOPPER, multiprocessors=132, is_sm90=True)
B200 = GpuTarget(Architecture.HOPPER, multiprocessors=148)
A100 = GpuTarget(Architecture.AMPERE, multiprocessors=108, has_fp8=False)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n; the extents of Triton's tiles are powers of two."""
    return 1 << max(0, n - 1).bit_length()


def padded_head(head_dim: int) -> int:
    """The extent of a head in an attention tile; matrix instructions take no fewer than 16."""
    return max(16, power_of_two(head_dim))


def dot_precision(dtype: torch.dtype) -> str:
    """Return how `tl.dot` treats its inputs: fp32 stays fp32 (Triton's default rounds it to tf32); 16-bit types ignore
    it."""
    return "ieee" if dtype == torch.float32 else "tf32"


compiles_only = False
"""Launches compile and run nothing (model/cuda/compile_ahead.py): what kernels would have written is of any value."""


@triton.jit
def await_inputs(DEPENDENT: tl.constexpr):
    """Let the next kernel be set up, and wait until the one before has ended and its results can be read."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Tell whether kernels on this device can be launched so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(x: Tensor) -> dict[str, Any]:
    """Return the launch arguments of a kernel that awaits its inputs, for tensors on x's device."""
    return {"DEPENDENT": True, "launch_pdl": True} if has_dependent_launch(x.device) else {"DEPENDENT": False}
