"""Objects small enough to be mutated by the thousand, and a store in memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

from twostroke.kvtiers.identity import KVIdentity, ObjectKey, tenant_digest
from twostroke.kvtiers.objects import (
    ObjectCipher,
    ObjectRows,
    SectionData,
    open_object,
    rows_key,
    section_bytes,
    write_object,
)
from twostroke.kvtiers.storage.blobs import BlobInfo, BlobMissing, BlobStore
from twostroke.protocol.block_hash import chain_hashes
from twostroke.protocol.kv_layout import FP8, STATE_WINDOW, KVLayout

PLAIN = KVLayout("plain", "bfloat16", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4)
IN_FP8 = KVLayout("fp8", FP8, num_layers=2, num_kv_heads=2, head_dim=8, block_size=4)
WINDOWS = KVLayout("windows", "float16", 4, 1, 4, 4, windows=(0, 8, 0, 8))
LATENTS = KVLayout("latents", "bfloat16", 2, 1, 6, 4, kinds=1)
STATES = KVLayout("states", "float32", 4, 1, 4, 4, windows=(STATE_WINDOW,) * 3 + (0,), state_numbers=8)
LAYOUTS = [PLAIN, IN_FP8, WINDOWS, LATENTS, STATES]


class MemoryReader:
    def __init__(self, blob: bytes):
        self.num_bytes = len(blob)
        self._rest = memoryview(blob)

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            if len(buffer) > len(self._rest):
                raise EOFError
            buffer[:] = self._rest[: len(buffer)]
            self._rest = self._rest[len(buffer) :]

    def skip(self, num_bytes: int) -> None:
        self._rest = self._rest[num_bytes:]


class MemoryBlobs:
    """A dictionary as a BlobStore."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.quarantined: list[str] = []

    @contextmanager
    def open(self, key: str) -> Iterator[MemoryReader]:
        if key not in self.blobs:
            raise BlobMissing(key)
        yield MemoryReader(self.blobs[key])

    def write(self, key: str, parts: Sequence[memoryview]) -> None:
        self.blobs[key] = b"".join(parts)

    def delete(self, key: str) -> None:
        self.blobs.pop(key, None)

    def quarantine(self, key: str) -> None:
        if self.blobs.pop(key, None) is not None:
            self.quarantined.append(key)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        for key, blob in list(self.blobs.items()):
            if key.startswith(prefix):
                yield BlobInfo(key, len(blob), 0.0)


class Sample(NamedTuple):
    """An object to write, and what must be read back."""

    key: ObjectKey
    layout: KVLayout
    rows: ObjectRows
    sections: list[SectionData]

    def write(self, blobs: BlobStore, cipher: ObjectCipher | None = None) -> int:
        return write_object(blobs, self.key, self.layout, self.rows, self.sections, cipher)

    def read(
        self, blobs: BlobStore, cipher: ObjectCipher | None = None, only: Sequence[int] | None = None
    ) -> list[bytes]:
        """Return the bytes of the sections with these indices; all without."""
        with open_object(blobs, self.key, self.layout, cipher) as reader:
            found = []
            for index in range(len(self.sections)) if only is None else only:
                section = reader.header.sections[index]
                tensors = len(self.layout.groups.tensors_of_group[section.group])
                buffers = [memoryview(bytearray(section.num_bytes // tensors)) for _ in range(tensors)]
                reader.read_section(index, buffers)
                found.append(b"".join(buffers))
            return found

    @property
    def contents(self) -> list[bytes]:
        return [b"".join(section.buffers) for section in self.sections]


def sample(
    layout: KVLayout = PLAIN, seed: int = 0, *, num_rows: int = 3, first_row: int = 2, client: bytes = b"someone"
) -> Sample:
    """Return an object whose tokens and bytes are random. Groups with a window keep fewer rows."""
    random = Random(seed)
    end = first_row + num_rows
    tokens = [random.randrange(1000) for _ in range(end * layout.block_size)]
    hashes = b"".join(chain_hashes(tokens, layout.block_size, client))[first_row * 16 :]
    identity = KVIdentity(layout, "", "bfloat16").digest
    sections = []
    for group, window in enumerate(layout.groups.windows):
        first = max(first_row, layout.groups.first_kept(group, end * layout.block_size) // layout.block_size)
        tensors = len(layout.groups.tensors_of_group[group])
        size = section_bytes(layout, group, end - first) // tensors
        assert window or first == first_row
        buffers = [memoryview(random.randbytes(size)) for _ in range(tensors)]
        sections.append(SectionData(group, first, end - first, buffers))
    key = rows_key(identity, tenant_digest(client), layout, hashes)
    previous = random.randbytes(32) if first_row else b""
    return Sample(key, layout, ObjectRows(first_row, hashes, previous), sections)
