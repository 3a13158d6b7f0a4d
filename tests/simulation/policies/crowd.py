"""Far more requests than decode workers have room for, none of which is promised anything, so that none is refused.

Prompts wait for prefill workers, and their KV for decode workers, for longer than a transfer may take that makes no
progress.
"""

from dataclasses import replace

from tests.simulation.policies.deployment import Run, serve
from tests.simulation.policies.traffic import strangers

NUM_REQUESTS = 100
RATE_PER_S = 60.0
"""Some eight times what the decode workers manage with answers of this length and room for so few of them."""
DECODE_CACHE_TOKENS = 6_000
LONGER = 3
"""How many times as long answers are as in other traces."""


def run_crowd(seed: int, *, num_requests: int = NUM_REQUESTS) -> Run:
    """All requests served to their end."""
    trace = strangers(seed, num_requests=num_requests, rate_per_s=RATE_PER_S, prompt_tokens=600.0, sigma=0.4)
    trace = [replace(one, num_output_tokens=LONGER * one.num_output_tokens) for one in trace]
    return serve(trace, "kv_aware", seed=seed, decode_cache_tokens=DECODE_CACHE_TOKENS)
