"""The pictures of reports: how a run's times are spread, what was sent and became of it, and runs at several rates.

Several servers, or kinds of requests, are laid over each other, each in a colour of its own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.report.chart import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    Plot,
    cumulative,
    duration_ticks,
    legend_below,
    level_lines,
    make_plot,
    panels,
    percent_axis,
    seconds_axis,
    series_colour,
    slo_line,
)
from twostroke.loadtests.report.estimates import Estimate, Floats, duration, number, percentile
from twostroke.loadtests.report.figures import NAN, Bools, Observations, ScalePoint, StagePart, Summary
from twostroke.loadtests.report.words import slo_words
from twostroke.loadtests.run_folder import Sample

STAGE_COLOURS = (GREY, PURPLE, SKY, BLUE, "#bdbdbd", ORANGE, YELLOW, GREEN)

Answers = tuple[Observations, Bools]
"""A run and the rows of it that are meant."""


def run_plots(plan: Plan, summary: Summary, observed: Observations, complete: Bools) -> list[Plot]:
    """Those for which there is something to draw; `complete` are the complete answers of the window."""
    plots = []
    if summary.slo_scales:
        plots.append(attainment_by_scale({"": summary.slo_scales}, plan.slo))
    if complete.any():
        kinds = np.unique(observed.kind[complete])
        plots.append(
            latency_cdfs({str(kind): (observed, complete & (observed.kind == kind)) for kind in kinds}, plan.slo)
        )
    if summary.stages:
        plots.append(stage_bars({summary.name: summary.stages}))
    return plots


def attainment_by_scale(series: Mapping[str, Sequence[ScalePoint]], slo: SLO) -> Plot:
    """`series` by name; of one alone TTFT and TPOT are drawn, too."""
    figure, ((axis,),) = panels(1)
    for index, (name, points) in enumerate(series.items()):
        scales = [point.scale for point in points]
        attainment = [point.attainment for point in points]
        axis.plot(scales, attainment, color=series_colour(index), label=name or "both")
        if len(series) == 1:
            axis.plot(scales, [point.ttft_attainment for point in points], "--", color=ORANGE, label="TTFT alone")
            axis.plot(scales, [point.tpot_attainment for point in points], "--", color=GREEN, label="TPOT alone")
    level_lines(axis)
    axis.axvline(1, color=GREY, linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks([0.25, 0.5, 1, 2, 4], ["0.25x", "0.5x", "1x", "2x", "4x"])
    axis.set_xlabel(f"SLO scale (1x: {slo_words(slo)})")
    axis.set_ylabel("attainment")
    percent_axis(axis)
    axis.legend(loc="lower right")
    return make_plot(
        "attainment-by-slo-scale",
        "Attainment against SLO scale",
        "The same answers, judged by an SLO that is stricter (left) or laxer (right) than the one asked for. What "
        "never got a complete answer is a miss at every scale.",
        figure,
    )


def latency_cdfs(groups: Mapping[str, Answers], slo: SLO, kind: str = "") -> Plot:
    """TTFT, TPOT, ITL and tail TBT of complete answers, each group in its colour."""
    figure, axes = panels(2, rows=2, height=6.0, sharey=True)
    columns = (
        ("TTFT", slo.ttft_s, [observed.ttft_s[rows] for observed, rows in groups.values()]),
        ("TPOT", slo.tpot_s, [observed.tpot_s[rows] for observed, rows in groups.values()]),
        ("ITL (gaps, pooled)", None, [observed.gaps_s[rows[observed.gap_row]] for observed, rows in groups.values()]),
        (
            "Tail TBT (longest 10% of an answer's gaps)",
            None,
            [observed.tail_tbt_s[rows] for observed, rows in groups.values()],
        ),
    )
    for axis, (title, limit_s, columns_of_groups) in zip(axes.flat, columns, strict=True):
        known = [values[~np.isnan(values)] for values in columns_of_groups]
        for index, (name, values) in enumerate(zip(groups, known, strict=True)):
            if len(values):
                axis.step(*cumulative(values), where="post", color=series_colour(index), label=name or "all")
        slo_line(axis, limit_s, upright=True)
        seconds_axis(axis, np.concatenate(known))
        percent_axis(axis)
        axis.set_title(title)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="lower right")
    for axis in axes[:, 0]:
        axis.set_ylabel("share of answers (gaps)")
    return make_plot(
        f"latency-cdfs-{re.sub('[^a-z0-9]+', '-', kind.lower())}" if kind else "latency-cdfs",
        f"How times are spread: {kind}" if kind else "How times are spread",
        "Which share of the complete answers (of their gaps, for ITL) took at most so long. Time axes are logarithmic. "
        "Tail TBT tells how long the stalls are that a reader notices, and that TPOT averages away.",
        figure,
    )


def stage_bars(series: Mapping[str, Sequence[StagePart]]) -> Plot:
    """Two bars for each run: all of the mean answer, and up to and just after the first token, where little is seen."""
    figure, axes = panels(2, height=1.9 + 0.55 * len(series), sharey=True)
    names = list(dict.fromkeys(part.name for parts in series.values() for part in parts))
    for axis, title, left_out in (
        (axes[0][0], "The mean answer", ()),
        (axes[0][1], "Without decode", ("decode", "first to last token")),
    ):
        begins = np.zeros(len(series))
        for index, name in enumerate(names):
            if name in left_out:
                continue
            widths = np.array([sum(p.mean_s for p in parts if p.name == name) for parts in series.values()])
            colour = STAGE_COLOURS[index % len(STAGE_COLOURS)]
            axis.barh(range(len(series)), widths, left=begins, color=colour, label=name, height=0.55)
            begins += widths
        axis.set_title(title)
        axis.set_yticks(range(len(series)), list(series))
        axis.set_xlim(0, max(float(begins.max()), 1e-6) * 1.02)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(lambda value, _: duration(value))
        axis.grid(axis="y", visible=False)
    axes[0][0].invert_yaxis()
    legend_below(figure, axes[0][0], 4)
    return make_plot(
        "stages",
        "Where the time goes",
        "Mean over complete answers. Parts do not overlap: of the KV transfer only what prefill did not hide is shown, "
        "and decode begins after it.",
        figure,
    )


MAX_BINS = 60
MIN_ANSWERS = 20  # in a step, about: of fewer, percentiles are all alike
MAX_MEANS = 150  # of the server's samples: a point each
BIN_WIDTHS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
ROLE_COLOURS = {"prefill": BLUE, "decode": ORANGE}


def time_plots(plan: Plan, observed: Observations, samples: Sequence[Sample]) -> list[Plot]:
    """Return plots of the whole run. The warm-up is shaded."""
    plots = []
    if len(observed):
        plots += [load_over_time(plan, observed), latency_over_time(plan, observed)]
    if samples:
        plots.append(server_over_time(plan, samples))
    return plots


def load_over_time(plan: Plan, observed: Observations) -> Plot:
    figure, axes = panels(2)
    edges = bin_edges(max(plan.seconds, float(observed.end_s.max())))
    width_s = float(edges[1])
    rates, flight = axes[0]

    def rate(at_s: Floats) -> Floats:
        counts, _ = np.histogram(at_s, edges)
        return counts.astype(np.float64) / width_s

    refused, failed = (rate(observed.end_s[observed.is_status(status)]) for status in ("refused", "failed"))
    answered = rate(observed.end_s[observed.is_status("ok")])
    rates.stairs(rate(observed.scheduled_s), edges, baseline=None, color=GREY, linewidth=1.4, label="scheduled")
    rates.stairs(answered, edges, baseline=None, color=GREEN, linewidth=1.4, label="answered whole")
    if refused.any():
        rates.stairs(refused, edges, fill=True, color=ORANGE, label="refused")
    if failed.any():
        rates.stairs(refused + failed, edges, baseline=refused, fill=True, color=VERMILION, label="failed")
    rates.set_title(f"Requests a second, in steps of {duration(width_s)}")
    _legend_above_curves(rates, 2)
    at_s, in_flight = requests_in_flight(observed)
    flight.step(at_s, in_flight, where="post", color=BLUE, linewidth=1)
    flight.set_title("Requests in flight")
    flight.set_ylim(bottom=0)
    for axis in axes[0]:
        _time_axis(axis, plan, edges[-1])
    return make_plot(
        "load-over-time",
        "Load over the run",
        "Scheduled is what was asked of the server; where answers fall behind it, requests in flight pile up.",
        figure,
    )


def latency_over_time(plan: Plan, observed: Observations) -> Plot:
    figure, axes = panels(2)
    complete = observed.is_status("ok")
    most = max(5, min(MAX_BINS, int(complete.sum()) // MIN_ANSWERS))
    edges = bin_edges(max(plan.seconds, float(observed.scheduled_s.max()) + 1e-9), most)
    columns = (("TTFT", plan.slo.ttft_s, observed.ttft_s), ("TPOT", plan.slo.tpot_s, observed.tpot_s))
    for axis, (title, limit_s, values) in zip(axes[0], columns, strict=True):
        known = complete & ~np.isnan(values)
        index = np.digitize(observed.scheduled_s[known], edges) - 1
        for percent, colour in ((99, VERMILION), (90, ORANGE), (50, BLUE)):
            curve = [percentile(values[known][index == step], percent) for step in range(len(edges) - 1)]
            curve = [NAN if value is None else value for value in curve]  # a hole where nothing was scheduled
            axis.stairs(curve, edges, baseline=None, color=colour, label=f"P{percent}", linewidth=1.4)
        slo_line(axis, limit_s)
        axis.set_title(f"{title}, by when it was scheduled")
        axis.yaxis.set_major_formatter(lambda value, _: duration(value))
        _legend_above_curves(axis, 4)
        _time_axis(axis, plan, edges[-1])
    return make_plot(
        "latency-over-time",
        "Times over the run",
        "Percentiles of the complete answers scheduled in each step of time. A curve that keeps growing says that the "
        "rate is more than the server can take: then its figures depend on how long the run was.",
        figure,
    )


def server_over_time(plan: Plan, samples: Sequence[Sample]) -> Plot:
    """Sums over a role's workers of what runs and waits, their mean KV use, and how many they are."""
    figure, axes = panels(2, rows=2, height=5.6)
    running, waiting, kv_usage, workers = axes.flat
    end_s = max(plan.seconds, *(sample.at_s for sample in samples))
    for role in sorted({sample.role for sample in samples}, reverse=True):
        of_role = [sample for sample in samples if sample.role == role]
        at_s, columns = server_means(of_role, np.linspace(0, end_s, MAX_MEANS))
        for axis, values in zip(axes.flat, columns, strict=True):
            axis.plot(at_s, values, color=ROLE_COLOURS.get(role, PURPLE), label=role, linewidth=1.5)
    running.set_title("Running requests")
    waiting.set_title("Waiting requests")
    kv_usage.set_title("KV cache in use")
    workers.set_title("Workers")
    for axis in axes.flat:
        _time_axis(axis, plan, end_s)
        axis.set_ylim(bottom=0)
    percent_axis(kv_usage)
    workers.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    workers.set_ylim(top=workers.get_ylim()[1] * 1.1)
    legend_below(figure, running, 4)
    return make_plot(
        "server-over-time",
        "The server over the run",
        "As the server told about once a second, in means over short times: sums over the workers of a role, of KV use "
        "their mean. Workers are those that the server told of: an autoscaler's steps show there.",
        figure,
    )


