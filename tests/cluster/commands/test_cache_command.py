"""`twostroke cache ls`, `stat`, `prune` and `drop`: they show what a tier holds, and delete what was asked, no more."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.command_line import one_line
from tests.kvtiers.rig import PLAIN, WINDOWS, Sample, sample
from twostroke.cluster.cli import main
from twostroke.kvtiers.objects import ObjectCipher
from twostroke.kvtiers.storage.bucket import BucketBlobs
from twostroke.kvtiers.storage.files import FileBlobs
from twostroke.router.http.tenants import KeyConfig, cache_salt

DAY_S = 86_400
ALICE_KEY = {"name": "alice", "sha256": "a1" * 32}
ALICE = cache_salt(KeyConfig(**ALICE_KEY))


def tenant_of(one: Sample) -> str:
    return one.key.tenant.hex()


def model_of(one: Sample) -> str:
    return one.key.path[:16]


@pytest.fixture
def tier(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path, sync=False)


@pytest.fixture
def objects(tier: FileBlobs) -> list[Sample]:
    """Two models' and three tenants' objects, each a day older than the one before."""
    made = [
        sample(PLAIN, 0, client=b""),
        sample(PLAIN, 1, client=ALICE),
        sample(PLAIN, 2, client=ALICE),
        sample(WINDOWS, 3, client=ALICE),
        sample(WINDOWS, 4, client=b"other"),
    ]
    for days, one in enumerate(made):
        one.write(tier)
        moment = time.time() - days * DAY_S - 60
        os.utime(place_of(tier, one), (moment, moment))
    return made


def place_of(tier: FileBlobs, one: Sample) -> Path:
    return tier.root / "twostroke-kv/v1/objects" / one.key.path


def told(capsys: pytest.CaptureFixture[str], tier: FileBlobs, *arguments: str, exit_code: int = 0) -> str:
    assert main(["cache", *arguments, "--path", str(tier.root)]) == exit_code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def configuration(folder: Path, tiers: dict[str, Any], **sections: Any) -> str:
    """Write a server's configuration; returns its path."""
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump({"kv_cache": {"tiers": tiers}, **sections}))
    return str(path)


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> FileBlobs:
    return FileBlobs(tmp_path_factory.mktemp("shared"), sync=False)


