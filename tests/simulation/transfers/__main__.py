"""Replay a seed of the transfers' lifecycle with a trace, or run many seeds.

python -m tests.simulation.transfers 17                seed 17, with a trace of every message and event
python -m tests.simulation.transfers 0 --count 1000    a thousand seeds from 0 on, without traces; prints seeds a second
"""

import argparse
import logging
import re
import sys
import time

from tests.simulation.transfers.plan import make_plan
from tests.simulation.transfers.run import Report, run_plan, run_seed

_RANDOM_BYTES = re.compile(r"b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\"")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    logging.disable()  # warnings of aborted transfers are what a simulation is made of
    if options.count == 1:
        plan = make_plan(options.seed)
        print(plan)
        print(run_plan(plan, lambda line: print(_RANDOM_BYTES.sub("...", line))))
        return 0
    total, failed = Report(), 0
    began = time.perf_counter()
    for seed in range(options.seed, options.seed + options.count):
        try:
            total.add(run_seed(seed))
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            for note in getattr(error, "__notes__", ())[:12]:
                print(f"    {note}")
    seconds = time.perf_counter() - began
    for name, value in vars(total).items():
        print(f"{name}: {dict(sorted(value.items())) if isinstance(value, dict) else value}")
    print(f"{options.count} seeds in {seconds:.1f} s: {options.count / seconds:.0f} a second, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
