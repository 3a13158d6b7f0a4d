"""The paged KV cache: one tensor a layer, [num_blocks, 2 (K, V), kv_heads, block_size, head_dim].

A block of a layer is contiguous, and within it each head's keys and values are: what a transfer moves is one piece.
Which block belongs to whom is the block pool's business, not ours.
"""

import torch
from torch import Tensor

from model.config import ModelConfig

LAYOUT_VERSION = 1


class KVCache:
    """Block storage of all layers; on CPUs also what `kvtransfer` calls a KVStore."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        model_digest: str,
    ):
        shape = (num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
        # Zeros, not garbage: masked positions are multiplied by 0, and 0 * NaN is NaN.
        self.tensors: list[Tensor] = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self._model_digest = model_digest

    @property
    def num_layers(self) -> int:
        return len(self.tensors)

    @property
    def num_blocks(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.tensors[0].shape[3]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.tensors[0][0].numel() * self.tensors[0].element_size()

    @property
    def fingerprint(self) -> str:
        """Of model and layout, readable: a mismatch shows which part differs."""
        _, _, heads, block_size, head_dim = self.tensors[0].shape
        dtype = str(self.tensors[0].dtype).removeprefix("torch.")
        return (
            f"model={self._model_digest} dtype={dtype} block_size={block_size} layers={self.num_layers} "
            f"kv_heads={heads} head_dim={head_dim} layout={LAYOUT_VERSION}"
        )

    def layer_bytes(self, layer: int) -> memoryview:
        """A writable view of uint8 [num_blocks * block_bytes]. Raises TypeError for a cache on a GPU."""
        tensor = self.tensors[layer]
        if tensor.device.type != "cpu":
            raise TypeError(f"the KV cache is on {tensor.device}, its bytes are not addressable from the host")
        return tensor.view(torch.uint8).reshape(-1).numpy().data


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in all layers together."""
    return 2 * config.num_layers * config.kv_size * block_size * dtype.itemsize