def bin_edges(seconds: float, most: int = MAX_BINS) -> Floats:
    """Return bin edges from 0 to at least `seconds` in equal steps that are easy to name, about `most` at the most."""
    width_s = next((width for width in BIN_WIDTHS_S if seconds / width <= most), BIN_WIDTHS_S[-1])
    return np.arange(int(np.ceil(seconds / width_s)) + 1, dtype=np.float64) * width_s


def requests_in_flight(observed: Observations) -> tuple[Floats, Floats]:
    """Moments, and how many requests are under way from then on: sent, and neither answered nor given up."""
    at_s = np.concatenate([observed.sent_s, observed.end_s])
    change = np.concatenate([np.ones(len(observed)), -np.ones(len(observed))])
    order = np.argsort(at_s, kind="stable")
    return at_s[order], np.cumsum(change[order])


def server_means(samples: Sequence[Sample], edges: Floats) -> tuple[Floats, tuple[Floats, ...]]:
    """Return one role's means per step of time that has samples: the moments, then running and waiting requests
    summed over workers, the workers' KV use, and their number."""
    at_s = np.array([sample.at_s for sample in samples])
    _, step = np.unique(np.digitize(at_s, edges), return_inverse=True)
    running, waiting, kv_usage = (
        np.bincount(step, [getattr(sample, name) for sample in samples]) for name in ("running", "waiting", "kv_usage")
    )
    num_samples = np.bincount(step)
    num_moments = np.array([len(np.unique(at_s[step == each])) for each in range(len(num_samples))])
    columns = running / num_moments, waiting / num_moments, kv_usage / num_samples, num_samples / num_moments
    return np.bincount(step, at_s) / num_samples, columns


