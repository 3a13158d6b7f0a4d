"""The costs of one worker: how long its steps take, how much KV it holds and sends, and what it is made of."""

from typing import Annotated, Literal

import msgspec

from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.stats import StepCosts

BLOCK_TOKENS = 16
CALL_S = 0.005  # to a worker and back, where it is not measured

AboveZero = Annotated[float, msgspec.Meta(gt=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class WorkerProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of worker, of either role: learnt from a server, measured by a bench, or computed from the roofline."""

    name: str
    costs: StepCosts  # in a file a list, in the order of its fields
    kv_bytes: AboveZero  # of a token, all layers, as it is sent to one copy
    kv_tokens: Annotated[int, msgspec.Meta(ge=BLOCK_TOKENS)]  # of a worker's cache
    link_bytes_per_s: AboveZero
    step_tokens: AtLeastOne
    max_batch: AtLeastOne
    source: str  # the origin of the figures
    num_layers: AtLeastOne = 32  # of a prompt's KV the last layer's part can't travel while the prompt is computed
    beside: StepCosts | None = None  # while another worker of the same machine computes; None: it has its own
    http_s: float = 0.0  # of a first token: HTTP, tokenising, admission
    call_s: float | None = None  # to a worker and back; None: not measured
    gpus: AtLeastOne = 1
    usd_per_hour: float = 1.0
    hardware: str = ""
    ranks: AtLeastOne = 1
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    block_size: AtLeastOne = BLOCK_TOKENS
    shares_contexts: bool = msgspec.field(default=False, name="context_parallel")  # ranks divide the tokens of latents
    # Share of answers' tokens that repeat earlier text: a property of the workload. 0: no tokens are drafted.
    repeated: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    copies: AtLeastOne = 1  # of heads, or of latents, on its ranks: KV is sent to each

    @property
    def overhead_s(self) -> float:
        """Seconds of a first token beside queues and steps."""
        return self.http_s + (CALL_S if self.call_s is None else self.call_s)

    @property
    def layout(self) -> KVLayout:
        """A layout of 2-byte values whose blocks have the right size."""
        values = max(1, round(self.kv_bytes / self.num_layers / 4))
        return KVLayout(
            self.name, "bfloat16", self.num_layers, num_kv_heads=1, head_dim=values, block_size=BLOCK_TOKENS
        )
