"""Style of all our plots: one palette that colour-blind readers can tell apart, readable sizes, no clutter."""

import io
import math
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, PercentFormatter

from twostroke.loadtests.report.estimates import Floats, duration

# Okabe and Ito's palette ("Color Universal Design", 2008), in the order of use.
BLUE = "#0072b2"
ORANGE = "#e69f00"
GREEN = "#009e73"
VERMILION = "#d55e00"
PURPLE = "#cc79a7"
SKY = "#56b4e9"
YELLOW = "#f0e442"
GREY = "#6b6b6b"
SERIES_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY)
MAX_POINTS = 2000  # of a drawn curve: more is not seen, and takes time

_STYLE = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 1.8,
    "figure.dpi": 144,
    "savefig.dpi": 144,
}


in_our_style = mpl.rc_context(_STYLE)
"""Decorates what draws: matplotlib asks for its settings whenever something is added to a figure."""


@dataclass(frozen=True)
class Plot:
    """A picture for the report; `name` is its file's, without `.png`."""

    name: str
    title: str
    caption: str  # how to read it
    png: bytes


def panels(columns: int, *, rows: int = 1, height: float = 3.4, width: float = 9.6, **more: Any) -> tuple[Figure, Any]:
    """A figure and the array of its axes, always of two dimensions."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def make_plot(name: str, title: str, caption: str, figure: Figure) -> Plot:
    """Draw `figure`. The file tells neither date nor program, so that equal data make equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return Plot(name, title, caption, buffer.getvalue())


def series_colour(index: int) -> str:
    return SERIES_COLOURS[index % len(SERIES_COLOURS)]


def cumulative(values: Floats) -> tuple[Floats, Floats]:
    """The points of an empirical distribution, thinned out evenly by rank, its ends kept."""
    ordered = np.sort(values)
    ranks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), MAX_POINTS)).astype(np.int64))
    return ordered[ranks], (ranks + 1) / len(ordered)


def percent_axis(axis: Any) -> None:
    """0 to 100%, with a little room."""
    axis.set_ylim(-0.02, 1.04)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def seconds_axis(axis: Any, values: Floats) -> None:
    """A logarithmic x axis of times in ms or s, from the 0.1th percentile of positive values to their maximum."""
    positive = values[values > 0]
    if not len(positive):
        axis.set_xlabel("none")
        return
    low, high = float(np.percentile(positive, 0.1)), float(positive.max())
    widened = max(1.0, math.sqrt(10 * low / high))  # to a decade at least, lest the axis have no label
    axis.set_xscale("log")
    axis.set_xlim(low / widened * 0.9, high * widened * 1.1)
    duration_ticks(axis.xaxis, close=high / low < 20)


def duration_ticks(axis: Any, *, close: bool) -> None:
    """Labels of a logarithmic x or y axis of times: three a decade where they may be `close`, or one."""
    # Of many decades every second or third is labelled: the labels of narrow panels would run together.
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if close else LogLocator(numticks=4))
    axis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def slo_line(axis: Any, limit_s: float | None, *, upright: bool = False) -> None:
    """Draw the SLO on an axis of times, if there is one; `upright` on x."""
    if limit_s is not None:
        draw = axis.axvline if upright else axis.axhline
        draw(limit_s, color=GREY, linewidth=1.2, linestyle=":", label=f"SLO {duration(limit_s)}")


def legend_below(figure: Figure, axis: Any, columns: int) -> None:
    """One legend for all panels, under them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def level_lines(axis: Any) -> None:
    """The attainment that people ask for."""
    for level in (0.9, 0.99):
        axis.axhline(level, color=VERMILION, linewidth=1, linestyle=":")
        axis.annotate(
            f"{level:.0%}",
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(2, 0),
            textcoords="offset points",
            color=VERMILION,
            fontsize=9,
            va="center",
        )