def _time_axis(axis: Any, plan: Plan, end_s: float) -> None:
    axis.set_xlim(0, end_s)
    axis.set_xlabel("seconds")
    if plan.warm_up_s:
        axis.axvspan(0, plan.warm_up_s, color=GREY, alpha=0.12, linewidth=0)


def _legend_above_curves(axis: Any, columns: int) -> None:
    axis.set_ylim(bottom=0)
    axis.set_ylim(top=axis.get_ylim()[1] * 1.18)
    axis.legend(loc="upper right", ncols=columns, columnspacing=1, handlelength=1.2)


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
"""Runs by name, each sorted by rate. Invalid runs are drawn as crosses and in no curve."""


def sweep_plots(curves: Curves, capacity: Estimate | None = None) -> list[Plot]:
    """`capacity`, at 90%, is shaded where there is one curve."""
    plots = [attainment_by_rate(curves, capacity), goodput_by_rate(curves), times_by_rate(curves)]
    if any(run.summary.user_rate for runs in curves.values() for run in _valid(runs)):
        plots.append(speed_against_throughput(curves))
    return plots


def attainment_by_rate(curves: Curves, capacity: Estimate | None) -> Plot:
    figure, ((axis,),) = panels(1, height=3.8)
    for index, (name, runs) in enumerate(curves.items()):
        colour = series_colour(index)
        label = "both" if len(curves) == 1 else name
        _curve(axis, runs, partial(_value, "attainment"), color=colour, label=label)
        if len(curves) == 1:
            _curve(axis, runs, partial(_value, "ttft_attainment"), "--", color=ORANGE, label="TTFT alone")
            _curve(axis, runs, partial(_value, "tpot_attainment"), "--", color=GREEN, label="TPOT alone")
        for run in _valid(runs):
            share = run.summary.attainment
            if share is not None and share.low is not None:
                axis.vlines(run.offered, share.low, share.high, color=colour, linewidth=1.2)
        broken = [run for run in runs if not run.summary.validity.valid]
        if broken:
            offered, values = [run.offered for run in broken], [_value("attainment", run.summary) for run in broken]
            axis.plot(offered, values, "x", color=colour, markersize=8, label=f"{label}: invalid")
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
    return make_plot(
        "attainment-by-rate",
        "Attainment against rate",
        "Bars are 95% intervals of a run; several points at one rate are repeated runs. The grey line is the capacity "
        "at 90%, its band the interval; crosses are runs that are no measurement.",
        figure,
    )


