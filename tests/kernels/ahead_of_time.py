"""Compile the CUDA backend's kernels for a GPU that is not there, and report what came out.

`python ahead_of_time.py 90` runs the backend's operations on tensors without data, catches each launch with its real
arguments, compiles it for that compute capability, and prints one JSON object a launch. So what is compiled is what the
backend would launch, divisibility of arguments included. Run it without TRITON_INTERPRET.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from model.backend import BatchLayout
from model.cuda_backend import CudaBackend
from model.kernels.kv_digest import copy_and_digest_units, digest, digest_units
from model.kernels.kv_encode import decode_units, encode_units
from model.kernels.kv_pack import copy_units, packed_places, paged_places
from model.kernels.launch import A100, H100, Target

TARGETS = {80: A100, 90: H100, 89: Target.of((8, 9), 142)}
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
_OPTIONS = {"num_warps", "num_stages"}
_DESCRIBED = ("HEAD_DIM", "BLOCK_SIZE", "BLOCK_M", "BLOCK_N", "HEADS_PER_GROUP", "SPLIT", "HIDDEN", "ADD")


@contextmanager
def caught_launches() -> Iterator[list[tuple[JITFunction, dict[str, Any]]]]:
    """Collect launches (kernel, arguments by name) instead of making them."""
    launches: list[tuple[JITFunction, dict[str, Any]]] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, dict(zip(self.arg_names, args, strict=False)) | kwargs))

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def run_backend(target: Target, head_dim: int, block_size: int, heads: int, groups: int, dtype: torch.dtype) -> None:
    """One step of three decodes and two prompt chunks through every operation, on tensors without data."""
    tokens, decodes = 1003, 3
    hidden = heads * head_dim

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    layout = BatchLayout(
        positions=empty(tokens, dtype=torch.int64),
        slots=empty(tokens, dtype=torch.int64),
        query_starts=empty(6, dtype=torch.int32),
        context_lens=empty(5, dtype=torch.int32),
        block_tables=empty(5, 8192 // block_size, dtype=torch.int32),
        num_decodes=decodes,
        max_query_len=700,
        max_context_len=8192,
    )
    backend = CudaBackend(target)
    kv_layer = empty(4096, 2, groups, block_size, head_dim)
    x = backend.rms_norm(empty(tokens, hidden), empty(hidden), 1e-5)
    backend.add_rms_norm(x, empty(tokens, hidden), empty(hidden), 1e-5)
    cos_sin = empty(8192, head_dim, dtype=torch.float32)
    q = backend.rope_and_write_kv(empty(tokens, (heads + 2 * groups) * head_dim), cos_sin, kv_layer, layout)
    backend.attention(q, kv_layer, layout)
    backend.silu_mul(empty(tokens, 2 * 4 * hidden))


def run_transfer(head_dim: int, block_size: int, groups: int) -> None:
    """Pack, digest, encode and decode a chunk: all heads of whole blocks, then one head of half blocks."""
    addresses = torch.empty(128, dtype=torch.int64, device="meta")
    wire = torch.empty(1 << 22, dtype=torch.uint8, device="meta")
    out = torch.empty(2, dtype=torch.int64, device="meta")
    for num_heads, unit_tokens in ((groups, block_size), (1, block_size // 2)):
        places = paged_places(
            row_bytes=2 * head_dim, heads_per_block=groups, block_size=block_size, first_head=0, num_heads=num_heads,
            unit_tokens=unit_tokens,
        )  # fmt: skip
        packed = packed_places(places)
        copy_units(places, addresses, packed, addresses)
        copy_units(packed, addresses, places, addresses)
        digest_units(places, addresses, 1 << 60, out)
        copy_and_digest_units(places, addresses, packed, addresses, 1 << 60, out)
        for encoding in ("int8", "fp8"):
            encode_units(places, addresses, encoding, "bfloat16", head_dim, wire)
            decode_units(places, addresses, encoding, "bfloat16", head_dim, wire)
    digest(wire, 1 << 22, 1 << 60, out)


def compile_launch(kernel: JITFunction, arguments: dict[str, Any], capability: int) -> Any:
    """Compile as the launcher would: pointers and integers divisible by 16 are known to be, ones are constants."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            if special:
                aligned[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if special and value % 16 == 0:
                aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {name: value for name, value in arguments.items() if name in _OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack and spill memory a thread, as cuobjdump reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        report = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (re.search(rf"\b{name}:(\d+)", report) for name in ("REG", "STACK", "LOCAL"))
    if registers is None or stack is None or local is None:
        raise RuntimeError(f"cuobjdump answered: {report}")
    return {"registers": int(registers[1]), "spilled_bytes": int(stack[1]) + int(local[1])}


def main(capability: int, head_dims: list[int], block_sizes: list[int]) -> None:
    seen: set[str] = set()
    for head_dim, block_size in itertools.product(head_dims, block_sizes):
        with caught_launches() as launches:
            run_backend(TARGETS[capability], head_dim, block_size, heads=32, groups=8, dtype=torch.bfloat16)
            run_transfer(head_dim, block_size, groups=8)
        for kernel, arguments in launches:
            plain = {name: value for name, value in arguments.items() if not isinstance(value, torch.Tensor)}
            described = {"kernel": kernel.__name__} | {k.lower(): plain[k] for k in _DESCRIBED if k in plain}
            key = json.dumps([kernel.__name__, plain], sort_keys=True, default=str)
            if key in seen:
                continue
            seen.add(key)
            compiled = compile_launch(kernel, arguments, capability)
            described |= resource_usage(compiled.asm["cubin"])
            described["shared_bytes"] = compiled.metadata.shared
            described["wgmma"] = "wgmma.mma_async" in compiled.asm["ptx"]
            described["async_copies"] = "cp.async.cg" in compiled.asm["ptx"]
            described["wide_loads"] = bool(re.search(r"ld\.global\S*\.v(4\.b32|2\.b64)", compiled.asm["ptx"]))
            print(json.dumps(described), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(d) for d in sys.argv[2].split(",")], [int(b) for b in sys.argv[3].split(",")])
