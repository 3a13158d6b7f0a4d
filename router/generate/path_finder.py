"""Finding the workers of an attempt, and waiting for some where there are none.

Asking workers for the prefixes they hold. All of it is guesswork without harm: a worker that holds less than was
thought sends less, or nothing, and whoever pulls computes the rest.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import SendPrefix
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, Ticket, mint_ticket
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.channels.worker_channel import ChannelListener
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.routing.block_index import CachedPrefixes
from twostroke.router.routing.cheapest_path import cheapest_path
from twostroke.router.routing.fleet_view import FleetView, WorkerTable
from twostroke.router.routing.in_flight import Hold, Place
from twostroke.router.routing.path_costs import Need
from twostroke.router.routing.policy import Estimate, NoPath, Path, choose_source, least_loaded, round_robin
from twostroke.router.routing.trials import Trials
from twostroke.router.slo.classes import Floats

_FIRST_ANSWER_TOKENS = 100.0  # how long an answer is taken to be before any has ended
_ANSWER_WEIGHT = 0.02  # of an answer that has ended, in their mean
_LEAST_S = 1e-3  # until a first token, when paths are compared


class PathFinder:
    """Asks the policy, with what is known now, and holds the workers' places before another request asks.

    `workers` tells who is there (Fleet.workers). Takes the channels' listener for itself: to be made before the
    channels follow any worker.
    """

    def __init__(
        self,
        *,
        workers: Callable[[], Sequence[WorkerInfo]],
        channels: TokenChannels,
        clock: Clock,
        config: PipelineConfig,
    ):
        self._workers = workers
        self._channels = channels
        self._clock = clock
        self._config = config
        self._view = FleetView(channels, clock)
        self._cached: CachedPrefixes | None = None
        if config.policy == "kv_aware":
            self._cached = CachedPrefixes(clock=clock, max_blocks=config.index_blocks, expected_s=config.expected_s)
        self._trials = Trials()
        self._turn = 0
        self._answer_tokens = _FIRST_ANSWER_TOKENS
        self.on_decision: Callable[[float], None] = lambda seconds: None
        """Told of every choice how long it took."""
        channels.listen(
            ChannelListener(
                told=self._view.told,
                changed=self._view.changed,
                blocks=None if self._cached is None else self._cached.heard,
            )
        )

    @property
    def in_flight(self) -> int:
        """Places held at workers: 0 when idle."""
        return self._view.in_flight.total()

    async def find(
        self,
        request: GenerateRequest,
        sent: Sequence[int],
        failed: Collection[Peer],
        ejected: Collection[Peer] = (),
    ) -> tuple[Path, Hold]:
        """The path of the attempt after the outputs `sent`, its decode worker reachable, and the hold on the pair.

        `failed` are workers that failed the request: one that lost a worker waits for another, a new one is refused at
        once. `ejected` are taken only for want of others. Raises NoPath.
        """
        now = self._clock()
        deadline = now + (self._config.retry_wait_s if failed else 0.0)
        while True:
            began = self._clock()
            try:
                path = self.choose(request, sent, failed, ejected)
            except NoPath:
                if self._clock() >= deadline:
                    raise
                await asyncio.sleep(self._config.retry_poll_s)
                continue
            self.on_decision(self._clock() - began)
            if path.decode.peer in failed and self._clock() < now + self._config.reuse_wait_s:
                await asyncio.sleep(self._config.retry_poll_s)
                continue
            was_down = self._channels.is_down(path.decode.peer)
            # Held before anything is awaited: requests that come together must see each other.
            hold = self._hold(path, request, sent)
            try:
                await self._channels.ensure(path.decode)
                return path, hold
            except BaseException as error:
                hold.release()
                if not isinstance(error, WorkerLost):
                    raise
                if not was_down:
                    continue  # it is known to be down now, so others come first
                if self._clock() >= deadline:
                    raise NoPath("no decode worker can be reached; try again shortly") from error
            await asyncio.sleep(self._config.retry_poll_s)

    def choose(
        self,
        request: GenerateRequest,
        sent: Sequence[int] = (),
        failed: Collection[Peer] = (),
        ejected: Collection[Peer] = (),
    ) -> Path:
        """The path that is best now; holds nothing. Raises NoPath."""
        infos = self._workers()
        self._channels.follow(infos)
        if self._view.follow(infos):
            self._trials.keep(infos, self._clock())
            if self._cached is not None:
                self._cached.keep({info.peer for info in infos})
        self._turn += 1
        table = self._view.table()
        if self._cached is None or table is None:
            return self._by_load(request, sent, failed, ejected)
        need = Need(
            num_tokens=len(request.token_ids) + len(sent),
            answer_tokens=max(1.0, min(self._answer_tokens, request.max_tokens - len(sent))),
            promise=request.promise,
            min_pull_tokens=self._config.pull_min_tokens if self._config.pulls else None,
        )
        held = self._cached.held(table, request, sent)
        best = cheapest_path(
            table,
            need,
            held,
            failed=failed,
            ejected=ejected,
            decodes_alone=self._config.decodes_alone,
            turn=self._turn,
        )
        return self._trial(table, need, held, {*failed, *ejected}, best) or best

    def prefilled(self, path: Path, num_tokens: int, reply: PrefillReply) -> None:
        """The path's prefill worker has read its `num_tokens` tokens."""
        if path.estimate is not None:
            took_s = reply.prefill_s - path.estimate.prefill_s
            self._learn_pull(path, num_tokens, reply.num_cached_tokens, took_s)

    def decoded(self, path: Path, num_tokens: int, reply: DecodeReply) -> None:
        """The path's decode worker has read its `num_tokens` tokens itself, and written the answer."""
        if reply.transfer_s > 0:  # else what it was to pull was there already
            self._learn_pull(path, num_tokens, reply.num_cached_tokens, reply.transfer_s)

    def answered(self, path: Path, request: GenerateRequest, sent: Sequence[int]) -> None:
        """The answer `sent` has ended on the path: its decode worker holds all but the last token's KV."""
        self._answer_tokens += _ANSWER_WEIGHT * (len(sent) - self._answer_tokens)
        self._expect(path.decode, request, sent[:-1])

    def _trial(self, table: WorkerTable, need: Need, held: Floats, avoid: Collection[Peer], best: Path) -> Path | None:
        """The path by a prefill worker that is due to be tried, if there is one. Not with requests in trouble."""
        now = self._clock()
        worker = None if avoid else self._trials.candidate(table, need.num_tokens, now)
        if worker is None or best.estimate is None or (best.prefill is not None and best.prefill.peer == worker):
            return None
        others = {info.peer for info in table.of_role["prefill"]} - {worker}
        path = cheapest_path(table, need, held, failed=others, decodes_alone=False, turn=self._turn)
        if path.prefill is None or path.estimate is None:
            return None
        slower = _first_token_s(path.estimate) / max(_first_token_s(best.estimate), _LEAST_S)
        if not self._trials.is_due(worker, need.num_tokens, slower, now):
            return None
        return msgspec.structs.replace(path, is_trial=True)

    def _learn_pull(self, path: Path, num_tokens: int, num_cached_tokens: int, took_s: float) -> None:
        """Of a pull that came, learn how long it took."""
        if path.estimate is None or path.estimate.pull_s == 0 or path.new_tokens is None:
            return
        if num_cached_tokens >= num_tokens - path.new_tokens:
            self._view.rates.pulled(path.reader.peer, expected_s=path.estimate.pull_s, took_s=took_s)

    def _by_load(
        self, request: GenerateRequest, sent: Sequence[int], failed: Collection[Peer], ejected: Collection[Peer]
    ) -> Path:
        num_tokens = len(request.token_ids) + len(sent)
        prefill, decode = self._view.candidates("prefill"), self._view.candidates("decode")
        avoid = self._view.down().union(failed)
        if self._config.policy == "round_robin":
            return round_robin(prefill, decode, num_tokens=num_tokens, turn=self._turn, avoid=avoid, ejected=ejected)
        path = least_loaded(prefill, decode, num_tokens=num_tokens, avoid=avoid, ejected=ejected)
        if self._cached is None or not self._config.pulls:
            return path
        source = choose_source(
            path.reader,
            [*prefill, *decode],
            held_tokens=self._cached.held_by(self._view.infos, request, sent),
            num_tokens=num_tokens,
            min_tokens=self._config.pull_min_tokens,
            avoid=avoid.union(ejected),
        )
        return msgspec.structs.replace(path, source=source)

    def _hold(self, path: Path, request: GenerateRequest, sent: Sequence[int]) -> Hold:
        sent = tuple(sent)  # it grows
        num_tokens = len(request.token_ids) + len(sent)
        new_tokens = num_tokens if path.new_tokens is None else path.new_tokens
        class_name = request.promise.class_name
        places = [Place(path.decode.peer, 0 if path.prefill else new_tokens, num_tokens, class_name)]
        if path.prefill is not None:
            places.append(Place(path.prefill.peer, new_tokens, num_tokens, class_name))
            self._trials.worked(path.prefill.peer, new_tokens, self._clock())
        # Only where the prompt is computed: the decode worker has nothing of it until then.
        if self._cached is not None:
            self._cached.expect(path.reader, request, sent, known_tokens=path.cached_tokens)
        return self._view.in_flight.hold(places, lambda: self._expect(path.decode, request, sent))

    def _expect(self, worker: WorkerInfo, request: GenerateRequest, sent: Sequence[int]) -> None:
        if self._cached is not None:
            self._cached.expect(worker, request, sent)


def _first_token_s(estimate: Estimate) -> float:
    """Until the first token is computed and the second can be."""
    return estimate.ttft_s + estimate.transfer_s


class PrefixPulls:
    """Sends the requests for prefixes. `secret` is the cluster's, to sign tickets."""

    def __init__(self, *, channels: TokenChannels, secret: bytes):
        self._channels = channels
        self._secret = secret

    def ask(self, path: Path, request: GenerateRequest) -> Ticket | None:
        """Have the path's source send what it holds of the attempt's tokens; the ticket for who computes the prompt.

        None where there is no source, or no channel to it now: the target would wait for it in vain.
        """
        if path.source is None or not self._channels.is_connected(path.source.peer):
            return None
        target = path.reader
        ticket = mint_ticket(
            self._secret,
            request.request_id,
            path.source.peer,
            target.peer,
            target.transfer_addresses,
            source_ranks=path.source.layout.tp_size,
        )
        self._channels.send_prefix(path.source.peer, SendPrefix(ticket, request.token_ids, request.cache_salt))
        return ticket