@pytest.fixture
def both(tier: FileBlobs, shared: FileBlobs, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration whose disk is `tier`, and whose shared directory is `shared`."""
    tiers = {"disk": {"path": str(tier.root), "bytes": "1GiB"}, "shared": str(shared.root)}
    return configuration(tmp_path_factory.mktemp("etc"), tiers, auth={"keys": [ALICE_KEY]})


def of_config(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> str:
    assert main(["cache", *arguments]) == exit_code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def left(tier: FileBlobs, objects: list[Sample]) -> list[int]:
    keys = [one.key.path for one in objects]
    return sorted(keys.index(info.key) for info in tier.list())


def test_a_listing_has_a_line_for_each_model_and_tenant(
    tier: FileBlobs, objects: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(told(capsys, tier, "ls", "--json"))
    assert [(one["model"], one["tenant"], one["objects"]) for one in found] == sorted(
        (model_of(objects[place]), tenant_of(objects[place]), count)
        for place, count in ((0, 1), (1, 2), (3, 1), (4, 1))
    )
    assert sum(one["bytes"] for one in found) == sum(info.num_bytes for info in tier.list())
    lines = told(capsys, tier, "ls").splitlines()
    assert lines[0].split() == ["MODEL", "TENANT", "OBJECTS", "BYTES", "NEWEST"]
    assert len(lines) == 5
    assert [f"{tenant_of(objects[0])} (no API key)" in line for line in lines].count(True) == 1


def test_what_was_never_used_is_empty(tier: FileBlobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(told(capsys, tier, "ls").splitlines()) == 1
    assert json.loads(told(capsys, tier, "stat", "--json"))["objects"] == 0
    assert "oldest       none" in told(capsys, tier, "stat", "--verify")
    assert told(capsys, tier, "prune", "--max-bytes", "0") == "deleted 0 objects of 0 B; 0 stay\n"
    assert not (tier.root / "twostroke-kv").exists()


def test_totals_are_told_and_every_object_is_checked(
    tier: FileBlobs, objects: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(told(capsys, tier, "stat", "--json"))
    assert (found["objects"], found["models"], found["tenants"], found["quarantined"]) == (5, 2, 3, 0)
    assert found["oldest"] < found["newest"]
    assert "whole" not in found
    assert json.loads(told(capsys, tier, "stat", "--verify", "--json"))["whole"] == 5
    assert "whole        5" in told(capsys, tier, "stat", "--verify")
    tier.quarantine(objects[0].key.path)
    torn = place_of(tier, objects[1])
    torn.write_bytes(torn.read_bytes()[:-1])
    swapped = place_of(tier, objects[2])
    swapped.write_bytes(place_of(tier, objects[3]).read_bytes())
    sample(PLAIN, 9).write(tier, ObjectCipher(bytes(32)))
    found = json.loads(told(capsys, tier, "stat", "--verify", "--json", exit_code=1))
    assert (found["objects"], found["whole"], found["quarantined"]) == (5, 2, 1)
    assert found["damaged"].keys() == {objects[1].key.path, objects[2].key.path}
    assert "the object of another path" in found["damaged"][objects[2].key.path]
    assert found["other_cipher"] == {sample(PLAIN, 9).key.path: "it is encrypted"}
    lines = told(capsys, tier, "stat", "--verify", exit_code=1).splitlines()
    assert "damaged      2" in lines
    assert [line.startswith("damaged: ") for line in lines].count(True) == 2
    assert lines[-1].startswith("--key-file FILE reads objects that are encrypted")


def test_encrypted_objects_are_checked_with_their_key(
    tier: FileBlobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample(WINDOWS).write(tier, ObjectCipher(bytes(32)))
    key = tmp_path / "kv.key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    found = json.loads(told(capsys, tier, "stat", "--verify", "--json", "--key-file", str(key)))
    assert (found["whole"], found["damaged"], found["other_cipher"]) == (1, {}, {})
    key.write_bytes(bytes(31) + b"x")
    found = json.loads(told(capsys, tier, "stat", "--verify", "--json", "--key-file", str(key)))
    assert (found["whole"], found["damaged"]) == (0, {})
    assert found["other_cipher"] == {sample(WINDOWS).key.path: "it is encrypted with another key"}
    assert main(["cache", "stat", "--path", str(tmp_path), "--key-file", str(key)]) == 2
    assert one_line(capsys) == "twostroke: --key-file: only --verify reads objects; give both or none"


def test_an_object_that_can_not_be_read_does_not_end_the_check(
    tier: FileBlobs, objects: list[Sample], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv
    calls = []

    def once_broken(*arguments: object) -> int:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", once_broken)
    found = json.loads(told(capsys, tier, "stat", "--verify", "--json", exit_code=1))
    assert (found["whole"], len(found["unreadable"]), len(objects)) == (4, 1, 5)


def test_the_oldest_are_pruned(tier: FileBlobs, objects: list[Sample], capsys: pytest.CaptureFixture[str]) -> None:
    dry = json.loads(told(capsys, tier, "prune", "--older-than", "3d", "--dry-run", "--json"))
    assert (dry["objects"], dry["left"], dry["dry_run"], left(tier, objects)) == (2, 3, True, [0, 1, 2, 3, 4])
    assert told(capsys, tier, "prune", "--older-than", "3d", "--dry-run").startswith("would delete 2 objects of")
    assert told(capsys, tier, "prune", "--older-than", "3d", "--model", model_of(objects[0])).startswith("deleted 0")
    assert told(capsys, tier, "prune", "--older-than", "72h").startswith("deleted 2 objects of")
    assert left(tier, objects) == [0, 1, 2]
    sizes = [place_of(tier, one).stat().st_size for one in objects[:3]]
    told(capsys, tier, "prune", "--max-bytes", str(sum(sizes)))
    assert left(tier, objects) == [0, 1, 2]
    told(capsys, tier, "prune", "--max-bytes", f"{sum(sizes) - 1}B", "--older-than", "9d")
    assert left(tier, objects) == [0, 1]
    told(capsys, tier, "prune", "--max-bytes", "1GiB", "--older-than", "1440m")
    assert left(tier, objects) == [0]
    told(capsys, tier, "prune", "--max-bytes", "0.1kB")
    assert left(tier, objects) == []


def test_a_file_of_the_future_is_not_old(
    tier: FileBlobs, objects: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(place_of(tier, objects[4]), (2e11, 2e11))
    os.utime(place_of(tier, objects[3]), (-1e9, -1e9))
    found = json.loads(told(capsys, tier, "stat", "--json"))
    assert found["oldest"] == "1970-01-01T00:00:00+00:00"
    assert found["newest"] > "2400"  # some file systems keep no later year than 2446
    told(capsys, tier, "prune", "--older-than", "0s")
    assert left(tier, objects) == [4]


def test_a_tenant_is_dropped_from_every_model_and_from_quarantine(
    tier: FileBlobs, objects: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    tier.quarantine(objects[2].key.path)
    tier.quarantine(objects[4].key.path)
    tenant = tenant_of(objects[1])
    assert "would delete 2 objects" in told(capsys, tier, "drop", "--tenant", tenant, "--dry-run")
    assert left(tier, objects) == [0, 1, 3]
    assert "and 1 in quarantine; 1 stay" in told(capsys, tier, "drop", "--tenant", tenant)
    assert left(tier, objects) == [0]
    assert len(tier.quarantined()) == 1
    assert not place_of(tier, objects[3]).parents[2].exists()  # nothing of its model is left
    told(capsys, tier, "drop", "--tenant", "-")
    assert left(tier, objects) == []


def test_a_tenant_is_known_by_the_name_of_its_key(
    tier: FileBlobs, objects: list[Sample], both: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "drop", "--path", str(tier.root), "--tenant", "alice"]) == 2
    assert one_line(capsys) == (
        "twostroke: --tenant alice: the name of an API key is looked up in the server's configuration: give --config "
        "FILE, or the 16 digits that `twostroke cache ls` shows, or - for requests without a key"
    )
    assert main(["cache", "drop", "--config", both, "--tenant", "bob"]) == 2
    assert one_line(capsys) == (
        f"twostroke: --tenant bob: {both} has no API key of that name; of a key that is deleted or replaced, give the "
        "16 digits that `twostroke cache ls` shows"
    )
    assert left(tier, objects) == [0, 1, 2, 3, 4]
    told(capsys, tier, "drop", "--config", both, "--tenant", "alice")
    assert left(tier, objects) == [0, 4]


def test_a_tenant_of_the_file_of_keys_is_dropped_from_all_tiers(
    tier: FileBlobs, shared: FileBlobs, objects: list[Sample], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects[1].write(shared)
    objects[4].write(shared)
    (keys := tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": [ALICE_KEY]}))
    tiers = {"disk": {"path": str(tier.root), "bytes": "1GiB"}, "shared": str(shared.root)}
    config = configuration(tmp_path, tiers, auth={"keys_file": str(keys)})
    dropped = of_config(capsys, "drop", "--config", config, "--tenant", "alice").splitlines()
    assert [line.split(" of ")[0] for line in dropped] == [
        f"disk: {tier.root}",
        "deleted 3 objects",
        "",
        f"shared: {shared.root}",
        "deleted 1 objects",
    ]
    assert (left(tier, objects), left(shared, objects)) == ([0, 4], [4])


def test_each_tier_of_the_configuration_is_shown_by_itself(
    tier: FileBlobs, shared: FileBlobs, objects: list[Sample], both: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects[4].write(shared)
    lines = of_config(capsys, "ls", "--config", both).splitlines()
    assert [line for line in lines if not line or ": " in line] == [f"disk: {tier.root}", "", f"shared: {shared.root}"]
    assert (lines[-1].split()[:3], len(lines)) == ([model_of(objects[4]), tenant_of(objects[4]), "1"], 10)
    found = json.loads(of_config(capsys, "ls", "--config", both, "--json"))
    assert {name: sum(one["objects"] for one in totals) for name, totals in found.items()} == {"disk": 5, "shared": 1}
    alone = of_config(capsys, "stat", "--config", both, "--tier", "shared").splitlines()
    assert alone[:2] == [f"shared: {shared.root}", "objects      1"]
    assert not any(line.startswith("quota") for line in alone)
    assert "quota        1.0 GiB" in of_config(capsys, "stat", "--config", both).splitlines()
    found = json.loads(of_config(capsys, "stat", "--config", both, "--json"))
    assert (found["disk"]["quota"], found["disk"]["objects"], found["shared"]["objects"]) == (2**30, 5, 1)


def test_one_damaged_tier_of_two_ends_the_check_with_its_exit_code(
    tier: FileBlobs, shared: FileBlobs, objects: list[Sample], both: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects[4].write(shared)
    torn = place_of(tier, objects[0])
    torn.write_bytes(torn.read_bytes()[:-1])
    found = json.loads(of_config(capsys, "stat", "--verify", "--config", both, "--json", exit_code=1))
    assert (found["disk"]["whole"], found["shared"]["whole"]) == (4, 1)


def test_the_key_of_the_configuration_reads_encrypted_objects(
    tier: FileBlobs, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    sample(WINDOWS).write(tier, ObjectCipher(bytes(32)))
    folder = tmp_path_factory.mktemp("etc")
    key = folder / "kv.key"
    key.write_text("00" * 32 + "\n")
    key.chmod(0o400)
    disk = {"path": str(tier.root), "bytes": "1GiB"}
    config = configuration(folder, {"disk": disk, "key_file": str(key)})
    verify = ("stat", "--verify", "--json", "--config", config)
    assert json.loads(of_config(capsys, *verify))["disk"]["whole"] == 1
    assert json.loads(of_config(capsys, *verify, "--path", str(tier.root)))["whole"] == 1
    key.chmod(0o602)
    assert json.loads(of_config(capsys, "stat", "--json", "--config", config))["disk"]["objects"] == 1  # reads no key
    assert main(["cache", *verify]) == 2
    assert one_line(capsys).startswith(f"twostroke: kv_cache.tiers.key_file: others can write {key}: chmod 400 ")


def test_the_configured_quota_is_what_a_disk_is_pruned_to(
    tier: FileBlobs, shared: FileBlobs, objects: list[Sample], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects[0].write(shared)
    size = sum(place_of(tier, one).stat().st_size for one in objects[:2])
    tiers = {"disk": {"path": str(tier.root), "bytes": size}, "shared": str(shared.root)}
    config = configuration(tmp_path, tiers)
    pruned = json.loads(of_config(capsys, "prune", "--config", config, "--json"))
    assert (pruned.keys(), pruned["disk"]["objects"], left(tier, objects)) == ({"disk"}, 3, [0, 1])
    assert main(["cache", "prune", "--config", config, "--tier", "shared"]) == 2
    assert one_line(capsys) == (
        "twostroke: cache prune: shared has no quota; give --max-bytes SIZE or --older-than AGE"
    )
    of_config(capsys, "prune", "--config", config, "--older-than", "12h")
    assert (left(tier, objects), left(shared, objects)) == ([0], [0])
    of_config(capsys, "prune", "--config", config, "--max-bytes", "0", "--tier", "disk")
    assert (left(tier, objects), left(shared, objects)) == ([], [0])


def test_nothing_is_deleted_while_a_tier_of_the_configuration_is_not_there(
    tier: FileBlobs, objects: list[Sample], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = {"disk": {"path": str(tier.root), "bytes": "1GiB"}, "shared": "/nowhere/kv"}
    config = configuration(tmp_path, tiers)
    assert main(["cache", "drop", "--config", config, "--tenant", "-"]) == 2
    assert one_line(capsys) == (
        "twostroke: kv_cache.tiers.shared.path: /nowhere/kv: there is no such directory on this machine; run this "
        "where a worker runs, or choose the other tier by --tier"
    )
    assert left(tier, objects) == [0, 1, 2, 3, 4]


def test_a_bucket_of_the_configuration_is_asked_at_its_endpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []
    make = BucketBlobs.__init__

    def noted(bucket: BucketBlobs, url: str, *, endpoint: str | None) -> None:
        asked.append((url, endpoint))
        make(bucket, url, endpoint=endpoint)

    monkeypatch.setattr(BucketBlobs, "__init__", noted)
    monkeypatch.setattr(BucketBlobs, "list", lambda *_: iter(()))
    config = configuration(tmp_path, {"shared": {"url": "s3://models/kv", "endpoint": "http://127.0.0.1:9"}})
    assert of_config(capsys, "ls", "--config", config).startswith("shared: s3://models/kv\nMODEL")
    assert asked == [("s3://models/kv", "http://127.0.0.1:9")]


@pytest.mark.parametrize(
    ("tiers", "arguments", "message"),
    [
        (
            None,
            [],
            "say where the tier lies: --config FILE, the server's configuration, or --path with a directory or "
            "s3://BUCKET/PREFIX",
        ),
        ({}, [], "--config {file}: kv_cache.tiers has neither disk nor shared, so nothing is stored"),
        ({"host_bytes": 7000}, [], "--config {file}: kv_cache.tiers has neither disk nor shared, so nothing is stored"),
        ({"shared": "/kv"}, ["--tier", "disk"], "--tier disk: kv_cache.tiers of {file} has only shared"),
        (
            {"shared": "/kv"},
            ["--tier", "disk", "--path", "/kv"],
            "--tier disk: --path names the tier already; give one of them",
        ),
        (
            {"shared": "s3://models"},
            ["--endpoint", "http://x"],
            "--endpoint http://x: it belongs to a bucket of --path; give both or none",
        ),
        (
            {"disk": {"path": "/nowhere/kv", "bytes": 1024}},
            [],
            "kv_cache.tiers.disk.path: /nowhere/kv: there is no such directory on this machine; run this where a "
            "worker runs",
        ),
    ],
)
def test_a_tier_that_the_options_do_not_name_is_told_with_the_way_out(
    tiers: dict[str, Any] | None,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = [] if tiers is None else ["--config", configuration(tmp_path, tiers)]
    assert main(["cache", "ls", *config, *arguments]) == 2
    assert one_line(capsys) == f"twostroke: {message.format(file=tmp_path / 'serve.yaml')}"


def test_a_model_is_dropped(tier: FileBlobs, objects: list[Sample], capsys: pytest.CaptureFixture[str]) -> None:
    tenant = tenant_of(objects[1])
    told(capsys, tier, "drop", "--model", model_of(objects[4]), "--tenant", tenant)
    assert left(tier, objects) == [0, 1, 2, 4]
    found = json.loads(told(capsys, tier, "drop", "--model", model_of(objects[0]), "--json"))
    assert (found["objects"], found["left"], left(tier, objects)) == (3, 0, [4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["ls", "--path", "{none}"],
            "--path {none}: there is no such directory on this machine; give one, or s3://BUCKET/PREFIX",
        ),
        (["ls", "--path", "{inner}"], "--path {inner}: it lies within a tier; give the directory above: {root}"),
        (["ls", "--path", "s3://"], "--path s3://: it is no bucket's URL; write s3://BUCKET or s3://BUCKET/PREFIX"),
        (
            ["ls", "--path", "{root}", "--endpoint", "http://x"],
            "--endpoint http://x: only buckets have one; --path {root} is a directory",
        ),
        (
            ["prune", "--path", "{root}"],
            "cache prune: say what goes, with --max-bytes SIZE or --older-than AGE; --config FILE alone prunes all "
            "models of its disk to the quota",
        ),
        (
            ["prune", "--path", "{root}", "--max-bytes", "much"],
            "--max-bytes much: write a number and its unit, as in 50GiB, 500MB or 2TB",
        ),
        (
            ["prune", "--path", "{root}", "--older-than", "7"],
            "--older-than 7: write a number and its unit, as in 7d, 12h or 30m",
        ),
        (["drop", "--path", "{root}"], "cache drop: say whose objects go, with --tenant TENANT or --model DIGITS"),
        (
            ["drop", "--path", "{root}", "--model", "llama"],
            "--model llama: it has no 16 hexadecimal digits; `twostroke cache ls` shows them",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_the_way_out(
    tier: FileBlobs, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tier.root / "twostroke-kv").mkdir(0o700)
    places = {"root": tier.root, "none": tier.root / "none", "inner": tier.root / "twostroke-kv"}
    assert main(["cache", *(one.format(**places) for one in arguments)]) == 2
    assert one_line(capsys) == f"twostroke: {message.format(**places)}"


def test_a_store_that_fails_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "the bucket can't be used", "objects")

    monkeypatch.setattr(BucketBlobs, "list", fail)
    assert main(["cache", "ls", "--path", "s3://bucket"]) == 2
    assert one_line(capsys) == "twostroke: --path s3://bucket: the bucket can't be used: objects"
