"""The workers as the router sees them, and the calls to them.

Live: Ray Serve (`cluster/deployments/fleet.py`); simulated: tests/simulation.
"""

from collections.abc import Sequence
from typing import Protocol

from twostroke.protocol.errors import RequestError
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, Ticket
from twostroke.protocol.stats import WorkerInfo


class Fleet(Protocol):
    """The workers of the fleet, and calls to them. Tokens come by the token channel instead.

    A call holds the request's place at the worker and ends with it. Cancelling the awaiting task cancels the request
    there. Calls raise WorkerLost when the worker dies or is gone, and RequestError when it refuses the request.
    """

    def workers(self) -> Sequence[WorkerInfo]:
        """Return the live workers of both roles."""

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        """Compute the prompt and draw the first token; with a ticket, send the KV to the decode worker.

        With `pull`, its source has been asked to send the KV of the prompt's beginning.
        """

    async def score_prompt(self, worker: Peer, request: GenerateRequest) -> PrefillReply:
        """Score or embed a prompt, on a worker of either role that does nothing else with it."""

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


class NoPath(RequestError):
    """No worker can serve the request now (503); the client may ask again in a second."""

    def __init__(self, message: str):
        super().__init__(message, code="no_workers", status=503, retry_after_s=1)