def goodput_by_rate(curves: Curves) -> Plot:
    figure, ((axis,),) = panels(1)
    highest = max((run.offered for runs in curves.values() for run in runs), default=1.0)
    axis.plot([0, highest], [0, highest], color=GREY, linewidth=1, linestyle=":", label="all that is offered")
    for index, (name, runs) in enumerate(curves.items()):
        label = "goodput" if len(curves) == 1 else name
        _curve(axis, runs, partial(_value, "goodput"), color=series_colour(index), label=label)
    axis.set_ylabel("goodput, requests/s")
    axis.set_ylim(bottom=0)
    _rate_axis(axis, curves)
    axis.legend(loc="upper left")
    return make_plot(
        "goodput-by-rate",
        "Goodput against rate",
        "Where the curve falls, more load means fewer requests served in time.",
        figure,
    )


def times_by_rate(curves: Curves) -> Plot:
    """P50 and P99 of TTFT and ITL."""
    figure, axes = panels(2)
    for axis, title in zip(axes[0], ("TTFT", "ITL"), strict=True):
        for index, (name, runs) in enumerate(curves.items()):
            colours = (BLUE, VERMILION) if len(curves) == 1 else (series_colour(index),) * 2
            prefix = "" if len(curves) == 1 else f"{name} "
            for which, line, colour in (("p50", ":", colours[0]), ("p99", "-", colours[1])):
                figure_of = partial(_percentile, title.lower(), which)
                _curve(axis, runs, figure_of, line, color=colour, label=f"{prefix}{which.upper()}")
        axis.set_title(title)
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        duration_ticks(axis.yaxis, close=high / low < 200)
        _rate_axis(axis, curves)
    legend_below(figure, axes[0][0], 4)
    return make_plot(
        "times-by-rate",
        "Times against rate",
        "Of complete answers only: what was refused or failed is not in them.",
        figure,
    )


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
    return make_plot(
        "speed-against-throughput",
        "Throughput against speed for each user",
        "A server can serve few users quickly or many slowly; further up and to the right is better. Numbers at the "
        "points are offered requests/s.",
        figure,
    )


