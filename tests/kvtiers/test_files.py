"""Files are whole or not there, whatever happens to writers, disks and clocks."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from tests.kvtiers.rig import PLAIN, WINDOWS, sample
from twostroke.kvtiers.objects import ObjectDamaged
from twostroke.kvtiers.storage import files
from twostroke.kvtiers.storage.blobs import BlobMissing
from twostroke.kvtiers.storage.files import MAX_QUARANTINED, STALE_S, FileBlobs

ROOT = Path(__file__).resolve().parents[2]
KEY = f"{'ab' * 8}/{'cd' * 8}/ef/{'ef' * 32}.kv"


@pytest.fixture(params=[True, False], ids=["synced", "not synced"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path, sync=request.param)


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def content(blobs: FileBlobs, key: str = KEY) -> bytes:
    with blobs.open(key) as reader:
        buffer = bytearray(reader.num_bytes)
        reader.read_into([memoryview(buffer)])
        return bytes(buffer)


def all_files(blobs: FileBlobs) -> list[Path]:
    return [path for path in (blobs.root / "twostroke-kv/v1/objects").rglob("*") if path.is_file()]


def place_of(blobs: FileBlobs, key: str = KEY) -> Path:
    return blobs.root / "twostroke-kv/v1/objects" / key


def test_objects_go_through_files(blobs: FileBlobs) -> None:
    ones = [sample(layout, seed) for layout in (PLAIN, WINDOWS) for seed in range(3)]
    for one in ones:
        one.write(blobs)
    for one in ones:
        assert one.read(blobs) == one.contents
        assert one.read(blobs, only=[len(one.sections) - 1]) == one.contents[-1:]
    listed = {info.key: info for info in blobs.list()}
    assert listed.keys() == {one.key.path for one in ones}
    assert all(abs(info.modified_s - time.time()) < 60 for info in listed.values())
    assert all(place_of(blobs, key).stat().st_size == info.num_bytes for key, info in listed.items())


def test_listings_are_of_keys_that_begin_so(blobs: FileBlobs) -> None:
    keys = [f"{model * 8}/{tenant * 8}/ef/{'ef' * 32}.kv" for model in ("aa", "ab") for tenant in ("cc", "cd")]
    for key in keys:
        blobs.write(key, views(b"x"))
    for prefix in (
        "",
        "a",
        "ab",
        "ab" * 8,
        f"{'ab' * 8}/",
        f"{'ab' * 8}/cd",
        f"{'ab' * 8}/{'cd' * 8}/ef/ef",
        "zz",
        KEY,
    ):
        assert sorted(info.key for info in blobs.list(prefix)) == [key for key in keys if key.startswith(prefix)]


def test_nobody_else_may_look_into_folders_and_files(blobs: FileBlobs) -> None:
    before = os.umask(0)
    try:
        blobs.write(KEY, views(b"secret"))
    finally:
        os.umask(before)
    for path in (blobs.root / "twostroke-kv", *(blobs.root / "twostroke-kv").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_others_may_read_is_refused(blobs: FileBlobs) -> None:
    (blobs.root / "twostroke-kv").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match=r"others could read KV there; chmod 700 .*twostroke-kv"):
        blobs.write(KEY, views(b"secret"))


def test_a_folder_of_another_user_is_refused(blobs: FileBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs.write(KEY, views(b"secret"))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    found = (
        rf"it belongs to user {user}, not to user {user + 1} .*; chown -R {user + 1} .*twostroke-kv, or name another"
    )
    with pytest.raises(PermissionError, match=found):
        FileBlobs(blobs.root, sync=False).prepare()


@pytest.mark.parametrize(
    "key",
    [
        *("", "x", "../../etc/passwd", f"../{KEY}", f"/{KEY}", KEY.upper(), f"{KEY}\n", KEY.replace("ef/", "../")),
        *(KEY.removesuffix(".kv"), f"{KEY}\0", KEY.replace("/", "//"), f"{'ab' * 8}/./ef/{'ef' * 32}.kv"),
    ],
)
def test_what_is_no_key_is_refused(tmp_path: Path, key: str) -> None:
    blobs = FileBlobs(tmp_path, sync=False)
    blobs.prepare()
    calls: list[Callable[[], object]] = [
        lambda: blobs.write(key, []),
        lambda: blobs.delete(key),
        lambda: blobs.quarantine(key),
        lambda: blobs.open(key).__enter__(),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is no key of a KV object"):
            call()


def test_links_are_not_followed(blobs: FileBlobs, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"not ours")
    blobs.write(KEY, views(b"ours"))
    place = place_of(blobs)
    place.unlink()
    place.symlink_to(outside / "file")
    with pytest.raises(OSError, match=r"Too many levels of symbolic links.*\.kv"), blobs.open(KEY):
        pass
    assert list(blobs.list()) == []
    blobs.write(KEY, views(b"again"))  # takes the link's place
    assert (outside / "file").read_bytes() == b"not ours"
    assert content(blobs) == b"again"
    tenant = place.parents[1]
    tenant.rename(tenant.parent / "moved")
    tenant.symlink_to(outside)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        blobs.write(KEY, views(b"x"))
    assert list(blobs.list()) == []
    assert [path.name for path in outside.iterdir()] == ["file"]


def test_our_own_folder_may_not_be_a_link(blobs: FileBlobs, tmp_path: Path) -> None:
    """Somebody else who may write into the root could lead us into a folder of theirs."""
    (tmp_path / "other").mkdir()
    other = FileBlobs(tmp_path / "other", sync=False)
    other.write(KEY, views(b"theirs"))
    (blobs.root / "twostroke-kv").symlink_to(tmp_path / "other/twostroke-kv")
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"), blobs.open(KEY):
        pass
    with pytest.raises(NotADirectoryError, match="where it is a link, name the folder"):
        blobs.write(KEY, views(b"ours"))
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        blobs.delete(KEY)
    assert list(blobs.list()) == []
    assert content(other) == b"theirs"


def test_a_pipe_in_a_files_place_does_not_hold_a_reader(blobs: FileBlobs) -> None:
    blobs.write(KEY, views(b"x"))
    place_of(blobs).unlink()
    os.mkfifo(place_of(blobs))
    with pytest.raises(OSError, match="it is no regular file"), blobs.open(KEY):
        pass
    assert list(blobs.list()) == []


def test_another_versions_folder_is_left_alone(blobs: FileBlobs) -> None:
    other = blobs.root / "twostroke-kv/v0/objects" / KEY
    (blobs.root / "twostroke-kv").mkdir(0o700)
    other.parent.mkdir(parents=True)
    other.write_bytes(b"of another version")
    assert list(blobs.list()) == []
    with pytest.raises(BlobMissing), blobs.open(KEY):
        pass
    blobs.write(KEY, views(b"x"))
    blobs.delete(KEY)
    blobs.clean()
    assert other.read_bytes() == b"of another version"
    assert "version 1" in (blobs.root / "twostroke-kv/v1/FORMAT").read_text()


def test_more_buffers_than_one_call_takes_are_read_and_written(blobs: FileBlobs) -> None:
    parts = [bytes([i % 251]) * (i % 3) for i in range(3 * files.IOV_MAX + 5)]
    blobs.write(KEY, views(*parts))
    assert place_of(blobs).read_bytes() == b"".join(parts)
    buffers = [memoryview(bytearray(len(part))) for part in parts]
    with blobs.open(KEY) as reader:
        reader.read_into(buffers)
        with pytest.raises(EOFError):
            reader.read_into([memoryview(bytearray(1))])
    assert list(map(bytes, buffers)) == parts


def test_short_reads_and_writes_go_on(blobs: FileBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def shortly(call: Callable[..., int]) -> Callable[..., int]:
        def one_piece(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            return call(descriptor, [buffers[0][:7]], offset)

        return one_piece

    monkeypatch.setattr(os, "preadv", shortly(os.preadv))
    monkeypatch.setattr(os, "pwritev", shortly(os.pwritev))
    one = sample(WINDOWS)
    one.write(blobs)
    assert one.read(blobs) == one.contents


def test_a_file_that_ends_early_is_damaged(blobs: FileBlobs) -> None:
    one = sample()
    one.write(blobs)
    with blobs.open(one.key.path) as reader:
        os.truncate(place_of(blobs, one.key.path), 100)  # while it is open
        with pytest.raises(EOFError):
            reader.read_into([memoryview(bytearray(reader.num_bytes))])
    with pytest.raises(ObjectDamaged):
        one.read(blobs)


def test_deleted_files_are_missing(blobs: FileBlobs) -> None:
    blobs.delete(KEY)
    blobs.quarantine(KEY)
    blobs.write(KEY, views(b"x"))
    blobs.delete(KEY)
    blobs.delete(KEY)
    with pytest.raises(BlobMissing), blobs.open(KEY):
        pass
    assert blobs.quarantined() == []


def test_an_open_file_is_read_to_its_end_though_it_is_deleted(blobs: FileBlobs) -> None:
    blobs.write(KEY, views(b"x" * 100))
    with blobs.open(KEY) as reader:
        blobs.delete(KEY)
        blobs.write(KEY, views(b"y" * 9))
        buffer = bytearray(100)
        reader.read_into([memoryview(buffer)])
    assert buffer == b"x" * 100


def test_quarantine_keeps_the_newest(blobs: FileBlobs) -> None:
    for number in range(MAX_QUARANTINED + 5):
        blobs.write(KEY, views(str(number).encode()))
        blobs.quarantine(KEY)
        with pytest.raises(BlobMissing), blobs.open(KEY):
            pass
    names = blobs.quarantined()
    assert {files.key_in_quarantine(name) for name in names} == {KEY}
    folder = blobs.root / "twostroke-kv/v1/quarantine"
    assert [int((folder / name).read_bytes()) for name in names] == list(range(5, MAX_QUARANTINED + 5))
    for name in (names[0], names[0]):
        blobs.delete_quarantined(name)
    assert blobs.quarantined() == names[1:]
    assert list(blobs.list()) == []


def test_what_dead_writers_left_is_removed_after_ten_minutes(blobs: FileBlobs) -> None:
    blobs.write(KEY, views(b"x"))
    folder = place_of(blobs).parent
    ages = {"old": STALE_S + 60, "new": STALE_S - 60, "ahead": -STALE_S - 60}
    left = {}
    for number, (name, age) in enumerate(ages.items()):
        left[name] = folder / f".tmp-{number:016x}"
        left[name].write_bytes(b"half")
        os.utime(left[name], (time.time() - age,) * 2)
    assert [info.key for info in blobs.list()] == [KEY]
    assert {name for name, path in left.items() if path.exists()} == {"new"}
    assert content(blobs) == b"x"


def test_a_clock_that_jumps_harms_nothing(blobs: FileBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    one = sample()
    now = time.time()
    for moment in (now, now - 1e9, now + 1e9, 0.0):
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        monkeypatch.setattr(time, "time_ns", lambda moment=moment: int(moment * 1e9))
        one.write(blobs)
        assert one.read(blobs) == one.contents
        assert [info.key for info in blobs.list()] == [one.key.path]
        blobs.quarantine(one.key.path)
    assert len(blobs.quarantined()) == 4


def test_cleaning_removes_empty_folders_and_a_writer_makes_them_again(blobs: FileBlobs) -> None:
    other = KEY.replace("cd" * 8, "ce" * 8)
    for key in (KEY, other):
        blobs.write(key, views(b"x"))
    blobs.delete(KEY)
    blobs.clean()
    assert not place_of(blobs).parents[1].exists()
    assert content(blobs, other) == b"x"
    blobs.write(KEY, views(b"y"))
    assert content(blobs) == b"y"


def test_all_may_be_deleted_under_a_writer(blobs: FileBlobs) -> None:
    blobs.write(KEY, views(b"x"))
    subprocess.run(["rm", "-r", str(blobs.root / "twostroke-kv")], check=True)
    with pytest.raises(BlobMissing), blobs.open(KEY):
        pass
    assert list(blobs.list()) == []
    assert blobs.quarantined() == []
    blobs.delete(KEY)
    blobs.write(KEY, views(b"y"))
    assert content(blobs) == b"y"


def test_a_root_that_is_not_there_is_named(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path / "none", sync=False)
    with pytest.raises(FileNotFoundError, match="none/twostroke-kv"):
        blobs.write(KEY, views(b"x"))
    assert list(blobs.list()) == []


def test_a_failed_write_leaves_nothing(blobs: FileBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs.write(KEY, views(b"old"))
    for name in ("pwritev", "rename", *(["fsync"] if blobs._sync else [])):

        def fail(*_: object, **__: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            with pytest.raises(OSError, match=r"No space left on device: '/.*\.kv'") as error:
                blobs.write(KEY, views(b"new"))
        assert error.value.errno == errno.ENOSPC
        assert all_files(blobs) == [place_of(blobs)]
        assert content(blobs) == b"old"


def test_a_disk_that_fills_within_a_file_leaves_nothing(blobs: FileBlobs) -> None:
    """RLIMIT_FSIZE stands for the disk: the kernel takes a part of the bytes, then fails."""
    blobs.write(KEY, views(b"old"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            blobs.write(KEY, views(b"x" * 9_000, b"y" * 9_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert all_files(blobs) == [place_of(blobs)]
    assert content(blobs) == b"old"


@pytest.fixture
def lent_folder() -> Iterator[Path]:
    """Yield a folder that a user without root's rights may have, whom modes bind as they bind nobody's root."""
    with TemporaryDirectory() as name:
        yield Path(name)
        os.seteuid(os.getuid())
        subprocess.run(["chmod", "-R", "u+rwx", name], check=True)


def test_a_directory_may_be_read_only(lent_folder: Path) -> None:
    blobs = FileBlobs(lent_folder, sync=False)
    one = sample()
    one.write(blobs)
    stale = place_of(blobs, one.key.path).parent / f".tmp-{0:016x}"
    stale.write_bytes(b"half")
    os.utime(stale, (0, 0))
    for path in (*lent_folder.rglob("*"), lent_folder):
        path.chmod(0o500 if path.is_dir() else 0o400)
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
    if os.geteuid() == 0:
        os.seteuid(65534)
    reader = FileBlobs(lent_folder, sync=False)
    assert one.read(reader) == one.contents
    assert [info.key for info in reader.list()] == [one.key.path]
    for change in (lambda: one.write(reader), lambda: reader.delete(one.key.path)):
        with pytest.raises(PermissionError, match=r"Permission denied: '/.*\.kv'"):
            change()
    with pytest.raises(PermissionError):
        reader.quarantine(one.key.path)
    assert one.read(reader) == one.contents


def test_two_writers_of_one_name_leave_one_of_their_objects(blobs: FileBlobs) -> None:
    one = sample(num_rows=40)
    one.write(blobs)
    failed: list[BaseException] = []
    ended = threading.Event()

    def write() -> None:
        try:
            for _ in range(50):
                one.write(blobs)
        except BaseException as error:
            failed.append(error)

    def read() -> None:
        try:
            while not ended.is_set():
                assert one.read(blobs) == one.contents
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write) for _ in range(2)]
    reader = threading.Thread(target=read)
    for thread in (*writers, reader):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    reader.join()
    assert failed == []
    assert all_files(blobs) == [place_of(blobs, one.key.path)]


WRITER = """
import sys
from pathlib import Path
from tests.kvtiers.rig import sample
from twostroke.kvtiers.storage.files import FileBlobs

