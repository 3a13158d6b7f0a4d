"""The pictures of runs at several rates: of one server's sweep, or of several laid over each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from twostroke.loadtests.report.chart import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILION,
    Plot,
    duration_ticks,
    in_our_style,
    legend_below,
    level_lines,
    panels,
    percent_axis,
    plot_of,
    series_colour,
)
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import Spread, Summary
from twostroke.loadtests.report.words import number


@dataclass(frozen=True)
class RatedRun:
    """One run of a sweep."""

    rate: float  # asked, requests (sessions) a second
    summary: Summary

    @property
    def offered(self) -> float:
        """Requests a second that the window really had: arrivals that are drawn differ from the rate asked for."""
        return self.summary.offered_rate


Curves = Mapping[str, Sequence[RatedRun]]
"""By name, each by rate. Runs that are not valid are drawn as crosses and in no curve."""


def sweep_plots(curves: Curves, capacity: Estimate | None = None) -> list[Plot]:
    """`capacity`, at 90%, is shaded where there is one curve."""
    plots = [attainment_by_rate(curves, capacity), goodput_by_rate(curves), times_by_rate(curves)]
    if any(run.summary.user_rate for runs in curves.values() for run in _valid(runs)):
        plots.append(speed_against_throughput(curves))
    return plots


@in_our_style
def attainment_by_rate(curves: Curves, capacity: Estimate | None) -> Plot:
    figure, ((axis,),) = panels(1, height=3.8)
    for index, (name, runs) in enumerate(curves.items()):
        colour = series_colour(index)
        valid = _valid(runs)
        label = "both" if len(curves) == 1 else name
        _curve(axis, valid, lambda summary: _value(summary.attainment), color=colour, label=label)
        if len(curves) == 1:
            _curve(axis, valid, lambda summary: _value(summary.ttft_attainment), "--", color=ORANGE, label="TTFT alone")
            _curve(axis, valid, lambda summary: _value(summary.tpot_attainment), "--", color=GREEN, label="TPOT alone")
        _intervals(axis, valid, colour)
        broken = [run for run in runs if not run.summary.validity.valid]
        if broken:
            values = [_value(run.summary.attainment) for run in broken]
            axis.plot(
                [run.offered for run in broken], values, "x", color=colour, markersize=8, label=f"{label}: invalid"
            )
    if capacity is not None and len(curves) == 1:
        # A capacity is of rates asked for.
        measured = next(iter(curves.values()))
        scale = sum(run.offered for run in measured) / sum(run.rate for run in measured)
        axis.axvline(capacity.value * scale, color=GREY, linewidth=1.2)
        if capacity.low is not None and capacity.high is not None:
            axis.axvspan(capacity.low * scale, capacity.high * scale, color=GREY, alpha=0.15, linewidth=0)
    level_lines(axis)
    percent_axis(axis)
    axis.set_ylabel("attainment")
    _rate_axis(axis, curves)
    axis.legend(loc="lower left")
    workers = {sum(run.summary.num_workers.values()) for runs in curves.values() for run in runs}
    if len(workers) == 1 and 0 not in workers:
        (num_workers,) = workers
        above = axis.secondary_xaxis(
            "top", functions=(lambda rate: rate / num_workers, lambda rate: rate * num_workers)
        )
        above.set_xlabel("requests/s for each worker")
    return plot_of(
        "attainment-by-rate",
        "Attainment against rate",
        "Bars are 95% intervals of a run; several points at one rate are repeated runs. The grey line is the capacity "
        "at 90%, its band the interval; crosses are runs that are no measurement.",
        figure,
    )


@in_our_style
def goodput_by_rate(curves: Curves) -> Plot:
    figure, ((axis,),) = panels(1)
    highest = max((run.offered for runs in curves.values() for run in runs), default=1.0)
    axis.plot([0, highest], [0, highest], color=GREY, linewidth=1, linestyle=":", label="all that is offered")
    for index, (name, runs) in enumerate(curves.items()):
        label = "goodput" if len(curves) == 1 else name
        _curve(axis, _valid(runs), lambda summary: _value(summary.goodput), color=series_colour(index), label=label)
    axis.set_ylabel("goodput, requests/s")
    axis.set_ylim(bottom=0)
    _rate_axis(axis, curves)
    axis.legend(loc="upper left")
    return plot_of(
        "goodput-by-rate",
        "Goodput against rate",
        "Where the curve falls, more load means fewer requests served in time.",
        figure,
    )


@in_our_style
def times_by_rate(curves: Curves) -> Plot:
    """P50 and P99 of TTFT and ITL."""
    figure, axes = panels(2)
    for axis, title in zip(axes[0], ("TTFT", "ITL"), strict=True):
        for index, (name, runs) in enumerate(curves.items()):
            colours = (BLUE, VERMILION) if len(curves) == 1 else (series_colour(index),) * 2
            prefix = "" if len(curves) == 1 else f"{name} "
            for percent, line, colour in ((50, ":", colours[0]), (99, "-", colours[1])):

                def figure_of(summary: Summary, title: str = title, percent: int = percent) -> float | None:
                    # A logarithmic axis has no place for 0, which is the gap of tokens that came together.
                    return _percentile(summary.ttft if title == "TTFT" else summary.itl, percent) or None

                _curve(axis, _valid(runs), figure_of, line, color=colour, label=f"{prefix}P{percent}")
        axis.set_title(title)
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        duration_ticks(axis.yaxis, close=high / low < 200)
        _rate_axis(axis, curves)
    legend_below(figure, axes[0][0], 4)
    return plot_of(
        "times-by-rate",
        "Times against rate",
        "Of complete answers only: what was refused or failed is not in them.",
        figure,
    )


@in_our_style
def speed_against_throughput(curves: Curves) -> Plot:
    figure, ((axis,),) = panels(1, height=3.8)
    per_worker = all(run.summary.num_workers for runs in curves.values() for run in runs)
    for index, (name, runs) in enumerate(curves.items()):
        points = []
        for run in _valid(runs):
            if run.summary.user_rate is not None:
                workers = sum(run.summary.num_workers.values()) if per_worker else 1
                points.append((run.summary.user_rate, run.summary.output_rate.value / workers, run.offered))
        colour = series_colour(index)
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", color=colour, markersize=5, label=name)
        for x, y, rate in points:
            axis.annotate(number(rate), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=9, color=colour)
    axis.set_xlabel("what a user sees: tokens/s (1 / median TPOT)")
    axis.set_ylabel("output tokens/s" + (" for each worker" if per_worker else ""))
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    if len(curves) > 1:
        axis.legend()
    return plot_of(
        "speed-against-throughput",
        "Throughput against speed for each user",
        "A server can serve few users quickly or many slowly; further up and to the right is better. Numbers at the "
        "points are offered requests/s.",
        figure,
    )


def _curve(axis: Any, runs: Sequence[RatedRun], figure_of: Any, line: str = "-", **style: Any) -> None:
    """A point for each run, a line through the means of each rate asked; runs without the figure are left out."""
    points = [(run.rate, run.offered, value) for run in runs if (value := figure_of(run.summary)) is not None]
    repeated = [list(group) for _, group in groupby(points, key=lambda point: point[0])]
    means = [(fmean(offered for _, offered, _ in same), fmean(value for _, _, value in same)) for same in repeated]
    axis.plot([offered for offered, _ in means], [value for _, value in means], line, **style)
    axis.plot([x for _, x, _ in points], [y for _, _, y in points], "o", color=style["color"], markersize=4)


def _intervals(axis: Any, runs: Sequence[RatedRun], colour: str) -> None:
    for run in runs:
        share = run.summary.attainment
        if share is not None and share.low is not None and share.high is not None:
            axis.vlines(run.offered, share.low, share.high, color=colour, linewidth=1.2)


def _valid(runs: Sequence[RatedRun]) -> list[RatedRun]:
    return sorted((run for run in runs if run.summary.validity.valid), key=lambda run: run.rate)


def _value(estimate: Estimate | None) -> float:
    return estimate.value if estimate else 0.0


def _percentile(spread: Spread | None, percent: int) -> float | None:
    if spread is None:
        return None
    return spread.p50.value if percent == 50 else spread.p99.value


def _rate_axis(axis: Any, curves: Curves) -> None:
    axis.set_xlabel("offered requests/s, as the window had them")
    axis.set_xlim(0, 1.05 * max((run.offered for runs in curves.values() for run in runs), default=1.0))
