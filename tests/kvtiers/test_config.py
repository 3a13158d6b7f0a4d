"""Settings of KV tiers: what a configuration may say, and what a process checks on its own machine."""

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.kvtiers import config
from twostroke.kvtiers.config import PASSING_BYTES, TiersConfig, check_machine, check_objects, read_key
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.settings import from_plain, to_plain

GIB = 2**30
DISK = {"path": "/data/kv", "bytes": "100GiB"}


def with_tiers(tiers: dict[str, Any], **sections: Any) -> ClusterConfig:
    return read_config({"kv_cache": {"tiers": tiers}, **sections})


def refusal(tiers: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        with_tiers(tiers, **sections).tiers  # noqa: B018
    return str(caught.value)


def test_without_a_word_there_are_no_tiers() -> None:
    tiers = ClusterConfig().tiers
    assert (tiers.is_on, tiers.has_storage, tiers.memory_bytes) == (False, False, 0)


def test_workers_of_both_roles_are_told_the_tiers() -> None:
    config = with_tiers({"host_bytes": "4GiB", "disk": DISK, "shared": {"path": "/mnt/kv"}, "object_tokens": 512})
    for section in config.roles.values():
        tiers = WorkerSettings.of(config, section).tiers
        assert (tiers.host_bytes, tiers.disk.path, tiers.disk.bytes) == (4 * GIB, "/data/kv", 100 * GIB)
        assert (tiers.shared.path, tiers.object_tokens, tiers.write_share) == ("/mnt/kv", 512, 0.5)


def test_the_settings_travel_to_other_processes() -> None:
    tiers = with_tiers({"disk": DISK, "shared": "s3://bucket/kv"}).tiers
    sent = msgspec.msgpack.encode(tiers, enc_hook=to_plain)
    assert msgspec.msgpack.decode(sent, type=TiersConfig, dec_hook=from_plain) == tiers


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * GIB), ("1.5 TB", 1_500_000_000_000), ("500MB", 500_000_000), ("4096", 4096), (7000, 7000)],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(text: str | int, size: int) -> None:
    assert with_tiers({"host_bytes": text}).tiers.host_bytes == size


def test_a_text_in_place_of_the_shared_tier_is_its_path_or_its_url() -> None:
    assert with_tiers({"shared": "/mnt/kv"}).tiers.shared.path == "/mnt/kv"
    assert with_tiers({"shared": "s3://bucket/prefix"}).tiers.shared.url == "s3://bucket/prefix"


def test_objects_have_memory_to_pass_where_a_storage_is_set_alone() -> None:
    assert with_tiers({"disk": DISK}).tiers.memory_bytes == PASSING_BYTES == 512 * 2**20
    assert with_tiers({"disk": DISK, "host_bytes": "1GiB"}).tiers.memory_bytes == GIB
    assert with_tiers({"host_bytes": "1MiB"}).tiers.memory_bytes == 2**20


