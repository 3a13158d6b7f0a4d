"""What requests have met at their workers, kept for those that come: who is left out, and who is suspected.

An attempt tells each step of its way here; the steps' meaning is in `ejection.py` and `poison.py`.
"""

import random
from collections.abc import Callable

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError, TwostrokeError, WorkerFailed, WorkerLeaving, WorkerLost
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import Role
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.channels.worker_channel import VerdictExchange
from twostroke.router.fleet import Fleet, Path
from twostroke.router.health.ejection import Ejection, EjectionConfig
from twostroke.router.health.poison import Case, Stay, Suspects, SuspectsConfig

_ROLES: tuple[Role, ...] = ("prefill", "decode")
_PAIR_FAILURES = 2  # in a row, after which two workers that can't exchange KV are kept apart


class WorkerRecords:
    """One router replica's. `draw` gives numbers from 0 to 1.

    Shares verdicts over the channels, so it is to be made before those follow any worker.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        channels: TokenChannels,
        clock: Clock,
        ejection: EjectionConfig,
        suspects: SuspectsConfig,
        draw: Callable[[], float] = random.random,
    ):
        self._fleet = fleet
        self._channels = channels
        self.suspects = Suspects(suspects, clock, is_gone=self._is_gone, tell=channels.tell_verdicts)
        channels.share_verdicts(VerdictExchange(known=self.suspects.verdicts, heard=self.suspects.hear))
        self._ejection = Ejection[Peer](ejection, clock=clock, draw=draw)
        pairs = ejection.model_copy(update={"failures_in_a_row": _PAIR_FAILURES})
        self._pairs = Ejection[tuple[Peer, Peer]](pairs, clock=clock, draw=draw)

    def ejected(self) -> frozenset[Peer]:
        """Workers that requests are kept from: for a while, and half of a role at most. Quick while none has failed."""
        if self._ejection.is_empty:
            return frozenset()
        workers = self._fleet.workers()
        present = {info.peer for info in workers}
        self._ejection.keep_where(present.__contains__)
        return frozenset().union(
            *(self._ejection.ejected([info.peer for info in workers if info.role == role]) for role in _ROLES)
        )

    def strangers_to(self, decode: Peer) -> frozenset[Peer]:
        """Prefill workers whose KV does not reach this decode worker."""
        if self._pairs.is_empty:
            return frozenset()
        workers = {info.peer for info in self._fleet.workers()}
        self._pairs.keep_where(lambda pair: workers.issuperset(pair))
        return frozenset(one for one in workers if self._pairs.is_out((one, decode)))

    # --- an attempt's way ---

    async def begin(self, case: Case, path: Path) -> None:
        """Before the first call; a suspect waits for its turn. Raises PoisonRequest."""
        case.is_prompt_done = False
        await self.suspects.may_try(case, path.workers)
        for worker in path.workers:
            self._ejection.begin(worker)
        if path.prefill is None:
            self.suspects.stay(case, path.decode.peer, Stay.FRESH)
        else:
            self._pairs.begin((path.prefill.peer, path.decode.peer))

    def computes(self, case: Case, worker: Peer) -> None:
        """The worker is about to be called: it may compute the prompt from now on. Raises PoisonRequest."""
        self.suspects.check(case)
        self.suspects.stay(case, worker, Stay.FRESH)

    def prompt_done(self, case: Case, prefill: Peer, decode: Peer) -> None:
        """The prefill worker has drawn the first token, and the decode worker may go on from it."""
        self.suspects.prompt_done(case)
        self.suspects.leave(case, prefill)
        self.suspects.stay(case, decode, Stay.FRESH)
        self._ejection.succeeded(prefill)

    def has_kv(self, case: Case, decode: Peer) -> None:
        """The decode worker has shown that the prompt's KV is there."""
        if case.stays.get(decode) in (Stay.AWAITS, Stay.HELD):
            self.suspects.stay(case, decode, Stay.FRESH)

    def got_on(self, case: Case, path: Path, position: int) -> None:
        """The decode worker has drawn output token `position` by itself."""
        decode = path.decode.peer
        self.suspects.got_on(case, decode, position)
        self._ejection.succeeded(decode)
        if path.prefill is not None:
            self._pairs.succeeded((path.prefill.peer, decode))

    async def may_compute(self, case: Case, decode: Peer) -> None:
        """The prefill has failed, and the decode worker is to do without. A suspect waits. Raises PoisonRequest."""
        await self.suspects.may_try(case, [decode])
        self.suspects.stay(case, decode, Stay.FRESH)

    def failed(self, case: Case, worker: Peer, error: TwostrokeError) -> None:
        """The worker failed the request, or the request the worker: only the former is held against the worker."""
        if isinstance(error, RequestError | WorkerLeaving):  # it lives, and computes nothing for the request any more
            self.suspects.leave(case, worker)
        if isinstance(error, WorkerLeaving):
            return
        if isinstance(error, WorkerLost) and not isinstance(error, WorkerFailed):
            if not self._channels.fell_silent(worker):  # of a request a process dies, and its connections end with it
                self.suspects.died(worker)
            self._ejection.lost(worker)
        elif not isinstance(error, RequestError) or error.status in (500, 502, 503):
            self._ejection.failed(worker)

    def pair_failed(self, prefill: Peer, decode: Peer) -> None:
        """KV did not get from one to the other. Whose fault that is, nobody knows: it is held against neither."""
        self._pairs.failed((prefill, decode))

    def ended(self, case: Case, path: Path) -> None:
        """The attempt has nothing open any more."""
        for worker in path.workers:
            self.suspects.leave(case, worker)
            self._ejection.unresolved(worker)
        if path.prefill is not None:
            self._pairs.unresolved((path.prefill.peer, path.decode.peer))

    def _is_gone(self, worker: Peer) -> bool | None:
        if self._channels.is_connected(worker):
            return False
        is_there = any(info.peer == worker for info in self._fleet.workers())
        return None if is_there else True
