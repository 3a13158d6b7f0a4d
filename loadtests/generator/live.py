"""Progress of a run, for people to watch. Reports are made of the records.

Each process sends counts and histograms of each second, which can be added up. The live page draws curves of them;
the terminal shows one line that changes, and a file or pipe gets a line every ten seconds.
"""

import math
import re
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.run_folder import Record

RATIO = 1.02  # between a histogram's neighbouring buckets: its percentiles are right within 1%
MIN_S = 1e-4

Histogram = dict[int, int]
"""Number of values per bucket."""


class Second(msgspec.Struct):
    """Events of one second of a run."""

    sent: int = 0
    ok: int = 0
    refused: int = 0
    failed: int = 0
    unfinished: int = 0
    judged: int = 0  # that are over and were not of the warm-up; without an SLO none
    met: int = 0  # of those
    output_tokens: int = 0
    ttft: Histogram = msgspec.field(default_factory=dict)
    itl: Histogram = msgspec.field(default_factory=dict)
    tpot: Histogram = msgspec.field(default_factory=dict)
    lag: Histogram = msgspec.field(default_factory=dict)

    @property
    def over(self) -> int:
        return self.ok + self.refused + self.failed + self.unfinished

    def add(self, other: "Second") -> None:
        for name in self.__struct_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                for bucket, count in others.items():
                    mine[bucket] = mine.get(bucket, 0) + count
            else:
                setattr(self, name, mine + others)


class LiveFigures:
    """Figures by second of the run, of one process or of all together."""

    def __init__(self) -> None:
        self.seconds: dict[int, Second] = {}

    def sent(self, at_s: float) -> None:
        self._second(at_s).sent += 1

    def record(self, record: Record, slo: SLO, warm_up_s: float) -> None:
        """Counts in the second in which the request was over."""
        second = self._second(record.end_s)
        setattr(second, record.status, getattr(second, record.status) + 1)
        count(second.lag, record.lag_s)
        if record.scheduled_s >= warm_up_s and slo != SLO():
            second.judged += 1
            second.met += met(record, slo)
        if record.ttft_s is not None:
            count(second.ttft, record.ttft_s)
        if record.tpot_s is not None:
            count(second.tpot, record.tpot_s)
        for gap in record.gaps_s:
            count(second.itl, gap)
        second.output_tokens += record.output_tokens or 0

    def take(self, before_s: float) -> dict[int, Second]:
        """The seconds that are over by then, which are gone from here."""
        whole = [second for second in self.seconds if second + 1 <= before_s]
        return {second: self.seconds.pop(second) for second in whole}

    def add(self, seconds: dict[int, Second]) -> None:
        """Another process's, or its next."""
        for at_s, second in seconds.items():
            self._second(at_s).add(second)

    def _second(self, at_s: float) -> Second:
        return self.seconds.setdefault(max(0, int(at_s)), Second())


def met(record: Record, slo: SLO) -> bool:
    """Return whether the answer met SLO.ttft_s and SLO.tpot_s, as far as they are set."""
    if record.status != "ok" or record.ttft_s is None:
        return False
    in_time = slo.ttft_s is None or record.ttft_s <= slo.ttft_s
    return in_time and (slo.tpot_s is None or record.tpot_s is None or record.tpot_s <= slo.tpot_s)


def count(histogram: Histogram, value_s: float) -> None:
    """Into the bucket of its size; what is below 0.1 ms counts as that."""
    bucket = round(math.log(max(value_s, MIN_S) / MIN_S, RATIO))
    histogram[bucket] = histogram.get(bucket, 0) + 1


def percentile(histograms: Iterable[Histogram], percent: float) -> float | None:
    """Return a percentile over several histograms together, in seconds; None where they are empty."""
    together: Histogram = {}
    for histogram in histograms:
        for bucket, number in histogram.items():
            together[bucket] = together.get(bucket, 0) + number
    left = math.ceil(sum(together.values()) * percent / 100)
    for bucket in sorted(together):
        left -= together[bucket]
        if left <= 0:
            return MIN_S * float(RATIO**bucket)
    return None


WINDOW_S = 5  # percentiles and shares are of so many seconds together: single ones have too few values


