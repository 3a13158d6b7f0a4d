"""The kinds of faults: how each is injected, and by what it is known to have fired.

Each method of Injector returns an Injected, or None where the fault found nothing to harm: that is not counted.

`wreak` draws from a seed which fault comes when, in three lanes beside each other, each with one after another. A lane
for each role takes one worker out of use at a time, so that another is always sound; the third has faults that leave
every worker in use.
"""

import asyncio
import contextlib
import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.answers import Family, Injected
from tests.chaos.fleet import REPLICAS, SEND_TIMEOUT_S, ServerUnderChaos, new_api_key, revoke_api_key
from tests.chaos.load import PATIENCE_S, ServerAddress, SteadyLoad
from tests.chaos.orders import Cut, Deed, Gone, HangEngine, HarmLink, LoseEngine, Partition, Side, Slow, Tamper, Worker
from tests.chaos.stalled_clients import Part, StalledClients
from tests.rigs.processes import comes, process_state
from twostroke.cluster.commands.application import num_requests

BACK_MOST_S = 60.0
"""When a replica that has not come back ends the run."""
POLL_S = 0.1
GONE_S = 20.0  # from a kill to the process's end
DEATHS_APART_S = 3.0
SILENCES_S = (0.5, 1.0, 2.0, 4.0, 7.0)
REFUSED_S = 3.0  # from a damaged chunk's leaving to its refusal
BURST = 16  # requests
DRAIN_S = 10.0  # in which the requests of a worker that drains leave it
LOGS_FILL_S = 10.0  # in which a pipe that nobody reads fills
LOGS_STALL_S = (3.0, 5.0)  # from then on
ORDERED_S = (0.5, 2.0, 4.0)  # from an order's effect to the order that takes it back


class NotBack(Exception):
    """A replica did not come back."""


