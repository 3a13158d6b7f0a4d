"""The interface of a tier's storage: named pieces of bytes. Files, a bucket, or memory stand behind it.

All methods block, so callers run them on threads. A key is a relative path (ObjectKey.path).
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class BlobMissing(Exception):
    """There is no blob of that key."""


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """One blob in a listing."""

    key: str
    num_bytes: int
    modified_s: float  # seconds since 1970


class BlobReader(Protocol):
    """One open blob, read from its beginning."""

    num_bytes: int

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill these buffers with the next bytes. Raises EOFError where the blob ends before, OSError otherwise."""

    def skip(self, num_bytes: int) -> None:
        """Pass over the next bytes."""


class BlobStore(Protocol):
    """A tier's storage. Every method raises OSError where the storage fails."""

    def open(self, key: str) -> AbstractContextManager[BlobReader]:
        """Open a blob for reading. Raises BlobMissing."""

    def write(self, key: str, parts: Sequence[memoryview]) -> None:
        """Store a blob in one piece: a reader finds all of it or nothing, whenever the writer dies."""

    def delete(self, key: str) -> None:
        """Delete a blob. Harmless where there is none."""

    def quarantine(self, key: str) -> None:
        """Take a damaged blob out of the readers' way. Harmless where there is none."""

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield the blobs whose keys begin with `prefix`, in no order."""
