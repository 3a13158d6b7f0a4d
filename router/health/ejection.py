"""Workers that are there and keep failing: they get nothing for a while, then one request to show what they can.

Pure: the clock and the random source are arguments. A worker's process that ends is none of this file's business: it
comes back with another epoch, and with nothing held against it.
"""

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeVar

from annotated_types import Ge, Le
from pydantic import PositiveFloat, model_validator

from twostroke.protocol.clock import Clock
from twostroke.protocol.settings import Count, Section

K = TypeVar("K", bound=Hashable)

_RECENT = 20  # outcomes that the failure rate is taken over
_FORGIVEN_AFTER = 10  # successes in a row after which the next ejection is as short as the first


class EjectionConfig(Section):
    """When a worker is left out, and for how long."""

    failures_in_a_row: Count = 5
    failure_rate: Annotated[float, Ge(0.05), Le(1)] = 0.5
    """Of the last 20 requests."""
    first_s: PositiveFloat = 2.0
    """The first time; doubles from time to time."""
    most_s: PositiveFloat = 60.0

    @model_validator(mode="after")
    def _check(self) -> "EjectionConfig":
        if self.first_s > self.most_s:
            raise ValueError(f"first_s: {self.first_s:g} must be at most most_s ({self.most_s:g})")
        return self


@dataclass(slots=True)
class _Record:
    """What is known of one worker. Ejected until `until`, then until a probe has succeeded."""

    recent: list[bool] = field(default_factory=list)  # outcomes, True is a failure
    in_a_row: int = 0  # failures
    successes: int = 0  # in a row
    times: int = 0  # ejected, since it was last forgiven
    until: float | None = None  # None: not ejected
    is_probed: bool = False  # one request is finding out
    lost_at: float = float("-inf")


class Ejection(Generic[K]):
    """Counts the outcomes of requests by worker (or by whatever may fail), and says who is to be left out.

    Only failures of the worker belong here: never a client's error, a refusal for lack of room, or a client that left.
    """

    def __init__(self, config: EjectionConfig, *, clock: Clock, draw: Callable[[], float]):
        self._config = config
        self._clock = clock
        self._draw = draw
        self._records: dict[K, _Record] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held against anybody."""
        return not self._records

    def keep_where(self, is_there: Callable[[K], bool]) -> None:
        """Forget the others."""
        for gone in [worker for worker in self._records if not is_there(worker)]:
            del self._records[gone]

    def begin(self, worker: K) -> None:
        """A request goes there. Where its ejection is over, this is the one that finds out."""
        record = self._records.get(worker)
        if record is not None and record.until is not None and record.until <= self._clock():
            record.is_probed = True

    def succeeded(self, worker: K) -> None:
        """A request got from the worker what it was to get."""
        record = self._records.get(worker)
        if record is None:
            return
        record.in_a_row = 0
        record.successes += 1
        self._remember(record, is_failure=False)
        if record.until is not None and (record.is_probed or record.until <= self._clock()):
            record.until = None
            record.is_probed = False
            record.recent.clear()
        if record.successes >= _FORGIVEN_AFTER and record.until is None:
            del self._records[worker]

    def failed(self, worker: K) -> None:
        """The worker failed a request."""
        record = self._records.setdefault(worker, _Record())
        record.successes = 0
        record.in_a_row += 1
        self._remember(record, is_failure=True)
        if record.until is not None and not record.is_probed:
            return  # requests that were there before it was ejected
        rate = sum(record.recent) / len(record.recent)
        is_often = len(record.recent) >= _RECENT and rate >= self._config.failure_rate
        if record.is_probed or record.in_a_row >= self._config.failures_in_a_row or is_often:
            self._eject(record)

    def lost(self, worker: K) -> None:
        """The connection to the worker broke. All requests there say so, and it counts once."""
        record = self._records.setdefault(worker, _Record())
        now = self._clock()
        if now - record.lost_at >= 1.0:
            record.lost_at = now
            self.failed(worker)

    def unresolved(self, worker: K) -> None:
        """A request has ended there without telling anything: its client left, or it was the request's own fault."""
        record = self._records.get(worker)
        if record is not None:
            record.is_probed = False  # the next request finds out

    def is_out(self, worker: K) -> bool:
        """Whether it is to be left out now, whoever else is."""
        record = self._records.get(worker)
        return record is not None and record.until is not None and (record.is_probed or record.until > self._clock())

    def ejected(self, among: Collection[K]) -> frozenset[K]:
        """Those of `among` to be left out now, half of them at most: the ones that return last."""
        out = [worker for worker in among if self.is_out(worker)]
        out.sort(key=lambda worker: -(self._records[worker].until or 0.0))
        return frozenset(out[: len(among) // 2])

    def _remember(self, record: _Record, *, is_failure: bool) -> None:
        record.recent.append(is_failure)
        del record.recent[:-_RECENT]

    def _eject(self, record: _Record) -> None:
        longest_s = min(self._config.first_s * 2.0 ** min(record.times, 32), self._config.most_s)
        record.times += 1
        record.in_a_row = 0
        record.recent.clear()
        record.is_probed = False
        record.until = self._clock() + longest_s * (1.0 - 0.5 * self._draw())
