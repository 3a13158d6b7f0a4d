"""Pictures of what was planned, in the load tests' style: a roofline with both phases on it, and a batch sweep."""

from collections.abc import Mapping, Sequence

import numpy as np

from twostroke.loadtests.report.chart import BLUE, GREY, ORANGE, VERMILION, Plot, in_our_style, panels, plot_of
from twostroke.model.config import ModelShape
from twostroke.model.operations import Held, Operation, decode_operations, prefill_operations
from twostroke.planning.roofline import Machine


def phases(shape: ModelShape, held: Held, prompt: int, batch: int, context: int) -> dict[str, list[Operation]]:
    """The operations of a prompt, and of a decode step."""
    return {
        f"prefill, {prompt:,} tokens": prefill_operations(shape, prompt, held=held),
        f"decode, batch {batch}, {context:,} of context": decode_operations(shape, batch, context, held),
    }


@in_our_style
def roofline(machine: Machine, shape: ModelShape, of_phases: Mapping[str, Sequence[Operation]]) -> Plot:
    """Operations a second against operations a byte (Williams et al., CACM 2009), a roof for each kind of number."""
    figure, axes = panels(1, height=4.6)
    chart, hardware = axes[0, 0], machine.hardware
    points, read = np.logspace(-1, 4.5, 200), hardware.read_bytes_per_s
    for number in dict.fromkeys((hardware.native, machine.number(shape))):
        peak, ridge = hardware.flops_per_s[number], hardware.ridge(number)
        chart.loglog(points, np.minimum(peak, points * read) / 1e12, color=GREY)
        chart.axvline(ridge, color=GREY, linewidth=0.8, linestyle="--")
        foot = ridge, points[0] * read / 1e12
        chart.annotate(f"ridge in {number}: {ridge:.0f}", foot, color=GREY, rotation=90, ha="right", va="bottom")
    for (phase, operations), colour, place in zip(
        of_phases.items(), (VERMILION, BLUE), ((4, 4), (4, -12)), strict=False
    ):
        at = np.array([one.intensity for one in operations])
        peaks = np.array([hardware.flops_per_s[machine.number(shape, one.kind)] for one in operations])
        rates = np.minimum(peaks, at * read) / 1e12
        chart.loglog(at, rates, "o", color=colour, label=phase)
        for one, x, y in zip(operations, at, rates, strict=True):
            chart.annotate(one.name, (x, y), textcoords="offset points", xytext=place, color=colour, fontsize=8)
    chart.set_xlabel("operations a byte")
    chart.set_ylabel("attainable TFLOP/s")
    chart.legend(loc="lower right")
    caption = "Left of the ridge an operation waits for memory, right of it for arithmetic."
    return plot_of("roofline", f"Roofline of a {hardware.title}", caption, figure)


@in_our_style
def batch_sweep(batches: Sequence[int], step_s: Sequence[float], most: int | None = None) -> Plot:
    """Throughput and time per token against batch. `most`: where the cache is full, or the promise is spent."""
    figure, axes = panels(2)
    rates = [batch / seconds for batch, seconds in zip(batches, step_s, strict=True)]
    for chart, values, label, colour in (
        (axes[0, 0], rates, "tokens a second", BLUE),
        (axes[0, 1], [seconds * 1000 for seconds in step_s], "ms a token", ORANGE),
    ):
        chart.plot(batches, values, marker="o", color=colour)
        chart.set_xscale("log", base=2)
        chart.set_xlabel("batch")
        chart.set_ylabel(label)
        chart.set_ylim(bottom=0)
        if most is not None:
            chart.axvline(most, color=GREY, linestyle="--", linewidth=0.8)
            chart.annotate("saturated", (most, 0), color=GREY, rotation=90, ha="right", va="bottom")
    return plot_of("batch_sweep", "A decode worker by batch", "One step's tokens, and how long each waits.", figure)
