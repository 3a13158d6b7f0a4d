"""Compare autoscaling policies in simulation, on public traces or on synthetic ones that imitate them; takes minutes.

python -m tests.simulation.autoscaling                           synthetic bursts of an hour, and a day of 3 hours
python -m tests.simulation.autoscaling --azure FILE              Azure's code trace, as it is and on larger workers
python -m tests.simulation.autoscaling --azure FILE --modes fixed hybrid --only-ours    what flexible roles save
python -m tests.simulation.autoscaling --servegen RATES LENGTHS  a day of ServeGen's rates

The last line is one JSON object.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from tests.simulation.autoscaling.compare import (
    Fixed,
    Ours,
    Outcome,
    RayServe,
    Setting,
    fleet_for_busiest,
    fleet_in_hindsight,
    serve,
)
from tests.simulation.autoscaling.traffic import Trace, azure_file, begun_later, bursts, diurnal, servegen_day
from twostroke.cluster.config.autoscaling import AutoscalingConfig, RoleLimits
from twostroke.planning.coarse.fleet import Scaler
from twostroke.planning.costs.profiles import H100, ONE_B, SMALL
from twostroke.planning.layouts import Mode

STARTUP_S = 45.0
MOST = 48, 16
RAY_DECODE_ONGOING = 16.0
"""Some that a decode worker of each setting can have within its promise; Serve's own target, 2, stays for prefill."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--azure", type=Path)
    parser.add_argument("--servegen", type=Path, nargs=2, metavar=("RATES", "LENGTHS"))
    parser.add_argument("--model", default="m-large")
    parser.add_argument("--day", type=int, default=0)
    parser.add_argument(
        "--peak", type=float, default=3.5, help="requests a second in the busiest 10 minutes of the day"
    )
    parser.add_argument("--cooldown", type=float, action="append", help="of our policy, s; several times: one run each")
    parser.add_argument("--startup", type=float, default=STARTUP_S, help="of a worker, s")
    parser.add_argument("--begin", type=float, help="begin the trace so many seconds later, with these at its end")
    parser.add_argument("--modes", nargs="+", choices=get_args(Mode), default=["hybrid"], help="planning/layouts.py")
    parser.add_argument("--only-ours", action="store_true", help="of the scalers: no fixed fleets, and not Ray Serve's")
    options = parser.parse_args()
    cooldowns = options.cooldown or [AutoscalingConfig().cooldown_s]
    small = Setting(SMALL, 5.0, 0.02, options.startup)  # twice what the longest prompt of Azure's takes alone
    if options.azure:
        cases = [
            (azure_file(options.azure), small),
            (azure_file(options.azure), replace(small, ttft_s=15.0)),
            (azure_file(options.azure, copies=10), Setting(H100, 2.0, 0.03, options.startup)),
        ]
    elif options.servegen:
        day = servegen_day(*options.servegen, options.model, options.day, options.peak)
        cases = [(day, Setting(ONE_B, 30.0, 0.15, options.startup))]
    else:
        cases = [(bursts(0, 3600.0), small), (diurnal(0, 3 * 3600.0, 2.0, 20.0), small)]
    if options.begin is not None:
        cases = [(begun_later(trace, options.begin), setting) for trace, setting in cases]
    found = [
        compare(trace, replace(setting, mode=mode), cooldowns, only_ours=options.only_ours)
        for trace, setting in cases
        for mode in options.modes
    ]
    print(json.dumps(found))


def compare(trace: Trace, setting: Setting, cooldowns: list[float], *, only_ours: bool) -> dict[str, Any]:
    """All scalers on one trace; each begins with the fleet that hindsight would have had, every prompt by a pair."""
    begun = time.monotonic()
    of_pairs = setting if setting.is_aggregated else replace(setting, mode="disaggregated")
    hindsight = fleet_in_hindsight(trace, of_pairs, MOST)
    busiest = fleet_for_busiest(trace, setting, AutoscalingConfig())
    most = max(hindsight[0], busiest[0]), max(hindsight[1], busiest[1])
    config = AutoscalingConfig(
        prefill=RoleLimits(min=min(1, most[0]), max=most[0]), decode=RoleLimits(min=1, max=most[1])
    )
    what = f"{trace.name} on {setting.kind.name}, {setting.mode}"
    print(f"{what}: {len(trace.requests)} requests, TTFT {setting.ttft_s:g} s")
    scalers: dict[str, Scaler] = {}
    if not only_ours:
        scalers = {"fixed, busiest 10 s": Fixed(*busiest), "fixed, hindsight": Fixed(*hindsight)}
    for cooldown_s in cooldowns:
        scalers[f"joint, {cooldown_s:g} s"] = Ours(config.model_copy(update={"cooldown_s": cooldown_s}))
    if not only_ours:
        scalers["ray serve"] = RayServe(config, 2.0, RAY_DECODE_ONGOING)
    outcomes: dict[str, Outcome] = {}
    for name, scaler in scalers.items():
        start = (scaler.prefill, scaler.decode) if isinstance(scaler, Fixed) else hindsight
        outcomes[name] = one = serve(trace, setting, scaler, start)
        print(
            f"  {name:20s} in time {one.attainment:6.1%}  worker-hours {one.worker_hours:6.1f}  "
            f"prefill {one.mean_prefill:5.2f} (at most {one.max_prefill})  decode {one.mean_decode:5.2f} "
            f"({one.max_decode})  reversals an hour {one.prefill_reversals} {one.decode_reversals}",
            flush=True,
        )
    return {
        "trace": trace.name,
        "workers": setting.kind.name,
        "mode": setting.mode,
        "ttft_s": setting.ttft_s,
        "tpot_s": setting.tpot_s,
        "startup_s": setting.startup_s,
        "took_s": time.monotonic() - begun,
        "outcomes": {name: asdict(one) for name, one in outcomes.items()},
    }


if __name__ == "__main__":
    main()
