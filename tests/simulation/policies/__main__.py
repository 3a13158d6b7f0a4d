"""Compare routing policies on two prefill and two decode workers, simulated; takes some minutes.

python -m tests.simulation.policies                     three seeds of 1,000 requests of each kind of trace
python -m tests.simulation.policies --requests 300 --seeds 1

The last line is one JSON object.
"""

import argparse
import json
from dataclasses import asdict
from typing import get_args

from tests.simulation.policies.results import DECODE_CACHE_TOKENS, PREFILL_CACHE_TOKENS, Result, result_of, serve
from tests.simulation.policies.traffic import TRACES
from tests.simulation.replay import quiet_logs
from twostroke.router.routing.chooser import Policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policy", choices=get_args(Policy), action="append")
    options = parser.parse_args()
    quiet_logs()
    print(f"KV cache: {PREFILL_CACHE_TOKENS} tokens a prefill worker, {DECODE_CACHE_TOKENS} a decode worker")
    results: dict[str, dict[str, Result]] = {}
    for kind, make_trace in TRACES.items():
        for policy in options.policy or get_args(Policy):
            runs = [serve(make_trace(seed, options.requests), policy) for seed in range(options.seeds)]
            result = results.setdefault(kind, {})[policy] = result_of(runs)
            print(
                f"{kind:13s} {policy:12s} TTFT mean {result.mean_ttft_s:6.3f} P90 {result.p90_ttft_s:6.3f} "
                f"P99 {result.p99_ttft_s:6.3f} s, TPOT {result.mean_tpot_s * 1e3:5.2f} ms, "
                f"hits {result.hit_rate:4.0%}, busy {result.prefill_busy:4.0%} {result.decode_busy:4.0%}",
                flush=True,
            )
    print(json.dumps({kind: {name: asdict(one) for name, one in of.items()} for kind, of in results.items()}))


if __name__ == "__main__":
    main()
