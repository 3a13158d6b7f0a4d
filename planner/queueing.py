"""What a fleet does to a load, by queueing formulas: how many first tokens, and tokens, come in time.

Prompts wait at prefill workers as at an M/G/n queue, first come first served: the chance to wait is Erlang's (1917),
the mean wait Allen and Cunneen's (1978), and waits beyond it fall exponentially. A decode worker's batch is what
Little's law (1961) makes of its own step time, a fixed point; around it the batch varies as M/G/infinity's, which is
Poisson. A worker that does both reads prompts in what its steps have left beside their rows (Agrawal et al.,
Sarathi-Serve, OSDI 2024).
Simulation then says how far this is from what schedulers do.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from twostroke.model.config import Quantization
from twostroke.planner.workload import Promise, Workload
from twostroke.protocol.stats import StepCosts

CALL_S = 0.005  # to a worker and back, where nobody has measured it
HANDOVER_S = 0.002  # of a prompt's last piece of KV, the bytes aside
JOIN_STEPS = 1.5  # that a new row waits for: the one that runs, and mostly the one scheduled ahead
PACE = 0.9  # of the promised time a token, that a step with a chunk of a prompt is planned to take
LEAST_CHUNK = 8  # prompt tokens of such a step, whatever time they take
LINK_SHARE = 0.9  # of a link's bytes, that KV may take before it waits for the link
LATE_SHARE = 0.05  # of all answers, that miss their promise for nothing but late KV: then the link binds
SEEN = 2 / 3
"""Of the variance of a batch at a moment, what is left of it in the mean over one answer's time: the batch of
M/D/infinity correlates by 1 - t / T, whose double integral over an answer is 2/3."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Kind:
    """One kind of worker: how long its steps take, what it holds and what it costs."""

    name: str
    costs: StepCosts
    kv_tokens: int  # of its cache, for requests of the workload
    kv_bytes: float  # of a token, as it is sent
    link_bytes_per_s: float
    num_layers: int
    step_tokens: int
    max_batch: int
    gpus: int
    usd_per_hour: float
    hardware: str = ""
    ranks: int = 1
    quantization: Quantization = "auto"
    block_size: int = 16
    call_s: float = CALL_S  # of a first token, beside queues and steps: HTTP, admission, to a worker and back


@dataclass(frozen=True)
class Met:
    """What comes in time, as shares of all requests, and what limits it."""

    ttft: float
    tpot: float
    room: float  # chance that the KV cache has room for whoever comes
    batch: float = 0.0  # of a decode worker
    ttft_binds: str = "FLOPs"
    tpot_binds: str = "bandwidth"

    def holds(self, promise: Promise) -> bool:
        return self.ttft >= promise.ttft_share and self.tpot >= promise.tpot_share and self.room >= promise.tpot_share

    def binds(self, promise: Promise) -> str:
        """What is scarcest: of the promises the one that is nearest to being broken."""
        slack = {
            self.ttft_binds: self.ttft - promise.ttft_share,
            self.tpot_binds: self.tpot - promise.tpot_share,
            "KV memory": self.room - promise.tpot_share,
        }
        return min(slack, key=lambda name: (slack[name], name))


NOTHING = Met(0.0, 0.0, 0.0)


def erlang_c(servers: int, load: float) -> float:
    """The chance to wait at so many servers (Erlang 1917); `load` is how many are busy on average, below `servers`."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


@dataclass(frozen=True)
class Wait:
    """How long requests wait for their turn."""

    chance: float
    mean_s: float  # of all, also of those that don't wait

    def within(self, seconds: float) -> float:
        """The share that waits no longer."""
        if seconds < 0:
            return 0.0
        if self.mean_s <= 0:
            return 1.0
        return 1.0 - self.chance * math.exp(-seconds * self.chance / self.mean_s)


def wait_of(rate: float, servers: int, mean_s: float, square_s: float) -> Wait | None:
    """Before service of that mean, and mean square, at an M/G/n queue; None where it grows without end.

    W = C / (n / E[S] - rate) (1 + cv^2) / 2 (Allen and Cunneen 1978; exact for one server, Pollaczek 1930).
    """
    load = rate * mean_s
    if load >= servers:
        return None
    chance = erlang_c(servers, load)
    variation = square_s / (mean_s * mean_s)  # 1 + cv^2
    return Wait(chance, chance / (servers / mean_s - rate) * variation / 2)


def read_alone_s(kind: Kind, prompt: int) -> float:
    """A prompt's time at an idle prefill worker."""
    return kind.costs.prefill_s(prompt, 0, kind.step_tokens)


