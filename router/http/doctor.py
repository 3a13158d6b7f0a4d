"""GET /doctor: how fast KV travels between the workers, tried out pair by pair with free blocks.

A trial takes memory bandwidth, the wire and up to half of two workers' free blocks for a moment. So one runs at a time,
each pair has a time limit, and the run ends with its client.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import msgspec

from twostroke.protocol.errors import RequestError, TwostrokeError
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.requests import Peer, mint_ticket
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats
from twostroke.router.fleet import Fleet
from twostroke.router.openai.answers import encode_json

MAX_PAIRS = 256
"""Most pairs of one run."""
PAIR_S = 30.0
"""Seconds after which a pair has failed."""
MAX_BYTES = 64 * 1024 * 1024
"""Most bytes of one trial transfer."""
ENOUGH_S = 0.1
"""Seconds of a transfer from which on no larger one is needed to time the link."""
_FIRST_BYTES = 1024 * 1024
_GROWTH = 8
_NUM_SMALL = 5
"""Transfers of one block; a first one, which also waits for links, is not counted."""
_NUM_LARGE = 3
"""Transfers of each larger size; a first one is not counted."""

Pair = tuple[WorkerInfo, WorkerInfo]


@dataclass(kw_only=True)
class Doctor:
    """Examines the ways of KV. `stats` tells a worker's latest numbers, `secret` is the cluster's.

    `expected` tells how many workers of each role there are to be.
    """

    fleet: Fleet
    stats: Callable[[Peer], WorkerStats | None]
    secret: bytes
    expected: Callable[[], Mapping[Role, int]]
    _is_running: bool = field(default=False, init=False)

    async def examine(self) -> AsyncGenerator[bytes, None]:
        """One line of JSON first, one for each pair, one at the end; always `aclose` it.

        Raises RequestError (409) at once while another run is going on.
        """
        if self._is_running:
            raise RequestError("the links are being examined already", code="doctor_is_running", status=409)
        self._is_running = True
        try:
            workers = self.fleet.workers()
            pairs = possible_pairs(workers)
            chosen = pairs[:MAX_PAIRS]
            numbers = {"pairs": len(chosen), "left_out": len(pairs) - len(chosen)}
            yield _line({"event": "begin", **numbers, "missing_workers": missing_workers(self.expected(), workers)})
            num_failed = 0
            for source, target in chosen:
                found = await self.probe(source, target)
                num_failed += found["error"] is not None
                roles = {"source_role": source.role, "target_role": target.role}
                names = {"source": source.peer.worker_id, "target": target.peer.worker_id}
                yield _line({"event": "pair", **roles, **names, **found})
            yield _line({"event": "end", "failed": num_failed})
        finally:
            self._is_running = False

    async def probe(self, source: WorkerInfo, target: WorkerInfo) -> dict[str, Any]:
        """The measured path from one worker to the other; with an `error` nothing was measured."""
        try:
            async with asyncio.timeout(PAIR_S):
                return await self._measure(source, target)
        except TimeoutError:
            error = f"the trial did not end within {PAIR_S:g} s"
        except TwostrokeError as failure:
            error = str(failure)
        nothing = {"transport": "", "why": "", "missing": (), "bytes_per_s": 0.0, "round_trip_s": 0.0}
        return {**nothing, "error": error}

    async def _measure(self, source: WorkerInfo, target: WorkerInfo) -> dict[str, Any]:
        one_block = max(source.layout.block_size, target.layout.block_size)
        small = await self._trial(source, target, _NUM_SMALL, one_block)
        token_bytes = source.layout.token_bytes
        most = max(one_block, min(self._room(source), self._room(target), MAX_BYTES // token_bytes))
        num_tokens = min(most, max(one_block, _FIRST_BYTES // token_bytes))
        while True:
            large = await self._trial(source, target, _NUM_LARGE, num_tokens)
            seconds = median(large.seconds)
            if num_tokens == most or seconds >= ENOUGH_S:
                break
            num_tokens = min(most, num_tokens * _GROWTH)
        return {
            "transport": large.transport,
            "why": large.why,
            "missing": large.missing,
            "bytes_per_s": source.layout.sent_bytes(num_tokens) / max(seconds, 1e-9),
            "round_trip_s": median(small.seconds),
            "error": None,
        }

    async def _trial(self, source: WorkerInfo, target: WorkerInfo, count: int, num_tokens: int) -> ProbeTimes:
        """Times of `count` transfers of so many tokens, after one that is not counted."""
        way = (self.secret, "doctor", source.peer, target.peer, target.transfer_addresses)
        tickets = tuple(
            mint_ticket(
                *way,
                source_cut=source.layout.cut,
                target_cut=target.layout.cut,
            )
            for _ in range(count + 1)
        )
        try:
            async with asyncio.TaskGroup() as group:
                # The target's call first, so that it expects the transfers as they come.
                group.create_task(self.fleet.probe_target(target.peer, tickets, num_tokens))
                sending = group.create_task(self.fleet.probe_source(source.peer, tickets, num_tokens))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        times = sending.result()
        return msgspec.structs.replace(times, seconds=times.seconds[1:])

    def _room(self, worker: WorkerInfo) -> int:
        """Tokens that a trial may have there: half of what the worker would allow, since its numbers are a bit old."""
        stats = self.stats(worker.peer)
        free_blocks = worker.num_blocks if stats is None else stats.free_blocks
        return free_blocks // 4 // worker.layout.groups.count * worker.layout.block_size


def missing_workers(expected: Mapping[Role, int], workers: Sequence[WorkerInfo]) -> list[str]:
    """Return in words how many workers each role lacks."""
    missing: list[str] = []
    for role, num_expected in expected.items():
        num_missing = num_expected - sum(info.role == role for info in workers)
        if num_missing > 0:
            noun, verb = ("worker" if num_expected == 1 else "workers", "is" if num_missing == 1 else "are")
            asks = f"{num_missing} of {num_expected} {role} {noun} that there are to be"
            missing.append(f"{asks} {verb} missing")
    return missing


def possible_pairs(workers: Sequence[WorkerInfo]) -> list[Pair]:
    """Return the pairs that may exchange KV, source first: prompts from prefill to decode workers, then pulls."""
    ways = (("prefill", "decode"), ("decode", "prefill"), ("prefill", "prefill"), ("decode", "decode"))
    pairs: list[Pair] = []
    for source_role, target_role in ways:
        targets = [info for info in workers if info.role == target_role and info.transfer_addresses]
        sources = [info for info in workers if info.role == source_role]
        pairs += [(source, target) for source in sources for target in targets if source is not target]
    return pairs


def _line(value: dict[str, Any]) -> bytes:
    return encode_json(value) + b"\n"
