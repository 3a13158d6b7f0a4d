"""Replay a seed with a trace, or run many seeds.

python -m tests.simulation 17                 seed 17, with a trace of every message and event
python -m tests.simulation 17 --faults        the same with faults
python -m tests.simulation 17 --moves         with streams that move; with --faults, too, if you like
python -m tests.simulation 17 --tiers         with KV tiers, and workers that restart
python -m tests.simulation 0 --count 1000     a thousand seeds from 0 on, without traces; prints seeds a second
"""

import sys
from functools import partial

from tests.simulation.replay import replay, seed_parser
from tests.simulation.scenarios.run import Report, run_seed

if __name__ == "__main__":
    parser = seed_parser(__doc__)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--moves", dest="kind", action="store_const", const="moves", default="plain")
    parser.add_argument("--tiers", dest="kind", action="store_const", const="tiers")
    options = parser.parse_args()
    run = partial(run_seed, with_faults=options.faults, kind=options.kind)
    sys.exit(replay(run, options, Report()))
