"""A bucket holds whole objects or none, and a store that fails ends in bounded time."""

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.kvtiers.rig import LAYOUTS, PLAIN, STATES, sample
from twostroke.kvtiers.objects import ObjectDamaged
from twostroke.kvtiers.storage.blobs import BlobMissing
from twostroke.kvtiers.storage.bucket import BucketBlobs
from twostroke.kvtiers.storage.files import MAX_QUARANTINED, key_in_quarantine
from twostroke.kvtiers.storage.quota import QuotaBlobs
from twostroke.protocol.errors import ConfigError

KEY = f"{'ab' * 8}/{'cd' * 8}/ef/{'ef' * 32}.kv"
LONG_S = 20.0
"""Seconds by which a call with a limit of one ends on the slowest machine."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Start moto's server, and give its URL."""
    arguments = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = None
        while found is None:
            line = server.stderr.readline()
            assert line, "moto's server has ended"
            found = re.search(r"Running on (http://127\.0\.0\.1:\d+)", line)
        drain = threading.Thread(target=server.stderr.read)
        drain.start()
        yield found[1]
        server.terminate()
        drain.join()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture
def blobs(endpoint: str, request: pytest.FixtureRequest) -> BucketBlobs:
    bucket = re.sub(r"[^a-z0-9]+", "-", request.node.name)[:60].strip("-")
    assert httpx.put(f"{endpoint}/{bucket}").status_code == 200
    return BucketBlobs(f"s3://{bucket}/some/prefix/", endpoint=endpoint)


def put(blobs: BucketBlobs | QuotaBlobs, key: str, content: bytes) -> None:
    blobs.write(key, [memoryview(content)])


def test_objects_go_through_a_bucket(blobs: BucketBlobs) -> None:
    ones = [sample(layout) for layout in LAYOUTS]
    for one in ones:
        one.write(blobs)
    for one in ones:
        assert one.read(blobs) == one.contents
        assert one.read(blobs, only=[len(one.sections) - 1]) == one.contents[-1:]
    listed = {info.key: info for info in blobs.list()}
    assert listed.keys() == {one.key.path for one in ones}
    assert all(abs(info.modified_s - time.time()) < 60 for info in listed.values())
    model = ones[0].key.path[:16]
    for prefix in (model, model[:5], f"{model}/", ones[0].key.path):
        assert [info.key for info in blobs.list(prefix)] == [ones[0].key.path]
    assert list(blobs.list("zz")) == []


def test_deleted_and_quarantined_objects_are_missing(blobs: BucketBlobs) -> None:
    blobs.delete(KEY)
    blobs.quarantine(KEY)
    assert blobs.quarantined() == []
    put(blobs, KEY, b"x")
    blobs.delete(KEY)
    with pytest.raises(BlobMissing), blobs.open(KEY):
        pass
    for number in range(MAX_QUARANTINED + 2):
        put(blobs, KEY, b"x" * number)
        blobs.quarantine(KEY)
    with pytest.raises(BlobMissing), blobs.open(KEY):
        pass
    names = blobs.quarantined()
    assert [key_in_quarantine(name) for name in names] == [KEY] * MAX_QUARANTINED
    blobs.delete_quarantined(names[0])
    assert blobs.quarantined() == names[1:]
    assert list(blobs.list()) == []


@pytest.mark.parametrize("skipped", [1000, 3 << 20, 9 << 20])
def test_what_is_skipped_is_not_read(blobs: BucketBlobs, skipped: int) -> None:
    content = bytes(range(251)) * 40_000
    put(blobs, KEY, content)
    with blobs.open(KEY) as reader:
        assert reader.num_bytes == len(content)
        begin, rest = bytearray(100), bytearray(len(content) - 100 - skipped)
        reader.read_into([memoryview(begin)])
        reader.skip(skipped)
        reader.read_into([memoryview(rest)[:7], memoryview(rest)[7:]])
        with pytest.raises(EOFError):
            reader.read_into([memoryview(bytearray(1))])
    assert begin == content[:100]
    assert rest == content[100 + skipped :]


def test_an_object_put_in_anothers_place_is_not_joined_with_it(blobs: BucketBlobs) -> None:
    put(blobs, KEY, bytes(9 << 20))
    with blobs.open(KEY) as reader:
        put(blobs, KEY, b"\1" * (9 << 20))
        with pytest.raises(OSError, match="another object was put in its place"):
            reader.skip(8 << 20)


def test_a_quota_binds_a_bucket(blobs: BucketBlobs) -> None:
    limited = QuotaBlobs(blobs, 100)
    keys = [KEY.replace("ef" * 32, f"e{number}" * 32) for number in range(3)]
    for key in keys:
        put(limited, key, bytes(40))
    assert {info.key for info in blobs.list()} == set(keys[1:])
    assert QuotaBlobs(blobs, 100).num_bytes == 80


def test_a_bucket_that_is_not_there_is_named(endpoint: str) -> None:
    blobs = BucketBlobs("s3://none-such", endpoint=endpoint)
    with pytest.raises(OSError, match=r"the bucket has no such object, or there is no bucket: .*\.kv"):
        put(blobs, KEY, b"x")
    with pytest.raises(OSError, match=r"(?s)the bucket can't be used: .*NoSuchBucket"):
        list(blobs.list())


