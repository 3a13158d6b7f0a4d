"""Asking workers for the prefixes they hold, and keeping in mind who holds what. All of it is guesswork without harm:
a worker that holds less than was thought sends less, or nothing, and the prefill worker computes the rest.
"""

from collections.abc import Collection, Sequence

from protocol.messages import SendPrefix
from protocol.requests import GenerateRequest
from protocol.stats import WorkerInfo
from protocol.tickets import Peer, Ticket, mint_ticket
from router.config import PipelineConfig
from router.policy import Candidate, Path, choose_source
from router.prefix_index import PrefixIndex, pieces_of
from router.token_channels import TokenChannels


class PrefixPulls:
    """One router replica's knowledge of prefixes. `secret` is the cluster's, to sign tickets."""

    def __init__(self, *, channels: TokenChannels, secret: bytes, config: PipelineConfig):
        self._channels = channels
        self._secret = secret
        self._config = config
        self._index = PrefixIndex(config.prefix_index_pieces)

    def follow(self, workers: Sequence[WorkerInfo]) -> None:
        """Forget what workers held that are there no more."""
        self._index.keep({info.peer for info in workers})

    def with_source(
        self,
        path: Path,
        request: GenerateRequest,
        sent: Sequence[int],
        workers: Sequence[Candidate],
        avoid: Collection[Peer],
    ) -> Path:
        """`path`, with the worker to pull from where one holds enough more of the prompt and the outputs `sent`."""
        if path.prefill is None or not self._config.pulls:
            return path
        token_ids = (*request.token_ids, *sent)
        source = choose_source(
            path.prefill,
            workers,
            held_tokens=self._index.find(pieces_of(token_ids, request.cache_salt)),
            num_tokens=len(token_ids),
            min_tokens=self._config.pull_min_tokens,
            avoid=avoid,
        )
        return Path(path.prefill, path.decode, source)

    def ask(self, path: Path, request: GenerateRequest) -> Ticket | None:
        """Have the path's source send what it holds of the attempt's tokens; the ticket for its prefill worker.

        None where there is no source, or no channel to it now: the prefill worker would wait for it in vain.
        """
        if path.source is None or path.prefill is None or not self._channels.is_connected(path.source.peer):
            return None
        ticket = mint_ticket(
            self._secret,
            request.request_id,
            path.source.peer,
            path.prefill.peer,
            path.prefill.transfer_addresses,
            source_ranks=path.source.layout.tp_size,
        )
        self._channels.send_prefix(path.source.peer, SendPrefix(ticket, request.token_ids, request.cache_salt))
        return ticket

    def remember(self, worker: Peer, token_ids: Sequence[int], cache_salt: bytes) -> None:
        """`worker` has computed, or received, the KV of these tokens."""
        if self._config.pulls:
            self._index.remember(worker, pieces_of(token_ids, cache_salt))
