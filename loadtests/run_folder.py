"""A run's folder: what a run leaves, and a report is made of.

plan.json            what was to be done
run.json             what it was done with: server, machine, versions, and how well the generator kept its schedule
records-N.jsonl      what became of each request, of Locust process N: a line as soon as it is over
samples.jsonl        the server's queues and KV use, about once a second, where it tells them
locust-*.log         what Locust itself said
report.json, report.html, *.png

All moments of records are seconds after the run's beginning, by the sender's monotonic clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from errno import ENOSPC
from io import FileIO
from os import strerror
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from twostroke.loadtests import LoadTestError, unwritable
from twostroke.loadtests.plan import Plan

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
    is_unreadable: bool = False  # failed since the client could not read the response, which says nothing of the server

    @property
    def lag_s(self) -> float:
        """Seconds by which it was sent late."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the scheduled arrival to the first text."""
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
        """Seconds between events that brought tokens, in order."""
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Record)


def record_line(record: Record) -> bytes:
    """Return the record as a line with its line end."""
    return _ENCODER.encode(record) + b"\n"


def append(file: FileIO, record: Record) -> None:
    """Unbuffered, and a whole line or none. Raises LoadTestError where the disk has no room."""
    line = record_line(record)
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


T = TypeVar("T")


class Sample(msgspec.Struct, frozen=True):
    """One worker's numbers at one moment."""

    at_s: float  # after the run's beginning
    role: str  # prefill or decode
    worker: str
    running: float
    waiting: float
    waiting_tokens: float
    kv_usage: float  # 0 to 1
    mfu: float | None = None  # model FLOPs utilisation, 0 to 1; None: the server does not tell
    mbu: float | None = None  # of its memory's bandwidth
    # Counters of speculative decoding, and of all tokens of answers; None: the server does not tell.
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    generated_tokens: float | None = None


class GeneratorHealth(msgspec.Struct, frozen=True):
    """CPU use and lag of one Locust process."""

    worker: int
    num_sent: int
    cpu_seconds: float  # of its process
    wall_seconds: float


class RunFacts(msgspec.Struct, frozen=True):
    """Server, machine and versions of a run."""

    started_at: str  # ISO 8601, UTC
    server: dict[str, Any]  # what the server tells of itself: version, workers, classes; empty for others' servers
    machine: dict[str, Any]  # of the generator: cores, model of CPU, memory, load average before
    versions: dict[str, str]  # twostroke, locust, python
    generators: tuple[GeneratorHealth, ...] = ()
    ended_early: bool = False  # by Ctrl-C, or since a process was lost


@dataclass(frozen=True)
class RunFolder:
    """The paths, and what is in them."""

    path: Path

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def facts_path(self) -> Path:
        return self.path / "run.json"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    def records_path(self, worker: int) -> Path:
        return self.path / f"records-{worker}.jsonl"

    def plan(self) -> Plan:
        """Raises LoadTestError where it is missing or wrong; so do the others."""
        return read_json(self.plan_path, Plan)

    def facts(self) -> RunFacts:
        return read_json(self.facts_path, RunFacts)

    def samples(self) -> list[Sample]:
        """None where the server tells none."""
        if not self.samples_path.exists():
            return []
        decode = msgspec.json.Decoder(Sample).decode
        lines = self.samples_path.read_bytes().split(b"\n")[:-1]
        try:
            return [decode(line) for line in lines]
        except msgspec.DecodeError as error:
            raise LoadTestError(f"{self.samples_path}: {error}") from error

    def records(self) -> Iterator[Record]:
        """Yield the records of all processes, in no order."""
        for path in sorted(self.path.glob("records-*.jsonl")):
            yield from read_records(path)


def read_json(path: Path, kind: type[T]) -> T:
    """Raises LoadTestError where the file is missing or wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise LoadTestError(f"{path}: not there; is {path.parent} the folder of a load test?") from error
    except OSError as error:
        raise LoadTestError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise LoadTestError(f"{path}: {error}") from error


def write(path: Path, content: str | bytes) -> None:
    """Raises LoadTestError where it can't be: the disk is full, or the folder somebody else's."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise unwritable(path, error) from error


def write_json(path: Path, content: msgspec.Struct) -> None:
    """Write indented JSON, because people read it too. Raises as `write` does."""
    write(path, msgspec.json.format(msgspec.json.encode(content), indent=2))


def make_folder(path: Path) -> None:
    """Make a folder and its parents. Raises LoadTestError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
