"""Replay a seed of the transfers' lifecycle with a trace, or run many seeds.

python -m tests.simulation.transfers 17                seed 17, with a trace of every message and event
python -m tests.simulation.transfers 0 --count 1000    a thousand seeds from 0 on, without traces; prints seeds a second
"""

import sys

from tests.simulation.replay import replay, seed_parser
from tests.simulation.transfers.run import Report, run_seed

if __name__ == "__main__":
    sys.exit(replay(run_seed, seed_parser(__doc__).parse_args(), Report()))
