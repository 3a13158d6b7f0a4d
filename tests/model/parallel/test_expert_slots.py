"""Copies of experts come to other ranks, whatever form they are held in, and change no token."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.architectures.test_conformance import FAMILY_SHAPES
from tests.model.architectures.test_experts import choices, close, expert_weights
from tests.model.conftest import make_decoder
from tests.model.parallel.test_tensor_parallel import BLOCK_SIZE, CPU, NUM_BLOCKS, Ranks, runner
from tests.rigs import reference
from twostroke.model.backend import Experts, ExpertWeights
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cpu.experts import CpuExperts, PlainExperts
from twostroke.model.cpu.kernels import experts
from twostroke.model.cpu.kernels.launch import Launcher
from twostroke.model.parallel.experts import ExpertHits, ExpertSlots, make_places, use_copies
from twostroke.model.parallel.form import Shard
from twostroke.model.parallel.tensor_parallel import GroupRanks, Rendezvous, SingleRank
from twostroke.model.runner import ModelRunner, RankExtras
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.step import SequenceStep
from twostroke.protocol.messages import ArrangeExperts, ExpertMove, LayerCopies
from twostroke.protocol.requests import SampledToken
from twostroke.worker.experts import ExpertBalance, ExpertLoad, Room


@contextmanager
def groups(size: int) -> Iterator[tuple[list[GroupRanks], ThreadPoolExecutor]]:
    rendezvous = Rendezvous("127.0.0.1")
    with ThreadPoolExecutor(size) as threads:
        shards = [Shard(rank, size, True) for rank in range(size)]
        yield list(threads.map(lambda shard: GroupRanks(shard, rendezvous.address, CPU), shards)), threads


def of_rank(weights: ExpertWeights, shard: Shard, spare: int) -> ExpertWeights:
    held = shard.experts(weights.number)
    numbers = [*range(held.start, held.stop), *[held.start] * spare]

    def picked(part: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        each = len(part if isinstance(part, Tensor) else part.values) // weights.number
        rows = torch.cat([torch.arange(number * each, (number + 1) * each) for number in numbers])
        return part[rows] if isinstance(part, Tensor) else part.rows(rows)

    biases = (None if each is None else each[numbers] for each in (weights.gate_up_bias, weights.down_bias))
    places = make_places(shard, weights.number, spare, CPU)
    return ExpertWeights(
        len(numbers), picked(weights.gate_up), picked(weights.down), *biases, held.start, weights.number, places
    )


FORMS = [
    (torch.float32, ""),
    (torch.bfloat16, ""),
    (torch.bfloat16, "int8 by rows"),
    (torch.bfloat16, "int4 by 16 with offsets"),
    (torch.bfloat16, "fp4 by 32"),
]


def check_copies(make: Callable[[ExpertWeights], Experts], dtype: torch.dtype, form: str) -> None:
    """Copy 2 of 5 experts on 2 ranks in pieces; before and after, the ranks' sums are the reference's."""
    weights = expert_weights(dtype, number=5, size=32, hidden=64, form=form)
    x, chosen = torch.randn(33, 64).to(dtype), choices(33, 5, 2)
    expected = reference.experts(x, chosen, weights, "silu")
    counted = torch.bincount(chosen.experts.flatten(), minlength=5)

    def summed(ranks: Sequence[Experts]) -> Tensor:
        for each in ranks:
            each.hits.zero_()
        total = sum((each(x, chosen).float() for each in ranks), torch.zeros(x.shape))
        assert all(torch.equal(each.hits, counted) for each in ranks)
        return total.to(dtype)

    with groups(2) as (members, threads):
        ranks = [make(of_rank(weights, member.shard, 1)) for member in members]
        for each in ranks:
            each(x, chosen)  # compiles
        close(summed(ranks), expected)
        slots = list(threads.map(lambda each, member: ExpertSlots([None, each], 1, member), ranks, members))
        size = slots[0].expert_bytes
        copies = LayerCopies(1, ((4,), (0,)))
        moves = [
            ExpertMove(1, *where, first, min(1000, size - first))
            for where in ((0, 0, 1, 3), (1, 2, 0, 2))
            for first in range(0, size, 1000)
        ]
        orders = [ArrangeExperts((), tuple(moves[::2])), ArrangeExperts((), tuple(moves[1::2]))]
        for order in [*orders, ArrangeExperts((copies,), ())]:
            list(threads.map(ExpertSlots.arrange, slots, [order] * 2))
        close(summed(ranks), expected)
        places = ranks[0].places
        assert places is not None
        assert places.slots[:, 0].tolist() == [2, 1, 1, 1, 2]


@pytest.mark.parametrize(("dtype", "form"), FORMS)
def test_an_experts_copy_computes_its_share_on_cpus(dtype: torch.dtype, form: str) -> None:
    backend = CpuBackend()
    check_copies(lambda weights: backend.make_experts(weights, "silu", "auto", dtype), dtype, form)


class RebalancedRanks(Ranks):
    """Asks the balance before each step, as rank 0 does, and has all ranks arrange what it says."""

    def __init__(self, runners: list[ModelRunner], threads: ThreadPoolExecutor, balance: ExpertBalance):
        super().__init__(runners, threads)
        self.balance = balance
        self.orders: list[ArrangeExperts] = []

    def run(self, batch: Sequence[SequenceStep]) -> list[SampledToken | None]:
        order = self.balance.next()
        if order is not None:
            self.orders.append(order)
            list(self._threads.map(ModelRunner.arrange_experts, self.runners, [order] * len(self.runners)))
        return super().run(batch)


@contextmanager
def rebalanced_ranks(folder: Path, size: int, spare: int) -> Iterator[RebalancedRanks]:
    config = load_model_config(folder)

    def made(member: GroupRanks) -> tuple[ModelRunner, ExpertSlots, ExpertHits]:
        decoder, cache = make_decoder(
            folder,
            CpuBackend(),
            num_blocks=NUM_BLOCKS * config.kv_groups.count,
            block_size=BLOCK_SIZE,
            parallel=member,
            redundant_experts=spare,
        )
        slots = ExpertSlots(decoder.experts, spare, member)
        hits = ExpertHits([None if experts is None else experts.hits for experts in decoder.experts])
        sampler = Sampler(decoder.vocab_size) if member.shard.rank == 0 else None
        made = ModelRunner(
            decoder, sampler, cache, config.max_position, extras=RankExtras(expert_slots=slots), parallel=member
        )
        return made, slots, hits

    with groups(size) as (members, threads):
        runners, slots, hits = zip(*threads.map(made, members), strict=True)
        steps = iter(range(10**9))
        room = Room(size, spare, slots[0].expert_bytes, slots[0].expert_bytes // 2 + 100)
        balance = ExpertBalance(ExpertLoad(hits[0].read, lambda: 0.0), room, lambda: float(next(steps)))
        yield RebalancedRanks(list(runners), threads, balance)


@pytest.mark.parametrize(
    ("family", "size"),
    [("qwen3_moe", 2), ("qwen3_moe", 4), ("gpt_oss", 2), ("deepseek_v3_experts", 4)],
)
def test_tokens_stay_what_they_are_while_experts_move(
    family: str, size: int, write_checkpoint: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.worker.experts.EXPERT_EXAMINE_S", 2.0)
    folder = write_checkpoint(seed=3, **FAMILY_SHAPES[family])
    prompts = [[7] * 20, [7] * 33, [11, 7] * 12, *([row] * 9 for row in range(20, 26))]
    expected = generate(runner(folder, SingleRank()), prompts, 24, chunk=37, block_size=BLOCK_SIZE)
    with rebalanced_ranks(folder, size, 2) as together:
        assert generate(together, prompts, 24, chunk=37, block_size=BLOCK_SIZE) == expected
        assert together.balance.num_copies > 0
        assert sum(bool(order.copies) for order in together.orders) > 1


@pytest.mark.parametrize(("dtype", "form"), FORMS)
def test_a_slot_of_packed_experts_is_all_that_an_expert_has(dtype: torch.dtype, form: str) -> None:
    weights = expert_weights(dtype, number=3, size=32, hidden=64, form=form)

    def packed(one: ExpertWeights) -> CpuExperts:
        return CpuExperts(one, "silu", "auto", Launcher())

    whole = packed(weights)
    for number in range(3):
        only = packed(of_rank(weights, Shard(number, 3, True), 0))
        for found, expected in zip(whole.slot_memory(number), only.slot_memory(0), strict=True):
            assert found.is_contiguous()
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    held = sum(part.nbytes for number in range(3) for part in whole.slot_memory(number))
    assert held == sum(part.nbytes for stack in (whole._gate_up, whole._down) for part in stack.memory)


def test_a_choice_is_located_by_its_row() -> None:
    places = make_places(Shard(1, 2, True), 5, 1, CPU)
    use_copies(places, LayerCopies(0, ((4,), (0,))), 1)
    chosen, hits = choices(33, 5, 2).experts, torch.zeros(5, dtype=torch.int64)
    located = experts.locate(Launcher(), chosen, places.slots, hits)
    assert torch.equal(located, PlainExperts._slots(chosen, places))
    assert torch.equal(hits, torch.bincount(chosen.flatten(), minlength=5))
