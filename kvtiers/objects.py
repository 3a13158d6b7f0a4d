"""KV objects: the KV of a run of consecutive rows of one prefix. Here are the format, and all that reads or writes it.

    preamble   magic, version, length of the header, length of all sections, mark of the cipher's key, the header's
               nonce, the header's digest
    header     ObjectHeader in MessagePack
    sections   the bytes of one group of layers each, one section after the other

A damaged object must never become a wrong token, so a reader believes nothing that it has not verified:

- The header's digest binds the key that the reader asks for, the preamble and the header. A header of another object
  never fits, whole as it may be.
- A section's digest binds the header without digests and the section's place. A section of another object, or of
  another place, never fits.
- The object's name must be that of the header's last block (identity.object_name), and all sizes those of the layout.
- The blob must have exactly the length that the preamble tells.

Digests are xxh3-128. They find damage, not malice: whoever can write into a tier can make objects. Where not all of
these are trusted, an ObjectCipher encrypts sections with AES-256-GCM, and the tags are the digests, the header's too.
Header fields stay readable: names, sizes, and hashes that tenants' salts key.

Everything here blocks. Payloads are neither joined nor copied, except that a cipher needs memory for what it encrypts.
"""

import hashlib
import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import xxhash

from twostroke.kvtiers.config import KEY_BYTES
from twostroke.kvtiers.identity import FORMAT_VERSION, NAME_BYTES, TENANT_BYTES, ObjectKey, object_name, pack_record
from twostroke.kvtiers.storage.blobs import BlobReader, BlobStore
from twostroke.protocol.block_hash import HASH_BYTES, BlockHash
from twostroke.protocol.errors import ConfigError, how_to_install
from twostroke.protocol.kv_layout import DTYPE_BYTES, ONE_RANK, KVLayout

MAGIC = b"\x89TS-KV\r\n"
MAX_HEADER_BYTES = 1 << 20
DIGEST_BYTES = 16
NONCE_BYTES = 12
_CIPHER_PIECE_BYTES = 256 << 10
"""Bytes that are encrypted or decrypted at once: other threads wait for so many, and a core's cache holds them."""

_VERIFIED_PIECE_BYTES = 4 << 20
"""Bytes of a section in memory while it is verified: its header may tell of any number."""

MARK_BYTES = 8
_PREAMBLE = struct.Struct("<8sIIQ8s12s16s")
_NO_NONCE = bytes(NONCE_BYTES)
_NO_MARK = bytes(MARK_BYTES)


_MAX_LAYERS = 1 << 12
_MAX_SIZE = 1 << 24
"""Bounds of a layout's numbers in a header, whoever wrote it: what is computed from more would fill the memory."""
_MAX_FAULT_CHARS = 500


class ObjectDamaged(Exception):
    """The blob is no whole object of the key and the layout that the reader asked for. The message says why."""

    def __init__(self, message: str):
        super().__init__(message[:_MAX_FAULT_CHARS])  # a header's texts may have a megabyte


class ObjectOfAnotherCipher(ObjectDamaged):
    """The object is encrypted and the reader has no key or another one, or it is not and the reader has a key."""


class ObjectRows(NamedTuple):
    """The rows of a block table that an object holds."""

    first_row: int
    row_hashes: bytes  # the 16-byte chain hashes of the rows' blocks, one after the other
    previous: bytes = b""  # name of the object of the rows before; empty: none is known

    @property
    def num_rows(self) -> int:
        return len(self.row_hashes) // HASH_BYTES

    @property
    def last_hash(self) -> BlockHash:
        """The hash of the last row's block, which names the object."""
        return self.row_hashes[-HASH_BYTES:]


class SectionData(NamedTuple):
    """One section to write."""

    group: int
    first_row: int  # of the block table, as in ObjectRows
    num_rows: int
    buffers: Sequence[memoryview]  # contiguous; `section_bytes` together, tensor after tensor


class StoredSection(msgspec.Struct, frozen=True, array_like=True):
    """One section, as the header tells it."""

    group: int
    first_row: int
    num_rows: int
    num_bytes: int
    nonce: bytes = b""  # of the cipher; empty without
    digest: bytes = b""


