"""What became of each request: a line of JSON, written as soon as it is over (`records-*.jsonl` of a run's folder).

All moments are seconds after the run's beginning, by the sender's monotonic clock.
"""

from collections.abc import Iterator
from errno import ENOSPC
from io import FileIO
from os import strerror
from pathlib import Path
from typing import Literal

import msgspec

from twostroke.loadtests.errors import LoadTestError

Status = Literal["ok", "refused", "failed", "unfinished"]
"""refused: 429 or 503, the server said that it won't; failed: an error, a broken or wrong stream, or no answer within
the limit; unfinished: the run was ended before the answer."""


class Record(msgspec.Struct, frozen=True):
    """One request."""

    session: int
    turn: int
    scheduled_s: float  # when it was to be sent: of later turns the end of the one before, and the time to think
    sent_s: float  # when it began to connect: what comes after is the server's and the network's
    end_s: float  # when all had come, or it was given up
    status: Status
    kind: str = ""
    http_status: int | None = None
    error: str | None = None  # one line, of refused and failed ones
    planned_input_tokens: int = 0
    planned_output_tokens: int = 0
    input_tokens: int | None = None  # the server's usage
    output_tokens: int | None = None
    cached_tokens: int | None = None
    token_s: tuple[float, ...] = ()  # when each event that brought text or a token came; the first: one with text
    stages: dict[str, float] | None = None  # the server's own durations, where it tells them (usage.stages)
    request_id: str | None = None

    @property
    def lag_s(self) -> float:
        """How late it was sent."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """From the scheduled arrival to the first text."""
        return self.token_s[0] - self.scheduled_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for one token, which has no time between.

        Where the server tells no number of tokens its events are counted: one may hold several, so that the true figure
        is at most that.
        """
        tokens = len(self.token_s) if self.output_tokens is None else self.output_tokens
        if not self.token_s or tokens < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between events that brought tokens, as they came."""
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Record)


def line_of(record: Record) -> bytes:
    """With its line end."""
    return _ENCODER.encode(record) + b"\n"


def append(file: FileIO, record: Record) -> None:
    """Unbuffered, and a whole line or none. Raises LoadTestError where the disk has no room."""
    line = line_of(record)
    try:
        written = file.write(line)
        if written < len(line):
            file.truncate(file.tell() - written)
            raise OSError(ENOSPC, strerror(ENOSPC))
    except OSError as error:
        raise LoadTestError(
            f"{file.name}: {error.strerror}, so the run ends: make room, or name another folder"
        ) from error


def read_records(path: Path) -> Iterator[Record]:
    """All whole lines of a file; a last one that was cut off is left out. Raises LoadTestError for others."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _DECODER.decode(line)
            except msgspec.DecodeError as error:
                raise LoadTestError(f"{path}, line {number}: no record of a load test: {error}") from error
