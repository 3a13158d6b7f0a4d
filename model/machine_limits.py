"""The limits of this machine's CPU: the rates of torch's own products, and of reads of its memory."""

import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from twostroke.model.operations import Limits

GEMM_SIZE = 2048  # [1024, 2048] x [2048, 2048], three times: 26 GFLOP
READ_BYTES = 512 * 2**20  # far more than any cache holds


class Machine:
    """Measures the limits with torch's own kernels, on as many threads as torch uses here."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]] = (), dtype: torch.dtype = torch.bfloat16):
        """`shapes`: (rows, columns in, columns out) of the products that the GEMM rate is measured with."""
        self._products = [
            (torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype))
            for rows, inner, outer in shapes or [(1024, GEMM_SIZE, GEMM_SIZE)]
        ]
        self._operations = 2.0 * sum(left.numel() * len(right) for left, right in self._products)
        self._memory = torch.ones(READ_BYTES // 4, dtype=torch.float32)
        self.measure()

    def measure(self) -> Limits:
        """Of now; the best of a few passes each."""
        gemm_s = min(timed(self._multiply) for _ in range(3))
        read_s = min(timed(lambda: self._memory.sum()) for _ in range(2))
        return Limits(gemm=self._operations / gemm_s, read=READ_BYTES / read_s)

    def _multiply(self) -> None:
        for left, right in self._products:
            functional.linear(left, right)


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
