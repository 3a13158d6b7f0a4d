"""Every kernel compiles for GPUs that are not there, within their registers and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # a program's most
KERNELS = {
    "rms_norm_kernel",
    "rope_kv_kernel",
    "silu_mul_kernel",
    "prefill_attention_kernel",
    "decode_attention_kernel",
    "merge_segments_kernel",
    "copy_units_kernel",
    "encode_units_kernel",
    "decode_units_kernel",
    "digest_parts_kernel",
    "digest_units_kernel",
    "digest_kernel",
}

COPYING = {"copy_units_kernel", "digest_parts_kernel", "digest_units_kernel"}


def compiled(capability: int, head_dims: str, block_sizes: str, cache: Path) -> list[dict[str, Any]]:
    script = Path(__file__).parent / "ahead_of_time.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(script.parents[2])}
    command = [sys.executable, str(script), str(capability), head_dims, block_sizes]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("capability", "head_dims", "block_sizes"),
    [(80, "64,128", "16"), (90, "64,128", "16"), (90, "128", "128"), (89, "128", "16")],
)
def test_kernels_compile_without_spills_within_shared_memory(
    capability: int, head_dims: str, block_sizes: str, tmp_path: Path
) -> None:
    kernels = compiled(capability, head_dims, block_sizes, tmp_path)
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    for kernel in kernels:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["shared_bytes"] < SHARED_BYTES[capability], kernel
        # Without asynchronous copies the loop over the keys would wait for memory at every step.
        assert kernel["async_copies"] == kernel["kernel"].endswith("attention_kernel"), kernel
        # A copy of single words takes several times as long.
        assert kernel["wide_loads"] or kernel["kernel"] not in COPYING, kernel
        on_hopper = capability == 90 and kernel["kernel"] == "prefill_attention_kernel"
        assert kernel["wgmma"] == on_hopper, kernel
