"""A cache in a GPU's memory, or in what a test takes for one, and random chunks of it."""

import random

import torch

from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.protocol.kv_layout import KVLayout

SEED = 2**63 + 5


class TensorStore:
    """A DeviceStore of random bf16 values, or of zeros without a seed."""

    rank = 0

    def __init__(self, layout: KVLayout, num_blocks: int, device: str, seed: int | None = None):
        self.layout, self.num_blocks, self.device = layout, num_blocks, device
        shape = (num_blocks, 2, layout.heads_per_rank, layout.block_size, layout.head_dim)
        self.layers = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(layout.num_layers)]
        if seed is not None:
            generator = torch.Generator(device).manual_seed(seed)
            for layer in self.layers:
                layer.normal_(generator=generator)

    def layer_tensor(self, layer: int) -> torch.Tensor:
        return self.layers[layer]

    def units(self, shard: KVShard, segments: list[Segment]) -> torch.Tensor:
        """[units, 2, heads, tokens, head_dim], one after the other."""
        heads = slice(shard.first_head, shard.first_head + shard.num_heads)
        found = []
        for segment in segments:
            for unit_id in segment.unit_ids:
                block, part = divmod(unit_id, shard.units_per_block)
                tokens = slice(part * shard.unit_tokens, (part + 1) * shard.unit_tokens)
                found.append(self.layers[segment.layer][block, :, heads, tokens])
        return torch.stack(found)


def segments_of(seed: int, shard: KVShard, num_blocks: int, num_units: int) -> list[Segment]:
    """Some units of each layer, in any order, the last layer first."""
    draw, ids = random.Random(seed), range(num_blocks * shard.units_per_block)
    return [Segment(layer, tuple(draw.sample(ids, num_units))) for layer in reversed(range(shard.layout.num_layers))]
