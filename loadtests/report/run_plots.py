"""The pictures of one run: how its answers' times are spread, and what was sent and became of it over time."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    in_our_style,
    legend_below,
    level_lines,
    panels,
    percent_axis,
    plot_of,
    seconds_axis,
    series_colour,
)
from twostroke.loadtests.report.estimates import Floats, percentile
from twostroke.loadtests.report.figures import ScalePoint, StagePart, Summary
from twostroke.loadtests.report.observations import NAN, Bools, Observations
from twostroke.loadtests.report.words import duration
from twostroke.loadtests.run_folder import Sample

STAGE_COLOURS = (GREY, PURPLE, SKY, BLUE, "#bdbdbd", ORANGE, YELLOW, GREEN)


def run_plots(plan: Plan, summary: Summary, seen: Observations, complete: Bools) -> list[Plot]:
    """Those for which there is something to draw; `complete` are the complete answers of the window."""
    plots = []
    if summary.slo_scales and (plan.slo.ttft_s is not None or plan.slo.tpot_s is not None):
        plots.append(attainment_by_scale({"": summary.slo_scales}, plan.slo))
    if complete.any():
        plots.append(latency_cdfs(_by_kind(seen, complete), plan.slo))
        plots.append(tail_plot(_by_kind(seen, complete)))
    if summary.stages:
        plots.append(stage_bars({summary.name: summary.stages}))
    return plots


@dataclass(frozen=True)
class Times:
    """What the plots of distributions draw of a group of complete answers; seconds."""

    ttft_s: Floats
    tpot_s: Floats
    gaps_s: Floats
    tail_tbt_s: Floats

    @classmethod
    def of(cls, seen: Observations, rows: Bools) -> "Times":
        return cls(
            ttft_s=_known(seen.ttft_s[rows]),
            tpot_s=_known(seen.tpot_s[rows]),
            gaps_s=seen.gaps_s[rows[seen.gap_row]],
            tail_tbt_s=_known(seen.tail_tbt_s[rows]),
        )

    @classmethod
    def pooled(cls, groups: Sequence["Times"]) -> "Times":
        """Of several runs together."""
        return cls(
            ttft_s=np.concatenate([each.ttft_s for each in groups]),
            tpot_s=np.concatenate([each.tpot_s for each in groups]),
            gaps_s=np.concatenate([each.gaps_s for each in groups]),
            tail_tbt_s=np.concatenate([each.tail_tbt_s for each in groups]),
        )


@in_our_style
def attainment_by_scale(series: Mapping[str, Sequence[ScalePoint]], slo: SLO) -> Plot:
    """`series` by name; of one alone TTFT and TPOT are drawn, too."""
    figure, ((axis,),) = panels(1)
    for index, (name, points) in enumerate(series.items()):
        colour = series_colour(index)
        scales = [point.scale for point in points]
        label = name or "both"
        axis.plot(scales, [point.attainment for point in points], color=colour, label=label)
        if len(series) == 1:
            axis.plot(scales, [point.ttft_attainment for point in points], "--", color=ORANGE, label="TTFT alone")
            axis.plot(scales, [point.tpot_attainment for point in points], "--", color=GREEN, label="TPOT alone")
    level_lines(axis)
    axis.axvline(1, color=GREY, linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks([0.25, 0.5, 1, 2, 4], ["0.25x", "0.5x", "1x", "2x", "4x"])
    asked = [f"{name} {duration(limit)}" for name, limit in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if limit]
    axis.set_xlabel(f"SLO scale (1x: {', '.join(asked)})")
    axis.set_ylabel("attainment")
    percent_axis(axis)
    axis.legend(loc="lower right")
    return plot_of(
        "attainment-by-slo-scale",
        "Attainment against SLO scale",
        "The same answers, judged by an SLO that is stricter (left) or laxer (right) than the one asked for. What "
        "never got a complete answer is a miss at every scale.",
        figure,
    )


@in_our_style
def latency_cdfs(groups: Mapping[str, Times], slo: SLO, kind: str = "") -> Plot:
    """TTFT, TPOT and ITL, each group in its colour."""
    figure, axes = panels(3, sharey=True)
    columns = (
        ("TTFT", slo.ttft_s, [each.ttft_s for each in groups.values()]),
        ("TPOT", slo.tpot_s, [each.tpot_s for each in groups.values()]),
        ("ITL (gaps, pooled)", None, [each.gaps_s for each in groups.values()]),
    )
    for axis, (title, limit_s, values) in zip(axes[0], columns, strict=True):
        _draw_cdf(axis, title, list(groups), values)
        if limit_s is not None:
            axis.axvline(limit_s, color=GREY, linewidth=1.2, linestyle=":")
            axis.annotate(
                f"SLO {duration(limit_s)}",
                (limit_s, 0.02),
                rotation=90,
                color=GREY,
                fontsize=9,
                ha="right",
                va="bottom",
            )
    axes[0][0].set_ylabel("share of answers (gaps)")
    if len(groups) > 1:
        legend_below(figure, axes[0][0], len(groups))
    return plot_of(
        _file_name("latency-cdfs", kind),
        f"How times are spread: {kind}" if kind else "How times are spread",
        "Which share of the complete answers (of their gaps, in the third panel) took at most so long. Time axes are "
        "logarithmic.",
        figure,
    )


@in_our_style
def tail_plot(groups: Mapping[str, Times], kind: str = "") -> Plot:
    """The longest tenth of each answer's gaps."""
    figure, ((axis,),) = panels(1)
    _draw_cdf(axis, "", list(groups), [each.tail_tbt_s for each in groups.values()])
    axis.set_xlabel("mean of the longest 10% of an answer's gaps")
    axis.set_ylabel("share of answers")
    if len(groups) > 1:
        axis.legend(loc="lower right")
    return plot_of(
        _file_name("tail-tbt", kind),
        f"Tail TBT: {kind}" if kind else "Tail TBT",
        "How long the stalls are that a reader notices: TPOT averages them away, this does not.",
        figure,
    )


