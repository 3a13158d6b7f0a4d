"""`twostroke cache ls`, `stat`, `prune` and `drop`: they show what a tier holds, and delete what was asked, no more."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.cluster.command_line import one_line
from tests.kvtiers.rig import PLAIN, WINDOWS, Sample, sample
from twostroke.cluster.cli import main
from twostroke.kvtiers.objects import ObjectCipher
from twostroke.kvtiers.storage.bucket import BucketBlobs
from twostroke.kvtiers.storage.files import FileBlobs
from twostroke.router.http.tenants import KeyConfig, Tenant

DAY_S = 86_400
ALICE = Tenant(
    KeyConfig(name="alice", sha256="0" * 64), secret=b"the cluster's secret", clock=time.monotonic, num_routers=1
).cache_salt


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
    assert lines[-1].startswith("--key-file FILE reads encrypted objects")


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
    found = json.loads(told(capsys, tier, "stat", "--verify", "--json", "--key-file", str(key), exit_code=1))
    assert (found["whole"], len(found["damaged"])) == (0, 1)
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


def test_a_tenant_is_known_by_its_keys_name_where_the_secret_is(
    tier: FileBlobs, objects: list[Sample], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TWOSTROKE_SECRET", raising=False)
    assert main(["cache", "drop", "--path", str(tier.root), "--tenant", "alice"]) == 2
    assert one_line(capsys) == (
        "twostroke: --tenant alice: a name becomes digits by the server's secret; set TWOSTROKE_SECRET to that, "
        "or give the 16 digits that `twostroke cache ls` shows"
    )
    monkeypatch.setenv("TWOSTROKE_SECRET", "the cluster's secret")
    told(capsys, tier, "drop", "--tenant", "alice")
    assert left(tier, objects) == [0, 4]


def test_a_model_is_dropped(tier: FileBlobs, objects: list[Sample], capsys: pytest.CaptureFixture[str]) -> None:
    tenant = tenant_of(objects[1])
    told(capsys, tier, "drop", "--model", model_of(objects[4]), "--tenant", tenant)
    assert left(tier, objects) == [0, 1, 2, 4]
    found = json.loads(told(capsys, tier, "drop", "--model", model_of(objects[0]), "--json"))
    assert (found["objects"], found["left"], left(tier, objects)) == (3, 0, [4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "--path", "{none}"], "--path {none}: there is no such directory; give one, or s3://BUCKET/PREFIX"),
        (["ls", "--path", "{inner}"], "--path {inner}: it lies within a tier; give the directory above: {root}"),
        (["ls", "--path", "s3://"], "--path s3://: it is no bucket's URL; write s3://BUCKET or s3://BUCKET/PREFIX"),
        (
            ["ls", "--path", "{root}", "--endpoint", "http://x"],
            "--endpoint http://x: only buckets have one; --path {root} is a directory",
        ),
        (["prune", "--path", "{root}"], "cache prune: say what goes, with --max-bytes SIZE or --older-than AGE"),
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
