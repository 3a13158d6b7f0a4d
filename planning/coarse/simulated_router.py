"""The live router's decisions and admission, asked about workers in closed form.

`cheapest_path` weighs every worker that it is given, which takes milliseconds where there are a thousand. Here it is
given the few of each role with the least to do: all of them in a small fleet. Their numbers are those of this moment,
where a live router's are some milliseconds old. Nothing is known of prefixes that prompts share.
"""

import heapq
from collections.abc import Sequence
from typing import Generic, TypeVar

from twostroke.planning.coarse.workers import CoarseDecodeWorker, CoarsePrefillWorker, CoarseRequest, CoarseWorker
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Address, GenerateRequest, Peer, Promise, SamplingParams
from twostroke.protocol.stats import QueuedWork, WorkerInfo, WorkerStats
from twostroke.router.fleet import NoPath
from twostroke.router.generate.moves import BUSY_SHARE
from twostroke.router.request_state import Path
from twostroke.router.routing.chooser import (
    ANSWER_WEIGHT,
    FIRST_ANSWER_TOKENS,
    PathQuery,
    Roles,
    cheapest_path,
    cheapest_target,
)
from twostroke.router.routing.workers import AVAILABLE, Classes, KnownWorker, PromptShares, WorkerLoad, known_workers
from twostroke.router.slo.admission import Admission, Overloaded
from twostroke.router.slo.classes import SLOConfig
from twostroke.worker.profile import BLOCK_TOKENS

CANDIDATES = 4
"""Candidates per role. With 4 and with 32, latencies of a fleet of 64 differ by less than those of two seeds."""
_NO_LOAD = WorkerLoad()

W = TypeVar("W", CoarsePrefillWorker, CoarseDecodeWorker)


