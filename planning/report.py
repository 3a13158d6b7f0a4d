"""The pictures of a verdict, and the one HTML file that has them: what each mode serves, and how it depends.

A page asks nothing of any network. Roofline and batch sweep are in advisor/pictures.py.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from matplotlib.ticker import PercentFormatter

from twostroke.loadtests.plan import SLO
from twostroke.loadtests.report.chart import (
    BLUE,
    GREEN,
    GREY,
    VERMILION,
    Plot,
    in_our_style,
    level_lines,
    make_plot,
    panels,
    percent_axis,
    series_colour,
)
from twostroke.loadtests.report.pages import write_plots
from twostroke.loadtests.report.words import slo_words
from twostroke.loadtests.run_folder import write
from twostroke.planning.coarse.fleet import CoarseFleet
from twostroke.planning.layouts import Layout, Mode
from twostroke.planning.trials import REQUESTS, requests_at, simulate
from twostroke.planning.workload import SLOTargets, Workload

MODES: tuple[Mode, ...] = get_args(Mode)
COLOURS: dict[Mode, str] = {"aggregated": GREY, "disaggregated": BLUE, "hybrid": GREEN, "fixed": VERMILION}
PAGE_FILE = "verdict.html"

Swept = Sequence[tuple[float, Mapping[Mode, float]]]


@in_our_style
def capacities(modes: Mapping[str, Mapping[str, Any]]) -> Plot:
    """Measured beside simulated, a pair of bars a mode; whiskers are the measured interval."""
    figure, axes = panels(1, height=1.2 + 0.75 * len(modes))
    chart, names = axes[0, 0], [mode for mode in MODES if mode in modes]
    for row, mode in enumerate(names):
        measured, simulated = modes[mode]["measured_rps"], modes[mode]["simulated_rps"]
        if measured is not None:
            value = measured["value"]
            chart.barh(row - 0.2, value, 0.36, color=COLOURS[mode])
            whisker = [[value - (measured["low"] or 0.0)], [(measured["high"] or value) - value]]
            chart.errorbar(value, row - 0.2, xerr=whisker, color="black", capsize=3, linewidth=1)
        if simulated is not None:
            chart.barh(
                row if measured is None else row + 0.2, simulated, 0.36, color=COLOURS[mode], alpha=0.4, hatch="//"
            )
    chart.set_yticks(range(len(names)), names)
    chart.invert_yaxis()
    chart.grid(visible=False, axis="y")
    chart.set_xlabel("requests a second within the SLO (solid: measured; hatched: simulated)")
    return make_plot("capacity-by-mode", "What each mode serves", "90% of the requests meet both times.", figure)


@in_our_style
def by_length(swept: Swept) -> Plot:
    """Simulated capacity against the length of prompts."""
    figure, axes = panels(1)
    _lines(axes[0, 0], swept)
    chart = axes[0, 0]
    chart.set_xscale("log", base=2)
    chart.set_yscale("log")
    chart.set_xticks([at for at, _ in swept], [f"{at:,.0f}" for at, _ in swept])
    chart.set_xlabel("tokens of each prompt")
    chart.set_ylabel("requests a second")
    caption = "Simulated. Where lines cross, another mode is the one to choose; a line ends where nothing is held."
    return make_plot("capacity-by-prompt-length", "Capacity against prompt length", caption, figure)


@in_our_style
def by_rate(swept: Swept) -> Plot:
    """Simulated attainment against the rate."""
    figure, axes = panels(1)
    _lines(axes[0, 0], swept)
    level_lines(axes[0, 0])
    percent_axis(axes[0, 0])
    axes[0, 0].set_xlabel("requests a second")
    axes[0, 0].set_ylabel("SLO attainment")
    return make_plot(
        "attainment-by-rate", "Attainment against rate", "Simulated, the workload as it was asked.", figure
    )


def _lines(chart: Any, swept: Swept) -> None:
    for mode in MODES:
        points = [(at, values[mode]) for at, values in swept if values.get(mode, 0.0) > 0]
        if points:
            chart.plot(*zip(*points, strict=True), marker="o", color=COLOURS[mode], label=mode)
    chart.legend()


@in_our_style
def by_ratio(split: Sequence[tuple[int, int, float]], aggregated: float) -> Plot:
    """Simulated capacity of as many workers, by how many of them read: (prefill, decode, requests a second)."""
    figure, axes = panels(1)
    chart, places = axes[0, 0], range(len(split))
    rates = [rate for _, _, rate in split]
    best = int(np.argmax(rates))
    chart.bar(places, rates, 0.6, color=[VERMILION if place == best else BLUE for place in places])
    for place, rate in zip(places, rates, strict=True):
        chart.annotate(f"{rate:.3g}", (place, rate), xytext=(0, 3), textcoords="offset points", ha="center")
    chart.axhline(aggregated, color=GREY, linestyle="--", label=f"all aggregated: {aggregated:.3g}")
    chart.set_xticks(places, [f"{prefill} : {decode}" for prefill, decode, _ in split])
    chart.set_ylim(0, 1.25 * max(*rates, aggregated, 1e-9))
    chart.grid(visible=False, axis="x")
    chart.set_xlabel("prefill : decode workers")
    chart.set_ylabel("requests a second")
    chart.legend(loc="upper right")
    caption = "Simulated, disaggregated, each worker on a machine of its own. Too few of one role bind the other."
    return make_plot("capacity-by-ratio", "Capacity against the ratio of workers", caption, figure)


@in_our_style
def memory(layout: Layout, workload: Workload, promise: SLOTargets, rate: float) -> Plot:
    """The share of each decode worker's KV cache that requests hold, simulated at a rate."""
    held: dict[str, list[tuple[float, float]]] = {}

    def watch(fleet: CoarseFleet) -> None:
        for number, worker in enumerate(fleet.decode):
            share = worker.held_tokens / worker.profile.kv_tokens
            held.setdefault(f"decode-{number}", []).append((fleet.now_s, share))

    simulate(layout, promise, requests_at(workload, rate, REQUESTS), watch)
    figure, axes = panels(1)
    chart = axes[0, 0]
    for index, (worker, samples) in enumerate(held.items()):
        chart.plot(*zip(*samples, strict=True), color=series_colour(index), label=worker, linewidth=1.3)
    most = max(share for samples in held.values() for _, share in samples)
    chart.set_xlabel("seconds")
    chart.set_ylabel("of the worker's KV cache")
    percent_axis(chart)
    if 0 < most < 0.4:  # or all of it would lie at the bottom
        chart.set_ylim(0, 1.2 * most)
        chart.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    chart.legend(loc="upper left", ncols=2)
    caption = "Simulated. Decode workers hold KV until the answer ends."
    return make_plot("kv-memory", "KV memory over time", caption, figure)


