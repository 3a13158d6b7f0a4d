"""Settings of KV transfer."""

from dataclasses import dataclass

from twostroke.protocol.kv_layout import Encoding


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """The same values belong on both sides; a peer with other ones is merely given up sooner or later."""

    lease_s: float = 3.0  # a peer that is silent for so long is gone; so is one that needs longer for one chunk's bytes
    progress_s: float = 15.0  # a transfer on which the peer makes no step for so long is given up
    max_chunk_bytes: int = 4 * 1024 * 1024  # a chunk's size at most, but at least one unit: transfers take turns by it
    encoding: Encoding = "raw"  # of KV that this worker sends
    max_pending_offers: int = 4096  # transfers whose offers wait for their request, of all peers
    max_queued_messages: int = 65536  # chunks of one peer that wait for their bytes
    used_ticket_s: float = 900.0  # how long a used ticket is remembered
    max_used_tickets: int = 65536  # how many at most; the oldest go first

    def __post_init__(self) -> None:
        """Raises ValueError for a value that can't be meant."""
        for name in self.__slots__:
            if name != "encoding" and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