class Injector:
    """Injects faults into one server under one load. `draw` decides all that is left to chance."""

    def __init__(self, server: ServerUnderChaos, load: SteadyLoad, stalled: StalledClients, draw: random.Random):
        self._server = server
        self._load = load
        self._stalled = stalled
        self._guests = itertools.count(1)
        self._draw = draw
        # One silence at a time: what a request waits for two, one after the other, is no measure of either.
        self._silence = asyncio.Lock()
        self._deaths = asyncio.Lock()
        self._last_death = 0.0

    @property
    def requests_under_way(self) -> int:
        """Those of the load."""
        return self._load.under_way

    # --- faults that take one worker of a role out of use ---

    async def kill(self, role: str) -> Injected | None:
        """kill -9. Proof: its socket closed, no such process is left, and another worker is there in its place."""

        async def strike(worker: Worker) -> None:
            os.kill(worker.pid, signal.SIGKILL)

        return await self._end(f"kill {role}", role, strike)

    async def lose_engine(self, role: str) -> Injected | None:
        """The worker finds its engine dead. Proof: as for `kill`; Serve replaces what says that it is not sound."""

        async def strike(worker: Worker) -> None:
            with contextlib.suppress(Gone):  # it may be quicker than its own report
                await self._server.control.order(worker, LoseEngine())

        return await self._end(f"engine {role}", role, strike)

    async def hang_engine(self, role: str) -> Injected | None:
        """The engine's thread hangs. Proof: as for `kill`; the worker has noticed and ended its own process."""

        async def strike(worker: Worker) -> None:
            await self._server.control.order(worker, HangEngine())

        return await self._end(f"hung engine {role}", role, strike, "hang")

    async def stop(self, role: str) -> Injected | None:
        """SIGSTOP and, after some seconds, SIGCONT. Proof: the kernel says that it is stopped, and then that it isn't.

        From shorter than anybody notices to longer than every lease.
        """
        async with self._silence:
            worker = self._victim(role)
            seconds = self._draw.choice(SILENCES_S)
            begin = time.monotonic()
            os.kill(worker.pid, signal.SIGSTOP)
            try:
                stopped = await comes(lambda: process_state(worker.pid) == "T", within_s=1.0)
                await asyncio.sleep(seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):  # something else has ended it
                    os.kill(worker.pid, signal.SIGCONT)
            woken = await comes(lambda: process_state(worker.pid) not in ("T", ""), within_s=1.0)
            await self._whole(role)
            end = time.monotonic()
        if not (stopped and woken):
            return None
        return Injected(f"stop {role}", "stop", begin, end, f"pid {worker.pid} stopped for {seconds:g} s")

    async def partition(self, role: str, side: Side) -> Injected | None:
        """Nothing gets through to the routers, or to all other workers. Proof: the worker held messages back."""
        async with self._silence:
            seconds = self._draw.choice(SILENCES_S)
            begin = time.monotonic()
            held = await self._server.control.order(self._victim(role), Partition(side, seconds))
            await self._whole(role)
            end = time.monotonic()
        if not held:
            return None
        return Injected(
            f"partition {role} | {side}", "partition", begin, end, f"{held} messages held for {seconds:g} s"
        )

    async def cut(self, role: str, side: Side) -> Injected | None:
        """Connections close. Proof: there were some."""
        worker = self._victim(role)
        begin = time.monotonic()
        closed = await self._server.control.order(worker, Cut(side))
        await self._whole(role)
        if not closed:
            return None
        return Injected(f"cut {role} | {side}", "network", begin, time.monotonic(), f"{closed} connections closed")

    # --- orders of an operator, which take a worker out of its role for a while ---

    async def drain(self, role: str) -> Injected | None:
        """A worker drains, and takes requests again. Proof: its requests have left it, and some had been there."""
        return await self._ordered(f"drain {role}", role, {"draining": True}, {"draining": False})

    async def change_role(self, role: str) -> Injected | None:
        """A worker takes the other role, and its own again. Proof: it says so."""
        other = "decode" if role == "prefill" else "prefill"
        return await self._ordered(f"role of {role}", role, {"role": other}, {"role": role})

    async def _ordered(
        self, name: str, role: str, order: Mapping[str, Any], back: Mapping[str, Any]
    ) -> Injected | None:
        worker = self._victim(role).worker_id
        begin = time.monotonic()
        before = await self._requests_at(worker)
        if not await self._server.order(worker, order):
            return None
        ordered = time.monotonic()
        left = await self._requests_at(worker)
        while order.get("draining") and left and time.monotonic() - ordered < DRAIN_S:
            await asyncio.sleep(POLL_S)
            left = await self._requests_at(worker)
        took_s = time.monotonic() - ordered
        await asyncio.sleep(self._draw.choice(ORDERED_S))
        while not await self._server.order(worker, back):
            if time.monotonic() - ordered > BACK_MOST_S:
                raise NotBack(f"worker {worker} has not obeyed {back} in {BACK_MOST_S:g} s")
            await asyncio.sleep(POLL_S)
        end = time.monotonic()
        if order.get("draining"):
            if not before or left:
                return None
            return Injected(name, "network", begin, end, f"{before} requests had left after {took_s:.1f} s")
        return Injected(name, "network", begin, end, f"{worker} was a {order['role']} worker for {end - ordered:.1f} s")

    async def _requests_at(self, worker_id: str) -> int:
        """Return the requests at a worker; -1 where nobody knows."""
        status = await self._server.status() or {"workers": []}
        rows = [one for one in status["workers"] if one["worker_id"] == worker_id and one["stats"] is not None]
        return num_requests(rows[0]) if rows else -1

    # --- faults that a worker stays in use with ---

    async def order(self, name: str, role: str, deed: Deed) -> Injected | None:
        """A worker harms what it sends. Proof: it had something in hand."""
        return await self._small(name, role, lambda worker: self._server.control.order(worker, deed))

    async def damage(self) -> Injected | None:
        """A bit of a chunk flips on its way. Proof: a digest has refused a chunk."""
        control = self._server.control
        refused = control.refused_chunks

        async def strike(worker: Worker) -> int:
            if not await control.order(worker, HarmLink("flip")):
                return 0
            return int(await comes(lambda: control.refused_chunks > refused, within_s=REFUSED_S))

        return await self._small("damaged chunk", "prefill", strike)

    # --- clients and routers ---

    async def leave(self) -> Injected | None:
        """A client leaves in the middle of its stream. Proof: it had some pieces and no end."""
        begin = time.monotonic()
        answer = await self._load.one_more(leave_after=self._draw.randint(1, 20))
        if not answer.left:
            return None
        return Injected("client leaves", "load", begin, time.monotonic(), "after some pieces, before the end")

    async def burst(self) -> Injected | None:
        """Many requests at once. Proof: all were under way together."""
        begin = time.monotonic()
        answers = await asyncio.gather(*(self._load.one_more() for _ in range(BURST)))
        last_sent = max(answer.sent_at for answer in answers)
        first_ended = min(answer.ended_at for answer in answers)
        if last_sent > first_ended:
            return None
        accepted = sum(answer.is_accepted for answer in answers)
        return Injected("burst", "load", begin, time.monotonic(), f"{accepted} of {BURST} accepted")

    async def send_halves(self, part: Part) -> Injected | None:
        """Many clients send a part of a request, and nothing more. Proof: their connections are open.

        The run's end asks whether the server has ended them.
        """
        begin = time.monotonic()
        num_open = await self._stalled.send_halves(part)
        if not num_open:
            return None
        return Injected(f"half {part}", "load", begin, time.monotonic(), f"{num_open} connections wait for the rest")

    async def read_nothing(self) -> Injected | None:
        """A client asks for a large answer, reads its beginning, and the rest late. Proof: that it had begun."""
        begin = time.monotonic()
        ended = await self._stalled.read_nothing(SEND_TIMEOUT_S + 1.0)
        if not ended:
            return None
        return Injected("slow reader", "load", begin, time.monotonic(), f"its stream ended {ended}")

    async def revoke_key(self) -> Injected | None:
        """A guest's key is made, used, and revoked. Proof: it was taken before, and is refused at all routers now."""
        name, file = f"guest-{next(self._guests)}", self._server.keys_file
        begin = time.monotonic()
        guest = ServerAddress(self._server.target.url, await asyncio.to_thread(new_api_key, file, name))
        await _told(guest, 200)
        revoked = time.monotonic()
        await asyncio.to_thread(revoke_api_key, file, name)
        await _told(guest, 401)
        end = time.monotonic()
        return Injected("revoked key", "load", begin, end, f"refused {end - revoked:.1f} s after it was revoked")

    async def kill_router(self) -> Injected | None:
        """kill -9. Proof: no such process is left, and there are as many routers again."""
        routers = self._server.routers()
        if len(routers) < REPLICAS:
            return None
        victim = self._draw.choice(routers)
        begin = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        gone = await comes(lambda: process_state(victim) == "", within_s=5.0)
        back = await comes(
            lambda: len(self._server.routers()) == REPLICAS and victim not in self._server.routers(), BACK_MOST_S
        )
        if not back:
            raise NotBack(f"no router within {BACK_MOST_S:g} s after one was killed")
        end = time.monotonic()
        return Injected("kill router", "load", begin, end, f"pid {victim} gone") if gone else None

    async def stop_router(self) -> Injected | None:
        """SIGSTOP and, after some seconds, SIGCONT. Proof: as for `stop`."""
        routers = self._server.routers()
        if len(routers) < REPLICAS:
            return None
        async with self._silence:
            victim, seconds = self._draw.choice(routers), self._draw.choice(SILENCES_S[:4])
            begin = time.monotonic()
            os.kill(victim, signal.SIGSTOP)
            try:
                stopped = await comes(lambda: process_state(victim) == "T", within_s=1.0)
                await asyncio.sleep(seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):  # something else has ended it
                    os.kill(victim, signal.SIGCONT)
            woken = await comes(lambda: process_state(victim) not in ("T", ""), within_s=1.0)
        if not (stopped and woken):
            return None
        return Injected("stop router", "stop", begin, time.monotonic(), f"pid {victim} stopped for {seconds:g} s")

    async def kill_controller(self) -> Injected | None:
        """kill -9 of Serve's controller. Proof: no such process is left, and another one is there. Streams go on.

        Where a worker is starting it would be started anew, which takes longer than a replacement may.
        """
        async with self._deaths:
            controllers = self._server.controllers()
            if len(controllers) != 1 or not await self._server.is_whole():
                return None
            begin = time.monotonic()
            os.kill(controllers[0], signal.SIGKILL)
            gone = await comes(lambda: process_state(controllers[0]) == "", within_s=5.0)
            if not await comes(lambda: bool(set(self._server.controllers()) - set(controllers)), BACK_MOST_S):
                raise NotBack(f"no controller within {BACK_MOST_S:g} s after it was killed")
            end = time.monotonic()
        return Injected("kill controller", "network", begin, end, f"pid {controllers[0]} gone") if gone else None

    async def stall_logs(self) -> Injected | None:
        """The collector of the replicas' logs reads nothing. Proof: the pipe is full. No stream may wait."""
        pipe = self._server.log_pipe
        before = await self._server.dropped_log_lines()
        begin = time.monotonic()
        pipe.stall()
        try:
            if not await comes(pipe.is_full, LOGS_FILL_S):
                return None
            seconds = self._draw.choice(LOGS_STALL_S)
            await asyncio.sleep(seconds)
            dropped = await self._server.dropped_log_lines()
        finally:
            pipe.collect()
        end = time.monotonic()
        num_dropped = sum(max(0, lines - before.get(worker, 0)) for worker, lines in dropped.items())
        return Injected(
            "stalled logs", "network", begin, end, f"full for {seconds:g} s, workers dropped {num_dropped} lines"
        )

    async def harm_tier(self, what: str) -> Injected | None:
        """Change an object of a tier as a bad disk does, or another program. Proof: the file is another one."""
        begin = time.monotonic()
        found = [path for folder in self._server.tier_folders for path in folder.rglob("objects/*/*/*/*.kv")]
        if not found:
            return None
        path, other = self._draw.choice(found), self._draw.choice(found)
        try:
            before = await asyncio.to_thread(path.read_bytes)
            match what:
                case "flip":
                    place = self._draw.randrange(len(before))
                    after = before[:place] + bytes([before[place] ^ 1 << self._draw.randrange(8)]) + before[place + 1 :]
                case "truncate":
                    after = before[: self._draw.randrange(len(before))]
                case "swap":
                    after = await asyncio.to_thread(other.read_bytes)
                case _:
                    after = b""
            if what == "delete":
                path.unlink()
            elif after == before:
                return None
            else:  # in place, as a disk does
                with path.open("r+b") as file:
                    file.write(after)
                    file.truncate(len(after))
        except FileNotFoundError:  # a worker has just dropped it
            return None
        proof = f"{path.name[:8]} of {len(before)} bytes"
        return Injected(f"{what} tier object", "network", begin, time.monotonic(), proof)

    def _victim(self, role: str) -> Worker:
        return self._draw.choice(self._server.control.of_role(role))

    async def _end(
        self, name: str, role: str, strike: Callable[[Worker], Awaitable[None]], family: Family = "kill"
    ) -> Injected | None:
        """One worker dies of a strike, a while after the last one, and another takes its place.

        A request that two workers die of before either has given it a token is poison to a router, which may let no
        third one die: where both deaths are ours, and in the same moment, it can't know better.
        """
        async with self._deaths:
            await asyncio.sleep(self._last_death + DEATHS_APART_S - time.monotonic())
            worker = self._victim(role)
            worker.is_doomed = True
            begin = time.monotonic()
            await strike(worker)
            has_gone = await comes(lambda: worker.gone.is_set() and process_state(worker.pid) == "", within_s=GONE_S)
            gone_at = self._last_death = time.monotonic()
        if not has_gone:
            return None
        await self._whole(role)
        end = time.monotonic()
        if worker.worker_id in {one.worker_id for one in self._server.control.of_role(role)}:
            return None
        proof = f"pid {worker.pid} gone, another worker is there"
        return Injected(name, family, begin, end, proof, back_s=end - (gone_at if family == "hang" else begin))

    async def _small(self, name: str, role: str, strike: Callable[[Worker], Awaitable[int]]) -> Injected | None:
        begin = time.monotonic()
        try:
            fired = await strike(self._victim(role))
        except (Gone, IndexError):  # killed by a neighbouring fault
            return None
        end = time.monotonic()
        return Injected(name, "network", begin, end, f"{fired} times") if fired else None

    async def _whole(self, role: str) -> None:
        """Return when the routers reach as many workers of the role as there are to be. Raises NotBack."""
        deadline = time.monotonic() + BACK_MOST_S
        while not await self._server.is_role_whole(role):
            if time.monotonic() > deadline:
                raise NotBack(f"{role} workers are not whole within {BACK_MOST_S:g} s")
            await asyncio.sleep(POLL_S)


