"""Cores lent between a server's workers: used while their owners have nothing to compute, given back at once, and never
lent twice."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.model.cache.layer_announcer import LaunchedStep
from twostroke.model.cpu.kernels import launch
from twostroke.model.cpu.kernels.launch import (
    _RELEASED,
    CHECK_S,
    MAX_THREADS,
    CoreLending,
    Kernel,
    Launcher,
    Program,
    as_integers,
    lend_cores,
    taken,
)
from twostroke.model.engine import ThreadEngine
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import load_engine
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams

Join = Callable[[int], CoreLending]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores" / "table"


@pytest.fixture
def join(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Makes busy workers of a host with eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    joined: list[CoreLending] = []

    def one(cores: int) -> CoreLending:
        joined.append(CoreLending(cores, path))
        return joined[-1]

    yield one
    for lending in joined:
        lending.close()
    torch.set_num_threads(1)


def test_a_worker_uses_the_cores_of_an_idle_one_until_that_has_a_step(join: Join) -> None:
    prefill, decode = join(2), join(3)
    assert prefill.num_threads() == 2, "the other one loads"
    decode.end()
    assert prefill.num_threads() == 5
    decode.begin()
    assert (prefill.num_threads(), decode.num_threads()) == (2, 3)


@pytest.mark.parametrize(("idle", "shares"), [(0, [1, 1, 1]), (1, [2, 1, 1]), (2, [2, 2, 1]), (4, [3, 2, 2])])
def test_busy_workers_share_what_is_lent(join: Join, idle: int, shares: list[int]) -> None:
    busy = [join(1) for _ in range(3)]
    for _ in range(idle):
        join(1).end()
    assert [worker.num_threads() for worker in busy] == shares
    assert sum(shares) == 3 + idle, "no core twice, and none left"


def test_no_step_has_more_threads_than_there_are_cores(join: Join) -> None:
    one, other = join(6), join(6)
    other.end()
    assert one.num_threads() == 8


def test_workers_that_own_more_cores_than_there_are_share_no_core_twice(join: Join) -> None:
    one, other, third = join(4), join(3), join(5)
    third.end()
    assert (one.num_threads(), other.num_threads()) == (5, 3)
    other.end()
    assert one.num_threads() == 8


def test_a_closed_worker_lends_nothing_and_the_last_one_removes_the_table(join: Join, path: Path) -> None:
    one, other = CoreLending(1, path), CoreLending(2, path)
    other.end()
    other.close()
    assert one.num_threads() == 1
    assert path.exists()
    one.close()
    assert not path.exists()


def test_a_killed_worker_lends_its_cores_no_longer_than_until_somebody_looks(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from twostroke.model.cpu.kernels.launch import CoreLending\n"
        "CoreLending(2, Path(sys.argv[1])); CoreLending(3, Path(sys.argv[1])).end()\n"
        "print(flush=True); sys.stdin.read()"
    )
    now = 0.0
    survivor = CoreLending(1, path, lambda: now)
    survivor._words[2] = 8  # the host's cores
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        now += CHECK_S
        survivor.begin()
        assert survivor.num_threads() == 1 + 2, "the process has an idle worker and a busy one"
        process.send_signal(signal.SIGKILL)
    now += CHECK_S
    survivor.begin()
    assert survivor.num_threads() == 1
    survivor.close()
    assert not path.exists(), "rows of the dead hold no lock"


def test_a_new_worker_removes_tables_of_servers_that_were_killed(join: Join, path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    left, other = path.with_name("left"), CoreLending(1, path.with_name("other"))
    left.write_bytes(bytes(8))
    join(1)
    assert sorted(path.parent.iterdir()) == [other._path, path]
    other.close()


def test_a_worker_that_can_not_take_part_keeps_to_its_own_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    assert lend_cores(2, tmp_path / "table") is None
    assert "others may write there" in caplog.text
    tmp_path.chmod(0o700)
    (tmp_path / "table").symlink_to(tmp_path / "elsewhere")
    assert lend_cores(2, tmp_path / "table") is None
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "table").unlink()
    monkeypatch.setattr(launch, "MAX_WORKERS", 0)
    assert lend_cores(2, tmp_path / "table") is None
    assert "keep to their own 2 cores" in caplog.text


@Kernel
def COUNT(words):
    """words: a counter, the row of a worker or 0, and what to say there of its being busy."""
    for _ in taken(words, words[1]):
        as_integers(words[3])[0] += 1
        if words[4] != 0:
            as_integers(words[4])[1] = words[5]


@pytest.mark.parametrize("busy_at", [None, 0, 2, 3])
def test_threads_on_borrowed_cores_leave_a_program_between_two_kernels(join: Join, busy_at: int | None) -> None:
    lending, neighbour = join(1), join(1)
    row = int(neighbour._table.ctypes.data) + neighbour._row * neighbour._table.itemsize * 2
    counts, program = torch.zeros(4, dtype=torch.int64), Program()
    for op in range(4):
        program.append(COUNT, 1, 1, counts[op:], row if op == busy_at else 0, 1)
    launcher = Launcher(lending)
    for replay in range(1, 4):
        neighbour.end()
        launcher.replay(program)
        assert counts.tolist() == [replay] * 4, "each kernel has run once, whoever left"
        assert program._memory is not None
        last, threads = divmod(int(program._memory[_RELEASED]), MAX_THREADS)
        assert (last, threads) == ((4, 2) if busy_at is None else (busy_at + 1, 1)), "barriers of the whole team"


def test_kernels_that_run_at_once_follow_what_is_lent(join: Join) -> None:
    lending, neighbour = join(2), join(3)
    launcher, counts, seen = Launcher(lending), torch.zeros(1, dtype=torch.int64), []
    for change in (neighbour.end, neighbour.begin):
        change()
        launcher.run(COUNT, 1, 1, counts, 0, 0)
        seen.append(torch.get_num_threads())
    assert seen == [5, 2]


def test_an_engine_lends_its_cores_while_it_has_no_step(join: Join, path: Path) -> None:
    seen: list[int] = []

    class Runner:
        num_broken_rows = 0

        def launch(self, batch: object, on_layer: object, earlier: object) -> LaunchedStep:
            seen.append(neighbour.num_threads())
            return LaunchedStep([])

        def close(self) -> None:
            pass

    neighbour = join(1)
    engine = ThreadEngine(lambda: Runner(), threads=1, lending=CoreLending(1, path))  # type: ignore[arg-type, return-value]

    async def steps() -> None:
        await asyncio.gather(engine.step([]), engine.step([]))

    try:
        seen.append(neighbour.num_threads())
        asyncio.run(steps())
        engine._executor.submit(int).result()  # the thread is through with the steps
        seen.append(neighbour.num_threads())
    finally:
        engine.close()
    assert seen == [2, 1, 1, 2]
    assert neighbour.num_threads() == 1, "a closed engine lends nothing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_logits_and_kv_have_the_same_bits_on_any_number_of_threads(
    write_checkpoint: Callable[..., Any], dtype: Any
) -> None:
    """Chunks of prompts beside decodes, and decodes alone, which are replayed; log-probabilities stand for logits."""
    loaded = load_engine(EngineConfig(write_checkpoint(), dtype=dtype, num_blocks=64, block_size=8, threads=1))
    draw = SamplingParams(temperature=0.8, seed=7, logprobs=20)

    def row(tokens: int, start: int, first: int) -> SequenceStep:
        ids = [(7 * token + first) % 96 for token in range(tokens)]
        return SequenceStep(ids, start, range(first, first + 16), Draw(draw, [1] * (start + tokens), 1))

    batches = [
        [row(100, 0, 0), row(3, 0, 16)],
        [row(1, 100, 0), row(1, 3, 16), row(64, 0, 32)],
        [row(1, 101, 0), row(1, 4, 16), row(1, 64, 32)],
        [row(1, 102, 0)],
    ]
    results = []
    try:
        for threads in (1, 2, 3):
            loaded.engine._executor.submit(torch.set_num_threads, threads).result()
            for layer in loaded.kv_cache.tensors:
                layer.zero_()
            drawn = [asyncio.run(loaded.engine.step(batch)) for batch in batches]
            results.append((drawn, [layer.clone() for layer in loaded.kv_cache.tensors]))
    finally:
        loaded.engine.close()
    (drawn, layers), *others = results
    assert all(token is not None and len(token.top) == 20 for step in drawn for token in step)
    for other, other_layers in others:
        assert other == drawn
        assert all(map(torch.equal, layers, other_layers))