blobs = FileBlobs(Path(sys.argv[1]), sync=sys.argv[2] == "synced")
objects = [sample(seed=seed, num_rows=200) for seed in range(8)]
print("ready", flush=True)
while True:
    for one in objects:
        one.write(blobs)
"""


def test_a_writer_that_is_killed_leaves_whole_objects_or_none(blobs: FileBlobs) -> None:
    objects = {one.key.path: one for one in (sample(seed=seed, num_rows=200) for seed in range(8))}
    random = Random(0)
    for _ in range(6):
        arguments = [sys.executable, "-c", WRITER, str(blobs.root), "synced" if blobs._sync else "not"]
        with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            end = time.monotonic() + random.random() / 30
            while time.monotonic() < end:  # readers meanwhile
                for info in blobs.list():
                    assert objects[info.key].read(blobs) == objects[info.key].contents
            writer.send_signal(signal.SIGKILL)
        for info in blobs.list():
            assert objects[info.key].read(blobs) == objects[info.key].contents
    assert {info.key for info in blobs.list()} <= objects.keys()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.kvtiers.rig import sample
from twostroke.kvtiers.storage.files import FileBlobs

name, before = sys.argv[2], sys.argv[3] == "before"
call = getattr(os, name)

def killed(*arguments, **named):
    if name == "pwritev" and before:
        call(arguments[0], [arguments[1][1][:1000]], 0)
    elif not before:
        call(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(os, name, killed)
sample(seed=1, num_rows=200).write(FileBlobs(Path(sys.argv[1]), sync=True))
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename"])
def test_a_writer_that_is_killed_at_a_step_leaves_what_is_removed(tmp_path: Path, call: str, moment: str) -> None:
    blobs = FileBlobs(tmp_path, sync=True)
    blobs.prepare()
    other, one = sample(seed=0), sample(seed=1, num_rows=200)
    other.write(blobs)
    place_of(blobs, one.key.path).parent.mkdir(parents=True)  # so that the first fsync is the file's
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), call, moment], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    there = {info.key for info in blobs.list()}
    is_whole = (call, moment) == ("rename", "after")
    assert there == {other.key.path, *([one.key.path] if is_whole else [])}
    left = [path for path in all_files(blobs) if path.name.startswith(".tmp-")]
    assert len(left) == (not is_whole)
    if is_whole:
        assert one.read(blobs) == one.contents
    for path in left:
        os.utime(path, (0, 0))
    blobs.clean()
    assert len(all_files(blobs)) == len(there)
