"""The layout of transfers: every head of every token arrives once, in its place."""

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.kv_pair import FAST, SECRET, TOKEN, D, P, fails, make_transport, rank_shard, reach
from twostroke.kvtransfer.layout import ChunkPlan, KVShard, pair_shards, rank_pairs
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.kv_layout import KVLayout, RankCut, incompatibility
from twostroke.protocol.messages import Run
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import Address, SampledToken, Ticket, mint_ticket
from twostroke.simulator.memory_store import GARBAGE, Array, FakeStore

UP_TO_8 = range(1, 9)
SIZES = [
    (source_tp, target_tp, heads)
    for source_tp, target_tp, heads in itertools.product(UP_TO_8, UP_TO_8, UP_TO_8)
    if all(max(tp, heads) % min(tp, heads) == 0 for tp in (source_tp, target_tp))
]
NUM_BLOCKS = 48
LAYERS = 3
HEAD_DIM = 2


def layout_of(
    tp_size: int, heads: int, block_size: int, kinds: int = 2, *, pp: int = 1, shares_context: bool = False
) -> KVLayout:
    return KVLayout(
        "m",
        "bfloat16",
        LAYERS,
        heads,
        HEAD_DIM,
        block_size,
        tp_size,
        kinds=kinds,
        pp_size=pp,
        context_ranks=tp_size if shares_context else 1,
    )


def truth_of(layout: KVLayout, num_tokens: int) -> Array:
    """KV of a prompt, [layer, token, kinds, head of the model, HEAD_DIM]: numbers of which no two are the same."""
    shape = (layout.num_layers, num_tokens, layout.kinds, layout.num_kv_heads, HEAD_DIM)
    return np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)


