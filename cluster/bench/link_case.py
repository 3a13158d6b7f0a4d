"""A message as it really is: the KV of one prompt of one model, cut into the chunks that a transfer would send."""

import random

import msgspec
import torch

from twostroke.kvtransfer.chunk_plan import ChunkPlan
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.layout import Cut, Segment, cut_lane, plan_lanes
from twostroke.model.config import ModelConfig, RopeConfig
from twostroke.model.kv_cache import SharedKVCache, make_kv_cache
from twostroke.protocol.errors import ConfigError

POOL_BYTES = 256 * 1024 * 1024
"""Of a case's cache: far more than the processor's caches hold, since KV that is sent was not touched just before.

A short prompt is there many times, each in blocks of its own. Of a longer one the tail is left out: it is the same
chunks for longer.
"""

SHAPES = {  # layers, KV heads, head dimension
    "160M": (12, 4, 64),
    "1B": (16, 8, 64),
    "8B": (32, 8, 128),
}


class Case(msgspec.Struct, frozen=True):
    """A cell of the grid."""

    shape: str
    prompt_tokens: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.shape}, {self.prompt_tokens} tokens, blocks of {self.block_size}"


class Message:
    """A case's cache in this process, its blocks scattered over the pool, and the chunks of all its copies."""

    def __init__(self, case: Case):
        num_layers, num_kv_heads, head_dim = SHAPES[case.shape]
        config = ModelConfig(
            vocab_size=1,
            hidden_size=num_kv_heads * head_dim,
            intermediate_size=1,
            num_layers=num_layers,
            num_heads=num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=case.prompt_tokens,
            rms_norm_eps=1e-5,
            rope=RopeConfig(),
        )
        pool_blocks = max(1, POOL_BYTES // (num_layers * 4 * num_kv_heads * head_dim * case.block_size))
        prompt_blocks = min(-(-case.prompt_tokens // case.block_size), pool_blocks)
        copies = pool_blocks // prompt_blocks
        num_blocks = copies * prompt_blocks
        cache = make_kv_cache(
            config,
            num_blocks=num_blocks,
            block_size=case.block_size,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            model_digest="bench",
        )
        if not isinstance(cache, SharedKVCache):
            raise ConfigError("this machine has no memfd, and the bench of shm needs one")
        self.cache = cache
        for layer, tensor in enumerate(cache.tensors):
            tensor.fill_(layer + 1)
        layout = cache.layout
        self.cut: Cut = cut_lane(plan_lanes(1, 1, num_kv_heads)[0], layout, layout, "raw")[0]
        table = list(range(num_blocks))
        random.Random(0).shuffle(table)
        self.chunks: list[tuple[Segment, ...]] = []
        for first in range(0, num_blocks, prompt_blocks):
            self.chunks += self._chunks(tuple(table[first : first + prompt_blocks]))
        self.num_bytes = num_layers * num_blocks * layout.block_bytes
        self.prompt_bytes = [self.num_bytes // copies] * copies  # of each prompt

    def _chunks(self, table: tuple[int, ...]) -> list[tuple[Segment, ...]]:
        """Of one prompt whose KV is all ready."""
        num_tokens = len(table) * self.cut.layout.block_size
        plan = ChunkPlan(num_layers=self.cut.layout.num_layers, num_tokens=num_tokens, num_ready_tokens=num_tokens)
        plan.begin(self.cut.unit_tokens, 0)
        max_units = max(1, TransferConfig().max_chunk_bytes // self.cut.unit_bytes)
        chunks: list[tuple[Segment, ...]] = []
        while runs := plan.next_runs(max_units):
            chunks.append(self.cut.segments(runs, table))
        return chunks

    @property
    def chunk_bytes(self) -> list[int]:
        """Of each chunk."""
        return [sum(len(segment.unit_ids) for segment in chunk) * self.cut.unit_bytes for chunk in self.chunks]

    def close(self) -> None:
        self.cache.close()