@in_our_style
def cost(curves: Mapping[Mode, Sequence[tuple[float, float]]], slo: SLO, unit: str) -> Plot:
    """Plot the cost of a million answer tokens in `unit` against the SLO's strictness: (scale, cost)."""
    figure, axes = panels(1)
    chart = axes[0, 0]
    for mode, points in curves.items():
        if points:
            chart.plot(*zip(*points, strict=True), marker="o", color=COLOURS[mode], label=mode)
    scales = sorted({scale for points in curves.values() for scale, _ in points})
    chart.set_xscale("log", base=2)
    chart.set_xticks(scales, [f"{scale:g}x" for scale in scales])
    chart.set_ylim(bottom=0)
    chart.set_xlabel(f"SLO scale (1x: {slo_words(slo)}); stricter to the left")
    chart.set_ylabel(f"{unit} a million tokens")
    chart.legend()
    caption = "Simulated, each mode at its capacity. A line begins where the mode holds the SLO at any rate."
    return make_plot("cost-by-slo", "Cost against SLO", caption, figure)


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "img{max-width:100%}figure{margin:2rem 0}figcaption{color:#555}h1{font-size:1.5rem}"
)


def write_page(folder: Path, sentences: Sequence[str], plots: Sequence[Plot]) -> Path:
    """A PNG for each picture, and the page with all of them; returns the page's path. Raises LoadTestError."""
    write_plots(folder, list(plots))
    first, *rest = (html.escape(one) for one in sentences)
    figures = [
        f"<figure><h2>{html.escape(one.title)}</h2>"
        f'<img alt="{html.escape(one.title)}" src="data:image/png;base64,{base64.b64encode(one.png).decode("ascii")}">'
        f"<figcaption>{html.escape(one.caption)}</figcaption></figure>"
        for one in plots
    ]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Should I disaggregate?</title><style>{_STYLE}</style><h1>{first}</h1>"
        f"<ul>{''.join(f'<li>{one}</li>' for one in rest)}</ul>{''.join(figures)}</html>\n"
    )
    write(folder / PAGE_FILE, page)
    return folder / PAGE_FILE
