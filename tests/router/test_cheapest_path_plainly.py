"""Choices compared with those of a plain calculation, worker by worker, in the words of docs/routing.md."""

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest

from twostroke.protocol.kv_layout import KVLayout, incompatibility
from twostroke.protocol.requests import Address, Peer, Promise
from twostroke.protocol.stats import QueuedWork, StepCosts, WorkerInfo, WorkerStats
from twostroke.router.routing.cheapest_path import cheapest_path
from twostroke.router.routing.fleet_view import AVAILABLE, UNWELCOME, WorkerTable
from twostroke.router.routing.in_flight import Load
from twostroke.router.routing.path_costs import HOP_S, Need
from twostroke.router.routing.policy import Estimate
from twostroke.router.slo.classes import ServiceClasses

CLASSES = (("gold", 2, 0.0), ("silver", 1, 0.3), ("standard", 0, 0.1))
LAYOUTS = (KVLayout("a model", "bfloat16", 2, 4, 8, 16), KVLayout("other", "bfloat16", 2, 4, 8, 16))
NOT_YET = 1e9


@dataclass(frozen=True)
class Worker:
    info: WorkerInfo
    stats: WorkerStats
    costs: StepCosts
    bytes_per_s: float
    held: int
    tier: int

    @property
    def is_decode(self):
        return self.info.role == "decode"

    @property
    def requests(self):
        return self.stats.num_running + self.stats.num_waiting

    @property
    def streams(self):
        return self.requests if self.is_decode else 0

    @property
    def step_s(self):
        return self.costs.base_s + (self.costs.decode_s(self.requests, self.stats.context_tokens) * self.is_decode)

    @property
    def chunk(self):
        room = NOT_YET
        if self.stats.tightest_tpot_s is not None:
            room = (self.stats.tightest_tpot_s - self.step_s) / self.costs.token_s
        return max(16, min(self.info.max_step_tokens - self.streams, room))

    def token_transfer_s(self):
        layout = self.info.layout
        return layout.block_bytes * layout.num_layers / layout.block_size / self.bytes_per_s

    def queue_s(self, promise):
        ahead = sum(work.tokens for work in self.stats.queued if work.priority >= promise.priority)
        shares = sum(work.share for work in self.stats.queued if work.priority < promise.priority and work.tokens)
        tokens = ahead / max(1 - shares, 0.01)
        if promise.share:
            own = sum(work.tokens for work in self.stats.queued if work.class_name == promise.class_name)
            tokens = min(tokens, own / promise.share)
        prompts = sum(work.requests for work in self.stats.queued)
        usual = sum(work.tokens for work in self.stats.queued) / prompts if prompts else 0
        return tokens * (self.costs.token_s + self.step_s / self.chunk + self.costs.pair_s * usual / 2)

    def lacks(self, need):
        return need.num_tokens - min(self.held, need.num_tokens - 1)

    def computing(self, num_tokens, before):
        """Seconds of the prompt, the same with what others wait for it, and tokens."""
        new = num_tokens - before
        prompt_s = self.costs.prompt_s(new, before)
        prefill_s = math.ceil(new / self.chunk) * self.step_s + prompt_s
        return prefill_s, prefill_s + (self.streams + 1) * prompt_s * self.is_decode, new

    def reading(self, need, source):
        """Seconds in all, and of pulling and of computing; tokens to compute."""
        before = need.num_tokens - self.lacks(need)
        prefill_s, cost_s, new = self.computing(need.num_tokens, before)
        pull_s = 0.0
        if source is not None and takes(self, source.info.layout):
            pulled = min(source.held, need.num_tokens - 1)
            way_s = HOP_S + (pulled - before) * self.token_transfer_s()
            rest_s, rest_cost_s, rest = self.computing(need.num_tokens, pulled)
            if pulled - before >= need.min_pull_tokens and way_s + rest_cost_s < cost_s:
                pull_s, prefill_s, cost_s, new = way_s, rest_s, way_s + rest_cost_s, rest
        return self.queue_s(need.promise) + cost_s, pull_s, prefill_s, new

    def transfer_s(self, need, hidden_s, last_tokens):
        missing = need.num_tokens - self.held
        last_s = min(missing, last_tokens) * self.token_transfer_s() / self.info.layout.num_layers
        return HOP_S + max(missing * self.token_transfer_s() - hidden_s, last_s)

    def answering(self, need):
        """Seconds in all, until there is a slot, and of a step."""
        step_s = self.step_s + self.costs.decode_s(1, need.num_tokens)
        limits = [one for one in (self.stats.tightest_tpot_s, need.promise.tpot_s) if one is not None]
        each = max(self.stats.context_tokens, 1) / max(self.requests, 1)
        free_tokens = self.stats.free_blocks * self.info.layout.block_size
        too_many = max(
            self.requests + 1 - self.info.max_batch,
            (need.num_tokens - free_tokens) / each,
            (step_s - min(limits, default=NOT_YET)) / self.costs.decode_s(1, each),
        )
        slot_s = max(0, min(too_many, self.requests)) * self.step_s / max(self.requests, 1) * need.answer_tokens
        return slot_s + need.answer_tokens * step_s, slot_s, step_s


def takes(worker, layout):
    return bool(worker.info.transfer_addresses) and incompatibility(layout, worker.info.layout) is None


def pick(costs, work, turn):
    """The worker of the least cost; of those within 5% the one with the least work, each in turn."""
    near = [one for one, cost_s in costs if cost_s <= 1.05 * min(cost_s for _, cost_s in costs)]
    least = min(work(one) for one in near)
    near = [one for one in near if work(one) == least]
    return near[turn % len(near)]


