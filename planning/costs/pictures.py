"""Pictures of plans and capacities, in the load tests' style: rooflines, batch sweeps, KV and intensities."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from twostroke.loadtests.report.chart import (
    BLUE,
    GREY,
    ORANGE,
    VERMILION,
    Plot,
    in_our_style,
    legend_below,
    make_plot,
    panels,
    series_colour,
)
from twostroke.model.config import ModelShape
from twostroke.model.costs.operations import NumberFormats, Operation, decode_operations, prefill_operations
from twostroke.model.published.hardware import GIB
from twostroke.planning.costs.capacity import SWEEP, CapacityCase, sweep
from twostroke.planning.costs.roofline import WorkerHardware, as_mha, kv_bytes
from twostroke.protocol.errors import ConfigError


def phases(shape: ModelShape, held: NumberFormats, prompt: int, batch: int, context: int) -> dict[str, list[Operation]]:
    """The operations of a prompt, and of a decode step."""
    return {
        f"prefill, {prompt:,} tokens": prefill_operations(shape, prompt, formats=held),
        f"decode, batch {batch}, {context:,} of context": decode_operations(shape, batch, context, held),
    }


@in_our_style
def roofline(machine: WorkerHardware, shape: ModelShape, of_phases: Mapping[str, Sequence[Operation]]) -> Plot:
    """Operations a second against operations a byte (Williams et al., CACM 2009), a roof for each kind of number."""
    figure, axes = panels(1, height=4.6)
    chart, hardware = axes[0, 0], machine.hardware
    points, read = np.logspace(-1, 4.5, 200), hardware.read_bytes_per_s
    roofs: dict[float, list[str]] = {}  # who has which peak
    for number in hardware.flops_per_s:
        for peak, label in (
            (hardware.peak(number), number),
            (hardware.peak(number, is_sparse=True), f"{number} sparse"),
        ):
            if np.isfinite(peak) and number not in roofs.setdefault(peak, []):
                roofs[peak].append(label)
    for peak, names in roofs.items():
        is_used = bool({hardware.native, machine.number(shape)} & set(names))
        is_sparse = all(name.endswith("sparse") for name in names)
        style = {"color": GREY, "linestyle": "--" if is_sparse else "-", "alpha": 1.0 if is_used else 0.4}
        chart.loglog(points, np.minimum(peak, points * read) / 1e12, **style)
        where = {"xy": (points[-1], peak / 1e12), "ha": "right", "va": "bottom"}
        chart.annotate(f"{', '.join(names)}: ridge {peak / read:.0f}", color=GREY, fontsize=8, **where)
    for (phase, operations), colour, (x, y), align in zip(
        of_phases.items(), (VERMILION, BLUE), ((-4, 2), (4, -2)), (("right", "bottom"), ("left", "top")), strict=False
    ):
        at = np.array([one.intensity for one in operations])
        peaks = np.array([hardware.flops_per_s[machine.number(shape, one.kind)] for one in operations])
        rates = np.minimum(peaks, at * read) / 1e12
        chart.loglog(at, rates, "o", color=colour, label=phase)
        for first, names in _neighbours(operations).items():
            where = {"xy": (at[first], rates[first]), "textcoords": "offset points", "xytext": (x, y)}
            chart.annotate("\n".join(names), color=colour, fontsize=8, ha=align[0], va=align[1], **where)
    chart.set_xlabel("operations a byte")
    chart.set_ylabel("attainable TFLOP/s")
    chart.legend(loc="lower right")
    caption = (
        "Left of a roof's ridge an operation waits for memory, right of it for arithmetic. "
        "Broken lines are the roofs of weights with two zeros in four."
    )
    return make_plot("roofline", f"Roofline of a {hardware.title}", caption, figure)


def _neighbours(operations: Sequence[Operation]) -> dict[int, list[str]]:
    """Names of operations whose points lie on one another, by the first of them."""
    found: dict[int, list[str]] = {}
    for one in operations:
        near = (first for first in found if 0.67 < one.intensity / operations[first].intensity < 1.5)
        found.setdefault(next(near, operations.index(one)), []).append(one.name)
    return found


@in_our_style
def batch_sweep(batches: Sequence[int], rates: Mapping[str, Sequence[float]], marks: Mapping[str, int]) -> Plot:
    """Throughput and time a token against batch, a curve for each of `rates`, and what batches are marked as."""
    figure, axes = panels(2)
    for index, label in enumerate(("tokens a second", "ms a token")):
        chart = axes[0, index]
        for number, (name, of_one) in enumerate(rates.items()):
            values = [1e3 * batch / rate if index else rate for batch, rate in zip(batches, of_one, strict=True)]
            chart.plot(batches, values, marker="o", color=series_colour(number), label=name)
        for mark, batch in marks.items():
            chart.axvline(batch, color=GREY, linestyle="--", linewidth=0.8)
            chart.annotate(mark, (batch, 0), color=GREY, rotation=90, ha="right", va="bottom")
        chart.set_xscale("log", base=2)
        chart.set_xticks(batches, [str(batch) for batch in batches])
        chart.set_xlabel("batch")
        chart.set_ylabel(label)
        chart.set_ylim(bottom=0)
    if len(rates) > 1:
        legend_below(figure, axes[0, 0], 2)
    return make_plot("batch_sweep", "A decode worker by batch", "One step's tokens, and how long each waits.", figure)


@in_our_style
def kv_by_context(case: CapacityCase) -> Plot:
    """KV of one request against its context, with the model's heads and as MHA, and the memory that is left for it."""
    figure, axes = panels(1)
    chart, itemsize = axes[0, 0], case.machine.held.kv_itemsize
    contexts = np.logspace(7, np.log2(max(*case.contexts, 1 << 12)), 60, base=2)
    for label, shape, colour in (("as it is", case.shape, BLUE), ("as MHA", as_mha(case.shape), ORANGE)):
        held = [kv_bytes(shape, tokens, itemsize) / GIB for tokens in contexts]
        chart.loglog(contexts, held, color=colour, label=label)
    left = max(0, case.room.cache_bytes) * case.machine.ranks / GIB
    chart.axhline(left, color=GREY, linestyle="--", linewidth=0.8, label=f"left for KV: {left:.0f} GiB")
    chart.set_xscale("log", base=2)
    chart.set_xlabel("tokens of context")
    chart.set_ylabel("GiB a request")
    chart.legend(loc="lower right")
    return make_plot(
        "kv_by_context", f"KV of {case.name}", "Where a line meets the broken one, one request fits.", figure
    )


