"""A rank does what rank 0 says, in its order: above all, nothing to blocks that its own step may still write into.

And what `tensor_parallel` makes of a worker's place, its share of cores, and its settings.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from twostroke.cluster.config.config import read_config
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.deployments.workers import worker_options
from twostroke.cluster.ranks.rank_parts import RankOrder, load_rank
from twostroke.cluster.ranks.rank_process import run_rank
from twostroke.cluster.ranks.worker_parts import check_step_size
from twostroke.model.parallel.form import ParallelForm
from twostroke.model.parallel.ranked_engine import RankConnections
from twostroke.model.step import BlockCopy, OnLayer, SequenceStep
from twostroke.protocol.errors import ConfigError, WorkerLost
from twostroke.protocol.kv_layout import KVLayout, stage_layers
from twostroke.protocol.messages import (
    RankCopy,
    RankSequence,
    RankStep,
    StepEnded,
    TransferCall,
)
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import Address, Peer, Ticket
from twostroke.protocol.stats import TransferStats

SECRET = b"a secret of tests"
WORKER = Peer("w", 5)
TICKET = Ticket(b"t" * 16, "r", Peer("p", 1), WORKER, (Address("h", 1),))
STEP = RankStep((RankSequence((7, 8), 2, (4,), False),), True, (RankCopy(True, (1,), (2,)),))


class FakeParts:
    """All that a rank loads; notes what is done to it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.notes: list[str] = []
        self.noted = asyncio.Event()
        self.store = SimpleNamespace(rank=1, layout=KVLayout("m", "bfloat16", 2, 2, 8, 4, tp_size=2))
        self.loaded = SimpleNamespace(engine=self)
        self.sender = self.receiver = self
        self.stats = TransferStats()
        self.closed = asyncio.Event()

    def note(self, what: str) -> None:
        self.notes.append(what)
        self.noted.set()

    async def step(
        self, batch: Sequence[SequenceStep], on_layer: OnLayer | None, copies: Sequence[BlockCopy]
    ) -> list[None]:
        self.note(f"begin {list(batch[0].token_ids)}, {len(copies)} copies")
        await self.gate.wait()
        if "fails" in self.notes:
            raise WorkerLost("no memory")
        if "has a bug" in self.notes:
            raise IndexError("past the end")
        self.note("end")
        if on_layer is not None:
            on_layer(0)
        return [None] * len(batch)

    def begin_transfer(self, *_: Any) -> "FakeParts":
        return self

    def layer_ready(self, layer: int, num_tokens: int) -> None:
        self.note(f"layer {layer}, {num_tokens} tokens")

    async def done(self) -> None:
        await self.closed.wait()

    def refuse_offer(self, ticket: Ticket) -> None:
        self.note("refuse")

    async def start(self, host: str) -> tuple[Address]:
        return (Address(host, 1),)

    async def close(self) -> None:
        self.closed.set()
        self.note("close")

    async def until(self, what: str) -> None:
        while what not in self.notes:
            self.noted.clear()
            await self.noted.wait()


@contextlib.asynccontextmanager
async def a_rank(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeParts, RankConnections]]:
    """Rank 1 of 2, with fake parts, in this process; and rank 0's connection to it."""
    parts = FakeParts()

    async def load(*_: Any) -> FakeParts:
        return parts

    monkeypatch.setattr("twostroke.cluster.ranks.rank_process.load_rank", load)
    network = TcpNetwork(SECRET)
    ranks = RankConnections(worker=WORKER, size=2, network=network)
    leader = await ranks.listen("127.0.0.1")
    config = read_config({"decode": {"tensor_parallel": 2}})
    settings = WorkerSettings.of(config, config.decode)
    order = RankOrder(WORKER, 1, leader, leader, "127.0.0.1", SECRET, settings)
    rank = asyncio.create_task(run_rank(order))
    async with asyncio.timeout(20):
        assert await ranks.loaded() == (Address("127.0.0.1", 1),)
        yield parts, ranks
        parts.gate.set()
        await ranks.close()
        await rank
    assert parts.notes[-1] == "close"


