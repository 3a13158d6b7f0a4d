"""The live router's decisions and admission, asked about workers in closed form.

`cheapest_path` weighs every worker that it is given, which takes milliseconds where there are a thousand. Here it is
given the few of each role with the least to do: all of them in a small fleet. Their numbers are those of this moment,
where a live router's are some milliseconds old. Nothing is known of prefixes that prompts share.
"""

import heapq
from collections.abc import Sequence
from typing import Generic, TypeVar

from twostroke.planning.coarse.workers import CoarseDecodeWorker, CoarsePrefillWorker, CoarseRequest
from twostroke.protocol.requests import Address, GenerateRequest, Peer, Promise, SamplingParams
from twostroke.protocol.stats import QueuedWork, WorkerInfo, WorkerStats
from twostroke.router.fleet import Path
from twostroke.router.routing.cheapest_path import PathQuery, cheapest_path
from twostroke.router.routing.chooser import ANSWER_WEIGHT, FIRST_ANSWER_TOKENS
from twostroke.router.routing.in_flight import WorkerLoad
from twostroke.router.routing.workers import AVAILABLE, Classes, KnownWorker, known_workers
from twostroke.router.slo.admission import Admission, Overloaded
from twostroke.router.slo.classes import SLOConfig
from twostroke.worker.profile import BLOCK_TOKENS, WorkerProfile

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


class LiveRouter:
    """One router of the whole fleet."""

    def __init__(self, slo: SLOConfig, *, candidates: int = CANDIDATES, decodes_alone: bool = True) -> None:
        self._candidates = candidates
        self._decodes_alone = decodes_alone
        self._now_s = 0.0
        self._turn = 0
        self._answer_tokens = FIRST_ANSWER_TOKENS
        self._stats: dict[Peer, WorkerStats] = {}
        self._admission = Admission(config=slo, stats=self._stats.get, clock=lambda: self._now_s)
        one = slo.default_class
        self._promise = Promise(one.name, one.priority, one.share, one.ttft_s, one.tpot_s)
        self._classes: Classes = {one.name: (one.priority, one.share)}
        self._prefill = Shortlist[CoarsePrefillWorker]()
        self._decode = Shortlist[CoarseDecodeWorker]()
        self._known: dict[int, KnownWorker] = {}
        self._workers: dict[Peer, CoarsePrefillWorker | CoarseDecodeWorker] = {}
        self._num_known = 0

    def follow(self, prefill: Sequence[CoarsePrefillWorker], decode: Sequence[CoarseDecodeWorker]) -> None:
        """These workers take requests now."""
        self._prefill.drop_all_but(prefill)
        self._decode.drop_all_but(decode)
        for reader in prefill:
            if not self._prefill.has(reader):
                self._meet(reader)
                self._prefill.put(reader, reader.free_s)
        for writer in decode:
            if not self._decode.has(writer):
                self._meet(writer)
                self._decode.put(writer, writer.num_requests)
        there = {id(worker) for worker in (*prefill, *decode)}
        self._workers = {peer: worker for peer, worker in self._workers.items() if id(worker) in there}
        self._known = {key: known for key, known in self._known.items() if key in there}

    def choose(
        self, request: CoarseRequest, now_s: float
    ) -> tuple[CoarsePrefillWorker | CoarseDecodeWorker, CoarseDecodeWorker] | None:
        """Choose the prefill and the decode worker; None where the request is refused. Raises NoPath without a
        decode worker."""
        self._now_s = now_s
        self._turn += 1
        query = PathQuery(
            num_tokens=request.prompt_tokens,
            answer_tokens=max(1.0, min(self._answer_tokens, request.output_tokens)),
            promise=self._promise,
            classes=self._classes,
            min_pull_tokens=None,
        )
        path = cheapest_path(
            [self._of_reader(one) for one in self._prefill.least(self._candidates)],
            [self._of_writer(one) for one in self._decode.least(self._candidates)],
            query,
            decodes_alone=self._decodes_alone,
            rotation=self._turn,
        )
        if not self._is_admitted(request, path):
            return None
        writer = self._workers[path.decode.peer]
        if not isinstance(writer, CoarseDecodeWorker):
            raise TypeError("a prefill worker can't write answers")
        return (writer if path.prefill is None else self._workers[path.prefill.peer]), writer

    def reads(self, worker: CoarsePrefillWorker) -> None:
        """A prompt has been queued there."""
        if self._prefill.has(worker):
            self._prefill.put(worker, worker.free_s)

    def changed(self, worker: CoarseDecodeWorker) -> None:
        """Requests have come, or ended, there."""
        if self._decode.has(worker):
            self._decode.put(worker, worker.num_requests)

    def ended(self, request: CoarseRequest) -> None:
        """Learn from an answer."""
        self._answer_tokens += ANSWER_WEIGHT * (request.output_tokens - self._answer_tokens)
        self._admission.ended(self._asked(request), request.output_tokens, None, None)

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

    def _meet(self, worker: CoarsePrefillWorker | CoarseDecodeWorker) -> None:
        profile = worker.profile
        self._num_known += 1
        peer = Peer(f"simulated-{self._num_known}", 1)
        info = WorkerInfo(
            role="prefill" if isinstance(worker, CoarsePrefillWorker) else "decode",
            peer=peer,
            token_address=Address("", 0),
            transfer_addresses=(Address("", 0),),
            layout=profile.layout,
            num_blocks=profile.kv_tokens // BLOCK_TOKENS,
            max_context=1 << 30,
            max_step_tokens=profile.step_tokens,
            max_batch=profile.max_batch,
        )
        known = known_workers([info])[0]
        self._known[id(worker)] = known
        self._workers[peer] = worker
        if isinstance(worker, CoarsePrefillWorker):  # nothing but its queue changes
            self._update(known, WorkerStats(), profile)

    def _of_reader(self, worker: CoarsePrefillWorker) -> KnownWorker:
        known = self._known[id(worker)]
        wait_s = worker.free_s - self._now_s
        known.requests = float(wait_s > 0)
        known.queued = {self._promise.class_name: wait_s / known.queue_token_s} if wait_s > 0 else {}
        return known

    def _of_writer(self, worker: CoarseDecodeWorker) -> KnownWorker:
        known, promise = self._known[id(worker)], self._promise
        worker.advance(self._now_s)
        queued: tuple[QueuedWork, ...] = ()
        if worker.prompts:
            tokens = int(sum(one.request.prompt_tokens * max(0.0, one.left) for one in worker.prompts))
            queued = (QueuedWork(promise.class_name, promise.priority, promise.share, tokens, len(worker.prompts)),)
        cached_tokens = worker.held_tokens + worker.coming_tokens + worker.waiting_tokens
        stats = WorkerStats(
            num_running=len(worker.rows),
            num_waiting=len(worker.prompts) + len(worker.waiting) + worker.coming,
            free_blocks=max(0, worker.profile.kv_tokens - cached_tokens) // BLOCK_TOKENS,
            total_blocks=known.info.num_blocks,
            queued=queued,
            context_tokens=int(worker.context) + worker.coming_tokens + worker.waiting_tokens,
            tightest_tpot_s=promise.tpot_s if worker.rows else None,
        )
        self._update(known, stats, worker.profile)
        return known

    def _update(self, known: KnownWorker, stats: WorkerStats, profile: WorkerProfile) -> None:
        self._stats[known.info.peer] = stats
        known.update(
            stats,
            _NO_LOAD,
            profile.costs,
            self._classes,
            tier=AVAILABLE,
            bytes_per_s=profile.link_bytes_per_s,
        )


_SAMPLING = SamplingParams(temperature=0.0)
