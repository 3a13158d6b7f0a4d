"""A rank's part of its worker's transfers: rank 0 tells what to send and to expect, and hears of every end."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from twostroke.kvtransfer.incoming import IncomingTransfer
from twostroke.kvtransfer.outgoing import OutgoingTransfer
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.stats import TransferStats
from twostroke.protocol.errors import ProtocolError, TransferFailed
from twostroke.protocol.rank_messages import (
    AbortTransfer,
    CommitTransfer,
    DeclineTransfer,
    ExpectTransfer,
    KeepTransfer,
    OpenTransfer,
    RefuseTransfer,
    TransferCounts,
    TransferEnded,
    TransferReady,
)
from twostroke.protocol.requests import SampledToken


class RankTransfers:
    """Acts on both sides of one rank. `tell` reaches rank 0, and never waits."""

    def __init__(
        self, *, sender: KVSender, receiver: KVReceiver, num_layers: int, tell: Callable[[TransferEnded], None]
    ):
        self._sender = sender
        self._receiver = receiver
        self._num_layers = num_layers
        self._tell = tell
        self._outgoing: dict[int, OutgoingTransfer] = {}  # by rank 0's number, until their end
        self._incoming: dict[int, IncomingTransfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # one for each of them
        self._num_layers_done = num_layers  # by the step under way; all of them where there is none
        self._fed: list[tuple[OutgoingTransfer, int]] = []  # what that step computes for whom: tokens when it is done

    # --- the rank's engine ---

    def step_began(self) -> None:
        self._num_layers_done = 0

    def layer_done(self, layer: int) -> None:
        """The step under way has written this layer's KV."""
        self._num_layers_done = layer + 1
        for transfer, num_tokens in self._fed:
            transfer.layer_ready(layer, num_tokens)

    def step_ended(self) -> None:
        """Every layer is done, announced or not."""
        for layer in range(self._num_layers_done, self._num_layers):
            self.layer_done(layer)
        self._num_layers_done = self._num_layers
        self._fed.clear()

    # --- rank 0's word ---

    def handle(self, message: object) -> None:
        """Do as it says; never waits. Raises ProtocolError for what does not concern transfers."""
        match message:
            case OpenTransfer(number, ticket, num_tokens, block_ids, num_ready_tokens):
                outgoing = self._sender.open(ticket, num_tokens, block_ids, num_ready_tokens)
                self._outgoing[number] = outgoing
                self._follow(number, outgoing.done(), self._sender.stats)
            case TransferReady(number, num_tokens):
                if (sending := self._outgoing.get(number)) is not None:
                    self._feed(sending, num_tokens)
            case CommitTransfer(number, first_token):
                if (sending := self._outgoing.get(number)) is not None:
                    sending.commit(first_token)
            case DeclineTransfer(ticket, reason):
                self._sender.decline(ticket, reason)
            case ExpectTransfer(number, ticket, block_ids, num_tokens, skip_tokens):
                incoming = self._receiver.expect(ticket, block_ids, num_tokens, skip_tokens)
                self._incoming[number] = incoming
                self._follow(number, incoming.verified(), self._receiver.stats)
            case KeepTransfer(ticket):
                self._receiver.keep(ticket)
            case RefuseTransfer(ticket):
                self._receiver.refuse(ticket)
            case AbortTransfer(number, reason):
                transfer = self._outgoing.get(number) or self._incoming.get(number)
                if transfer is not None:
                    transfer.abort(reason)
            case _:
                raise ProtocolError(f"rank 0 must not send {type(message).__name__}")

    async def close(self) -> None:
        """Close both sides, and return once nothing touches a block any more."""
        await self._sender.close()
        await self._receiver.close()
        await asyncio.gather(*self._tasks)

    # --- inside ---

    def _feed(self, transfer: OutgoingTransfer, num_tokens: int) -> None:
        for layer in range(self._num_layers_done):
            transfer.layer_ready(layer, num_tokens)
        if self._num_layers_done < self._num_layers:
            self._fed.append((transfer, num_tokens))

    def _follow(self, number: int, end: Coroutine[Any, Any, SampledToken | None], stats: TransferStats) -> None:
        task = asyncio.create_task(self._see_off(number, end, stats), name=f"part of transfer {number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_off(self, number: int, end: Coroutine[Any, Any, SampledToken | None], stats: TransferStats) -> None:
        failure, first_token = None, None
        try:
            first_token = await end
        except TransferFailed as error:
            failure = str(error)
        self._outgoing.pop(number, None)
        self._incoming.pop(number, None)
        counts = TransferCounts(stats.bytes, stats.digest_failures, stats.retries, stats.links_lost)
        self._tell(TransferEnded(number, failure, first_token, counts))