@in_our_style
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
    return plot_of(
        "stages",
        "Where the time goes",
        "Mean over complete answers. Parts do not overlap: of the KV transfer only what prefill did not hide is shown, "
        "and decode begins after it.",
        figure,
    )


def _draw_cdf(axis: Any, title: str, names: list[str], values: list[Floats]) -> None:
    for index, (name, group) in enumerate(zip(names, values, strict=True)):
        if len(group):
            axis.step(*cumulative(group), where="post", color=series_colour(index), label=name or "all")
    seconds_axis(axis, np.concatenate(values))
    percent_axis(axis)
    axis.set_title(title)


def _file_name(plot: str, kind: str) -> str:
    return f"{plot}-{re.sub('[^a-z0-9]+', '-', kind.lower())}" if kind else plot


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _by_kind(seen: Observations, complete: Bools) -> dict[str, Times]:
    """All together where there is one kind only."""
    groups = {name: complete & (seen.kind == index) for index, name in enumerate(seen.kinds)}
    return {name: Times.of(seen, rows) for name, rows in sorted(groups.items()) if rows.any()}


MOST_BINS = 60
LEAST_ANSWERS = 20  # in a step, about: of fewer, percentiles are all alike
MOST_MEANS = 150  # of the server's samples: a point each
BIN_WIDTHS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
ROLE_COLOURS = {"prefill": BLUE, "decode": ORANGE}


def time_plots(plan: Plan, seen: Observations, samples: Sequence[Sample]) -> list[Plot]:
    """Of the whole run, the warm-up included, which is shaded."""
    plots = []
    if len(seen):
        plots += [load_over_time(plan, seen), latency_over_time(plan, seen)]
    if samples:
        plots.append(server_over_time(plan, samples))
    return plots


@in_our_style
def load_over_time(plan: Plan, seen: Observations) -> Plot:
    figure, axes = panels(2)
    edges = bin_edges(max(plan.seconds, float(seen.end_s.max())))
    width_s = float(edges[1])
    rates, flight = axes[0]

    def rate(at_s: Floats) -> Floats:
        counts, _ = np.histogram(at_s, edges)
        return counts.astype(np.float64) / width_s

    refused, failed = (rate(seen.end_s[seen.is_status(status)]) for status in ("refused", "failed"))
    rates.stairs(rate(seen.scheduled_s), edges, baseline=None, color=GREY, linewidth=1.4, label="scheduled")
    answered = rate(seen.end_s[seen.is_status("ok")])
    rates.stairs(answered, edges, baseline=None, color=GREEN, linewidth=1.4, label="answered whole")
    if refused.any():
        rates.stairs(refused, edges, fill=True, color=ORANGE, label="refused")
    if failed.any():
        rates.stairs(refused + failed, edges, baseline=refused, fill=True, color=VERMILION, label="failed")
    rates.set_title(f"Requests a second, in steps of {duration(width_s)}")
    rates.set_ylim(bottom=0)
    rates.legend(loc="upper right", ncols=2)
    _room_for_legend(rates)
    at_s, in_flight = requests_in_flight(seen)
    flight.step(at_s, in_flight, where="post", color=BLUE, linewidth=1)
    flight.set_title("Requests in flight")
    flight.set_ylim(bottom=0)
    for axis in axes[0]:
        _time_axis(axis, plan, edges[-1])
    return plot_of(
        "load-over-time",
        "Load over the run",
        "Scheduled is what was asked of the server; where answers fall behind it, requests in flight pile up.",
        figure,
    )


