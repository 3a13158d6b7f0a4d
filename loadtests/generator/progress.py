"""How a run goes, for people: a line each second.

How a run goes, on the terminal: one line that changes; into a file or a pipe a line every ten seconds.
"""

from types import TracebackType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from twostroke.loadtests.plan import Plan


class Progress(msgspec.Struct, frozen=True):
    """Of a run so far, all processes together."""

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


LINE_INTERVAL_S = 10.0


class ProgressDisplay:
    """On standard error, so that results can be piped. Without `show` it is silent."""

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

    def show(self, progress: Progress) -> None:
        elapsed = f"{progress.elapsed_s:.0f} of {self._plan.seconds:g} s"
        text = line_of(progress)
        self._bar.update(self._task, completed=progress.elapsed_s, elapsed=elapsed, text=text)
        if self._bar.disable and (progress.elapsed_s >= self._next_line_s or progress.is_over):
            self.say(f"{elapsed}: {text}")
            self._next_line_s = progress.elapsed_s + LINE_INTERVAL_S

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def line_of(progress: Progress) -> str:
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
