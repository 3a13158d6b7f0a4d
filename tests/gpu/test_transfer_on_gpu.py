"""KV transfer's kernels and links on the GPU at hand. Not confirmed on hardware so far: none was at hand."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rigs.device_store import SEED, TensorStore, segments_of
from tests.rigs.kv_pair import rank_shard
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.transports.host_units import encode
from twostroke.protocol.kv_layout import Encoding, KVLayout

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 40


def store_of(block_size: int = 16, seed: int | None = None) -> TensorStore:
    layout = KVLayout("m", "bfloat16", num_layers=3, num_kv_heads=8, head_dim=128, block_size=block_size)
    return TensorStore(layout, NUM_BLOCKS, "cuda:0", seed)


def chunk_of(seed: int, shard: KVShard) -> list[Segment]:
    return segments_of(seed, shard, NUM_BLOCKS, 20)


CUTS = [(0, 8, 16), (2, 4, 16), (0, 8, 4), (7, 1, 1)]


@pytest.mark.parametrize("encoding", ["raw", "int8", "fp8"])
@pytest.mark.parametrize(("first", "heads", "tokens"), CUTS)
def test_chunks_are_packed_digested_encoded_and_unpacked_as_the_references_do(
    first: int, heads: int, tokens: int, encoding: Encoding
) -> None:
    from tests.rigs.cuda_reference import digest_reference
    from twostroke.kvtransfer.transports.device_units import DeviceUnits

    source, target = store_of(seed=1), store_of()
    shard = rank_shard(source.layout, first, heads, tokens, encoding)
    here, there = DeviceUnits(source, shard), DeviceUnits(target, shard)
    sent, received = chunk_of(1, shard), chunk_of(2, shard)
    packed = torch.full((here.buffer_bytes(60),), 0xAB, dtype=torch.uint8, device="cuda")
    here.pack(sent, SEED, packed)
    raw = source.units(shard, sent).cpu()
    wire = raw.contiguous().view(torch.uint8).reshape(-1).numpy()
    if encoding != "raw":
        encoded = np.zeros(60 * shard.unit_bytes, np.uint8)
        encode(wire, shard, encoded)
        wire = encoded
    on_host = packed.cpu().numpy()
    assert np.array_equal(on_host[: wire.size], wire)
    assert on_host[-16:].tobytes() == digest_reference(wire, SEED)
    packed[5] ^= 1
    assert not there.unpack(received, SEED, packed)
    assert not any(layer.any() for layer in target.layers)
    packed[5] ^= 1
    assert there.unpack(received, SEED, packed)
    found = target.units(shard, received).cpu()
    if encoding == "raw":
        assert torch.equal(found, raw)
    else:
        torch.testing.assert_close(found.float(), raw.float(), rtol=0.07, atol=0.02)


SOURCE = """
import asyncio, json, sys
sys.path[:0] = [{root!r}]
from tests.rigs.kv_pair import lane_end
from tests.gpu.test_transfer_on_gpu import SEAL, chunk_of, store_of

async def main():
    store = store_of(seed=1)
    cut = lane_end(store.layout, 2, 4, 16, "raw")
    transport = {transport}(store, join_timeout_s=60)
    link = await transport.join(json.loads(sys.stdin.readline()), cut)
    for seed in (1, 3):
        await link.send(chunk_of(seed, cut), SEAL)
    print("sent", flush=True)
    sys.stdin.readline()
    await transport.close()

asyncio.run(main())
"""


async def receive_from_process(module: str, name: str) -> None:
    """Two chunks out of another process's cache into blocks of another size."""
    import importlib
    import json

    made = getattr(importlib.import_module(module), name)
    reference, store = store_of(seed=1), store_of(32)
    shard, own = rank_shard(reference.layout, 2, 4, 16, "raw"), rank_shard(store.layout, 2, 4, 16, "raw")
    transport = made(store, join_timeout_s=60)
    pending = await transport.prepare("127.0.0.1", own)
    script = f"from {module} import {name}\n" + SOURCE.format(root=str(ROOT), transport=name)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(pending.params).encode() + b"\n")
        link = await pending.established()
        for seed in (1, 3):
            received = chunk_of(seed + 1, own)
            assert await link.receive(received, SEED)
            assert torch.equal(store.units(own, received), reference.units(shard, chunk_of(seed, shard)))
        process.stdin.write(b"end\n")
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await transport.close()


async def test_cuda_ipc_reads_another_processs_cache() -> None:
    from twostroke.kvtransfer.transports.cuda_ipc import missing

    lacking = missing()
    if lacking is not None:
        pytest.skip(f"cuda_ipc needs {lacking}")
    await receive_from_process("twostroke.kvtransfer.transports.cuda_ipc", "CudaIpcTransport")


async def test_a_pair_of_processes_exchanges_chunks_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    if torch.cuda.device_count() == 1:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if version < (2, 30):
            pytest.skip(f"NCCL {'.'.join(map(str, version))} can't have two ranks on one GPU: it takes 2.30")
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    await receive_from_process("twostroke.kvtransfer.transports.torch_distributed", "TorchDistributedTransport")


def test_layers_are_announced_while_the_gpu_computes_and_their_kv_is_there() -> None:
    from twostroke.model.cache.layer_announcer import layer_announcer

    values = [torch.zeros(1 << 20, device="cuda") for _ in range(6)]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    seen: list[float] = []

    def on_layer(layer: int) -> None:
        with torch.cuda.stream(side):  # a stream that waits for nobody
            seen.append(float(values[layer].min()))

    announcer = layer_announcer(torch.device("cuda", torch.cuda.current_device()))
    assert announcer is not None
    step = announcer.step(on_layer)
    for layer, value in enumerate(values):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        value.fill_(layer + 1)
        step.announce(layer)
    step.result()
    announcer.close()
    assert seen == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