def series(live: LiveFigures, first: int, end: int) -> list[dict[str, Any]]:
    """A point for each of the seconds `first` to `end - 1`. Times in seconds; None where nothing happened."""
    before = [second for at_s, second in live.seconds.items() if at_s < first]
    under_way = sum(second.sent - second.over for second in before)
    points = []
    for at_s in range(first, end):
        now = live.seconds.get(at_s, Second())
        under_way += now.sent - now.over
        window = [live.seconds[each] for each in range(at_s - WINDOW_S + 1, at_s + 1) if each in live.seconds]
        judged = sum(second.judged for second in window)
        points.append(
            {
                "at_s": at_s + 1,
                "ttft": _both([second.ttft for second in window]),
                "itl": _both([second.itl for second in window]),
                "tpot": _both([second.tpot for second in window]),
                "lag": [percentile([second.lag for second in window], 99)],
                "attainment": [sum(second.met for second in window) / judged if judged else None],
                "under_way": [under_way],
                "rates": [now.sent, now.ok],
                "errors": [now.refused, now.failed],
                "tokens": [sum(second.output_tokens for second in window) / max(1, len(window))],
            }
        )
    return points


def _both(histograms: list[Histogram]) -> list[float | None]:
    """P50 and P99."""
    return [percentile(histograms, 50), percentile(histograms, 99)]


class RunProgress(msgspec.Struct, frozen=True):
    """Progress of a run over all its processes."""

    elapsed_s: float
    sent: int
    under_way: int
    ok: int
    refused: int
    failed: int
    attainment: float | None  # of requests that are over, the warm-up's left out
    ttft_p50_s: float | None
    lag_p99_s: float | None
    is_over: bool
    error: str | None


def tell_locust(environment: Any, record: Record, request_type: str, name: str, length: int = 0) -> None:
    """Tell Locust of a request and of its tokens' times, for its table, page and files. Who listens to its requests
    finds the times in the event's context."""
    error: LoadTestError | None = None
    if record.status != "ok":
        # Locust counts equal errors together. The first word, a status, has no space before.
        error = LoadTestError(re.sub(r"(?<= )\S*\d\S*", "#", record.error or record.status))
    environment.events.request.fire(
        request_type=request_type,
        name=name,
        response_time=(record.end_s - record.scheduled_s) * 1e3,
        response_length=length,
        exception=error,
        context={"ttft_s": record.ttft_s, "tpot_s": record.tpot_s},
    )
    tell_times(environment, record, name)


def tell_times(environment: Any, record: Record, name: str) -> None:
    """Tell Locust of the tokens' times alone. They have rows of their own, which don't count as requests."""
    for kind, seconds in (("TTFT", [record.ttft_s]), ("TPOT", [record.tpot_s]), ("ITL", record.gaps_s)):
        row = environment.stats.get(name, kind)
        for value in seconds:
            if value is not None:
                row.log(value * 1e3, 0)


LINE_INTERVAL_S = 10.0


class ProgressDisplay:
    """Display on standard error, so that results can be piped. Without `show` it is silent."""

    def __init__(self, plan: Plan, show: bool):
        self._console = Console(stderr=True, quiet=not show)
        self._bar = Bar(
            TextColumn("{task.fields[elapsed]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            disable=not show or not self._console.is_terminal,
        )
        self._plan = plan
        self._task = self._bar.add_task("run", total=plan.seconds, elapsed="starting", text="")
        self._next_line_s = 0.0

    def __enter__(self) -> "ProgressDisplay":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, progress: RunProgress) -> None:
        elapsed = f"{progress.elapsed_s:.0f} of {self._plan.seconds:g} s"
        text = progress_line(progress)
        self._bar.update(self._task, completed=progress.elapsed_s, elapsed=elapsed, text=text)
        if self._bar.disable and (progress.elapsed_s >= self._next_line_s or progress.is_over):
            self.say(f"{elapsed}: {text}")
            self._next_line_s = progress.elapsed_s + LINE_INTERVAL_S

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def progress_line(progress: RunProgress) -> str:
    parts = [f"{progress.sent} sent", f"{progress.under_way} under way", f"{progress.ok} ok"]
    parts += [
        f"{number} {what}" for number, what in ((progress.refused, "refused"), (progress.failed, "failed")) if number
    ]
    if progress.attainment is not None:
        parts.append(f"SLO met by {progress.attainment:.1%}")
    if progress.ttft_p50_s is not None:
        parts.append(f"TTFT P50 {progress.ttft_p50_s:.3g} s")
    if progress.lag_p99_s is not None:
        parts.append(f"lag P99 {progress.lag_p99_s * 1e3:.3g} ms")
    return ", ".join(parts)
