"""A store that is being opened: a disk that hangs while a worker starts delays its tier alone."""

import errno
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from twostroke.kvtiers.storage.blobs import BlobInfo, BlobReader, BlobStore

_log = logging.getLogger(__name__)

StoreT = TypeVar("StoreT", bound=BlobStore)


class OpeningBlobs(Generic[StoreT]):
    """A BlobStore over one that is being opened on a thread. Calls wait until it is, on their own threads."""

    def __init__(self, name: str, opening: "Future[StoreT]"):
        """`name` is the tier's, in logs."""
        self._name = name
        self._opening = opening

    @property
    def opened(self) -> StoreT | None:
        """The store; None before it is open, and where it could not be opened."""
        return self._opening.result() if self._opening.done() and self._opening.exception() is None else None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the store, at most so long. Returns whether it is open; raises what opening it raised."""
        try:
            self._opening.result(timeout_s)
        except TimeoutError:
            if self._opening.done():
                raise
            _log.warning(
                "the %s tier waits for its storage or key, which does not answer; the worker starts without", self._name
            )
            self._opening.add_done_callback(self._answered)
            return False
        return True

    def _answered(self, opening: "Future[StoreT]") -> None:
        if (error := opening.exception()) is None:
            _log.info("the storage of the %s tier has answered, and is used from now on", self._name)
        else:
            _log.error("the %s tier stays out until the worker starts again: %s", self._name, error)

    def _store(self) -> StoreT:
        try:
            return self._opening.result()
        except Exception as error:
            raise OSError(errno.EIO, f"the storage could not be opened: {error}") from error

    def open(self, key: str) -> AbstractContextManager[BlobReader]:
        """Implement BlobStore.open."""
        return self._store().open(key)

    def write(self, key: str, parts: Sequence[memoryview]) -> None:
        """Implement BlobStore.write."""
        self._store().write(key, parts)

    def delete(self, key: str) -> None:
        """Implement BlobStore.delete."""
        self._store().delete(key)

    def quarantine(self, key: str) -> None:
        """Implement BlobStore.quarantine."""
        self._store().quarantine(key)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Implement BlobStore.list."""
        return self._store().list(prefix)
