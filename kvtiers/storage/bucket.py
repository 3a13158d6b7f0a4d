"""Blobs as objects of an S3-compatible bucket: `s3://bucket/prefix`.

The client is obstore, the Arrow project's object_store for Python (extra `s3`). boto3, the other well-kept one, was
compared in November 2026:

- Time: obstore limits a whole request, its body included. botocore limits the wait for each piece of a body, so a store
  that sends a byte now and then holds a thread for ever.
- Speed: obstore works outside Python's lock and takes a list of buffers. botocore hashes, copies and sends in Python,
  and steps of the worker wait for it.
- Size: obstore has no dependencies; boto3 brings five packages and holds python-dateutil back.
- For boto3 speak profiles and single sign-on. obstore knows environment variables, web identity, containers and
  instance roles, which servers use.

A PUT is atomic, so readers find a whole object or none. Every call ends in bounded time: after one retry at most.
Credentials come from the environment (AWS_ACCESS_KEY_ID, ...) or the machine's role.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from twostroke.kvtiers.identity import FORMAT_VERSION
from twostroke.kvtiers.storage.blobs import BlobInfo, BlobMissing
from twostroke.kvtiers.storage.files import MAX_QUARANTINED, OUR_FOLDER, check_key, quarantine_name
from twostroke.protocol.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from obstore import BytesStream, GetResult
    from obstore.store import S3Store

TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 2.0
_PIECE_BYTES = 1 << 20
"""Bytes that are taken from a response at once."""
_RANGE_BYTES = 4 << 20
"""Bytes from which on it is quicker to ask anew than to receive what is skipped: what comes in a round trip."""
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([^?#]*))?")
_MESSAGE = 300
"""Most letters of the client's message in an error."""
_REQUEST = re.compile(r"(?:Generic S3 error: )?(?:Error performing \w+ request: )?Error performing (?=\w+)|http\S+ ")


