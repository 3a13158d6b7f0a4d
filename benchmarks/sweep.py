"""`twostroke bench engine --sweep FILE`: decode at batches 1 to 64, drawn beside what this machine could do at best."""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.benchmarks.engine import SWEPT, decodes, in_turns, medians
from twostroke.loadtests.report.chart import GREY, Plot, in_our_style, legend_below, panels, plot_of, series_colour
from twostroke.model.load import LoadedEngine
from twostroke.model.this_machine import Machine
from twostroke.protocol.errors import ConfigError

KNEE_GAIN = 1.5


async def measure_sweep(loaded: LoadedEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Decode at batches 1 to 64, and draw it beside what the model's operations take at this machine's limits.

    A shared machine's limits change from minute to minute. So each batch is held against the limits around it, and both
    curves are drawn for the medians of all limits.
    """
    machine, subjects = Machine(), {batch: decodes(loaded, batch, args) for batch in SWEPT}
    results = {}
    for batch, subject in subjects.items():
        turns = await in_turns(f"decode at batch {batch}", {"": subject}, args.rounds, machine)
        results[batch] = medians(turns[""])
    limits = machine.median()
    floors = [batch / subject.work.floor_s(limits) for batch, subject in subjects.items()]
    rates = [floor * result.over_floor for floor, result in zip(floors, results.values(), strict=True)]
    print(f"{limits.gemm / 1e9:.0f} GFLOP/s, {limits.read / 1e9:.1f} GB/s; of the model's rate at these limits:")
    print(f"{'batch':>5}{'tokens/s':>12}{'of model':>10}{'at medians':>12}{'model':>10}{'ms a token':>12}{'model':>8}")
    for (batch, result), rate, floor in zip(results.items(), rates, floors, strict=True):
        as_told = f"{result.tokens_per_s:>12.1f}{result.over_floor:>10.2f}{rate:>12.1f}{floor:>10.1f}"
        print(f"{batch:>5}{as_told}{1e3 * batch / rate:>12.2f}{1e3 * batch / floor:>8.2f}")
    knees = knee(rates), knee(floors)
    try:
        args.sweep.write_bytes(sweep_picture(SWEPT, {"measured": rates, "model": floors}, knees[0]).png)
    except OSError as error:
        raise ConfigError(f"--sweep {args.sweep}: {error.strerror}") from error
    print(f"knee at batch {knees[0]}, by the model at {knees[1]}; {args.sweep} shows it")
    return {
        "batches": list(SWEPT),
        "tok_s": [round(result.tokens_per_s, 1) for result in results.values()],
        "of_model": [round(result.over_floor, 3) for result in results.values()],
        "model_tok_s": [round(floor, 1) for floor in floors],
        "knee": knees[0],
        "model_knee": knees[1],
        "picture": str(args.sweep),
    }


def knee(rates: Sequence[float]) -> int:
    """Return the batch up to which each doubling has given KNEE_GAIN times the tokens a second, or more."""
    pairs = zip(SWEPT, itertools.pairwise(rates), strict=False)
    return next((batch for batch, (rate, doubled) in pairs if doubled < KNEE_GAIN * rate), SWEPT[-1])


@in_our_style
def sweep_picture(batches: Sequence[int], rates: Mapping[str, Sequence[float]], knee: int) -> Plot:
    """Draw throughput and time a token against batch, a curve for each of `rates`."""
    figure, axes = panels(2)
    for index, label in enumerate(("tokens a second", "ms a token")):
        chart = axes[0, index]
        for number, (name, of_one) in enumerate(rates.items()):
            values = [1e3 * batch / rate if index else rate for batch, rate in zip(batches, of_one, strict=True)]
            chart.plot(batches, values, marker="o", color=series_colour(number), label=name)
        chart.axvline(knee, color=GREY, linestyle="--", linewidth=0.8)
        chart.annotate("knee", (knee, 0), color=GREY, rotation=90, ha="right", va="bottom")
        chart.set_xscale("log", base=2)
        chart.set_xticks(batches, [str(batch) for batch in batches])
        chart.set_xlabel("batch")
        chart.set_ylabel(label)
        chart.set_ylim(bottom=0)
    legend_below(figure, axes[0, 0], 2)
    caption = "Decode steps as measured, and as this machine's GEMM rate and bandwidth allow them at best."
    return plot_of("sweep", "Decode by batch", caption, figure)
