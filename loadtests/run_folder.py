"""A run's folder: what a run leaves, and a report is made of.

plan.json            what was to be done
run.json             what it was done with: server, machine, versions, and how well the generator kept its schedule
records-N.jsonl      each request, of Locust process N
samples.jsonl        the server's queues and KV use, about once a second, where it tells them
locust-*.log         what Locust itself said
report.json, report.html, *.png
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from twostroke.loadtests.errors import LoadTestError, unwritable
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.records import Record, read_records

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


class GeneratorHealth(msgspec.Struct, frozen=True):
    """How one Locust process fared."""

    worker: int
    num_sent: int
    cpu_seconds: float  # of its process
    wall_seconds: float


class RunFacts(msgspec.Struct, frozen=True):
    """What a run was done with."""

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
        return read_plan(self.plan_path)

    def facts(self) -> RunFacts:
        return _read(self.facts_path, RunFacts)

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
        """Of all processes, in no order."""
        for path in sorted(self.path.glob("records-*.jsonl")):
            yield from read_records(path)


def read_plan(path: Path) -> Plan:
    """Raises LoadTestError where it is missing or wrong."""
    return _read(path, Plan)


def _read(path: Path, kind: type[T]) -> T:
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
