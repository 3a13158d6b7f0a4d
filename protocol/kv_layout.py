"""How a worker lays out its KV cache, and which layouts can exchange KV. Pure.

A layer's cache on one tensor-parallel rank is [num_blocks, 2 (K, V), heads of this rank, block_size, head_dim].
"""

from typing import Literal

import msgspec

Encoding = Literal["raw", "int8", "fp8"]
"""KV on the wire: as it is stored, or one byte a value with a bf16 scale for each (token, head) of K and of V."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class KVLayout(msgspec.Struct, frozen=True, array_like=True):
    """What two workers compare before they exchange KV. All ranks of a worker have the same one."""

    model: str  # digest of configuration and weights
    dtype: str  # as torch names it, without the prefix
    num_layers: int
    num_kv_heads: int  # of the whole model
    head_dim: int
    block_size: int  # tokens
    tp_size: int = 1
    version: int = 1  # of this very arrangement

    @property
    def heads_per_rank(self) -> int:
        """KV heads in one rank's cache: 1 where there are more ranks than heads, which then hold copies."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer on one rank."""
        return 2 * self.heads_per_rank * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    def first_head(self, rank: int) -> int:
        """The first of the model's KV heads that `rank` holds."""
        return rank * self.num_kv_heads // self.tp_size

    def __str__(self) -> str:
        return (
            f"model={self.model} dtype={self.dtype} layers={self.num_layers} kv_heads={self.num_kv_heads} "
            f"head_dim={self.head_dim} block_size={self.block_size} tp={self.tp_size} layout={self.version}"
        )


def incompatibility(source: KVLayout, target: KVLayout, encoding: Encoding = "raw") -> str | None:
    """Why KV can't go from `source` to `target`, with both sides' values; None where it can.

    Block sizes and tensor-parallel sizes may differ; dtypes only where the KV is encoded on its way.
    """
    for name, what in (
        ("model", "model"),
        ("num_layers", "number of layers"),
        ("num_kv_heads", "number of KV heads"),
        ("head_dim", "head dimension"),
        ("version", "layout version"),
    ):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            return f"the {what} differs: {ours} at the source, {theirs} at the target"
    if encoding == "raw" and source.dtype != target.dtype:
        return f"the KV dtype differs: {source.dtype} at the source, {target.dtype} at the target"
    for side, layout in (("source", source), ("target", target)):
        fault = _fault(layout)
        if fault is not None:
            return f"the {side}'s layout can't be: {fault}"
    return None


def _fault(layout: KVLayout) -> str | None:
    if layout.dtype not in DTYPE_BYTES:
        return f"there is no KV dtype {layout.dtype}"
    if min(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.tp_size) < 1:
        return f"a size is not positive in {layout}"
    small, large = sorted((layout.tp_size, layout.num_kv_heads))
    if large % small:
        return f"{layout.tp_size} tensor-parallel ranks can't share {layout.num_kv_heads} KV heads evenly"
    return None