def test_what_is_no_bucket_is_named() -> None:
    for url in ("s3://", "s3:/bucket", "s3://UPPER", "s3://bucket?x=1", "https://bucket", "bucket"):
        with pytest.raises(ConfigError, match=re.escape(f"{url}: it is no bucket's URL; write s3://BUCKET")):
            BucketBlobs(url)
    with pytest.raises(ConfigError, match=r"host:9000: it is no store's URL; write https://HOST"):
        BucketBlobs("s3://bucket", endpoint="host:9000")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("obstore", "obstore.store"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"s3://bucket: a bucket needs obstore: .*\[s3\]"):
        BucketBlobs("s3://bucket")


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def bad_store(answer: Answer) -> Iterator[tuple[BucketBlobs, list[str]]]:
    """Yield a bucket at a server that answers so, and the methods of the requests that it got."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            with suppress(ConnectionError):
                super().handle_one_request()

        def do_GET(self) -> None:
            requests.append(self.command)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.close_connection = True
            answer(self)

        do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield BucketBlobs("s3://bucket", endpoint=url, timeout_s=1, connect_timeout_s=1), requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def calls_of(blobs: BucketBlobs) -> dict[str, Callable[[], object]]:
    return {
        "open": lambda: sample(PLAIN).read(blobs),
        "write": lambda: sample(PLAIN).write(blobs),
        "delete": lambda: blobs.delete(KEY),
        "quarantine": lambda: blobs.quarantine(KEY),
        "list": lambda: list(blobs.list()),
    }


def fail_all(answer: Answer, most_requests: int) -> None:
    """Make every call at such a store: each fails in time, after so many requests at most."""
    with bad_store(answer) as (blobs, requests):
        for name, call in calls_of(blobs).items():
            requests.clear()
            began = time.monotonic()
            with pytest.raises(OSError, match="the bucket can't be used"):
                call()
            assert time.monotonic() - began < LONG_S, name
            assert 1 <= len(requests) <= most_requests, (name, requests)


def test_a_store_that_hangs_ends_in_time() -> None:
    ended = threading.Event()

    def hang(_: BaseHTTPRequestHandler) -> None:
        ended.wait(60)

    try:
        with bad_store(hang) as (blobs, requests):
            for name in ("open", "write"):
                requests.clear()
                began = time.monotonic()
                with pytest.raises(OSError, match="the bucket can't be used"):
                    calls_of(blobs)[name]()
                assert 0.5 < time.monotonic() - began < LONG_S, name
                assert 1 <= len(requests) <= 2
            ended.set()
    finally:
        ended.set()


def test_a_store_that_answers_503_is_asked_twice() -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(503, "Slow Down")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    fail_all(refuse, 2)


def test_a_store_that_refuses_is_told_as_that() -> None:
    def forbid(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(403)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with bad_store(forbid) as (blobs, requests):
        with pytest.raises(PermissionError, match="the bucket refuses"):
            put(blobs, KEY, b"x")
        assert len(requests) == 1


def test_a_store_that_hangs_up_at_once_is_asked_twice() -> None:
    fail_all(lambda _: None, 2)


def answer_with(sent: bytes, told: int, pause: Callable[[], object] = lambda: None) -> Answer:
    """Return what tells of `told` bytes and sends others."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(told))
        handler.send_header("ETag", '"tag"')
        handler.send_header("Last-Modified", "Fri, 27 Nov 2026 10:00:00 GMT")
        handler.end_headers()
        handler.wfile.write(sent)
        handler.wfile.flush()
        pause()

    return answer


def stored_bytes() -> bytes:
    from tests.kvtiers.rig import MemoryBlobs

    memory, one = MemoryBlobs(), sample(STATES)
    one.write(memory)
    return memory.blobs[one.key.path]


def test_a_store_that_cuts_an_answer_short_gives_no_object() -> None:
    whole = stored_bytes()
    for sent in (0, 30, 300, len(whole) - 1):
        with (
            bad_store(answer_with(whole[:sent], len(whole))) as (blobs, _),
            pytest.raises(OSError, match="the bucket can't be used"),
        ):
            sample(STATES).read(blobs)
        with bad_store(answer_with(whole[:sent], sent)) as (blobs, _), pytest.raises(ObjectDamaged):
            sample(STATES).read(blobs)
    with bad_store(answer_with(whole, len(whole))) as (blobs, _):
        assert sample(STATES).read(blobs) == sample(STATES).contents


def test_a_store_that_stops_within_an_answer_ends_in_time() -> None:
    whole, ended = stored_bytes(), threading.Event()
    with bad_store(answer_with(whole[:-1], len(whole), lambda: ended.wait(60))) as (blobs, _):
        began = time.monotonic()
        with pytest.raises(OSError, match="the bucket can't be used"):
            sample(STATES).read(blobs)
        assert time.monotonic() - began < LONG_S
        ended.set()


def test_a_store_that_drips_ends_in_time() -> None:
    ended = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        with suppress(OSError):
            answer_with(b"", 1000)(handler)
            while not ended.wait(0.1):
                handler.wfile.write(b"x")

    with bad_store(drip) as (blobs, _):
        began = time.monotonic()
        with pytest.raises(OSError, match="the bucket can't be used"):
            sample(STATES).read(blobs)
        assert time.monotonic() - began < LONG_S
        ended.set()


def test_a_store_that_nobody_runs_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    blobs = BucketBlobs("s3://bucket", endpoint=f"http://127.0.0.1:{port}", timeout_s=1)
    for call in calls_of(blobs).values():
        began = time.monotonic()
        with pytest.raises(OSError, match="the bucket can't be used"):
            call()
        assert time.monotonic() - began < LONG_S