def plainly(workers, need, turn):
    """Who computes the prompt, who decodes, the source; the estimate and the tokens to compute."""
    roomy = [one for one in workers if one.info.max_context >= need.num_tokens]
    well = [one for one in workers if one.tier == AVAILABLE]
    decode = [one for one in roomy if one.is_decode and one in well] or [one for one in roomy if one.is_decode]
    most = max((one.held for one in well), default=0)
    source = None
    if most >= need.min_pull_tokens:
        source = min((one for one in well if one.held == most), key=lambda one: one.requests)

    paths = []
    for layout in LAYOUTS:
        takers = [one for one in decode if one.info.layout == layout and one.info.transfer_addresses]
        senders = [one for one in roomy if not one.is_decode and one in well and one.info.layout == layout]
        if not takers or not senders:
            continue
        costs = [(one, one.reading(need, source)[0]) for one in senders]
        p = pick(costs, lambda one: one.lacks(need), turn)
        cost_s, pull_s, prefill_s, new = p.reading(need, source)
        sending = {one.info.peer: one.transfer_s(need, prefill_s, min(new, p.chunk)) for one in takers}
        d = pick(
            [(one, sending[one.info.peer] + one.answering(need)[0]) for one in takers],
            lambda one, sending=sending: (one.requests, sending[one.info.peer]),
            turn,
        )
        in_all_s = cost_s + sending[d.info.peer] + d.answering(need)[0]
        paths.append((in_all_s, p, d, sending[d.info.peer]))
    d = pick(
        [(one, one.reading(need, source)[0] + one.answering(need)[0]) for one in decode],
        lambda one: (one.requests, one.lacks(need)),
        turn,
    )
    paths.append((d.reading(need, source)[0] + d.answering(need)[0], d, d, 0.0))

    _, reader, d, sending_s = min(paths, key=lambda path: path[0])
    _, pull_s, prefill_s, new = reader.reading(need, source)
    _, slot_s, step_s = d.answering(need)
    estimate = Estimate(reader.queue_s(need.promise), pull_s, prefill_s, sending_s, slot_s, step_s)
    names = [None if reader is d else reader, d, source if pull_s else None]
    return [one and one.info.peer.worker_id for one in names], estimate, new


def draw_worker(draw, name, *, is_mixed):
    role = "prefill" if name[0] == "p" else "decode"
    running = draw.choice([0, 0, draw.randrange(12)])
    queued = tuple(
        QueuedWork(*one, tokens := draw.choice([0, draw.randrange(1, 2000)]), draw.randrange(1, 4) if tokens else 0)
        for one in draw.sample(CLASSES, draw.randrange(len(CLASSES) + 1))
    )
    info = WorkerInfo(
        role,
        Peer(name, 1),
        Address("h", 1),
        () if is_mixed and draw.random() < 0.2 else (Address("h", 2),),
        draw.choice(LAYOUTS) if is_mixed else LAYOUTS[0],
        num_blocks=400,
        max_context=draw.choice([1000, 10_000]) if is_mixed else 10_000,
        max_step_tokens=draw.choice([256, 2048]),
        max_batch=draw.choice([4, 256]),
    )
    stats = WorkerStats(
        num_running=running,
        num_waiting=sum(one.requests for one in queued),
        free_blocks=draw.randrange(10, 400),
        queued=queued,
        context_tokens=running * draw.randrange(10, 500),
        tightest_tpot_s=draw.choice([None, draw.uniform(0.008, 0.04)]),
    )
    slow = draw.uniform(0.5, 2)
    costs = StepCosts(0.008 * slow, 6e-5 * slow, 2e-8 * slow, 5e-4 * slow, 4e-7 * slow)
    tier = UNWELCOME if is_mixed and draw.random() < 0.15 else AVAILABLE
    return Worker(info, stats, costs, draw.choice([2e5, 1e7, 1e9]), 16 * draw.choice([0, draw.randrange(60)]), tier)


@pytest.mark.parametrize("is_mixed", [False, True], ids=["one kind, all well", "several kinds, some down"])
def test_arrays_lead_to_the_paths_of_a_plain_calculation(is_mixed):
    kinds = set()
    for seed in range(250):
        draw = random.Random(seed)
        names = [f"p{n}" for n in range(draw.randrange(4))] + [f"d{n}" for n in range(draw.randrange(1, 5))]
        workers = [draw_worker(draw, name, is_mixed=is_mixed) for name in names]
        name, priority, share = draw.choice(CLASSES)
        promise = Promise(name, priority, share, tpot_s=draw.choice([None, 0.012]))
        longest = max(one.info.max_context for one in workers if one.is_decode)
        need = Need(min(draw.randrange(960, 1500), longest), draw.uniform(1, 300), promise, 64)
        table = WorkerTable([one.info for one in workers], ServiceClasses())
        for row, one in enumerate(workers):
            table.update(row, one.stats, Load(), one.costs, one.tier, one.bytes_per_s)
        path = cheapest_path(table, need, np.array([float(one.held) for one in workers]), turn=seed)
        expected, estimate, new_tokens = plainly(workers, need, seed)
        taken = [info and info.peer.worker_id for info in (path.prefill, path.decode, path.source)]
        assert (taken, path.new_tokens) == (expected, new_tokens), seed
        for field in Estimate.__struct_fields__:
            assert getattr(path.estimate, field) == pytest.approx(getattr(estimate, field)), (seed, field)
        kinds.add(tuple(name is not None for name in (expected[0], expected[2])))
    assert len(kinds) >= 3, "by a prefill worker, with a pull, and alone"