class ObjectHeader(msgspec.Struct, frozen=True, array_like=True):
    """All that an object tells about itself."""

    identity: bytes  # the parts of its ObjectKey
    tenant: bytes
    name: bytes
    previous: bytes  # name of the object of the rows before; empty: none is known
    layout: KVLayout  # of one rank
    first_row: int
    num_rows: int
    row_hashes: bytes  # as in ObjectRows
    sections: tuple[StoredSection, ...]
    cipher: str  # empty: none
    created: int  # seconds since 1970

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(self.identity, self.tenant, self.name)

    @property
    def rows(self) -> ObjectRows:
        return ObjectRows(self.first_row, self.row_hashes, self.previous)


def section_bytes(layout: KVLayout, group: int, num_rows: int) -> int:
    """Return the bytes of a section: a block of each row in each tensor that the group's layers write into."""
    return layout.block_bytes * len(layout.groups.tensors_of_group[group]) * num_rows


def rows_key(identity: bytes, tenant: bytes, layout: KVLayout, row_hashes: bytes) -> ObjectKey:
    """Return the key of the object of rows with these hashes, which are at least one."""
    num_tokens = len(row_hashes) // HASH_BYTES * layout.block_size
    return ObjectKey(identity, tenant, object_name(identity, row_hashes[-HASH_BYTES:], num_tokens))


def write_object(
    blobs: BlobStore,
    key: ObjectKey,
    layout: KVLayout,
    rows: ObjectRows,
    sections: Sequence[SectionData],
    cipher: "ObjectCipher | None" = None,
) -> int:
    """Write an object, whose buffers must not change meanwhile; returns its bytes.

    Raises ValueError for parts that make no object, and OSError where the storage fails.
    """
    seal: _Seal = cipher or _CHECKSUMS
    blank = ObjectHeader(
        *key,
        previous=rows.previous,
        layout=layout,
        first_row=rows.first_row,
        num_rows=rows.num_rows,
        row_hashes=rows.row_hashes,
        sections=tuple(
            StoredSection(part.group, part.first_row, part.num_rows, sum(view.nbytes for view in part.buffers))
            for part in sections
        ),
        cipher=seal.name,
        created=int(time.time()),
    )
    fault = _fault(blank)
    if fault is not None:
        raise ValueError(f"these parts make no object: {fault}")
    binding = _binding(blank)
    sealed = [
        seal.seal(_context(binding, index), [_flat(view) for view in part.buffers])
        for index, part in enumerate(sections)
    ]
    records = zip(blank.sections, sealed, strict=True)
    header = msgspec.structs.replace(
        blank,
        sections=tuple(
            msgspec.structs.replace(section, nonce=one.nonce, digest=one.digest) for section, one in records
        ),
    )
    packed = msgspec.msgpack.encode(header)
    if len(packed) > MAX_HEADER_BYTES:
        raise ValueError(f"the header of an object of {rows.num_rows} rows has {len(packed)} bytes; make it shorter")
    lengths = len(packed), sum(section.num_bytes for section in header.sections)
    own = seal.seal(_header_context(key, *lengths, packed), [])
    preamble = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, *lengths, seal.mark, own.nonce or _NO_NONCE, own.digest)
    parts = [memoryview(preamble), memoryview(packed), *(view for one in sealed for view in one.parts)]
    blobs.write(key.path, parts)
    return len(preamble) + sum(lengths)


