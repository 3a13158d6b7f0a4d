"""Memory that an engine may take, what remains for the KV cache, and the message where nothing remains."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twostroke.model.batch import check_batch
from twostroke.model.cache import memory
from twostroke.model.cache.memory import (
    GpuMemory,
    MemoryNeed,
    cache_bytes_on_gpu,
    cache_bytes_on_host,
    check_memory,
    check_memory_of_all,
    describe_cache,
)
from twostroke.model.costs.sizes import COMMUNICATOR_BYTES, CUDA_CONTEXT_BYTES, StepBounds, communicator_bytes
from twostroke.model.load import largest_batch
from twostroke.model.parallel.form import ParallelForm
from twostroke.protocol.errors import ConfigError

GIB = 2**30


def cgroup(folder: Path, most: str, used: int, *, cached: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip(names, (most, str(used)), strict=True):
        (folder / name).write_text(f"{text}\n")
    field = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{field} {cached}\n")


def own(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "self-cgroup"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_host_without_limits_gives_what_the_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cgroup"
    assert memory._cgroup_bytes(root, own(tmp_path, "0::/")) == []
    cgroup(root, "max", GIB)
    assert memory._cgroup_bytes(root, own(tmp_path, "0::/")) == []
    assert memory._cgroup_bytes(root, tmp_path / "none") == []
    monkeypatch.setattr(memory, "_cgroup_bytes", list)
    assert memory.available_bytes(torch.device("cpu")) > 0


def test_a_services_limit_counts_and_so_do_those_around_it(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    cgroup(root / "system.slice", str(8 * GIB), 6 * GIB)
    cgroup(root / "system.slice" / "a.service", str(4 * GIB), 3 * GIB, cached=GIB)
    found = memory._cgroup_bytes(root, own(tmp_path, "0::/system.slice/a.service"))
    assert found == [2 * GIB, 2 * GIB]


def test_limits_of_the_first_version_count(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    cgroup(root / "memory", str(4 * GIB), GIB, cached=GIB, version=1)
    assert memory._cgroup_bytes(root, own(tmp_path, "4:memory:/x")) == [4 * GIB]
    cgroup(root / "memory" / "x", str(2 * GIB), GIB, version=1)
    assert memory._cgroup_bytes(root, own(tmp_path, "4:cpu,memory:/x")) == [4 * GIB, GIB]


def test_a_full_group_leaves_nothing(tmp_path: Path) -> None:
    cgroup(tmp_path / "cgroup", str(GIB), 2 * GIB)
    assert memory._cgroup_bytes(tmp_path / "cgroup", own(tmp_path, "0::/")) == [0]


@pytest.mark.parametrize(
    ("free", "graphs", "staging", "left"),
    [
        (60, 0, 0, 54 * GIB - CUDA_CONTEXT_BYTES),
        (60, 1, 0, 53 * GIB - CUDA_CONTEXT_BYTES),
        (60, 1, 2, 51 * GIB - CUDA_CONTEXT_BYTES),
        (10, 0, 0, 8 * GIB),
        (10, 0, 1, 7 * GIB),
    ],
    ids=["its share", "beside captured steps", "and links", "beside what others hold", "beside both"],
)
def test_the_cache_gets_what_weights_steps_links_cuda_and_others_leave(
    free: int, graphs: int, staging: int, left: int
) -> None:
    memory = GpuMemory(
        80 * GIB,
        free * GIB,
        share=0.9,
        weights=16 * GIB,
        peak_step=2 * GIB,
        graphs=graphs * GIB,
        staging=staging * GIB,
    )
    assert cache_bytes_on_gpu(memory) == left


def test_nccls_communicators_of_the_ranks_come_out_of_the_workers_share_alone() -> None:
    """They are there when the step is measured, so they are not free any more."""
    assert [communicator_bytes(ParallelForm(*form)) for form in ((1, 1), (2, 1), (1, 2), (4, 2))] == [
        0,
        COMMUNICATOR_BYTES,
        COMMUNICATOR_BYTES,
        2 * COMMUNICATOR_BYTES,
    ]
    taken = communicator_bytes(ParallelForm(2))
    memory = GpuMemory(80 * GIB, 70 * GIB, share=0.5, weights=16 * GIB, peak_step=2 * GIB, communicators=taken)
    assert cache_bytes_on_gpu(memory) == 22 * GIB - CUDA_CONTEXT_BYTES - taken
    assert cache_bytes_on_gpu(replace(memory, free=12 * GIB)) == 10 * GIB


def test_where_nothing_is_left_one_line_has_the_arithmetic() -> None:
    memory = GpuMemory(total=24 * GIB, free=6 * GIB, share=0.5, weights=11 * GIB, peak_step=1 * GIB)
    with pytest.raises(
        ConfigError, match=r"0\.50 of 24\.00 GiB = 12\.00 GiB .* 11\.00 GiB, the largest step 1\.00 GiB"
    ):
        cache_bytes_on_gpu(memory)


def test_a_sum_that_just_fits_is_taken() -> None:
    check_memory("cpu", weights=5, cache=3, step=2, free=10)
    with pytest.raises(ConfigError, match=r"only 0\.0 MiB are free"):
        check_memory("cpu", weights=5, cache=3, step=2, free=9)


def test_a_cache_is_described_in_full_requests() -> None:
    said = describe_cache(num_blocks=1024, block_size=16, block_bytes=2**20, requests=2.0, max_context=8192)
    assert said == (
        "KV cache 1.00 GiB: 1024 blocks of 16 tokens, room for 2.0 requests of the full context of 8192 tokens"
    )


@pytest.mark.parametrize(
    ("bounds", "max_context"),
    [(StepBounds(2048, 256), 8192), (StepBounds(100, 256), 64), (StepBounds(5000, 3), 1024), (StepBounds(7, 3), 1024)],
)
def test_the_largest_batch_is_one_that_a_cache_of_one_block_takes(bounds: StepBounds, max_context: int) -> None:
    batch = largest_batch(bounds, 16, max_context)
    check_batch(batch, 16, 1, max_context)
    assert len(batch) == min(bounds.max_sequences, bounds.max_tokens)
    tokens = sum(len(step.token_ids) for step in batch)
    assert tokens == min(bounds.max_tokens, len(batch) * (max_context - 1))


def test_where_all_workers_need_too_much_each_part_is_named() -> None:
    prefill = MemoryNeed("prefill", 2, weights=GIB, cache=2 * GIB, step=GIB // 2, swap=0, processes=GIB)
    decode = MemoryNeed("decode", 1, weights=GIB, cache=GIB, step=0, swap=3 * GIB, processes=GIB)
    check_memory_of_all([prefill, decode], rest=GIB, free=16 * GIB)
    with pytest.raises(ConfigError) as told:
        check_memory_of_all([prefill, decode], rest=GIB, free=16 * GIB - 1)
    assert str(told.value).startswith(
        "too little memory: 2 prefill of 4.50 GiB (weights 1.00 GiB, KV cache 2.00 GiB, largest step 512.0 MiB, "
        "processes 1.00 GiB) + 1 decode of 6.00 GiB (weights 1.00 GiB, KV cache 1.00 GiB, swap 3.00 GiB, processes "
        "1.00 GiB) + Ray and routers 1.00 GiB = 16.00 GiB, but only 16.00 GiB are free: lower kv_cache_gib"
    )


@pytest.mark.parametrize(
    ("free_gib", "ranks", "needed_gib", "context_gib", "cache_gib"),
    [
        (40, 2, 1, 0.125, 2),  # a tenth, shared
        (16, 2, 1, 0.5, 2),  # four full contexts
        (16, 2, 1, 4, 3.5),  # for which there is no room: half of what is left
        (4, 2, 3, 4, 0.25),  # hardly anything is left: the sum is checked, and told
    ],
)
def test_a_cpus_cache_is_part_of_a_tenth_and_four_contexts_where_there_is_room(
    free_gib: float, ranks: int, needed_gib: float, context_gib: float, cache_gib: float
) -> None:
    free, needed, context = (int(size * 2**30) for size in (free_gib, needed_gib, context_gib))
    assert cache_bytes_on_host(free, ranks, needed=needed, full_context=context) == int(cache_gib * 2**30)
