"""Kinds of workers to simulate with."""

from tests.simulation.autoscaling.workers import Kind
from tests.simulation.policies.calibration import SMALL_MODEL
from twostroke.protocol.stats import StepCosts

SMALL = Kind(
    name="160m on 2 cores",
    costs=SMALL_MODEL.costs,
    kv_bytes=SMALL_MODEL.layout.num_layers * 2 * 4 * 64 * 2,
    kv_tokens=200_000,
    link_bytes_per_s=SMALL_MODEL.link_bytes_per_s,
    step_tokens=2048,
    max_batch=256,
    source=SMALL_MODEL.source,
)
"""4,900 prompt tokens a second: a prompt of 1,000 takes 0.2 s, one of 7,400 takes 2.5 s."""

ONE_B = Kind(
    name="1.2b on 2 cores",
    # 476 prompt tokens a second at 1k tokens; 32.5, 210 and 334 tokens a second at batches of 1, 8 and 32.
    costs=StepCosts(base_s=2.7e-2, token_s=1.92e-3, pair_s=3.6e-7, row_s=1.9e-3, context_s=8e-7),
    kv_bytes=32_768,
    kv_tokens=200_000,
    link_bytes_per_s=1e9,
    step_tokens=2048,
    max_batch=256,
    source="docs/performance-log.md: `twostroke bench engine` with the 1.2b model, 2 threads",
)
"""Slow enough that a day of 100,000 requests needs some eight prefill workers."""

H100 = Kind(
    name="8B on one H100",
    # Floors of Llama-3.1-8B in bf16 at 0.7 of 798 TFLOP/s and 0.8 of 3.0 TB/s: 2 x 8.03e9 operations a token,
    # 4 x 32 x 4096 a pair, 15.0 GB of weights a step and 131,072 bytes a token of context; 1 ms a step for the host.
    costs=StepCosts(base_s=7.3e-3, token_s=2.9e-5, pair_s=9.4e-10, row_s=2.9e-5, context_s=5.5e-8),
    kv_bytes=131_072,
    kv_tokens=400_000,
    link_bytes_per_s=25e9,
    step_tokens=8192,
    max_batch=256,
    source="floors of the cost model; no GPU has confirmed them",
)