class Shortlist(Generic[W]):
    """Workers by how much they have to do; what was put in before a change is passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, W]] = []
        self._key: dict[int, tuple[float, int]] = {}
        self._number = 0

    def put(self, worker: W, load: float) -> None:
        """It has so much to do now."""
        self._number += 1
        self._key[id(worker)] = load, self._number
        heapq.heappush(self._heap, (load, self._number, worker))

    def drop_all_but(self, workers: Sequence[W]) -> None:
        """These are there now, and no others."""
        there = {id(worker) for worker in workers}
        self._key = {key: value for key, value in self._key.items() if key in there}

    def has(self, worker: W) -> bool:
        return id(worker) in self._key

    def least(self, count: int) -> list[W]:
        """Those with the least to do, fewest first."""
        found: list[tuple[float, int, W]] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            if self._key.get(id(entry[2])) == entry[:2]:
                found.append(entry)
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [worker for _, _, worker in found]


class SimulatedRouter:
    """One router of the whole fleet."""

    def __init__(
        self,
        slo: SLOConfig,
        *,
        candidates: int = CANDIDATES,
        decodes_alone: bool = True,
        roles: Roles = "flexible",
        moves: bool = True,
    ) -> None:
        self.moves = moves
        self._candidates = candidates
        self._decodes_alone = decodes_alone
        self._is_flexible = roles == "flexible"
        self._now_s = 0.0
        self._turn = 0
        self._answer_tokens = FIRST_ANSWER_TOKENS
        self._stats: dict[Peer, WorkerStats] = {}
        self._admission = Admission(config=slo, stats=self._stats.get, clock=lambda: self._now_s)
        self._shares = PromptShares(lambda: self._now_s)
        one = slo.default_class
        self._promise = Promise(one.name, one.priority, one.share, one.ttft_s, one.tpot_s)
        self._classes: Classes = {one.name: (one.priority, one.share)}
        self._prefill = Shortlist[CoarsePrefillWorker]()
        self._decode = Shortlist[CoarseDecodeWorker]()
        self._known: dict[int, KnownWorker] = {}
        self._workers: dict[Peer, CoarseWorker] = {}
        self._num_known = 0
        self._layout: KVLayout | None = None  # of all workers: profiles name theirs by themselves

    def follow(
        self, prefill: Sequence[CoarsePrefillWorker], decode: Sequence[CoarseDecodeWorker], now_s: float
    ) -> None:
        """These workers take requests now. Called about once a second: prompts' shares of time are learnt here."""
        self._now_s = now_s
        self._prefill.drop_all_but(prefill)
        self._decode.drop_all_but(decode)
        for writer in decode:
            if not self._decode.has(writer):
                self._meet(writer)
                self._decode.put(writer, writer.num_requests)
        for reader in prefill:
            if not self._prefill.has(reader):
                self._meet(reader)
                self._prefill.put(reader, reader.free_s)
        there = {id(worker) for worker in (*prefill, *decode)}
        self._workers = {peer: worker for peer, worker in self._workers.items() if id(worker) in there}
        self._known = {key: known for key, known in self._known.items() if key in there}
        if self._is_flexible:
            for reader in prefill:
                peer = self._known[id(reader)].info.peer
                computed = WorkerStats(computed_tokens=reader.computed_tokens, costs=reader.profile.costs)
                self._shares.on_stats(peer, computed)
            self._shares.keep(self._workers.keys())

    def choose(self, request: CoarseRequest, now_s: float) -> tuple[CoarseWorker, CoarseWorker] | None:
        """Choose the workers that compute the prompt and the answer, perhaps the same one; None: it is refused.

        Raises NoPath without a decode worker.
        """
        self._now_s = now_s
        self._turn += 1
        path = cheapest_path(
            [self._prefill_view(one) for one in self._prefill.least(self._candidates)],
            [self._decode_view(one) for one in self._decode.least(self._candidates)],
            self._query(request, 0),
            decodes_alone=self._decodes_alone,
            prefill_decodes=self._is_flexible,
            rotation=self._turn,
        )
        if not self._is_admitted(request, path):
            return None
        writer = self._workers[path.decode.peer]
        return (writer if path.prefill is None else self._workers[path.prefill.peer]), writer

    def gets_prompts(self, worker: CoarsePrefillWorker, now_s: float) -> bool:
        """Return whether streams had better leave a prefill worker, as StreamMoves judges it."""
        known = self._known.get(id(worker))
        return known is not None and (worker.free_s > now_s or self._shares.of(known.info.peer) > BUSY_SHARE)

    def move_target(
        self, request: CoarseRequest, written: int, source: CoarseWorker, *, to_prefill: bool
    ) -> CoarseWorker | None:
        """Return the worker at which a stream that leaves `source` goes on; None where no other has room."""
        decode = [self._decode_view(one) for one in self._decode.least(self._candidates) if one is not source]
        prefill: list[KnownWorker] = []
        if to_prefill and self._is_flexible:
            prefill = [self._prefill_view(one) for one in self._prefill.least(self._candidates) if one is not source]
        workers = [*decode, *prefill]
        try:  # all are of one layout, so any of them stands for the source
            target = cheapest_target(workers, self._query(request, written), workers[0].info) if workers else None
        except NoPath:
            target = None
        return None if target is None else self._workers[target.info.peer]

    def changed(self, worker: CoarseWorker) -> None:
        """Requests have come, or ended, there."""
        if isinstance(worker, CoarsePrefillWorker):
            if self._prefill.has(worker):
                self._prefill.put(worker, worker.free_s + len(worker.rows))
        elif isinstance(worker, CoarseDecodeWorker) and self._decode.has(worker):
            self._decode.put(worker, worker.num_requests)

    def ended(self, request: CoarseRequest) -> None:
        """Learn from an answer."""
        self._answer_tokens += ANSWER_WEIGHT * (request.output_tokens - self._answer_tokens)
        self._admission.ended(self._asked(request), request.output_tokens, None, None)

    def _query(self, request: CoarseRequest, written: int) -> PathQuery:
        return PathQuery(
            num_tokens=request.prompt_tokens + written,
            answer_tokens=max(1.0, min(self._answer_tokens, request.output_tokens - written)),
            promise=self._promise,
            classes=self._classes,
            min_pull_tokens=None,
            most_tokens=request.prompt_tokens + request.output_tokens,
        )

    def _is_admitted(self, request: CoarseRequest, path: Path) -> bool:
        try:
            self._admission.admit(self._asked(request), path, 0.0, False)
        except Overloaded:
            return False
        return True

    def _asked(self, request: CoarseRequest) -> GenerateRequest:
        return GenerateRequest(
            request_id="",
            router_id="",
            token_ids=(),
            num_prompt_tokens=request.prompt_tokens,
            sampling=_SAMPLING,
            max_tokens=request.output_tokens,
            promise=self._promise,
        )

    def _meet(self, worker: CoarseWorker) -> None:
        profile = worker.profile
        self._num_known += 1
        peer = Peer(f"simulated-{self._num_known}", 1)
        self._layout = self._layout or profile.layout
        info = WorkerInfo(
            role=worker.role,
            peer=peer,
            token_address=Address("", 0),
            transfer_addresses=(Address("", 0),),
            layout=self._layout,
            num_blocks=profile.kv_tokens // BLOCK_TOKENS,
            max_context=1 << 30,
            max_step_tokens=profile.step_tokens,
            max_batch=profile.max_batch,
            machine="shared" if profile.beside else "",
        )
        known = known_workers([info])[0]
        self._known[id(worker)] = known
        self._workers[peer] = worker
        self._tell(known, worker)

    def _prefill_view(self, worker: CoarsePrefillWorker) -> KnownWorker:
        known = self._known[id(worker)]
        if worker.rows or worker.coming or known.decoding:  # else nothing but its queue changes
            self._tell(known, worker)
        wait_s = worker.free_s - self._now_s
        known.requests = known.decoding + (wait_s > 0)
        known.queued = {self._promise.class_name: wait_s / known.queue_token_s} if wait_s > 0 else {}
        known.prompt_share = self._shares.of(known.info.peer)
        return known

    def _decode_view(self, worker: CoarseDecodeWorker) -> KnownWorker:
        known, promise = self._known[id(worker)], self._promise
        queued: tuple[QueuedWork, ...] = ()
        worker.advance(self._now_s)
        if worker.prompts:
            tokens = int(sum(one.request.prompt_tokens * max(0.0, one.left) for one in worker.prompts))
            queued = (QueuedWork(promise.class_name, promise.priority, promise.share, tokens, len(worker.prompts)),)
        self._tell(known, worker, queued)
        return known

    def _tell(self, known: KnownWorker, worker: CoarseWorker, queued: tuple[QueuedWork, ...] = ()) -> None:
        """Take in a worker's numbers of this moment, as a real one's WorkerStats tell them."""
        worker.advance(self._now_s)
        cached_tokens = worker.held_tokens + worker.coming_tokens + worker.waiting_tokens
        streams = len(worker.waiting) + worker.coming
        speedup = 1.0
        if worker.profile.repeated and worker.rows:
            step = worker.drafted()
            speedup = step.plain_s / step.token_s
        num_waiting = streams + (worker.num_prompts if known.info.role == "decode" else 0)
        stats = WorkerStats(
            num_running=len(worker.rows),
            num_waiting=num_waiting,
            num_decoding=len(worker.rows) + num_waiting,
            free_blocks=max(0, worker.profile.kv_tokens - cached_tokens) // BLOCK_TOKENS,
            total_blocks=known.info.num_blocks,
            queued=queued,
            context_tokens=int(worker.context) + worker.coming_tokens + worker.waiting_tokens,
            tightest_tpot_s=self._promise.tpot_s * speedup if worker.rows and self._promise.tpot_s else None,
            draft_speedup=speedup,
        )
        self._stats[known.info.peer] = stats
        known.update(
            stats,
            _NO_LOAD,
            worker.profile.costs,
            self._classes,
            tier=AVAILABLE,
            bytes_per_s=worker.profile.link_bytes_per_s,
            prompt_share=self._shares.of(known.info.peer),
        )


_SAMPLING = SamplingParams(temperature=0.0)
