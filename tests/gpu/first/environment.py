"""`python3 -m tests.gpu.first.environment`: versions, what can't be imported, and what launches cost the host."""

import importlib
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *("triton", "numba", "numpy", "pytest", "xdist", "pytest_timeout", "pytest_asyncio", "msgspec", "llguidance"),
    *("pydantic", "annotated_types", "typing_extensions", "xxhash", "safetensors", "ray"),
)
OURS = (
    *("tests.model.conftest", "tests.rigs.kv_pair", "tests.kernels.paged_cases", "tests.gpu.test_engine_on_gpu"),
    *(
        "twostroke.benchmarks.gpu.command",
        "twostroke.benchmarks.transfers.transfer",
        "twostroke.benchmarks.transfers.pull",
    ),
    *("twostroke.kvtransfer.transports.cuda_ipc", "twostroke.kvtransfer.transports.torch_distributed"),
)
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)
"""
LAUNCHES = 2000


def versions() -> dict[str, Any]:
    """The packages' versions, and the errors of our modules that can't be imported."""
    found: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            found[name] = str(getattr(importlib.import_module(name), "__version__", "there"))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:120]
    broken = {}
    for name in OURS:
        try:
            importlib.import_module(name)
        except Exception as error:
            broken[name] = f"{type(error).__name__}: {error}"[:200]
    return found | ({"broken_imports": broken} if broken else {})


def device() -> dict[str, Any]:
    begin = time.perf_counter()
    torch.ones(8, device="cuda").sum().item()
    free, total = torch.cuda.mem_get_info()
    return {
        "cuda_start_s": round(time.perf_counter() - begin, 1),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": torch.cuda.nccl.version(),  # type: ignore[no-untyped-call]
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "context_mib": (total - free) >> 20,
        "total_mib": total >> 20,
        "cores": os.cpu_count(),
    }


def launches(values: torch.Tensor) -> dict[str, float]:
    """Return the host's cost of a launch by Triton and of one by torch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one_kernel.py"  # Triton reads kernels' sources from files
        path.write_text(KERNEL)
        spec = importlib.util.spec_from_file_location("one_kernel", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        def launch() -> None:
            module.add_one[(4,)](values, values.numel(), BLOCK=1024)

        begin = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        first_s = time.perf_counter() - begin
        return {
            "first_triton_kernel_s": round(first_s, 2),
            "triton_launch_host_us": _host_us(launch),
            "torch_launch_host_us": _host_us(lambda: values.add_(1)),
        }


def _host_us(launch: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        launch()
    taken_s = time.perf_counter() - begin
    torch.cuda.synchronize()
    return round(taken_s / LAUNCHES * 1e6, 2)


if __name__ == "__main__":
    print(json.dumps(device() | versions() | launches(torch.zeros(4096, device="cuda"))))
