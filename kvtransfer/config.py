"""Settings of KV transfer."""

from typing import Annotated

from annotated_types import Ge

from twostroke.protocol.kv_layout import Encoding
from twostroke.protocol.settings import Count, Section


class TransferConfig(Section):
    """The same values belong on both sides; a peer with other ones is merely given up sooner or later."""

    lease_s: float = 3.0
    """A peer that is silent for so long is gone; so is one that needs longer for one chunk's bytes."""
    progress_s: float = 15.0
    """A transfer on which the peer makes no step for so long is given up."""
    max_chunk_bytes: int | None = None
    """A chunk's size at most, but at least one unit: transfers take turns by it. None: by where the cache is, see
    link.Pace."""
    encoding: Encoding = "raw"
    """Of KV that this worker sends."""
    max_pending_offers: Count = 4096
    """Transfers whose offers wait for their request, of all peers."""
    max_queued_messages: Count = 65536
    """Chunks of one peer that wait for their bytes."""
    used_ticket_s: Annotated[float, Ge(1)] = 900.0
    """How long a used ticket is remembered."""
    max_used_tickets: Count = 65536
    """How many at most; the oldest go first."""