class ObjectReader:
    """An open object. Its header is verified, and each section is when it is read."""

    def __init__(self, reader: BlobReader, header: ObjectHeader, seal: "_Seal"):
        self.header = header
        self._reader = reader
        self._seal = seal
        self._binding = _binding(header)
        self._next = 0  # section

    def read_section(self, index: int, buffers: Sequence[memoryview]) -> None:
        """Fill these contiguous buffers with a section, in the order in which they were written.

        Sections are read from the first to the last; those between are skipped. What the buffers hold counts only when
        this has returned. Raises ObjectDamaged, OSError, and ValueError for buffers of another size.
        """
        if not self._next <= index < len(self.header.sections):
            raise ValueError(f"section {index} can't be read: the next of {len(self.header.sections)} is {self._next}")
        section = self.header.sections[index]
        views = [_flat(view) for view in buffers]
        if sum(map(len, views)) != section.num_bytes:
            raise ValueError(f"buffers of {sum(map(len, views))} bytes for a section of {section.num_bytes}")

        def read() -> Iterator[memoryview]:
            self._reader.read_into(views)
            yield from views

        self._verify(index, read())

    def verify(self) -> None:
        """Read all sections and keep nothing of them. Raises as `read_section` does."""
        for index, section in enumerate(self.header.sections):
            self._verify(index, self._pieces(section.num_bytes))

    def _pieces(self, num_bytes: int) -> Iterator[memoryview]:
        """Read the next bytes in pieces, each in the place of the one before."""
        scratch = memoryview(bytearray(min(num_bytes, _VERIFIED_PIECE_BYTES)))
        for first in range(0, num_bytes, _VERIFIED_PIECE_BYTES):
            piece = scratch[: num_bytes - first]
            self._reader.read_into([piece])
            yield piece

    def _verify(self, index: int, parts: Iterable[memoryview]) -> None:
        """Skip to a section, and verify its parts, which are read as they are taken."""
        section = self.header.sections[index]
        skipped = sum(one.num_bytes for one in self.header.sections[self._next : index])
        self._next = index + 1
        try:
            if skipped:
                self._reader.skip(skipped)
            is_whole = self._seal.opens(_context(self._binding, index), section.nonce, section.digest, parts)
        except EOFError as error:
            raise ObjectDamaged(f"the object ends within section {index}") from error
        if not is_whole:
            raise ObjectDamaged(f"the digest of section {index} is wrong")


@contextmanager
def open_object(
    blobs: BlobStore, key: ObjectKey, layout: KVLayout, cipher: "ObjectCipher | None" = None
) -> Iterator[ObjectReader]:
    """Open an object of this key and layout. Raises ObjectDamaged, BlobMissing, and OSError where the storage fails."""
    with blobs.open(key.path) as blob:
        seal: _Seal = cipher or _CHECKSUMS
        yield ObjectReader(blob, _read_header(blob, seal, key, layout), seal)


@contextmanager
def open_listed_object(
    blobs: BlobStore, path: str, cipher: "ObjectCipher | None" = None, layout: KVLayout | None = None
) -> Iterator[ObjectReader]:
    """Open the object of a listing, about which its path is known, and its layout where one is given.

    Raises as `open_object` does.
    """
    with blobs.open(path) as blob:
        seal: _Seal = cipher or _CHECKSUMS
        header = _read_header(blob, seal, None, layout)
        if header.key.path != path:
            raise ObjectDamaged(f"it is the object of another path: {header.key.path}")
        yield ObjectReader(blob, header, seal)


def verify_listed_object(blobs: BlobStore, path: str, cipher: "ObjectCipher | None" = None) -> ObjectHeader:
    """Read all of an object of a listing; returns its header. Raises as `open_object` does."""
    with open_listed_object(blobs, path, cipher) as reader:
        reader.verify()
        return reader.header


def _read_header(blob: BlobReader, seal: "_Seal", key: ObjectKey | None, layout: KVLayout | None) -> ObjectHeader:
    """Read and verify a header; without a key, it is its own, and without a layout any. Raises ObjectDamaged."""
    try:
        preamble = bytearray(_PREAMBLE.size)
        blob.read_into([memoryview(preamble)])
        magic, version, header_bytes, payload_bytes, mark, nonce, digest = _PREAMBLE.unpack(preamble)
        if magic != MAGIC:
            raise ObjectDamaged("it does not begin as an object")
        if version != FORMAT_VERSION:
            raise ObjectDamaged(f"it has version {version}, not {FORMAT_VERSION}")
        if header_bytes > MAX_HEADER_BYTES:
            raise ObjectDamaged(f"its header would have {header_bytes} bytes")
        if blob.num_bytes != _PREAMBLE.size + header_bytes + payload_bytes:
            expected = _PREAMBLE.size + header_bytes + payload_bytes
            raise ObjectDamaged(f"it has {blob.num_bytes} bytes, and tells of {expected}")
        packed = bytearray(header_bytes)
        blob.read_into([memoryview(packed)])
    except EOFError as error:
        raise ObjectDamaged("it ends before its sections") from error
    if mark != seal.mark:
        if mark == _NO_MARK:
            raise ObjectOfAnotherCipher("it is not encrypted")
        raise ObjectOfAnotherCipher("it is encrypted" if seal.mark == _NO_MARK else "it is encrypted with another key")
    if (nonce == _NO_NONCE) != (mark == _NO_MARK):
        raise ObjectDamaged("its nonce is not one of its cipher")

    def verify(key: ObjectKey) -> None:
        if not seal.opens(_header_context(key, header_bytes, payload_bytes, packed), nonce, digest, []):
            raise ObjectDamaged("the header's digest is wrong")

    if key is not None:
        verify(key)  # before anything decodes it
    try:
        header = _DECODER.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ObjectDamaged(f"its header can't be decoded: {error}") from error
    if key is None:
        verify(header.key)
    elif header.key != key:
        raise ObjectDamaged("it is the object of another key")
    if msgspec.msgpack.encode(header) != packed:
        raise ObjectDamaged("its header holds more than is known")
    if header.cipher != seal.name:
        raise ObjectDamaged(f"its cipher is {header.cipher!r}, not {seal.name!r}")
    if layout is not None and header.layout != layout:  # before anything is computed from it
        raise ObjectDamaged(f"its KV has another layout: {header.layout}, not {layout}")
    fault = _fault(header)
    if fault is not None:
        raise ObjectDamaged(fault)
    if payload_bytes != sum(section.num_bytes for section in header.sections):
        raise ObjectDamaged("its length is not that of its sections")
    return header