@in_our_style
def latency_over_time(plan: Plan, seen: Observations) -> Plot:
    figure, axes = panels(2)
    complete = seen.is_status("ok")
    most = max(5, min(MOST_BINS, int(complete.sum()) // LEAST_ANSWERS))
    edges = bin_edges(max(plan.seconds, float(seen.scheduled_s.max()) + 1e-9), most)
    columns = (
        ("TTFT, by when it was scheduled", plan.slo.ttft_s, seen.ttft_s),
        ("TPOT, by when it was scheduled", plan.slo.tpot_s, seen.tpot_s),
    )
    for axis, (title, limit_s, values) in zip(axes[0], columns, strict=True):
        known = complete & ~np.isnan(values)
        index = np.digitize(seen.scheduled_s[known], edges) - 1
        for percent, colour in ((99, VERMILION), (90, ORANGE), (50, BLUE)):
            curve = [percentile(values[known][index == step], percent) for step in range(len(edges) - 1)]
            curve = [NAN if value is None else value for value in curve]  # a hole where nothing was scheduled
            axis.stairs(curve, edges, baseline=None, color=colour, label=f"P{percent}", linewidth=1.4)
        if limit_s is not None:
            axis.axhline(limit_s, color=GREY, linestyle=":", label=f"SLO {duration(limit_s)}")
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(lambda value, _: duration(value))
        axis.legend(loc="upper right", ncols=4, columnspacing=1, handlelength=1.2)
        _room_for_legend(axis)
        _time_axis(axis, plan, edges[-1])
    return plot_of(
        "latency-over-time",
        "Times over the run",
        "Percentiles of the complete answers scheduled in each step of time. A curve that keeps growing says that the "
        "rate is more than the server can take: then its figures depend on how long the run was.",
        figure,
    )


@in_our_style
def server_over_time(plan: Plan, samples: Sequence[Sample]) -> Plot:
    """Sums over a role's workers of what runs and waits, their mean KV use, and how many they are."""
    figure, axes = panels(2, rows=2, height=5.6)
    running, waiting, kv_usage, workers = axes.flat
    end_s = max(plan.seconds, *(sample.at_s for sample in samples))
    edges = np.linspace(0, end_s, MOST_MEANS)
    for role in sorted({sample.role for sample in samples}, reverse=True):
        colour = ROLE_COLOURS.get(role, PURPLE)
        at_s, columns = by_moment([sample for sample in samples if sample.role == role])
        step = np.digitize(at_s, edges)
        for axis, values in zip((running, waiting, kv_usage, workers), columns, strict=True):
            steps = np.unique(step)
            means = [values[step == each].mean() for each in steps]
            axis.plot([at_s[step == each].mean() for each in steps], means, color=colour, label=role, linewidth=1.5)
    running.set_title("Running requests")
    waiting.set_title("Waiting requests")
    kv_usage.set_title("KV cache in use")
    workers.set_title("Workers")
    workers.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    percent_axis(kv_usage)
    for axis in axes.flat:
        _time_axis(axis, plan, end_s)
    for axis in (running, waiting, workers):
        axis.set_ylim(bottom=0)
    workers.set_ylim(top=workers.get_ylim()[1] * 1.1)
    legend_below(figure, running, 4)
    return plot_of(
        "server-over-time",
        "The server over the run",
        "As the server told about once a second, in means over short times: sums over the workers of a role, of KV use "
        "their mean. Workers are those that the server told of: an autoscaler's steps show there.",
        figure,
    )


def bin_edges(seconds: float, most: int = MOST_BINS) -> Floats:
    """From 0 to at least `seconds`, in equal steps that are easy to name, about `most` of them at the most."""
    width_s = next((width for width in BIN_WIDTHS_S if seconds / width <= most), BIN_WIDTHS_S[-1])
    return np.arange(int(np.ceil(seconds / width_s)) + 1, dtype=np.float64) * width_s


def requests_in_flight(seen: Observations) -> tuple[Floats, Floats]:
    """Moments, and how many requests are under way from then on: sent, and neither answered nor given up."""
    at_s = np.concatenate([seen.sent_s, seen.end_s])
    change = np.concatenate([np.ones(len(seen)), -np.ones(len(seen))])
    order = np.argsort(at_s, kind="stable")
    return at_s[order], np.cumsum(change[order])


def by_moment(samples: Sequence[Sample]) -> tuple[Floats, tuple[Floats, Floats, Floats, Floats]]:
    """Moments, and at each the sums of running and waiting, the mean KV use, and the number of one role's workers."""
    moments, index = np.unique(np.array([sample.at_s for sample in samples]), return_inverse=True)

    def total(values: list[float]) -> Floats:
        return np.bincount(index, values).astype(np.float64)

    running = total([sample.running for sample in samples])
    waiting = total([sample.waiting for sample in samples])
    workers = total([1.0] * len(samples))
    kv_usage = total([sample.kv_usage for sample in samples]) / workers
    return moments.astype(np.float64), (running, waiting, kv_usage, workers)


def _time_axis(axis: Any, plan: Plan, end_s: float) -> None:
    axis.set_xlim(0, end_s)
    axis.set_xlabel("seconds")
    if plan.warm_up_s:
        axis.axvspan(0, plan.warm_up_s, color=GREY, alpha=0.12, linewidth=0)


def _room_for_legend(axis: Any) -> None:
    axis.set_ylim(top=axis.get_ylim()[1] * 1.18)