@pytest.mark.parametrize(
    ("tiers", "beginning"),
    [
        ({"host_bytes": "4 gigs"}, "host_bytes: '4 gigs' is no size: write a number of bytes, or a text such as 4GiB"),
        ({"host_bytes": -1}, "host_bytes: -1 should be greater than or equal to 0"),
        ({"host_bytes": True}, "host_bytes: True should be a valid integer"),
        ({"disk": {"path": "/d"}}, "disk.bytes: is required beside path: say how much"),
        ({"disk": {"bytes": "1GiB"}}, "disk.path: is required beside bytes (1073741824): name a directory"),
        ({"disk": {**DISK, "path": "kv"}}, "disk.path: 'kv' is no absolute path"),
        ({"disk": {**DISK, "path": "s3://b/x"}}, "disk.path: is a URL: a bucket belongs under kv_cache.tiers.shared.u"),
        ({"shared": "kv"}, "shared.path: 'kv' is no absolute path"),
        ({"shared": {"path": "/a", "url": "s3://bucket"}}, "shared.path: stands beside url: give one of the two"),
        ({"shared": "http://bucket/x"}, "shared.url: is no bucket: write s3://BUCKET"),
        ({"shared": "s3://Bucket"}, "shared.url: is no bucket"),
        ({"shared": "s3://bucket//x"}, "shared.url: is no bucket"),
        ({"shared": "s3://bucket/../x"}, "shared.url: is no bucket"),
        ({"shared": "s3://bucket/x?versionId=1"}, "shared.url: is no bucket"),
        ({"shared": {"endpoint": "http://minio:9000"}}, "shared.endpoint: stands without url: give the bucket"),
        ({"shared": {"url": "s3://bucket", "endpoint": "minio:9000"}}, "shared.endpoint: is no address: write http"),
        ({"disk": DISK, "shared": "/data/kv/all"}, "shared.path: /data/kv/all and disk.path /data/kv lie in each oth"),
        ({"disk": DISK, "shared": "/data/kv/"}, "shared.path: /data/kv and disk.path /data/kv lie in each other"),
        ({"key_file": "/k"}, "key_file: there is no tier to encrypt: set disk or shared"),
        ({"disk": DISK, "key_file": "k"}, "key_file: 'k' is no absolute path"),
        ({"object_tokens": 8}, "object_tokens: 8 should be greater than or equal to 16"),
        ({"write_share": 0}, "write_share: 0 should be greater than 0"),
        ({"disc": DISK}, "disc: there is no such setting; did you mean disk?"),
        ({"disk": DISK, "object_tokens": 250}, "object_tokens: 250 is no multiple of the 16 tokens of a block of pre"),
    ],
)
def test_a_wrong_setting_is_named_with_the_way_out(tiers: dict[str, Any], beginning: str) -> None:
    assert refusal(tiers).startswith(f"kv_cache.tiers.{beginning}")


def test_credentials_in_a_url_are_refused_and_not_shown() -> None:
    for shared in (
        "s3://key:secret@bucket",
        {"url": "s3://bucket", "endpoint": "https://key:secret@minio:9000"},
    ):
        assert "secret" not in refusal({"shared": shared})


def test_objects_are_exact_so_no_other_encoding_goes_with_them() -> None:
    told = refusal({"disk": DISK}, kv_transfer={"encoding": "int8"})
    assert told.startswith("kv_transfer.encoding: int8 beside kv_cache.tiers, ")
    assert with_tiers({}, kv_transfer={"encoding": "int8"}).tiers == TiersConfig()


def test_caches_on_gpus_have_no_tiers_yet() -> None:
    gpus = {role: {"num_gpus": 1} for role in ("prefill", "decode")}
    assert refusal({"disk": DISK}, **gpus).startswith("kv_cache.tiers: tiers of caches on GPUs are not supported yet")
    assert with_tiers({}, **gpus).tiers == TiersConfig()


def test_objects_are_whole_blocks_of_both_roles() -> None:
    told = refusal({"disk": DISK, "object_tokens": 96}, decode={"block_size": 64})
    assert told.startswith("kv_cache.tiers.object_tokens: 96 is no multiple of the 64 tokens of a block of decode")


def tiers_at(path: Path, size: str | int = "1MiB", **others: Any) -> TiersConfig:
    return TiersConfig.model_validate({"disk": {"path": str(path), "bytes": size}, **others})


def test_a_directory_that_is_there_or_can_be_made_is_taken(tmp_path: Path) -> None:
    assert check_machine(tiers_at(tmp_path)) == []
    assert check_machine(tiers_at(tmp_path / "kv")) == []
    assert not (tmp_path / "kv").exists()
    assert check_machine(TiersConfig()) == []


def test_a_path_below_a_disk_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^kv_cache.tiers.disk.path: there is no directory {tmp_path}/mnt: mount"):
        check_machine(tiers_at(tmp_path / "mnt" / "kv"))