def _curve(
    axis: Any, runs: Sequence[RatedRun], figure_value: Callable[[Summary], float | None], line: str = "-", **style: Any
) -> None:
    """A point for each valid run, a line through the means of each rate asked; runs without the value are left out."""
    points = [
        (run.rate, run.offered, value) for run in _valid(runs) if (value := figure_value(run.summary)) is not None
    ]
    repeated = [list(group) for _, group in groupby(points, key=lambda point: point[0])]
    means = [(fmean(offered for _, offered, _ in same), fmean(value for _, _, value in same)) for same in repeated]
    axis.plot([offered for offered, _ in means], [value for _, value in means], line, **style)
    axis.plot([x for _, x, _ in points], [y for _, _, y in points], "o", color=style["color"], markersize=4)


def _valid(runs: Sequence[RatedRun]) -> list[RatedRun]:
    return sorted((run for run in runs if run.summary.validity.valid), key=lambda run: run.rate)


def _value(figure: str, summary: Summary) -> float:
    estimate: Estimate | None = getattr(summary, figure)
    return estimate.value if estimate else 0.0


def _percentile(figure: str, which: str, summary: Summary) -> float | None:
    """None for 0, too, the gap of tokens that came together: a logarithmic axis has no place for it."""
    spread = getattr(summary, figure)
    return None if spread is None else getattr(spread, which).value or None


def _rate_axis(axis: Any, curves: Curves) -> None:
    axis.set_xlabel("offered requests/s, as the window had them")
    axis.set_xlim(0, 1.05 * max((run.offered for runs in curves.values() for run in runs), default=1.0))
