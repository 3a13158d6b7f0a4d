"""The pictures of one run that tell how its answers' times are spread. Times over the run: time_plots.py."""

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
from twostroke.loadtests.report.estimates import Floats
from twostroke.loadtests.report.figures import ScalePoint, Summary
from twostroke.loadtests.report.observations import Bools, Observations
from twostroke.loadtests.report.stage_times import StagePart
from twostroke.loadtests.report.words import duration

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
