"""The workers as the router sees them. Live: Ray Serve (`cluster/`); simulated: tests/simulation.

Which workers can take whose KV. Pure: it follows from their layouts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twostroke.protocol.kv_layout import KVLayout, incompatibility
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, Ticket
from twostroke.protocol.stats import WorkerInfo


class Fleet(Protocol):
    """Who is there, and how to call them. Tokens don't come this way but by the token channel.

    A call holds the request's place at the worker and ends with it. Cancelling the awaiting task cancels the request
    there. Calls raise WorkerLost when the worker dies or is gone, and RequestError when it refuses the request.
    """

    def workers(self) -> Sequence[WorkerInfo]:
        """Those alive now, of both roles."""

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        """Compute the prompt and draw the first token; with a ticket, send the KV to the decode worker.

        With `pull`, its source has been asked to send the KV of the prompt's beginning.
        """

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        """Continue the request to its end; without a ticket, compute the prompt here too.

        With `pull`, its source has been asked to send the KV of the prompt's beginning; only without a ticket.
        """

    async def probe_source(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        """Send KV of so many tokens once for each ticket, out of free blocks, and time it.

        Also raises TransferFailed, as `probe_target` does.
        """

    async def probe_target(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> None:
        """Receive what `probe_source` sends with these tickets, into free blocks."""


Mask = NDArray[np.bool_]
"""By workers. Where None stands for one, all of them are meant: most fleets are of one kind and well."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Decode workers of one kind, and the prefill workers whose KV they take."""

    decode: Mask | None
    prefill: Mask | None


def pair_up(prefill: Sequence[WorkerInfo], decode: Sequence[WorkerInfo]) -> tuple[Pairing, ...]:
    """Who can send KV to whom; decode workers that take none are in no pair."""
    if not prefill:
        return ()
    kinds = dict.fromkeys(info.layout for info in decode)
    senders = dict.fromkeys(info.layout for info in prefill)
    pairings: list[Pairing] = []
    for kind in kinds:
        able = {layout for layout in senders if incompatibility(layout, kind) is None}
        pairings.append(
            Pairing(
                _mask(info.layout == kind and bool(info.transfer_addresses) for info in decode),
                _mask(info.layout in able for info in prefill),
            )
        )
    return tuple(pairings)


def takers(infos: Sequence[WorkerInfo], layout: KVLayout) -> Mask:
    """Who takes KV of this layout."""
    able = {kind for kind in {info.layout for info in infos} if incompatibility(layout, kind) is None}
    return np.array([info.layout in able and bool(info.transfer_addresses) for info in infos], bool)


def both(one: Mask | None, other: Mask | None) -> Mask | None:
    """Workers that are in both."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def anybody(mask: Mask | None) -> bool:
    """Whether it is of somebody. Not to be asked where there are no workers at all."""
    return mask is None or bool(mask.any())


def _mask(rows: Iterable[bool]) -> Mask | None:
    mask = np.array(list(rows), bool)
    return None if mask.all() else mask