_DECODER = msgspec.msgpack.Decoder(ObjectHeader)


def _fault(header: ObjectHeader) -> str | None:
    """Return why the header's parts don't fit each other; None where they do."""
    layout, rows = header.layout, header.rows
    if layout.cut != ONE_RANK:
        return f"the layout is not that of one rank: {layout}"
    sizes = layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.kinds
    if layout.dtype not in DTYPE_BYTES or min(sizes) < 1 or layout.num_layers > _MAX_LAYERS or max(sizes) > _MAX_SIZE:
        return f"there is no such layout: {layout}"
    for windows in (layout.windows, layout.parts):
        if windows and len(windows) != layout.num_layers:
            return f"there is no such layout: {layout}"
    if len(header.identity) != NAME_BYTES or len(header.tenant) != TENANT_BYTES:
        return f"the key's parts have {len(header.identity)} and {len(header.tenant)} bytes"
    if not rows.num_rows or len(rows.row_hashes) % HASH_BYTES or header.num_rows != rows.num_rows:
        return f"{len(rows.row_hashes)} bytes are not the hashes of {header.num_rows} rows"
    if rows_key(header.identity, header.tenant, layout, rows.row_hashes) != header.key:
        return "the name is not that of the last row's block"
    if len(header.previous) not in (0, len(header.name)):
        return f"the name of the object before has {len(header.previous)} bytes"
    if header.first_row < 0 or (header.previous and not header.first_row):
        return f"the first row is {header.first_row}, and the object before is {header.previous.hex() or 'not known'}"
    groups = [section.group for section in header.sections]
    if not groups or sorted(set(groups)) != groups or not 0 <= groups[0] <= groups[-1] < layout.groups.count:
        return f"sections of the groups {groups}, of {layout.groups.count} groups in their order"
    end = header.first_row + header.num_rows
    for index, section in enumerate(header.sections):
        last = section.first_row + section.num_rows
        if section.num_rows < 1 or not header.first_row <= section.first_row < last <= end:
            return f"section {index} begins at row {section.first_row} and has {section.num_rows} rows"
        if section.num_bytes != (expected := section_bytes(layout, section.group, section.num_rows)):
            return f"section {index} has {section.num_bytes} bytes, and its rows have {expected}"
    return None


def _binding(header: ObjectHeader) -> bytes:
    """Return the digest of the header without what sealing adds: each section's digest binds it."""
    sections = tuple(msgspec.structs.replace(section, nonce=b"", digest=b"") for section in header.sections)
    return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(header, sections=sections))).digest()


def _context(binding: bytes, index: int) -> bytes:
    """Return what a section's digest binds beside its bytes."""
    return binding + index.to_bytes(4, "little")


def _header_context(key: ObjectKey, header_bytes: int, payload_bytes: int, packed: bytes | bytearray) -> bytes:
    """Return what the header's digest binds."""
    lengths = struct.pack("<IIQ", FORMAT_VERSION, header_bytes, payload_bytes)
    return pack_record({**key._asdict(), "lengths": lengths, "header": bytes(packed)})


