"""The interface of all transports: move blocks of one layer from this worker's store into the peer's.

A link carries bytes, in order, between one prefill and one decode worker. What they mean is agreed beforehand on the
control connection (messages.Chunk), so a link has no headers, and the receiver alone decides where bytes go.
"""

from collections.abc import Sequence
from typing import Protocol

LinkParams = dict[str, str | int]
"""What the receiving side tells the sending side so that it can join: an address, a one-time token (hex), a store."""


class DataLink(Protocol):
    """One direction of bytes between a pair of workers. Calls are made one at a time, each awaited.

    Every method raises ConnectionLost once the link is broken. A cancelled call leaves the link unusable.
    """

    async def send(self, layer: int, block_ids: Sequence[int]) -> None:
        """Send these blocks of `layer`, in this order; returns when the store's memory is no longer read."""

    async def receive(self, layer: int, block_ids: Sequence[int]) -> None:
        """Receive len(block_ids) blocks into these places; returns when all bytes are written."""

    async def discard(self, num_bytes: int) -> None:
        """Receive `num_bytes` into nowhere: a chunk of a transfer that was aborted here."""

    async def close(self) -> None:
        """Break the link. When this returns, nothing reads or writes the store through it any more."""


class PendingLink(Protocol):
    """A link that the receiving side has prepared and the sending side has not joined yet."""

    @property
    def params(self) -> LinkParams: ...

    async def established(self) -> DataLink:
        """The link, once the peer has joined. Raises ConnectionLost after the transport's time-out."""

    async def close(self) -> None:
        """Give it up."""


class Transport(Protocol):
    """Makes links for one worker."""

    @property
    def name(self) -> str:
        """As in the configuration: `tcp`, `torch_distributed`."""

    async def prepare(self, host: str) -> PendingLink:
        """Receiving side: make ready for one peer to join, reachable at `host`."""

    async def join(self, params: LinkParams) -> DataLink:
        """Sending side: join what the peer prepared. Raises ConnectionLost."""

    async def close(self) -> None:
        """Let go of everything, links included."""
