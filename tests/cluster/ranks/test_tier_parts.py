"""Storage of a worker's KV tiers, made of its settings."""

import os
from pathlib import Path

import pytest

from tests.kvtiers.rig import PLAIN, sample
from twostroke.cluster.ranks.tier_parts import storage_of
from twostroke.kvtiers.config import TiersConfig
from twostroke.protocol.errors import ConfigError


def tiers_in(folder: Path) -> TiersConfig:
    disk = {"path": str(folder / "disk"), "bytes": "1GiB"}
    return TiersConfig.model_validate({"disk": disk, "shared": str(folder / "shared")})


def test_tiers_are_looked_up_from_the_disk_on(tmp_path: Path) -> None:
    assert [tier.name for tier in storage_of(tiers_in(tmp_path), PLAIN)] == ["disk", "shared"]


def test_the_directories_are_made_for_the_worker_alone(tmp_path: Path) -> None:
    for tier in storage_of(tiers_in(tmp_path), PLAIN):
        sample(PLAIN).write(tier.blobs)
        assert (tmp_path / tier.name).stat().st_mode & 0o777 == 0o700
    assert len(list(tmp_path.rglob("*.kv"))) == 2
    storage_of(tiers_in(tmp_path), PLAIN)  # once more, as after a restart


def test_a_directory_that_others_can_read_is_refused_at_start(tmp_path: Path) -> None:
    ours = tmp_path / "disk" / "twostroke-kv"
    ours.mkdir(parents=True)
    os.chmod(ours, 0o755)
    with pytest.raises(
        ConfigError, match=rf"^kv_cache\.tiers\.disk\.path: {ours.parent} can't be used: others could read KV there; "
    ):
        storage_of(tiers_in(tmp_path), PLAIN)
