"""What a sweep leaves: `sweep.json`, a folder of one run for each point, and the rates that the server can take.

The sweep's folder holds sweep.json and runs/*; from both follow sweep.html and its plots.
"""

from pathlib import Path

import msgspec

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import Summary
from twostroke.loadtests.run_folder import write

SWEEP_FILE = "sweep.json"


class SweepPoint(msgspec.Struct, frozen=True):
    """One run at one rate. Several may have the same rate: runs repeated to know how much they differ."""

    rate: float  # asked, requests (sessions) a second
    folder: str  # of the run, relative to the sweep's
    attainment: float  # 0 to 1, of all scheduled in the window
    ttft_attainment: float
    tpot_attainment: float
    goodput: float  # requests met a second
    valid: bool


class Capacity(msgspec.Struct, frozen=True):
    """The highest rate at which `attainment` of the requests met the SLO."""

    attainment: float  # 0.9 or 0.99
    rate: Estimate | None  # requests a second; None: none of the rates tried reached it
    rate_per_worker: Estimate | None = None  # None where the number of workers isn't known
    is_lower_bound: bool = False  # a search ended without a valid run that missed it


class SweepResult(msgspec.Struct, frozen=True):
    """`sweep.json`."""

    name: str
    url: str
    points: tuple[SweepPoint, ...]  # by rate
    capacities: tuple[Capacity, ...]
    num_workers: int | None = None
    ended_early: str | None = None  # why not all was measured

    @property
    def valid(self) -> bool:
        """Whether anything was measured: capacities go by valid runs alone, an invalid one beside them spoils none."""
        return any(point.valid for point in self.points)


def point_of(rate: float, folder: str, summary: Summary) -> SweepPoint:
    """A run's figures as a point of a sweep; a run without requests in its window met nothing."""
    return SweepPoint(
        rate=rate,
        folder=folder,
        attainment=summary.attainment.value if summary.attainment else 0.0,
        ttft_attainment=summary.ttft_attainment.value if summary.ttft_attainment else 0.0,
        tpot_attainment=summary.tpot_attainment.value if summary.tpot_attainment else 0.0,
        goodput=summary.goodput.value if summary.goodput else 0.0,
        valid=summary.validity.valid,
    )


def write_sweep(folder: Path, result: SweepResult) -> None:
    write(folder / SWEEP_FILE, msgspec.json.format(msgspec.json.encode(result), indent=2))


def read_sweep(folder: Path) -> SweepResult:
    """Raises LoadTestError where it is missing or wrong."""
    path = folder / SWEEP_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=SweepResult)
    except FileNotFoundError as error:
        raise LoadTestError(f"{path}: not there; is {folder} the folder of a sweep?") from error
    except msgspec.DecodeError as error:
        raise LoadTestError(f"{path}: {error}") from error
