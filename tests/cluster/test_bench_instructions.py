"""Counting instructions, where the machine lets us."""

import os
import threading

import pytest

from twostroke.benchmarks.instructions import counting


def work(rounds: int) -> None:
    for _ in range(rounds):
        pass


def test_what_a_process_executes_is_counted_in_threads_that_begin_later_too() -> None:
    with counting({"mine": [os.getpid()], "nobody": []}) as instructions:
        if instructions is None:
            pytest.skip("this machine lets nobody count instructions")
        before = instructions.so_far()["mine"]
        thread = threading.Thread(target=work, args=(1_000_000,))
        thread.start()
        thread.join()
        counts = instructions.so_far()
    assert counts["mine"] - before > 1_000_000
    assert counts["nobody"] == 0


def test_processes_that_are_gone_count_nothing() -> None:
    with counting({"gone": [2**22 + 1]}) as instructions:
        assert instructions is None or instructions.so_far() == {"gone": 0}
