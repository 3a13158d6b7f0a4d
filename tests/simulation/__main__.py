"""Replay a seed with a trace, or run many seeds.

python -m tests.simulation 17                 seed 17, with a trace of every message and event
python -m tests.simulation 17 --faults        the same with faults
python -m tests.simulation 0 --count 1000     a thousand seeds from 0 on, without traces; prints seeds a second
"""

import argparse
import re
import sys
import time

from tests.simulation.report import Report
from tests.simulation.run import quiet_logs, run_scenario
from tests.simulation.scenario import make_scenario

_RANDOM_BYTES = re.compile(r"b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\"")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    quiet_logs()
    if options.count == 1:
        scenario = make_scenario(options.seed, with_faults=options.faults)
        print(scenario)
        print(run_scenario(scenario, lambda line: print(_RANDOM_BYTES.sub("...", line))))
        return 0
    total, failed = Report(), 0
    began = time.perf_counter()
    for seed in range(options.seed, options.seed + options.count):
        try:
            total.add(run_scenario(make_scenario(seed, with_faults=options.faults)))
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            for note in getattr(error, "__notes__", ())[:12]:
                print(f"    {note}")
    seconds = time.perf_counter() - began
    print(total)
    print(f"{options.count} seeds in {seconds:.1f} s: {options.count / seconds:.0f} a second, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