@in_our_style
def intensity_by_phase(case: CapacityCase) -> Plot:
    """FLOPs a byte of each operation: of a prompt by its tokens, of a decode step by its batch."""
    figure, axes = panels(2, height=4.0)
    shape, machine, ridge = case.shape, case.machine, case.hardware.ridge()
    sizes = [1 << power for power in range(14)]
    prompts = [prefill_operations(shape, size, formats=machine.held) for size in sizes]
    steps = [decode_operations(shape, size, case.context, machine.held) for size in sizes]
    for chart, label, found in (
        (axes[0, 0], "prefill: tokens of a prompt", prompts),
        (axes[0, 1], "decode: batch", steps),
    ):
        for index, of_sizes in enumerate(zip(*found, strict=True)):
            values = [one.intensity for one in of_sizes]
            chart.loglog(sizes, values, color=series_colour(index), label=of_sizes[0].name)
        if np.isfinite(ridge):
            chart.axhline(ridge, color=GREY, linestyle="--", linewidth=0.8, label=f"ridge: {ridge:.0f}")
        chart.set_xlabel(label)
        chart.set_ylabel("operations a byte")
    legend_below(figure, axes[0, 0], 4)
    caption = "Above the ridge an operation waits for arithmetic; a prompt's do, a decode step's attention never does."
    return make_plot("intensity_by_phase", f"Intensity of {case.name}'s operations", caption, figure)


def case_pictures(case: CapacityCase) -> list[Plot]:
    """Draw a case's roofline, its sweep of batches, KV and intensities."""
    swept = sweep(case)
    batch = max(1, case.best_batch)
    of_phases = phases(case.shape, case.machine.held, case.prompt, batch, int(case.context))
    marks = {"knee": swept["knee"], "saturated": batch}
    return [
        roofline(case.machine, case.shape, of_phases),
        batch_sweep(SWEEP, {case.name: [row["tokens_per_s"] for row in swept["sweep"]]}, marks),
        kv_by_context(case),
        intensity_by_phase(case),
    ]


def write_pictures(folder: Path, pictures: Sequence[Plot]) -> None:
    """Raises ConfigError where the folder can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            (folder / f"{picture.name}.png").write_bytes(picture.png)
    except OSError as error:
        raise ConfigError(f"--report {folder}: {error.strerror}") from error