def _flat(view: memoryview) -> memoryview:
    """Return the view as bytes. Raises ValueError for one that is not contiguous."""
    if not view.c_contiguous:
        raise ValueError("a buffer is not contiguous")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class _Sealed(NamedTuple):
    """Bytes ready to be stored, and what a reader needs to verify them."""

    nonce: bytes
    digest: bytes
    parts: Sequence[memoryview]


class _Seal(Protocol):
    """A way to make and verify digests."""

    @property
    def name(self) -> str:
        """The cipher's name; empty for none."""

    @property
    def mark(self) -> bytes:
        """Bytes that tell the keys of ciphers apart; zeros for none."""

    def seal(self, context: bytes, parts: Sequence[memoryview]) -> _Sealed:
        """Return these bytes sealed, bound to `context`."""

    def opens(self, context: bytes, nonce: bytes, digest: bytes, parts: Iterable[memoryview]) -> bool:
        """Turn stored bytes into what they were, in place; returns whether they are whole and bound to `context`.

        Each part is done with before the next one is taken.
        """


class _Checksums:
    """Digests by xxh3-128, of bytes that are stored as they are."""

    name = ""
    mark = _NO_MARK

    def seal(self, context: bytes, parts: Sequence[memoryview]) -> _Sealed:
        return _Sealed(b"", self._digest(context, parts), parts)

    def opens(self, context: bytes, nonce: bytes, digest: bytes, parts: Iterable[memoryview]) -> bool:
        return self._digest(context, parts) == digest

    def _digest(self, context: bytes, parts: Iterable[memoryview]) -> bytes:
        digest = xxhash.xxh3_128(len(context).to_bytes(4, "little") + context)
        for part in parts:
            digest.update(part)
        return digest.digest()


_CHECKSUMS = _Checksums()


class ObjectCipher:
    """AES-256-GCM with an operator's key: sections are encrypted, and the tags bind them and the header.

    Nonces are random, so one key serves 2^32 sections and headers: change it before it has sealed so many, which are
    petabytes. Objects of another key are told by its mark. Raises ConfigError where `cryptography` is missing.
    """

    name = "aes-256-gcm"

    def __init__(self, key: bytes):
        """`key`: 32 random bytes."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ModuleNotFoundError as error:
            raise ConfigError(f"encryption of KV at rest needs cryptography: {how_to_install('serve')}") from error
        self.mark = hashlib.sha256(pack_record({"mark of a key": key})).digest()[:MARK_BYTES]
        self._invalid = InvalidTag
        self._cipher = Cipher
        self._aes = algorithms.AES(key)
        self._gcm = modes.GCM

    def seal(self, context: bytes, parts: Sequence[memoryview]) -> _Sealed:
        nonce = os.urandom(NONCE_BYTES)
        encryptor = self._cipher(self._aes, self._gcm(nonce)).encryptor()
        encryptor.authenticate_additional_data(context)
        encrypted = []
        for part in parts:
            room = np.empty(len(part) + 16, np.uint8).data  # the package asks for a block's room behind the end
            for first in range(0, len(part), _CIPHER_PIECE_BYTES):
                encryptor.update_into(part[first : first + _CIPHER_PIECE_BYTES], room[first:])
            encrypted.append(room[: len(part)])
        encryptor.finalize()
        return _Sealed(nonce, encryptor.tag, encrypted)

    def opens(self, context: bytes, nonce: bytes, digest: bytes, parts: Iterable[memoryview]) -> bool:
        if len(nonce) != NONCE_BYTES or len(digest) != DIGEST_BYTES:
            return False
        decryptor = self._cipher(self._aes, self._gcm(nonce, digest)).decryptor()
        decryptor.authenticate_additional_data(context)
        scratch = memoryview(bytearray(0))
        for part in parts:
            if len(scratch) < (needed := min(_CIPHER_PIECE_BYTES, len(part)) + 16):
                scratch = memoryview(bytearray(needed))
            for first in range(0, len(part), _CIPHER_PIECE_BYTES):
                piece = part[first : first + _CIPHER_PIECE_BYTES]
                piece[:] = scratch[: decryptor.update_into(piece, scratch)]
        try:
            decryptor.finalize()
        except self._invalid:
            return False
        return True