def block_table(num_tokens: int, block_size: int, seed: int) -> tuple[int, ...]:
    num_blocks = -(-num_tokens // block_size)
    return tuple(int(block) for block in np.random.default_rng(seed).permutation(NUM_BLOCKS)[:num_blocks])


def stores_of(layout: KVLayout) -> list[FakeStore]:
    """One for each rank."""
    return [FakeStore(layout, num_blocks=NUM_BLOCKS, rank=rank) for rank in range(layout.num_ranks)]


def heads_of(store: FakeStore) -> slice:
    first = store.layout.first_head(store.rank)
    return slice(first, first + store.layout.heads_per_rank)


def write_prompt(store: FakeStore, block_ids: tuple[int, ...], num_tokens: int) -> None:
    truth = truth_of(store.layout, num_tokens)
    for layer in store.layout.layers_of(store.rank):
        store.write_values(layer, block_ids, 0, truth[layer][:, :, heads_of(store)])


def assert_prompt(store: FakeStore, block_ids: tuple[int, ...], tokens: range) -> None:
    """These tokens, to the prompt's last, are there; neither those before them nor other blocks were touched."""
    others = [block for block in range(NUM_BLOCKS) if block not in block_ids]
    truth = truth_of(store.layout, tokens.stop)
    for layer in store.layout.layers_of(store.rank):
        found = store.values(layer, block_ids, tokens.stop)
        expected = truth[layer, :, :, heads_of(store)].copy()
        held = store.layout.tokens_of(store.rank)
        elsewhere = [position for position in range(tokens.stop) if position % store.layout.block_size not in held]
        expected[elsewhere] = GARBAGE
        assert np.array_equal(found[tokens.start :], expected[tokens.start :])
        assert (found[: tokens.start] == GARBAGE).all()
    for tensor in store.layers:
        assert (tensor[others] == GARBAGE).all()


@pytest.mark.parametrize("sizes", [(3, 1, 8), (1, 3, 8), (0, 1, 1), (1, 1, 0), (-2, 1, 2), (16, 1, 6)])
def test_sizes_that_can_not_share_the_heads_raise(sizes: tuple[int, int, int]) -> None:
    source_tp, target_tp, heads = sizes
    with pytest.raises(ValueError, match="can't share"):
        rank_pairs(layout_of(source_tp, heads, 4), layout_of(target_tp, heads, 4))


@pytest.mark.parametrize("pp", [0, LAYERS + 1])
def test_stages_that_can_not_share_the_layers_raise(pp: int) -> None:
    with pytest.raises(ValueError, match=f"{pp} stages can't share {LAYERS} layers"):
        rank_pairs(layout_of(1, 1, 4), layout_of(1, 1, 4, pp=pp))
    with pytest.raises(ValueError, match="2 stages can't share 3 ranks"):
        layout_of(1, 1, 4).over(RankCut(3, 2))


@pytest.mark.parametrize(("source_tp", "target_tp", "heads"), SIZES)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_byte_arrives_once_where_it_belongs(
    source_tp: int, target_tp: int, heads: int, data: st.DataObject
) -> None:
    """Rank pairs, cuts, plans and segments, on arrays instead of links."""
    kinds, stages = data.draw(st.integers(1, 2)), st.integers(1, LAYERS)
    source_layout = layout_of(source_tp, heads, data.draw(st.integers(1, 8)), kinds, pp=data.draw(stages))
    target_layout = layout_of(target_tp, heads, data.draw(st.integers(1, 8)), kinds, pp=data.draw(stages))
    num_tokens = data.draw(st.integers(1, 24))
    num_skipped = data.draw(st.integers(0, num_tokens // target_layout.block_size)) * target_layout.block_size
    if data.draw(st.booleans()) and num_tokens - num_skipped < target_layout.block_size:
        num_skipped = num_tokens
    max_units = data.draw(st.integers(1, 9))
    source_ids = block_table(num_tokens, source_layout.block_size, 1)
    target_ids = block_table(num_tokens, target_layout.block_size, 2)
    pairs = rank_pairs(source_layout, target_layout)
    assert len({(rank_pair.source_rank, rank_pair.target_rank) for rank_pair in pairs}) == len(pairs), (
        "one rank pair a pair at most"
    )
    assert {rank_pair.target_rank for rank_pair in pairs} == set(range(target_layout.num_ranks)), (
        "every rank hears of an offer"
    )
    for stage in range(source_layout.pp_size):
        ranks = {rank_pair.source_rank for rank_pair in pairs if rank_pair.source_rank // source_tp == stage}
        assert len(ranks) >= min(source_tp, target_tp), "copies share the work"
        assert source_tp % target_tp or len(ranks) == source_tp, "no rank idles"
    sources, targets = stores_of(source_layout), stores_of(target_layout)
    for store in sources:
        write_prompt(store, source_ids, num_tokens)
    _move(sources, targets, (source_ids, target_ids), range(num_skipped, num_tokens), max_units)
    for target in targets:
        assert_prompt(target, target_ids, range(num_skipped, num_tokens))


PARTS = [
    # (ranks of the source, whether they share tokens, its block size), the same of the target
    ((1, False, 8), (2, True, 8)),
    ((2, False, 8), (4, True, 8)),
    ((2, True, 8), (1, False, 8)),
    ((4, True, 8), (2, False, 8)),
    ((2, True, 8), (2, True, 8)),
    ((2, True, 8), (4, True, 8)),
    ((4, True, 8), (2, True, 8)),
    ((3, False, 6), (3, True, 6)),
    ((2, True, 4), (2, False, 8)),
    ((2, False, 4), (2, True, 8)),
    ((1, True, 4), (4, True, 4)),
]


@pytest.mark.parametrize(("source", "target"), PARTS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_token_of_latents_goes_from_its_source_rank_to_its_target_rank(
    source: tuple[int, bool, int], target: tuple[int, bool, int], data: st.DataObject
) -> None:
    source_layout, target_layout = (
        layout_of(ranks, 1, size, 1, pp=data.draw(st.integers(1, LAYERS)), shares_context=shares)
        for ranks, shares, size in (source, target)
    )
    assert incompatibility(source_layout, target_layout) is None
    num_tokens = data.draw(st.integers(1, 24))
    num_skipped = data.draw(st.integers(0, num_tokens // target_layout.block_size)) * target_layout.block_size
    source_ids = block_table(num_tokens, source_layout.block_size, 1)
    target_ids = block_table(num_tokens, target_layout.block_size, 2)
    pairs = rank_pairs(source_layout, target_layout)
    assert len({(rank_pair.source_rank, rank_pair.target_rank) for rank_pair in pairs}) == len(pairs), (
        "one rank pair a pair at most"
    )
    assert {rank_pair.target_rank for rank_pair in pairs} == set(range(target_layout.num_ranks)), (
        "every rank hears of an offer"
    )
    sources, targets = stores_of(source_layout), stores_of(target_layout)
    for store in sources:
        write_prompt(store, source_ids, num_tokens)
    _move(sources, targets, (source_ids, target_ids), range(num_skipped, num_tokens), data.draw(st.integers(1, 9)))
    for store in targets:
        assert_prompt(store, target_ids, range(num_skipped, num_tokens))


@pytest.mark.parametrize(
    ("source", "target"),
    [((2, True, 16), (1, False, 4)), ((1, False, 4), (2, True, 16)), ((2, True, 8), (2, True, 16)),
     ((2, True, 6), (3, True, 6)), ((8, True, 16), (1, False, 4)), ((1, False, 12), (8, True, 16))],
)  # fmt: skip
def test_parts_that_would_be_in_pieces_on_the_other_side_are_refused(
    source: tuple[int, bool, int], target: tuple[int, bool, int]
) -> None:
    layouts = [layout_of(ranks, 1, size, 1, shares_context=shares) for ranks, shares, size in (source, target)]
    fault = incompatibility(*layouts)
    assert fault is not None
    assert "set the same block_size" in fault


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (layout_of(3, 1, 4, 1, shares_context=True), "3 ranks can't share blocks of 4 tokens evenly"),
        (layout_of(2, 2, 4, 2, shares_context=True), "can't share the tokens of keys and values"),
        (msgspec.structs.replace(layout_of(4, 1, 4, 1), context_ranks=2), "2 of 4 ranks can't share"),
    ],
)
def test_parts_that_can_not_be_are_refused(layout: KVLayout, fault: str) -> None:
    assert fault in (incompatibility(layout_of(1, layout.num_kv_heads, 4, layout.kinds), layout) or "")


@pytest.mark.parametrize(("source_pp", "target_pp"), [(1, 2), (2, 1), (2, 2)])
def test_layers_with_windows_lie_in_other_groups_and_tensors_where_there_are_other_stages(
    source_pp: int, target_pp: int
) -> None:
    """Layer 2 is in the second group's second tensor of the whole model, and in a third group of its first half."""
    whole = KVLayout("m", "bfloat16", 6, 2, HEAD_DIM, 4, windows=(0, 6, 6) * 2)
    source_layout, target_layout = (whole.over(RankCut(pp, pp)) for pp in (source_pp, target_pp))
    assert incompatibility(source_layout, target_layout) is None
    tables = tuple(tuple(range(at, at + 3 * 4)) for at in (5, 20))
    sources, targets = stores_of(source_layout), stores_of(target_layout)
    for store in sources:
        write_prompt(store, tables[0], 15)
    _move(sources, targets, tables, range(15), 4)
    truth = truth_of(whole, 15)
    for store in targets:
        for layer in store.layout.layers_of(store.rank):
            kept = slice(10 if layer % 3 else 0, 15)  # the one after them attends to 5 of them and itself
            found = store.values(layer, tables[1], 15)[-5:] if layer % 3 else store.values(layer, tables[1], 15)
            assert np.array_equal(found, truth[layer, kept])


def _move(
    sources: list[FakeStore], targets: list[FakeStore], tables: tuple[tuple[int, ...], ...], tokens: range, at_once: int
) -> None:
    """Everything over all rank pairs, each unit once: the KV of these tokens, of which there are `tokens.stop`."""
    source_layout, target_layout = sources[0].layout, targets[0].layout
    written: Counter[tuple[int, int, int, int]] = Counter()  # target rank, layer, unit, head
    for rank_pair in rank_pairs(source_layout, target_layout):
        from_cut, to_cut = pair_shards(rank_pair, source_layout, target_layout, "raw")
        plan = ChunkPlan(
            groups=source_layout.groups, layers=rank_pair.layers, num_tokens=tokens.stop, num_ready_tokens=tokens.stop
        )
        plan.begin(from_cut.unit_tokens, tokens.start, from_cut.share)
        while runs := plan.next_runs(at_once):
            places = zip(_units(from_cut, runs, tables[0]), _units(to_cut, runs, tables[1]), strict=True)
            for (layer, from_unit), (_, to_unit) in places:
                unit = sources[rank_pair.source_rank].read_units(layer, (from_unit,), from_cut)
                assert len(unit) == from_cut.unit_bytes == to_cut.unit_bytes
                targets[rank_pair.target_rank].write_units(layer, (to_unit,), to_cut, unit)
                heads_there = range(to_cut.first_head, to_cut.first_head + to_cut.num_heads)
                written.update((rank_pair.target_rank, layer, to_unit, head) for head in heads_there)
        assert plan.all_taken
    assert set(written.values()) <= {1}, "nothing is sent twice"


def _units(shard: KVShard, runs: tuple[Run, ...], block_ids: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(segment.layer, unit) for segment in shard.segments(runs, block_ids) for unit in segment.unit_ids]


@pytest.mark.parametrize(("encoding", "num_bytes"), [("raw", 2 * 2 * 4 * 2 * 2), ("int8", 2 * 2 * 4 * (2 + 2))])
def test_a_units_bytes_include_its_scales(encoding: Any, num_bytes: int) -> None:
    assert rank_shard(layout_of(1, 2, 4), 0, 2, 4, encoding).unit_bytes == num_bytes


# --- the same with real senders and receivers, one for each rank ---


class Fleet:
    """All ranks of a source and of a target."""

    def __init__(self, source: KVLayout, target: KVLayout, transport: str = "tcp"):
        self.sources, self.targets = stores_of(source), stores_of(target)
        network = TcpNetwork(SECRET)
        common: dict[str, Any] = {"network": network, "config": FAST, "clock": time.monotonic}
        self._transports: list[Transports] = []

        def transports(store: FakeStore) -> Transports:
            self._transports.append(Transports({transport: make_transport(transport, store)}, reach(transport)))
            return self._transports[-1]

        self.senders = [KVSender(peer=P, store=store, transports=transports(store), **common) for store in self.sources]
        self.receivers = [
            KVReceiver(peer=D, store=store, transports=transports(store), secret=SECRET, **common)
            for store in self.targets
        ]

    async def __aenter__(self) -> "Fleet":
        addresses = [address for receiver in self.receivers for address in await receiver.start("127.0.0.1")]
        self.ticket = self.mint(tuple(addresses))
        return self

    def mint(self, addresses: tuple[Address, ...]) -> Ticket:
        source, target = self.sources[0].layout, self.targets[0].layout
        return mint_ticket(SECRET, "r", P, D, addresses, source_cut=source.cut, target_cut=target.cut)

    async def __aexit__(self, *_: object) -> None:
        ends: list[Any] = [*self.senders, *self.receivers]
        await asyncio.gather(*(end.close() for end in ends))
        await asyncio.gather(*(made.close() for made in self._transports))


@pytest.mark.parametrize(
    ("source_tp", "target_tp", "heads", "source_block", "target_block", "kinds", "stages"),
    [
        (1, 1, 2, 4, 4, 2, (1, 1)),
        (1, 4, 4, 4, 4, 2, (1, 1)),
        (4, 1, 4, 4, 8, 2, (1, 1)),
        (2, 4, 4, 6, 4, 2, (1, 1)),
        (4, 2, 2, 3, 2, 2, (1, 1)),
        (8, 8, 2, 4, 4, 2, (1, 1)),
        (4, 8, 8, 8, 2, 2, (1, 1)),
        # Stages: of 3 layers they have 1 and 2, or 1 each.
        (1, 1, 2, 4, 4, 2, (2, 1)),
        (1, 2, 2, 4, 8, 2, (2, 3)),
        (2, 1, 2, 4, 6, 2, (1, 2)),
        # Latents, which all ranks of a stage hold.
        (1, 2, 1, 4, 4, 1, (1, 1)),
        (4, 2, 1, 4, 6, 1, (1, 1)),
        (2, 1, 1, 4, 4, 1, (2, 1)),
        (2, 4, 1, 4, 2, 1, (1, 2)),
        (3, 1, 1, 8, 4, 1, (1, 1)),
        (4, 2, 2, 4, 2, 2, (1, 1)),
    ],
)
async def test_ranks_of_unequal_workers_exchange_a_prompt(
    source_tp: int,
    target_tp: int,
    heads: int,
    source_block: int,
    target_block: int,
    kinds: int,
    stages: tuple[int, int],
) -> None:
    source = layout_of(source_tp, heads, source_block, kinds, pp=stages[0])
    target = layout_of(target_tp, heads, target_block, kinds, pp=stages[1])
    await _exchange_a_prompt(source, target)


@pytest.mark.parametrize(("source", "target"), PARTS)
async def test_ranks_that_share_the_tokens_of_blocks_exchange_a_prompt(
    source: tuple[int, bool, int], target: tuple[int, bool, int]
) -> None:
    layouts = [layout_of(ranks, 1, size, 1, shares_context=shares) for ranks, shares, size in (source, target)]
    await _exchange_a_prompt(*layouts)


async def _exchange_a_prompt(source: KVLayout, target: KVLayout) -> None:
    num_tokens, num_skipped = 21, target.block_size
    source_ids = block_table(num_tokens, source.block_size, 1)
    target_ids = block_table(num_tokens, target.block_size, 2)
    async with asyncio.timeout(30), Fleet(source, target) as fleet:
        for store in fleet.sources:
            write_prompt(store, source_ids, num_tokens)
        outs = [sender.begin_transfer(fleet.ticket, num_tokens, source_ids, 0) for sender in fleet.senders]
        incomings = [
            receiver.expect_transfer(fleet.ticket, target_ids, num_tokens, num_skipped) for receiver in fleet.receivers
        ]
        for tokens, (rank, out) in itertools.product((10, num_tokens), enumerate(outs)):
            for layer in source.layers_of(rank):
                out.layer_ready(layer, tokens)
        for out in outs:
            out.commit(TOKEN)
        assert await asyncio.gather(*(incoming.verified() for incoming in incomings)) == [TOKEN] * target.num_ranks
        await asyncio.gather(*(out.done() for out in outs))
        for store in fleet.targets:
            assert_prompt(store, target_ids, range(num_skipped, num_tokens))
        for stats in (end.stats for ends in (fleet.senders, fleet.receivers) for end in ends):
            assert (stats.done, stats.failed, stats.in_flight) == (1, 0, 0)
        used = sum(len(sender.links()) for sender in fleet.senders)
        assert used == len(rank_pairs(source, target))


@pytest.mark.parametrize("pp", [1, 3])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (2, 1), (2, 2), (2, 4), (3, 1), (4, 2)])
async def test_each_target_rank_is_sent_latents_once_and_the_sources_ranks_send_equally_much(
    source_tp: int, target_tp: int, pp: int
) -> None:
    """Each end counts what it moves of a prompt of 13 blocks of which the target has the first; both sides have as many
    stages."""
    block_size, num_tokens = 4, 52
    source, target = (layout_of(tp, 1, block_size, kinds=1, pp=pp) for tp in (source_tp, target_tp))
    blocks = block_table(num_tokens, block_size, 1)
    async with asyncio.timeout(30), Fleet(source, target) as fleet:
        for store in fleet.sources:
            write_prompt(store, blocks, num_tokens)
        outs = [sender.begin_transfer(fleet.ticket, num_tokens, blocks, num_tokens) for sender in fleet.senders]
        incomings = [
            receiver.expect_transfer(fleet.ticket, blocks, num_tokens, block_size) for receiver in fleet.receivers
        ]
        for out in outs:
            out.commit(TOKEN)
        await asyncio.gather(*(end.end() for end in (*outs, *incomings)))
        latents = 48 * source.token_bytes // pp  # of a stage
        assert [receiver.stats.bytes for receiver in fleet.receivers] == [latents] * target.num_ranks
        assert [sender.stats.bytes for sender in fleet.senders] == [latents * target_tp // source_tp] * source.num_ranks


async def test_one_ranks_failure_is_the_whole_transfers_at_every_rank_it_reaches() -> None:
    async with asyncio.timeout(30), Fleet(layout_of(2, 2, 4), layout_of(1, 2, 4)) as fleet:
        outs = [sender.begin_transfer(fleet.ticket, 8, (0, 1), 8) for sender in fleet.senders]
        incoming = fleet.receivers[0].expect_transfer(fleet.ticket, (0, 1), 8, 0)
        outs[0].commit(TOKEN)
        await outs[0].done()
        outs[1].abort("its engine died")
        await fails(incoming.verified(), match="its engine died")
        assert incoming.ended


async def test_a_rank_pair_that_is_refused_takes_the_senders_others_with_it() -> None:
    async with asyncio.timeout(30), Fleet(layout_of(1, 2, 4), layout_of(2, 2, 4)) as fleet:
        (out,) = (sender.begin_transfer(fleet.ticket, 8, (0, 1), 8) for sender in fleet.senders)
        first = fleet.receivers[0].expect_transfer(fleet.ticket, (0, 1), 8, 0)
        fleet.receivers[1].refuse_offer(fleet.ticket)
        await fails(out.done(), match="given the request up already")
        await fails(first.verified())


async def test_ranks_that_name_different_first_tokens_are_not_believed() -> None:
    async with asyncio.timeout(30), Fleet(layout_of(2, 2, 4), layout_of(1, 2, 4)) as fleet:
        outs = [sender.begin_transfer(fleet.ticket, 8, (0, 1), 8) for sender in fleet.senders]
        incoming = fleet.receivers[0].expect_transfer(fleet.ticket, (0, 1), 8, 0)
        for token, out in enumerate(outs):
            out.commit(SampledToken(token))
        await fails(incoming.verified(), match="different first tokens")


async def test_a_ticket_that_counts_other_ranks_fails_at_the_source() -> None:
    async with Fleet(layout_of(1, 2, 4), layout_of(1, 2, 4)) as fleet:
        odd = mint_ticket(SECRET, "r", P, D, fleet.ticket.target_addresses, source_cut=RankCut(2))
        await fails(
            fleet.senders[0].begin_transfer(odd, 8, (0, 1), 8).done(),
            match="counts 2 ranks in 1 stages, and this worker has 1 ranks in 1",
        )


async def test_a_rank_whose_heads_copies_send_is_done_with_its_commit() -> None:
    async with asyncio.timeout(30), Fleet(layout_of(3, 1, 4), layout_of(2, 1, 4)) as fleet:
        idle = fleet.senders[2].begin_transfer(fleet.ticket, 8, (0, 1), 8)
        assert not idle.pairs
        assert not idle.ended
        idle.commit(TOKEN)
        await idle.done()
        again = fleet.mint(fleet.ticket.target_addresses)
        given_up = fleet.senders[2].begin_transfer(again, 8, (0, 1), 8)
        await fleet.senders[2].close()
        await fails(given_up.done(), match="the source is closing")
