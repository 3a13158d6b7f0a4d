"""The pipe of a chaos run's logs."""

import os
from pathlib import Path

import pytest

from tests.chaos.log_pipe import LogPipe
from tests.rigs.processes import comes


async def test_a_pipe_is_full_once_it_was_logged_into_and_nobody_reads_and_loses_no_line(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as log:
        pipe = LogPipe(tmp_path / "pipe", log)
        assert not any(pipe.is_full() for _ in range(64)), "nobody has logged"
        process = os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK)
        os.write(process, b"line\n")
        assert await comes(pipe.is_full, within_s=5.0)
        with pytest.raises(BlockingIOError):
            os.write(process, b"x" * 1024)
        pipe.collect()
        assert await comes(lambda: not pipe.is_full(), within_s=5.0)
        pipe.close()
        os.close(process)
    assert (tmp_path / "log").read_bytes().startswith(b"line\n")