async def _told(guest: ServerAddress, status: int) -> None:
    """Return when all of several requests for the list of models get this status. Raises NotBack."""
    deadline = time.monotonic() + BACK_MOST_S
    while True:
        found = await asyncio.gather(*(_status_of_models(guest) for _ in range(4 * REPLICAS)))
        if set(found) == {status}:
            return
        if time.monotonic() > deadline:
            raise NotBack(f"a guest's key gets {found}, not {status}, {BACK_MOST_S:g} s after it was changed")
        await asyncio.sleep(POLL_S)


async def _status_of_models(guest: ServerAddress) -> int:
    """Return the status of GET /v1/models; 0 where the connection breaks, as at a router that is killed."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await guest.connect()
            try:
                writer.write(guest.head(0).replace(b"POST /v1/completions", b"GET /v1/models"))
                return int((await reader.readline()).split()[1])
            finally:
                writer.close()
    except (OSError, IndexError, TimeoutError):
        return 0


Strike = Callable[[], Awaitable[Injected | None]]

PAUSE_S = (0.2, 1.0)  # between two faults of a lane


@dataclass
class Chaos:
    """Injection of faults. `idle` counts strikes that found nothing to harm."""

    faults: list[Injected] = field(default_factory=list)
    idle: int = 0


async def wreak(injector: Injector, chaos: Chaos, seconds: float, seed: int, tell: Callable[[Injected], None]) -> None:
    """Inject faults for so long. Raises NotBack."""
    end = time.monotonic() + seconds
    lanes = [role_lane(injector, "prefill"), role_lane(injector, "decode"), small_lane(injector)]
    tasks = [
        asyncio.create_task(_run(injector, lane, chaos, end, random.Random(f"{seed} {number}"), tell))
        for number, lane in enumerate(lanes)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def role_lane(injector: Injector, role: str) -> Sequence[tuple[int, Strike]]:
    """Strikes with their weights."""
    return [
        (5, lambda: injector.kill(role)),
        (1, lambda: injector.lose_engine(role)),
        (2, lambda: injector.hang_engine(role)),
        (4, lambda: injector.stop(role)),
        (3, lambda: injector.partition(role, "routers")),
        (3, lambda: injector.partition(role, "workers")),
        (3, lambda: injector.cut(role, "routers")),
        (3, lambda: injector.cut(role, "workers")),
        (4, lambda: injector.drain(role)),
        (3, lambda: injector.change_role(role)),
    ]


def small_lane(injector: Injector) -> Sequence[tuple[int, Strike]]:
    """Strikes with their weights."""
    return [
        (5, injector.damage),
        (3, lambda: injector.order("cut data link", "prefill", HarmLink("cut"))),
        (2, lambda: injector.order("drop TokenFrame", "decode", Tamper("TokenFrame", "drop"))),
        (2, lambda: injector.order("repeat TokenFrame", "decode", Tamper("TokenFrame", "repeat"))),
        (2, lambda: injector.order("repeat Commit", "prefill", Tamper("Commit", "repeat"))),
        (2, lambda: injector.order("repeat Offer", "prefill", Tamper("Offer", "repeat"))),
        (2, lambda: injector.order("repeat Grant", "decode", Tamper("Grant", "repeat"))),
        (2, lambda: injector.order("repeat Verified", "decode", Tamper("Verified", "repeat"))),
        (4, lambda: injector.order("slow link", "prefill", Slow(2.0, 0.1))),
        (5, injector.leave),
        (1, injector.burst),
        (1, lambda: injector.send_halves("head")),
        (1, lambda: injector.send_halves("body")),
        (1, lambda: injector.send_halves("large body")),
        (2, injector.read_nothing),
        (2, injector.revoke_key),
        (1, injector.kill_router),
        (1, injector.stop_router),
        (1, injector.kill_controller),
        (2, injector.stall_logs),
        *((2, functools.partial(injector.harm_tier, what)) for what in ("flip", "truncate", "swap", "delete")),
    ]


async def _run(
    injector: Injector,
    lane: Sequence[tuple[int, Strike]],
    chaos: Chaos,
    end: float,
    draw: random.Random,
    tell: Callable[[Injected], None],
) -> None:
    bag: list[Strike] = []
    while time.monotonic() < end:
        if not bag:  # each kind as often as it weighs, in an order of its own
            bag = [strike for weight, strike in lane for _ in range(weight)]
            draw.shuffle(bag)
        under_way = injector.requests_under_way
        try:
            injected = await bag.pop()()
        except Gone:
            injected = None
        if injected is None or not under_way:
            chaos.idle += 1
        else:
            chaos.faults.append(injected)
            tell(injected)
        await asyncio.sleep(draw.uniform(*PAUSE_S))
