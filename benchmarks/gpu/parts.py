"""Smaller parts of serving on a GPU: packing KV, drawing tokens, and the start of a worker."""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from twostroke.benchmarks.engine import write_random_model
from twostroke.benchmarks.gpu.limits import GpuLimits, GpuPlace, Row, Sizes
from twostroke.model.cuda.kernels.kv_digest import copy_and_digest_units
from twostroke.model.cuda.kernels.kv_units import address_tensor, packed_places, paged_places
from twostroke.model.cuda.sampler import DeviceSampler
from twostroke.model.step import Draw
from twostroke.protocol.requests import SamplingParams

SEAL = 12345
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50, seed=1),
}
COLD_START_S = 20.0


def measure_packing(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> list[Row]:
    """Whole blocks in any order to one buffer and back, with their digest, against a plain copy."""
    return [row for block_size in sizes.pack_blocks for row in _packing(sizes, place, limits, block_size)]


def measure_sampling(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> list[Row]:
    """Drawing from logits of the whole vocabulary, against reading them once."""
    sampler = DeviceSampler(sizes.model.vocab_size, place.device)
    rows = []
    for count in sizes.sampled_rows:
        logits = torch.randn(count, sizes.model.vocab_size, device=place.device)
        for name, sampling in SAMPLINGS.items():
            launch = partial(sampler.launch, logits, [Draw(sampling, [1], 1)] * count, [1] * count)
            launch()  # compiles
            taken_s = place.clock.queued_seconds(launch)
            share = logits.nbytes / limits.read / taken_s
            rows.append(Row(f"sampling {count} rows, {name}", share, None, f"{taken_s * 1e6:.0f} us", "one read"))
    return rows


def measure_start(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> list[Row]:
    """A process's way to an engine that has drawn a token, of the 1.2B shape; before and after kernels are compiled."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder), "1.2b")
        cache = Path(folder, "triton")
        for name in ("kernels to compile", "kernels compiled"):
            begin = time.perf_counter()
            command = [sys.executable, "-m", "twostroke.benchmarks.gpu.start", folder, place.device.type]
            subprocess.run(command, check=True, env={**os.environ, "TRITON_CACHE_DIR": str(cache)})
            taken_s = time.perf_counter() - begin
            rows.append(Row(f"start, {name}", COLD_START_S / taken_s, 1.0, f"{taken_s:.1f} s", "20 s"))
    return rows


def _packing(sizes: Sizes, place: GpuPlace, limits: GpuLimits, block_size: int) -> list[Row]:
    config, device = sizes.model, place.device
    paged = paged_places(
        row_bytes=config.head_dim * 2,
        heads_per_block=config.num_kv_heads,
        block_size=block_size,
        first_head=0,
        num_heads=config.num_kv_heads,
        unit_tokens=block_size,
    )
    flat, units = packed_places(paged), max(1, sizes.pack_bytes // paged.unit_bytes)
    cache, buffer = (torch.zeros(units * paged.unit_bytes // 8, dtype=torch.int64, device=device) for _ in range(2))
    there = np.random.default_rng(0).permutation(units)
    scattered = address_tensor(paged.addresses(np.int64(cache.data_ptr()), there), device)
    packed = address_tensor(flat.addresses(np.int64(buffer.data_ptr()), np.arange(units)), device)
    digest = torch.zeros(2, dtype=torch.int64, device=device)
    ways = {"pack": (paged, scattered, flat, packed), "unpack": (flat, packed, paged, scattered)}
    rows = []
    for name, way in ways.items():
        rate = units * paged.unit_bytes / place.clock.seconds(partial(copy_and_digest_units, *way, SEAL, digest))
        figure = f"{rate / 1e12:.2f} TB/s"
        rows.append(Row(f"KV {name}, blocks of {block_size}", rate / limits.copy, 0.85, figure, "copy rate"))
    return rows