class BucketReader:
    """One object of a bucket, while it is received."""

    def __init__(self, store: "S3Store", place: str, response: "GetResult"):
        self.num_bytes = response.meta["size"]
        self._store = store
        self._place = place
        self._tag = response.meta["e_tag"]
        self._stream: BytesStream = response.stream(min_chunk_size=_PIECE_BYTES)
        self._piece = memoryview(b"")
        self._offset = 0

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill these buffers with the next bytes. Raises EOFError where the object ends before, OSError otherwise."""
        for buffer in buffers:
            filled = 0
            while filled < len(buffer):
                if not len(self._piece):
                    self._receive()
                taken = self._piece[: len(buffer) - filled]
                buffer[filled : filled + len(taken)] = taken
                self._piece = self._piece[len(taken) :]
                filled += len(taken)
            self._offset += filled

    def skip(self, num_bytes: int) -> None:
        """Pass over the next bytes."""
        self._offset += num_bytes
        if num_bytes >= _RANGE_BYTES + len(self._piece) and self._offset < self.num_bytes:
            from obstore import get

            with _as_os_errors(self._place):
                # The same object, or none: another writer may have put one in its place.
                response = get(
                    self._store, self._place, options={"range": {"offset": self._offset}, "if_match": self._tag}
                )
                self._stream = response.stream(min_chunk_size=_PIECE_BYTES)
            self._piece = memoryview(b"")
            return
        while num_bytes:
            if not len(self._piece):
                self._receive()
            passed = min(num_bytes, len(self._piece))
            self._piece = self._piece[passed:]
            num_bytes -= passed

    def _receive(self) -> None:
        with _as_os_errors(self._place):
            piece = next(self._stream, None)
        if piece is None:
            raise EOFError("the object ends before")
        self._piece = memoryview(piece)


class BucketBlobs:
    """A bucket as a BlobStore. All threads may use one."""

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ):
        """`endpoint`: URL of a store that isn't Amazon's. `timeout_s` limits a request, which is retried once.

        Asks the bucket nothing. Raises ConfigError for what can't be its URL, and where obstore is missing.
        """
        match = _URL.fullmatch(url)
        if match is None:
            raise ConfigError(f"{url}: it is no bucket's URL; write s3://BUCKET or s3://BUCKET/PREFIX")
        if endpoint is not None and not re.fullmatch(r"https?://[^/?#]+/?", endpoint):
            raise ConfigError(f"{endpoint}: it is no store's URL; write https://HOST or http://HOST:PORT")
        try:
            from obstore.store import S3Store
        except ModuleNotFoundError as error:
            raise ConfigError(f"{url}: a bucket needs obstore: {how_to_install('s3')}") from error
        self.url = url
        prefix = "/".join(part for part in (match[2] or "").split("/") if part)
        self._store = S3Store(
            match[1],
            prefix="/".join(filter(None, (prefix, OUR_FOLDER, f"v{FORMAT_VERSION}"))),
            config={} if endpoint is None else {"endpoint": endpoint.rstrip("/")},
            client_options={
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=connect_timeout_s),
                "allow_http": endpoint is not None and endpoint.startswith("http:"),
            },
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=2 * timeout_s)},
        )

    @contextmanager
    def open(self, key: str) -> Iterator[BucketReader]:
        """Begin to receive an object. Raises BlobMissing, and OSError."""
        from obstore import get

        place = _object_path(key)
        try:
            with _as_os_errors(place):
                response = get(self._store, place)
        except FileNotFoundError as error:
            raise BlobMissing(key) from error
        yield BucketReader(self._store, place, response)

    def write(self, key: str, parts: Sequence[memoryview]) -> None:
        """Store an object in one piece. Raises OSError."""
        from obstore import put

        with _as_os_errors(place := _object_path(key)):
            put(self._store, place, [part for part in parts if len(part)], use_multipart=False)

    def delete(self, key: str) -> None:
        """Delete an object. Harmless where there is none."""
        self._delete(_object_path(key))

    def quarantine(self, key: str) -> None:
        """Move a damaged object aside, for people to look at; the newest 16 are kept. Harmless where there is none."""
        from obstore import copy

        place = _object_path(key)
        try:
            with _as_os_errors(place):
                copy(self._store, place, f"quarantine/{quarantine_name(key)}")
        except FileNotFoundError:
            return
        self._delete(place)
        for old in self.quarantined()[:-MAX_QUARANTINED]:
            self.delete_quarantined(old)

    def quarantined(self) -> Sequence[str]:
        """Return the names of objects in quarantine, the oldest first: `key_in_quarantine` tells their keys."""
        return sorted(info.key.removeprefix("quarantine/") for info in self._list("quarantine"))

    def delete_quarantined(self, name: str) -> None:
        """Delete an object in quarantine. Harmless where there is none."""
        self._delete(f"quarantine/{name}")

    def clean(self) -> None:
        """Do nothing: a bucket has neither folders nor halves of objects. Files have."""

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield the objects whose keys begin with `prefix`, in no order."""
        folder = f"objects/{prefix}".rpartition("/")[0]
        for info in self._list(folder):
            key = info.key.removeprefix("objects/")
            if key.startswith(prefix):
                yield BlobInfo(key, info.num_bytes, info.modified_s)

    def _list(self, folder: str) -> Iterator[BlobInfo]:
        from obstore import list as list_objects

        stream = iter(list_objects(self._store, folder))
        while True:
            with _as_os_errors(folder):
                page = next(stream, None)
            if page is None:
                return
            for meta in page:
                if meta["path"].endswith(".kv"):
                    yield BlobInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())

    def _delete(self, place: str) -> None:
        from obstore import delete

        try:
            with _as_os_errors(place):
                delete(self._store, place)
        except FileNotFoundError:
            return


def _object_path(key: str) -> str:
    check_key(key)
    return f"objects/{key}"


@contextmanager
def _as_os_errors(place: str) -> Iterator[None]:
    """Raise the client's errors as OSErrors that name the object."""
    from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "the bucket has no such object, or there is no bucket", place) from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, f"the bucket refuses: {_first_words(error)}", place) from error
    except PreconditionError as error:
        raise OSError(errno.ESTALE, "another object was put in its place", place) from error
    except (BaseError, ValueError) as error:
        raise OSError(errno.EIO, f"the bucket can't be used: {_first_words(error)}", place) from error


def _first_words(error: Exception) -> str:
    """Return what went wrong, without the request's URL, which is long, and the client's structures behind it."""
    text = _REQUEST.sub("", str(error).partition("Debug source:")[0])
    words = " ".join(text.split())
    return words if len(words) <= _MESSAGE else f"{words[:_MESSAGE]}..."
