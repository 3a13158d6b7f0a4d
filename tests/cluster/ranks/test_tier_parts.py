"""Storage of a worker's KV tiers, made of its settings."""

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from tests.kvtiers.rig import PLAIN, sample
from twostroke.cluster.ranks import worker_parts
from twostroke.cluster.ranks.worker_parts import make_storage_tiers
from twostroke.kvtiers.config import TiersConfig
from twostroke.kvtiers.objects import ObjectCipher
from twostroke.kvtiers.storage.files import FileBlobs
from twostroke.kvtiers.storage.threads import on_thread
from twostroke.protocol.errors import ConfigError


def tiers_in(folder: Path) -> TiersConfig:
    disk = {"path": str(folder / "disk"), "bytes": "1GiB"}
    return TiersConfig.model_validate({"disk": disk, "shared": str(folder / "shared")})


def test_tiers_are_looked_up_from_the_disk_on(tmp_path: Path) -> None:
    assert [tier.name for tier in make_storage_tiers(tiers_in(tmp_path), PLAIN)] == ["disk", "shared"]


def test_the_directories_are_made_for_the_worker_alone(tmp_path: Path) -> None:
    for tier in make_storage_tiers(tiers_in(tmp_path), PLAIN):
        sample(PLAIN).write(tier.store())
        assert (tmp_path / tier.name).stat().st_mode & 0o777 == 0o700
    assert len(list(tmp_path.rglob("*.kv"))) == 2
    make_storage_tiers(tiers_in(tmp_path), PLAIN)  # once more, as after a restart


def test_a_directory_that_others_can_read_is_refused_at_start(tmp_path: Path) -> None:
    ours = tmp_path / "disk" / "twostroke-kv"
    ours.mkdir(parents=True)
    os.chmod(ours, 0o755)
    with pytest.raises(
        ConfigError, match=rf"^kv_cache\.tiers\.disk\.path: {ours.parent} can't be used: others could read KV there; "
    ):
        make_storage_tiers(tiers_in(tmp_path), PLAIN)


class HangingDisk:
    """Directories that answer when they are let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.answers = threading.Event()
        prepare = FileBlobs.prepare

        def prepare_late(blobs: FileBlobs) -> None:
            assert self.answers.wait(60.0)
            prepare(blobs)

        monkeypatch.setattr(FileBlobs, "prepare", prepare_late)
        monkeypatch.setattr(worker_parts, "OPEN_S", 0.01)


def test_a_disk_that_hangs_at_start_delays_its_tier_alone_and_joins_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = sample(PLAIN)
    one.write(make_storage_tiers(tiers_in(tmp_path), PLAIN)[0].store())
    hanging = HangingDisk(monkeypatch)
    with caplog.at_level(logging.INFO):
        tiers = make_storage_tiers(tiers_in(tmp_path), PLAIN)
    assert len(tiers) == 2
    disk = tiers[0]
    assert "the disk tier waits for its storage or key, which does not answer" in caplog.text
    assert [(tier.is_resting, tier.takes_writes, tier.stats().num_bytes) for tier in tiers] == [(True, False, 0)] * 2

    async def scan() -> None:
        scanning = asyncio.create_task(disk.scan(one.key.identity))
        await asyncio.sleep(0)
        assert not scanning.done()
        hanging.answers.set()
        await scanning

    with caplog.at_level(logging.INFO):
        asyncio.run(scan())
        for tier in tiers:
            tier.store()
    assert disk.holds(one.key.name)
    assert [(tier.is_resting, tier.takes_writes) for tier in tiers] == [(False, True)] * 2
    assert disk.stats().num_bytes > 0
    for tier in tiers:
        tier.close()


def test_a_key_that_hangs_at_start_delays_all_storage_until_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_parts, "OPEN_S", 0.01)
    key, config = tmp_path / "key", tiers_in(tmp_path).model_dump()
    os.mkfifo(key, 0o600)
    started = on_thread(
        "start", lambda: make_storage_tiers(TiersConfig.model_validate(config | {"key_file": str(key)}), PLAIN)
    )
    try:
        tiers = started.result(30.0)
        assert [(tier.stats().is_open, tier.takes_writes) for tier in tiers] == [(False, False)] * 2
        assert not list(tmp_path.rglob("twostroke-kv"))
    finally:
        key.write_bytes(bytes(32))
    for tier in tiers:
        tier.store()
        assert (tier.stats().is_open, tier.takes_writes) == (True, True)
        cipher = tier.cipher()
        assert cipher is not None
        assert cipher.mark == ObjectCipher(bytes(32)).mark
        tier.close()


def test_a_directory_that_answers_late_with_a_refusal_stays_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = HangingDisk(monkeypatch)
    disk, shared = make_storage_tiers(tiers_in(tmp_path), PLAIN)
    (tmp_path / "disk" / "twostroke-kv").mkdir(mode=0o755)
    hanging.answers.set()
    with pytest.raises(OSError, match=r"could not be opened: kv_cache\.tiers\.disk\.path: .* others could read KV"):
        disk.store()
    assert (disk.is_resting, disk.takes_writes) == (True, False)
    for tier in (disk, shared):
        tier.close()
