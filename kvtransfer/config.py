"""Settings of KV transfer."""

from typing import Annotated

from annotated_types import Ge

from twostroke.protocol.kv_layout import Encoding
from twostroke.protocol.settings import Count, Section


class TransferConfig(Section):
    """The same values belong on both sides; a peer with other ones is merely given up sooner or later."""

    lease_s: float = 3.0
    """At least 0.1, and at most `progress_s`. A silent peer's transfers end after so long, and so does one chunk that
    takes longer: a decode worker that can't reach the prefill worker any more then computes the prompt itself. Longer
    for machines that stand still at times: blocks of lost peers are then held longer, too."""
    progress_s: float = 15.0
    """At least 1. A transfer on which the peer makes no step for so long is given up, although the peer gives signs of
    life: its engine stands still, or other prompts go first there. Longer than a prompt that has been begun may wait
    for others; a prompt that waits to be begun is no transfer yet, and KV whose request waits for room at the decode
    worker is kept however long."""
    max_chunk_bytes: int | None = None
    """At least 4096. Transfers take turns by chunks of this size at most, or of one unit: smaller ones are fairer to
    short prompts, larger ones cost less each. null: 4 MiB of caches in host memory, 32 MiB of GPUs', where two and
    three chunks of a link are under way at a time. Links by `torch_distributed` and `nixl` between GPUs hold memory for
    three chunks each, which is set aside before the KV cache is sized, for links with all workers there may be: where
    they are so many that this would be more than 1 GiB, their chunks are smaller, down to 4 MiB."""
    encoding: Encoding = "raw"
    """KV as it is stored (`raw`), or one byte a value with a scale for each token and head: half the bytes of bf16, and
    answers that differ a little: of 27 greedy ones of a float32 model that a user compared with `raw`'s, 26 were equal
    with `int8` and 16 with `fp8`. For slow wires. Not with `model.kv_cache_dtype: fp8`, which has one byte already, nor
    with `shm` and `cuda_ipc`: `auto` then gives them up, though on one machine they are the faster way."""
    max_pending_offers: Count = 4096
    """Transfers whose offers wait for their request, or for room with it; more are refused."""
    max_queued_messages: Count = 65536
    """Messages of one peer that wait for their bytes; a peer that sends more is cut off."""
    used_ticket_s: Annotated[float, Ge(1)] = 900.0
    """How long a used ticket is remembered, so that it is not used twice."""
    max_used_tickets: Count = 65536
    """Tickets that are remembered; the oldest go first."""
