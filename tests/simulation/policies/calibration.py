"""What the simulated workers are like: those of this project's small random model on the machine that CI runs on."""

from dataclasses import dataclass

from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.stats import StepCosts


@dataclass(frozen=True)
class Calibration:
    """One kind of worker."""

    costs: StepCosts
    layout: KVLayout
    link_bytes_per_s: float
    source: str


SMALL_MODEL = Calibration(
    # 4,900 prompt tokens a second at 1k tokens, of which attention takes a tenth; steps of 3.2, 4.5 and 13 ms for 1, 8
    # and 32 requests with 256 tokens of context each.
    costs=StepCosts(base_s=2.9e-3, token_s=1.83e-4, pair_s=4.0e-8, row_s=2.0e-4, context_s=4.5e-7),
    layout=KVLayout("160m", "bfloat16", num_layers=12, num_kv_heads=4, head_dim=64, block_size=16),
    link_bytes_per_s=1e9,
    source="docs/performance-log.md: `twostroke bench engine` with the 160m model, 2 threads; a link of 1 GB/s",
)
