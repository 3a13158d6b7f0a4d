"""Small tensors from the host to the engine's device, without waiting for what the device is still doing.

A copy out of ordinary memory would wait: torch ends it with a synchronisation. One out of pinned memory is queued, and
torch keeps that memory until it has been made.
"""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def place(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, in the order of the current stream; on a CPU a tensor over the same memory."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
