"""The workers as the router sees them, and the path of an attempt through them.

Live: Ray Serve (`cluster/deployments/fleet.py`); simulated: tests/simulation.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import msgspec

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


class PathEstimate(msgspec.Struct, frozen=True):
    """A request's times on a path, in seconds, by the cost models that its workers have fitted."""

    queue_s: float  # until its prompt is begun: work that goes first
    pull_s: float  # fetching the prompt's beginning from another worker
    prefill_s: float  # computing what is cached nowhere
    transfer_s: float  # of KV, as far as prefill doesn't hide it
    decode_slot_s: float  # until the decode worker's next step has room for it
    step_s: float  # of the decode worker with the request in it, drafts aside
    speedup: float = 1.0  # by drafts: a token takes so much less than a step
    tier_read_s: float = 0.0  # reading the prompt's beginning from KV tiers of the worker that computes the rest

    @property
    def token_s(self) -> float:
        """Predicted time between tokens."""
        return self.step_s / self.speedup

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.queue_s + self.pull_s + self.tier_read_s + self.prefill_s


class NoPath(RequestError):
    """No worker can serve the request now (503); the client may ask again in a second."""

    def __init__(self, message: str):
        super().__init__(message, code="no_workers", status=503, retry_after_s=1)


PathKind = Literal["decode", "prefill_decode", "prefill", "score"]
"""A decode worker alone; a pair; a prefill worker alone, which also writes the answer; any worker that only scores."""

PATH_KINDS: tuple[PathKind, ...] = get_args(PathKind)


class Path(msgspec.Struct, frozen=True):
    """The workers of one attempt. Without a prefill worker, the decode worker computes the prompt itself.

    A prompt that is only scored has one worker, of either role, in the field `decode`.
    """

    prefill: WorkerInfo | None
    decode: WorkerInfo
    source: WorkerInfo | None = None  # the worker from which the prompt's beginning is pulled
    estimate: PathEstimate | None = (
        None  # None: the workers have not reported their costs yet, or the policy needs none
    )
    new_tokens: int | None = None  # of the prompt, to be computed; known with the estimate
    is_cost_probe: bool = False  # taken to check its costs, not for them
    is_scoring: bool = False  # the prompt is only scored or embedded
    is_at_prefill: bool = False  # a prefill worker writes the answer

    @property
    def kind(self) -> PathKind:
        """The path by which workers it takes."""
        if self.is_scoring:
            return "score"
        if self.prefill is not None:
            return "prefill_decode"
        return "prefill" if self.is_at_prefill else "decode"

    @property
    def prompt_worker(self) -> WorkerInfo:
        """The worker that computes the prompt."""
        return self.prefill or self.decode

    @property
    def worker_ids(self) -> tuple[str, str]:
        """The ids of the prefill and of the decode worker, as lines and spans name them; empty for one that is not
        there."""
        decode = self.decode.peer.worker_id
        if self.prefill is not None:
            return self.prefill.peer.worker_id, decode
        return (decode, "") if self.is_scoring and self.decode.role == "prefill" else ("", decode)

    @property
    def workers(self) -> tuple[Peer, ...]:
        """The workers that serve the attempt, first the one that computes the prompt."""
        return (self.decode.peer,) if self.prefill is None else (self.prefill.peer, self.decode.peer)