async def test_what_follows_a_steps_end_waits_for_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rank(monkeypatch) as (parts, ranks):
        for message in (STEP, StepEnded(), TransferCall("refuse_offer", ticket=TICKET)):
            ranks.tell(message)
        await parts.until("begin [7, 8], 1 copies")
        await asyncio.sleep(0.05)  # time enough to do it wrongly
        assert parts.notes == ["begin [7, 8], 1 copies"]
        parts.gate.set()
        await parts.until("refuse")
        assert parts.notes[1:] == ["end", "refuse"]


async def test_a_step_begins_while_the_one_before_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    second = RankStep((RankSequence((0,), 3, (4,), True, follows=0),), False)
    async with a_rank(monkeypatch) as (parts, ranks):
        for message in (STEP, second, StepEnded(), TransferCall("refuse_offer", ticket=TICKET), StepEnded()):
            ranks.tell(message)
        await parts.until("begin [0], 0 copies")
        assert parts.notes == ["begin [7, 8], 1 copies", "begin [0], 0 copies"]
        parts.gate.set()
        await parts.until("refuse")
        assert "end" in parts.notes


async def test_what_comes_during_a_step_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rank(monkeypatch) as (parts, ranks):
        ranks.tell(STEP)
        ranks.tell(TransferCall("refuse_offer", ticket=TICKET))
        await parts.until("refuse")
        await parts.until("begin [7, 8], 1 copies")
        assert "end" not in parts.notes


async def test_kv_of_a_step_is_ready_when_the_ranks_own_step_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rank(monkeypatch) as (parts, ranks):
        for message in (
            TransferCall("begin_transfer", 1, TICKET, (4, 5, 6), 9),
            STEP,
            TransferCall("layer_ready", 1, num_tokens=9),
        ):
            ranks.tell(message)
        await parts.until("begin [7, 8], 1 copies")
        await asyncio.sleep(0.05)  # time enough to do it wrongly
        assert parts.notes == ["begin [7, 8], 1 copies"]
        parts.gate.set()
        await parts.until("layer 1, 9 tokens")
        assert parts.notes[1:] == ["end", "layer 0, 9 tokens", "layer 1, 9 tokens"]


async def test_a_step_that_fails_is_told_and_is_the_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rank(monkeypatch) as (parts, ranks):
        parts.note("fails")
        parts.gate.set()
        ranks.tell(STEP)
        assert await ranks.lost == "rank 1 failed: no memory"
        await parts.until("close")


async def test_a_bug_in_a_step_is_told_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with a_rank(monkeypatch) as (parts, ranks):
        parts.note("has a bug")
        parts.gate.set()
        ranks.tell(STEP)
        ranks.tell(StepEnded())
        assert await ranks.lost == "rank 1 failed: IndexError: past the end"
        await parts.until("close")
    assert "rank 1 of worker w has failed" in caplog.text


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_replica_has_the_cores_and_gpus_of_all_its_ranks(ranks: int) -> None:
    each = {"tensor_parallel": ranks, "num_gpus": 1, "threads": 3}
    config = read_config({"prefill": each, "decode": each})
    options = worker_options(WorkerSettings.of(config, config.decode), config.decode, grace_s=1.0)
    assert options["ray_actor_options"] == {"num_cpus": 3 * ranks, "num_gpus": ranks}


def test_a_worker_of_several_stages_has_a_bundle_for_each_and_its_replica_fits_the_first() -> None:
    each = {"tensor_parallel": 2, "pipeline_parallel": 3, "num_gpus": 1, "threads": 4}
    where = {"node_labels": {"kind": "a"}, "node_resources": {"slot": 1}}
    config = read_config({"prefill": each, "decode": {**each, **where}})
    options = worker_options(WorkerSettings.of(config, config.decode), config.decode, grace_s=1.0)
    assert options["ray_actor_options"] == {"num_cpus": 8, "num_gpus": 2, "resources": {"slot": 1}}
    assert options["placement_group_bundles"] == [{"CPU": 8, "GPU": 2, "slot": 1}] * 3
    assert options["placement_group_strategy"] == "PACK"
    assert options["placement_group_bundle_label_selector"] == [{"kind": "a"}] * 3
    assert config.gpus_each["decode"] == 6