@pytest.mark.parametrize("tier", ["disk", "shared"])
def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path, tier: str) -> None:
    (file := tmp_path / "kv").write_text("")
    tiers = tiers_at(file) if tier == "disk" else TiersConfig.model_validate({"shared": str(file)})
    with pytest.raises(ConfigError, match=f"^kv_cache.tiers.{tier}.path: {file} is no directory: name one"):
        check_machine(tiers)


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=f"^kv_cache.tiers.disk.path: {tmp_path} can't be written by user "):
        check_machine(tiers_at(tmp_path))


def test_a_quota_beyond_the_disk_is_warned_of(tmp_path: Path) -> None:
    (warning,) = check_machine(tiers_at(tmp_path, "900000TiB"))
    assert warning.startswith("kv_cache.tiers.disk.bytes: the quota of 921600000.0 GiB is more than the ")


def test_what_lies_there_already_counts_as_room_for_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "object.kv").write_bytes(bytes(1000))

    class Usage:
        free = 500

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    assert check_machine(tiers_at(tmp_path, 1500)) == []
    assert len(check_machine(tiers_at(tmp_path, 1501))) == 1


def test_a_quota_smaller_than_one_object_is_refused() -> None:
    tiers = tiers_at(Path("/data/kv"), "8MiB")
    check_objects(tiers, token_bytes=32 * 1024)
    with pytest.raises(ConfigError, match=r"^kv_cache\.tiers\.disk\.bytes: 8388608 bytes hold no object: one of 256 "):
        check_objects(tiers, token_bytes=32 * 1024 + 1)
    with pytest.raises(ConfigError, match=r"^kv_cache\.tiers\.host_bytes: 1024 bytes hold no object"):
        check_objects(TiersConfig(host_bytes=1024), token_bytes=32 * 1024)
    check_objects(TiersConfig(), token_bytes=2**40)


def key_file(folder: Path, content: bytes, mode: int = 0o400) -> str:
    path = folder / "kv.key"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_a_key_is_32_bytes_or_their_digits(tmp_path: Path) -> None:
    key = bytes(range(32))
    for raw in (key, key.hex().encode(), f"{key.hex().upper()}\n".encode()):
        assert read_key(key_file(tmp_path, raw)) == key


@pytest.mark.parametrize("raw", [b"", b"top secret", bytes(31), bytes(33), b"0" * 63, b"0" * 64 + b" " * 256])
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, raw: bytes) -> None:
    path = key_file(tmp_path, raw)
    with pytest.raises(ConfigError) as caught:
        read_key(path)
    assert str(caught.value) == (
        f"kv_cache.tiers.key_file: {path} has neither 32 bytes nor 64 hexadecimal digits: `openssl rand -hex 32` "
        "makes one"
    )


def test_a_key_that_lacks_or_that_others_can_write_is_refused(tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=rf"^kv_cache\.tiers\.key_file: there is no file {none} of a key: `openssl"):
        check_machine(tiers_at(tmp_path, key_file=none))
    with pytest.raises(ConfigError, match=rf"^--key-file: {tmp_path} can't be read: Is a directory"):
        read_key(str(tmp_path), setting="--key-file")
    for mode in (0o620, 0o602):
        path = key_file(tmp_path, bytes(32), mode)
        with pytest.raises(ConfigError, match=rf"^kv_cache\.tiers\.key_file: others can write {path}: chmod 400 "):
            check_machine(tiers_at(tmp_path, key_file=path))
    assert read_key(key_file(tmp_path, bytes(32), 0o444)) == bytes(32)  # as Kubernetes mounts a Secret


def test_directories_that_hang_are_warned_of_and_keep_nothing_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(config, "ANSWER_S", 0.01)
    monkeypatch.setattr(config, "_check_directory", lambda *_: answers.wait(60.0))
    (warning,) = check_machine(tiers_at(tmp_path))
    assert warning == "kv_cache.tiers: its directories have not answered for 0.01 s: workers start without them"
    answers.set()
