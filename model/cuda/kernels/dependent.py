"""Programmatic dependent launch: a kernel of a decode step is set up while the one before it still runs.

Without it each of a step's nine kernels a layer begins when the last program of the one before has ended: a microsecond
or two in which the GPU reads nothing. With it the programs of the next kernel are there already, and wait for the
memory of the one before. NVIDIA's CUDA programming guide describes it; GPUs have it from sm_90 on.

A kernel that is launched so calls `await_inputs` first of all, in every program, before it touches memory or ends. Then
each kernel ends after the one before it, as without, and others may follow that are launched in the ordinary way.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
