"""`twostroke bench engine --sweep FILE`: decode at batches 1 to 64, drawn beside what this machine could do at best."""

import argparse
from typing import Any

from twostroke.benchmarks.engines.engine import SWEPT, decodes, in_turns, medians
from twostroke.benchmarks.engines.hardware import NUMBERS_HERE
from twostroke.model.load import LoadedEngine
from twostroke.model.machine_limits import LimitsMeter
from twostroke.planning.costs.pictures import batch_sweep
from twostroke.planning.costs.roofline import knee
from twostroke.protocol.errors import ConfigError


async def measure_sweep(loaded: LoadedEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Decode at batches 1 to 64, and draw it beside what the model's operations take at this machine's limits.

    A shared machine's limits change from minute to minute. So each batch is held against the limits around it, and both
    curves are drawn for the medians of all limits.
    """
    machine, subjects = LimitsMeter(dtype=NUMBERS_HERE), {batch: await decodes(loaded, batch, args) for batch in SWEPT}
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
    knees = knee(SWEPT, rates), knee(SWEPT, floors)
    try:
        args.sweep.write_bytes(batch_sweep(SWEPT, {"measured": rates, "model": floors}, {"knee": knees[0]}).png)
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
