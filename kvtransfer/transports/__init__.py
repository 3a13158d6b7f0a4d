"""Ways for KV to travel, by the names they have in the configuration."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from kvtransfer.link import Transport
from protocol.messages import Reach


@dataclass(frozen=True)
class Transports:
    """All transports that a rank has, and what its peers are told of them."""

    by_name: Mapping[str, Transport]
    reach: Reach

    async def close(self) -> None:
        """Close them all."""
        await asyncio.gather(*(transport.close() for transport in self.by_name.values()))
