"""Triton's CPU interpreter with bf16 put right."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter


@contextmanager
def bf16_interpreter() -> Iterator[None]:
    """Within the block the interpreter computes bf16 as a GPU does, up to the order of sums.

    By itself it keeps bf16 as bare uint16 bits. Loads and stores move them unharmed, but a dot multiplies them as
    integers and fp32 -> bf16 truncates or mis-carries. Our kernels touch bf16 in three ways only: widen, round, dot.
    Those three are replaced here by torch's own conversions, as is what widens FP8 (e4m3), since the interpreter takes
    its NaN for 480; any arithmetic on bf16 raises, since it breaks the
    kernels' rule that arithmetic is in fp32 and would silently compute on bits.
    """
    builder, handle = triton_interpreter.InterpreterBuilder, triton_interpreter.TensorHandle
    dot, cast, binary, unary = builder.create_dot, builder.cast_impl, builder.binary_op, builder.unary_op

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if not _is_bf16(a) and not _is_bf16(b):
            return dot(self, a, b, d, *options)
        return handle(np.matmul(widen(a.data), widen(b.data)) + d.data, d.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if _is_bf16(source) and target.scalar == tl.float32:
            return handle(widen(source.data), tl.float32)
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return handle(narrow(source.data), tl.bfloat16)
        return cast(self, source, target)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if _is_bf16(left) or _is_bf16(right):
            raise TypeError(f"{op.__name__} on bf16: kernels do arithmetic in fp32")
        return binary(self, left, right, op)

    def unary_op(self: Any, value: Any, op: Any) -> Any:
        if _is_bf16(value):
            raise TypeError(f"{op.__name__} on bf16: kernels do arithmetic in fp32")
        return unary(self, value, op)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.dtype.scalar == tl.float8e4nv:
            source = handle(widen(source.data, torch.float8_e4m3fn), tl.float32)
            if target.scalar == tl.float32:
                return source
        if _is_bf16(source) or target.scalar == tl.bfloat16:
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    convert = builder.create_fp_to_fp
    changed = {
        "create_dot": create_dot,
        "cast_impl": cast_impl,
        "binary_op": binary_op,
        "unary_op": unary_op,
        "create_fp_to_fp": create_fp_to_fp,
    }
    originals = {name: getattr(builder, name) for name in changed}
    for name, function in changed.items():
        setattr(builder, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(builder, name, function)


def widen(bits: npt.NDArray[Any], dtype: torch.dtype = torch.bfloat16) -> npt.NDArray[Any]:
    """The bits of bf16, as uint16, or of another type -> the same values as fp32."""
    whole = np.ascontiguousarray(bits).view(f"int{8 * dtype.itemsize}")
    return torch.from_numpy(whole).view(dtype).float().numpy().reshape(bits.shape)


def narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """fp32 -> bf16 bits as uint16, to nearest, ties to even."""
    whole = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return whole.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def _is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)
