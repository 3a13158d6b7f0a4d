"""What a fleet's workers are like: how long their steps take, and how much KV they hold and send.

Known by name, or read from the file that `twostroke bench costs` writes.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.stats import StepCosts
from twostroke.worker.step_costs import StepContent

BLOCK_TOKENS = 16

AboveZero = Annotated[float, msgspec.Meta(gt=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of worker, of either role."""

    name: str
    costs: StepCosts  # in the file a list, in the order of its fields
    kv_bytes: AboveZero  # of a token, all layers
    kv_tokens: Annotated[int, msgspec.Meta(ge=BLOCK_TOKENS)]  # of a worker's cache
    link_bytes_per_s: AboveZero
    step_tokens: AtLeastOne
    max_batch: AtLeastOne
    source: str  # where the figures come from
    num_layers: AtLeastOne = 32  # of a prompt's KV the last layer's part can't travel while the prompt is computed
    beside: StepCosts | None = None  # while another worker of the same machine computes; None: it has its own
    http_s: float = 0.0  # to the server and back, of a first token
    admit_s: float = 0.0  # reading, tokenising, choosing the path
    prompt_s: float = 0.0  # of any step with a prompt in it, the constant of all steps aside
    call_s: float | None = None  # to a worker and back; None: drawn, some milliseconds
    others: float = 0.0  # threads of other programs that wanted the machine's cores while this was measured
    threads: int = 1  # of a worker, which take a core each

    def step_s(self, content: StepContent, *, is_beside: bool = False) -> float:
        """Seconds of a step; what prompts cost beyond its parts is as much dearer beside others as their tokens are."""
        costs = self.beside if is_beside and self.beside is not None else self.costs
        slower = costs.token_s / self.costs.token_s if self.costs.token_s else 1.0
        return content.expected_s(costs) + (self.prompt_s * slower if content.prompt_tokens else 0.0)

    @property
    def layout(self) -> KVLayout:
        """A layout of 2-byte values whose blocks have the right size."""
        values = max(1, round(self.kv_bytes / self.num_layers / 4))
        return KVLayout(
            self.name, "bfloat16", self.num_layers, num_kv_heads=1, head_dim=values, block_size=BLOCK_TOKENS
        )


SMALL = Kind(
    name="160m-cpu",
    # 4,900 prompt tokens a second at 1k tokens, of which attention takes a tenth; steps of 3.2, 4.5 and 13 ms for 1, 8
    # and 32 requests with 256 tokens of context each.
    costs=StepCosts(base_s=2.9e-3, token_s=1.83e-4, pair_s=4.0e-8, row_s=2.0e-4, context_s=4.5e-7),
    kv_bytes=12 * 2 * 4 * 64 * 2,
    kv_tokens=200_000,
    link_bytes_per_s=1e9,
    step_tokens=2048,
    max_batch=256,
    source="docs/performance-log.md: `twostroke bench engine` with the 160m model, 2 threads; a link of 1 GB/s",
    num_layers=12,
)
"""A prompt of 1,000 takes 0.2 s, one of 7,400 takes 2.5 s."""

ONE_B = Kind(
    name="1.2b-cpu",
    # 476 prompt tokens a second at 1k tokens; 32.5, 210 and 334 tokens a second at batches of 1, 8 and 32.
    costs=StepCosts(base_s=2.7e-2, token_s=1.92e-3, pair_s=3.6e-7, row_s=1.9e-3, context_s=8e-7),
    kv_bytes=32_768,
    kv_tokens=200_000,
    link_bytes_per_s=1e9,
    step_tokens=2048,
    max_batch=256,
    source="docs/performance-log.md: `twostroke bench engine` with the 1.2b model, 2 threads",
    num_layers=16,
)
"""Slow enough that a day of 100,000 requests needs some eight prefill workers."""

H100 = Kind(
    name="8b-h100-floor",
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

KINDS = {kind.name: kind for kind in (SMALL, ONE_B, H100)}


def kind_of(name: str) -> Kind:
    """A known kind, or a file's. Raises ConfigError."""
    if name in KINDS:
        return KINDS[name]
    try:
        kind = msgspec.json.decode(Path(name).read_bytes(), type=Kind)
    except OSError as error:
        known = ", ".join(KINDS)
        raise ConfigError(
            f"--costs {name}: {error.strerror}; name a file of `bench costs`, or one of {known}"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--costs {name}: {error}") from error
    for field, costs in (("costs", kind.costs), ("beside", kind.beside)):
        if costs is not None and min(msgspec.structs.astuple(costs)) < 0:
            raise ConfigError(f"--costs {name}: {field}: seconds below 0: measure anew by `twostroke bench costs`")
    return kind