@pytest.mark.parametrize("ours", range(1, 9))
@pytest.mark.parametrize("theirs", range(1, 9))
def test_staging_memory_is_there_for_every_stage_that_one_may_have_layers_in_common_with(
    ours: int, theirs: int
) -> None:
    for num_layers in range(8, 24):
        found = [
            sum(
                bool(set(stage_layers(num_layers, ours, stage)) & set(stage_layers(num_layers, theirs, other)))
                for other in range(theirs)
            )
            for stage in range(ours)
        ]
        most = ParallelForm(stages=ours).most_peers(ParallelForm(stages=theirs))
        assert max(found) <= most <= max(found) + 1 or num_layers % (ours * theirs)


def test_the_engine_is_told_its_ranks() -> None:
    config = read_config({"prefill": {"tensor_parallel": 2}})
    assert WorkerSettings.of(config, config.prefill).engine_config(Path(), gpu=1).parallel.tensor_ranks == 2
    assert WorkerSettings.of(config, config.decode).engine_config(Path()).parallel.tensor_ranks == 1


def test_steps_that_no_message_could_hold_are_refused() -> None:
    config = read_config({"decode": {"tensor_parallel": 2}, "model": {"block_size": 16}})
    settings = WorkerSettings.of(config, config.decode)
    check_step_size(settings, max_context=32_768, blocks_of_one=2048, host_blocks=10_000)
    with pytest.raises(ConfigError, match="max_batch: steps of 256 requests with 131072 tokens in blocks of 16"):
        check_step_size(settings, max_context=131_072, blocks_of_one=8192, host_blocks=0)
    with pytest.raises(ConfigError, match="max_context or swap_gib"):
        check_step_size(settings, max_context=32_768, blocks_of_one=2048, host_blocks=1_000_000)


@pytest.mark.parametrize(("device", "interval_s"), [("cuda", [1e-4]), ("cpu", [])])
async def test_the_threads_of_a_gpus_rank_take_turns_many_times_in_a_step(
    device: Literal["cuda", "cpu"], interval_s: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", asked.append)
    config = read_config({"model": {"path": str(tmp_path / "none")}})
    with pytest.raises(ConfigError):
        await load_rank(
            replace(WorkerSettings.of(config, config.decode), device=device), WORKER, TcpNetwork(SECRET), SECRET
        )
    assert asked == interval_s


async def load_with(tiers: dict[str, Any], **model: Any) -> None:
    config = read_config({"model": model, "decode": {"num_blocks": 64}, "kv_cache": {"tiers": tiers}})
    await load_rank(WorkerSettings.of(config, config.decode), WORKER, TcpNetwork(SECRET), SECRET)


async def test_a_tier_that_can_not_be_used_here_is_told_before_the_model_is_looked_for(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "not" / "mounted"), "bytes": "1GiB"}
    with pytest.raises(ConfigError, match=r"^kv_cache\.tiers\.disk\.path: there is no directory "):
        await load_with({"disk": disk}, path=str(tmp_path / "none"))


async def test_a_quota_that_no_disk_has_is_warned_of_where_the_worker_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: "):
        await load_with({"disk": {"path": str(tmp_path), "bytes": "900000TiB"}}, path=str(tmp_path / "none"))
    (record,) = caplog.records
    assert record.message.startswith("kv_cache.tiers.disk.bytes: the quota of ")


async def test_a_tier_that_holds_no_object_of_the_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache\.tiers\.disk\.bytes: 4096 bytes hold no object: "):
        await load_with({"disk": {"path": str(tmp_path), "bytes": 4096}})