def _read_busy_s(kind: Kind, prompt: int) -> float:
    """What it adds where others wait: their steps are full, and share what reading the weights takes."""
    steps = -(-prompt // kind.step_tokens)
    return read_alone_s(kind, prompt) - kind.costs.weights_s * (steps - prompt / kind.step_tokens)


def late_s(sender: Kind, prompt: int, rate_each: float, mean_prompt: float) -> float:
    """From the first token until the KV is at the decode worker; infinite where the link can't carry it all.

    Layers travel while later ones are computed, so that what is late is what the link is slower by, or the last layer.
    """
    used = rate_each * mean_prompt * sender.kv_bytes / sender.link_bytes_per_s
    if used >= LINK_SHARE:
        return math.inf
    whole_s = prompt * sender.kv_bytes / sender.link_bytes_per_s / (1 - used)
    hidden_s = sender.costs.prompt_s(prompt)
    return HANDOVER_S + max(whole_s - hidden_s, whole_s / sender.num_layers)


def rows_s(kind: Kind, batch: float, context: float) -> float:
    """A decode step of so many rows."""
    costs = kind.costs
    return costs.reading_s(batch) + batch * (costs.row_s + context * costs.context_s)


def batch_of(kind: Kind, workload: Workload, rate: float, longer_s: float = 0.0, share: float = 0.0) -> float:
    """How many rows a decode worker has, at so many requests a second: the least fixed point of Little's law.

    For `share` of the time steps take `longer_s`. Infinite beyond `max_batch`.
    """
    batch, asked = 0.0, rate * workload.mean_answer
    for _ in range(400):
        step_s = rows_s(kind, batch, workload.mean_context)
        new = asked * (share * max(longer_s, step_s) + (1 - share) * step_s)
        if new > kind.max_batch:
            return math.inf
        if abs(new - batch) <= 1e-3 * max(1.0, batch):
            return new
        batch = new
    return math.inf


def room_of(kind: Kind, workload: Workload, batch: float) -> float:
    """The chance that the cache holds a batch that varies as Poisson's; requests as they are met in it."""
    mean, square = workload.held
    spread = math.sqrt(max(1e-9, batch * square))
    return _NORMAL.cdf((kind.kv_tokens - batch * mean) / spread)


def _batch_within(kind: Kind, workload: Workload, batch: float, step_s: float) -> float:
    """The share of answers over whose time the mean step takes no longer than `step_s`."""
    low, high = 0.0, 4.0 * kind.max_batch
    if rows_s(kind, low, workload.mean_context) > step_s:
        return 0.0
    if kind.costs.experts_s == 0:
        low = (step_s - kind.costs.base_s) / (rows_s(kind, 1.0, workload.mean_context) - kind.costs.base_s)
    else:
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if rows_s(kind, middle, workload.mean_context) <= step_s else (low, middle)
    return _NORMAL.cdf((low - batch) / math.sqrt(max(1e-6, SEEN * batch)))


def _step_binds(kind: Kind, batch: float, context: float) -> str:
    """What a decode step spends most of its time on."""
    computing_s = batch * kind.costs.row_s
    return "FLOPs" if computing_s > rows_s(kind, batch, context) / 2 else "bandwidth"


def decoding(kind: Kind, count: int, workload: Workload, promise: Promise, rate: float, lates: list[float]) -> Met:
    """Decode workers that only write. `lates`: of each of the workload's strata, when its KV is there."""
    batch = batch_of(kind, workload, rate / count)
    if math.isinf(batch):
        return replace(NOTHING, ttft=1.0, tpot_binds=_step_binds(kind, kind.max_batch, workload.mean_context))
    step_s = rows_s(kind, batch, workload.mean_context)
    shares = [
        _batch_within(kind, workload, batch, promise.tpot_s - (late_s + JOIN_STEPS * step_s) / (answer - 1))
        if answer > 1
        else 1.0
        for (_, answer), late_s in zip(workload.strata, lates, strict=True)
    ]
    met = sum(shares) / len(shares)
    is_late = _batch_within(kind, workload, batch, promise.tpot_s) - met > LATE_SHARE
    binds = "link" if is_late else _step_binds(kind, batch, workload.mean_context)
    return Met(1.0, met, room_of(kind, workload, batch), batch, tpot_binds=binds)


def reading(kind: Kind, count: int, workload: Workload, promise: Promise, rate: float) -> Met:
    """Prefill workers, of all of them together."""
    times = [_read_busy_s(kind, prompt) for prompt, _ in workload.strata]
    wait = wait_of(rate, count, sum(times) / len(times), sum(one * one for one in times) / len(times))
    binds = "FLOPs" if kind.costs.prompt_s(int(workload.mean_prompt)) > kind.costs.weights_s else "bandwidth"
    if wait is None:
        return replace(NOTHING, tpot=1.0, room=1.0, ttft_binds=binds)
    shares = [wait.within(promise.ttft_s - kind.call_s - read_alone_s(kind, prompt)) for prompt, _ in workload.strata]
    return Met(sum(shares) / len(shares), 1.0, 1.0, ttft_binds=binds)


def mixed(kind: Kind, count: int, workload: Workload, promise: Promise, rate: float, read_rate: float) -> Met:
    """Workers that write `rate` answers a second, all of them together, and read the prompts of `read_rate`."""
    costs, context = kind.costs, workload.mean_context
    share, batch, step_s = 0.0, 0.0, 0.0
    unhindered = [(read_alone_s(kind, prompt), costs.prompt_s(prompt)) for prompt, _ in workload.strata]
    times: list[float] = []
    for _ in range(60):
        beside_s = rows_s(kind, batch, context)
        token_s = costs.prompt_s(int(workload.mean_prompt)) / max(1, int(workload.mean_prompt))
        longest_s = beside_s + max(1.0, kind.step_tokens - batch) * token_s
        step_s = max(min(promise.tpot_s * PACE, longest_s), beside_s + LEAST_CHUNK * token_s)
        stretch = step_s / (step_s - beside_s)
        alone = math.exp(-batch)  # the chance that there are no rows
        times = [alone * alone_s + (1 - alone) * prompt_s * stretch for alone_s, prompt_s in unhindered]
        busy = read_rate / count * sum(times) / len(times)
        new = batch_of(kind, workload, rate / count, step_s, min(1.0, busy))
        if busy >= 1 or math.isinf(new):
            return replace(NOTHING, ttft_binds="FLOPs", tpot_binds=_step_binds(kind, kind.max_batch, context))
        if abs(new - batch) < 1e-3 * max(1.0, batch) and abs(busy - share) < 1e-4:
            break
        share, batch = busy, (batch + new) / 2
    wait = wait_of(read_rate, count, sum(times) / len(times), sum(one * one for one in times) / len(times))
    if wait is None:
        return NOTHING
    shares = [
        wait.within(promise.ttft_s - kind.call_s - seconds - (1 - math.exp(-batch)) * beside_s / 2) for seconds in times
    ]
    tpot = _batch_within(kind, workload, batch, promise.tpot_s) if step_s <= promise.tpot_s else 0.0
    return Met(
        sum(shares) / len(shares),
        tpot,
        room_of(kind, workload, batch),
        batch,
        ttft_binds="FLOPs" if costs.prompt_s(int(workload.mean_prompt)) > beside_s else "bandwidth",
        tpot_binds=_step_binds(kind, batch, context),
    )
