"""`twostroke bench engine --sweep FILE`: decode at batches 1 to 64, drawn beside what this machine could do at best."""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.benchmarks.engine import SWEPT, decodes, in_turns, medians
from twostroke.benchmarks.hardware import Machine
from twostroke.loadtests.report.chart import GREY, Plot, in_our_style, legend_below, panels, plot_of, series_colour
from twostroke.model.load import LoadedEngine
from twostroke.protocol.errors import ConfigError

KNEE_GAIN = 1.5


async def measure_sweep(loaded: LoadedEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Decode at batches 1 to 64, and draw it beside what the model's operations take at this machine's limits.

    The knee of either curve is the first batch whose doubling gives less than KNEE_GAIN times the tokens a second.
    """
    machine, rates, floors = Machine(), [], []
    print(f"{'batch':>5}{'tokens/s':>12}{'ms a token':>12}{'model tokens/s':>16}{'of it':>8}")
    for batch in SWEPT:
        turns = await in_turns(f"decode at batch {batch}", {"": decodes(loaded, batch, args)}, args.rounds, machine)
        result = medians(turns[""])
        rates.append(result.tokens_per_s)
        floors.append(result.tokens_per_s / result.over_floor)
        step_ms = 1e3 * batch / rates[-1]
        print(f"{batch:>5}{rates[-1]:>12.1f}{step_ms:>12.2f}{floors[-1]:>16.1f}{result.over_floor:>8.2f}", flush=True)
    knees = knee(rates), knee(floors)
    try:
        args.sweep.write_bytes(sweep_picture(SWEPT, {"measured": rates, "model": floors}, knees[0]).png)
    except OSError as error:
        raise ConfigError(f"--sweep {args.sweep}: {error.strerror}") from error
    print(f"knee at batch {knees[0]}, by the model at {knees[1]}; {args.sweep} shows it")
    told = {"batches": list(SWEPT), "tok_s": rates, "model_tok_s": floors}
    return {**told, "knee": knees[0], "model_knee": knees[1], "picture": str(args.sweep)}


def knee(rates: Sequence[float]) -> int:
    """Return the first batch whose doubling gives less than KNEE_GAIN times the rate; the last where none does."""
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
        chart.set_xlabel("batch")
        chart.set_ylabel(label)
        chart.set_ylim(bottom=0)
    legend_below(figure, axes[0, 0], 2)
    caption = "Decode steps as measured, and as this machine's GEMM rate and bandwidth would allow them at best."
    return plot_of("sweep", "Decode by batch", caption, figure)
