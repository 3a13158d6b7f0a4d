"""Cores lent between a machine's workers: taken while their owners have nothing to do, and never twice."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from twostroke.model.cpu import core_lending
from twostroke.model.cpu.core_lending import PAUSE_NS, STEP_NS, CoreLending, lend_cores
from twostroke.model.engine import ThreadEngine
from twostroke.model.runner import LaunchedStep

Join = Callable[[int], CoreLending]


class Clock:
    def __init__(self) -> None:
        self.now = 10**15

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@pytest.fixture
def join(path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Makes workers of a machine with eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    joined: list[CoreLending] = []

    def one(cores: int) -> CoreLending:
        joined.append(CoreLending(cores, path, clock))
        return joined[-1]

    yield one
    for lending in joined:
        lending.close()


def test_a_worker_that_loads_lends_nothing(join: Join, clock: Clock) -> None:
    prefill, _ = join(2), join(3)
    clock.now += 60 * STEP_NS
    assert prefill.begin() == 2


def test_cores_come_back_once_a_pause_is_too_long_for_one_between_steps(join: Join, clock: Clock) -> None:
    prefill, decode = join(2), join(3)
    decode.begin()
    decode.end()
    clock.now += PAUSE_NS
    assert prefill.begin() == 2, "between two steps"
    clock.now += 1
    assert prefill.begin() == 5
    assert decode.begin() == 3, "its own, whoever uses them still"
    assert prefill.begin() == 2, "at the next layer"


def test_who_dies_within_a_step_lends_before_long(join: Join, clock: Clock) -> None:
    prefill, decode = join(2), join(3)
    decode.begin()
    clock.now += STEP_NS + 1
    assert prefill.begin() == 5


def test_borrowers_share_what_is_lent(join: Join, clock: Clock) -> None:
    workers = [join(2) for _ in range(3)]
    for worker in workers:
        worker.end()
    clock.now += PAUSE_NS + 1
    assert workers[0].begin() == 6
    assert workers[1].begin() == 3, "half of the third one's"
    assert workers[0].begin() == 3


def test_no_step_has_more_threads_than_there_are_cores(join: Join, clock: Clock) -> None:
    workers = [join(6) for _ in range(2)]
    workers[1].end()
    clock.now += PAUSE_NS + 1
    assert workers[0].begin() == 8


def test_rows_of_closed_and_of_dead_workers_lend_nothing(join: Join, path: Path, clock: Clock) -> None:
    program = (
        "import sys; from pathlib import Path; from twostroke.model.cpu.core_lending import CoreLending\n"
        "for lending in [CoreLending(cores, Path(sys.argv[1])) for cores in (2, 3)]: lending.end()\n"
        "print(flush=True); sys.stdin.read()"
    )
    first, closed = join(1), CoreLending(2, path, clock)
    closed.end()
    closed.close()
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        clock.now = 2**62  # beyond the real clock's, which the process told
        assert first.begin() == 6, "the process is idle"
        process.send_signal(signal.SIGKILL)
    second = join(1)
    second.begin()
    assert first.begin() == 1, "one of the dead rows is taken, the other one empty"


def test_an_engine_sets_its_threads_by_what_it_is_lent(join: Join, path: Path, clock: Clock) -> None:
    seen: list[int] = []

    class Runner:
        num_broken_rows = 0

        def launch(self, batch: object, on_layer: Callable[[int], None] | None, earlier: object) -> LaunchedStep:
            seen.append(torch.get_num_threads())
            neighbour.begin()
            assert on_layer is not None
            on_layer(0)
            seen.append(torch.get_num_threads())
            return LaunchedStep([])

    neighbour, lending = join(1), CoreLending(1, path, clock)
    neighbour.end()
    clock.now += PAUSE_NS + 1
    engine = ThreadEngine(lambda: Runner(), threads=1, lending=lending)  # type: ignore[arg-type, return-value]
    try:
        asyncio.run(engine.step([], lambda layer: None))
    finally:
        engine.close()
    assert seen == [2, 1], "the neighbour's core, until it began"
    clock.now += PAUSE_NS + 1
    assert neighbour.begin() == 1, "a closed engine lends nothing"


def test_who_can_not_take_part_keeps_to_its_own_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(core_lending, "default_path", lambda: tmp_path / "link")
    assert lend_cores(2) is None
    assert "keep to 2 cores of their own" in caplog.text
    assert not (tmp_path / "elsewhere").exists()
