"""Objects are read back as they were written, or not at all."""

import struct
from collections.abc import Sequence

import msgspec
import pytest

from tests.kvtiers.mutations import Mutations
from tests.kvtiers.rig import LAYOUTS, PLAIN, STATES, WINDOWS, MemoryBlobs, MemoryReader, Sample, sample
from twostroke.kvtiers import objects
from twostroke.kvtiers.objects import (
    _PREAMBLE,
    ObjectCipher,
    ObjectDamaged,
    ObjectOfAnotherCipher,
    SectionData,
    open_listed_object,
    open_object,
    section_bytes,
    verify_listed_object,
    write_object,
)
from twostroke.kvtiers.storage.blobs import BlobMissing
from twostroke.protocol.kv_layout import KVLayout, RankCut

CIPHERS = [None, ObjectCipher(bytes(range(32)))]


def layout_name(value: object) -> str | None:
    if isinstance(value, KVLayout):
        return value.model
    return "plain" if value is None else None if not isinstance(value, ObjectCipher) else value.name


@pytest.mark.parametrize("cipher", CIPHERS, ids=layout_name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_what_was_written_is_read_back(layout: KVLayout, cipher: ObjectCipher | None) -> None:
    blobs = MemoryBlobs()
    one = sample(layout)
    assert one.write(blobs, cipher) == len(blobs.blobs[one.key.path])
    assert one.read(blobs, cipher) == one.contents
    header = verify_listed_object(blobs, one.key.path, cipher)
    assert (header.key, header.rows, header.layout) == (one.key, one.rows, layout)
    stored = blobs.blobs[one.key.path]
    assert (one.contents[0] in stored) == (cipher is None)


def test_a_window_and_a_state_have_sections_of_fewer_rows() -> None:
    assert [section.num_rows for section in sample(WINDOWS).sections] == [3, 2]
    assert [section.num_rows for section in sample(STATES).sections] == [3, 1, 1, 1]


@pytest.mark.parametrize("cipher", CIPHERS, ids=layout_name)
def test_a_reader_skips_sections_that_it_does_not_need(cipher: ObjectCipher | None) -> None:
    blobs, one = MemoryBlobs(), sample(STATES)
    one.write(blobs, cipher)
    assert one.read(blobs, cipher, only=[3]) == one.contents[3:]
    assert one.read(blobs, cipher, only=[0, 2]) == [one.contents[0], one.contents[2]]
    with open_object(blobs, one.key, STATES, cipher) as reader:
        reader.read_section(1, [memoryview(bytearray(reader.header.sections[1].num_bytes))])
        with pytest.raises(ValueError, match="section 0 can't be read: the next of 4 is 2"):
            reader.read_section(0, [])
        with pytest.raises(ValueError, match="buffers of 3 bytes for a section of"):
            reader.read_section(2, [memoryview(bytearray(3))])


@pytest.mark.parametrize("cipher", CIPHERS, ids=layout_name)
def test_an_object_is_verified_in_pieces_however_large_its_sections_are(
    cipher: ObjectCipher | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, one, asked = MemoryBlobs(), sample(WINDOWS), set[int]()
    one.write(blobs, cipher)
    read_into = MemoryReader.read_into

    def record(reader: MemoryReader, buffers: Sequence[memoryview]) -> None:
        asked.update(map(len, buffers))
        read_into(reader, buffers)

    header = verify_listed_object(blobs, one.key.path, cipher)
    monkeypatch.setattr(MemoryReader, "read_into", record)
    monkeypatch.setattr(objects, "_VERIFIED_PIECE_BYTES", 100)
    assert verify_listed_object(blobs, one.key.path, cipher) == header
    whole = blobs.blobs[one.key.path]
    header_bytes = _PREAMBLE.unpack_from(whole)[2]
    assert max(asked - {_PREAMBLE.size, header_bytes}) == 100 < min(section.num_bytes for section in header.sections)
    blobs.blobs[one.key.path] = whole[:-1] + bytes([whole[-1] ^ 1])
    with pytest.raises(ObjectDamaged, match="the digest of section 1 is wrong"):
        verify_listed_object(blobs, one.key.path, cipher)


def test_an_object_that_is_not_there_is_missing() -> None:
    with pytest.raises(BlobMissing):
        sample().read(MemoryBlobs())


def test_an_object_of_another_layout_is_refused() -> None:
    blobs, one = MemoryBlobs(), sample()
    one.write(blobs)
    for change in ({"model": "other"}, {"dtype": "float16"}, {"windows": (0, 0)}, {"version": 2}):
        other = msgspec.structs.replace(PLAIN, **change)
        with pytest.raises(ObjectDamaged, match="another layout"), open_object(blobs, one.key, other):
            pass


@pytest.mark.parametrize(("written", "read"), [(CIPHERS[0], CIPHERS[1]), (CIPHERS[1], CIPHERS[0])], ids=layout_name)
def test_plain_objects_and_encrypted_ones_are_not_taken_for_each_other(
    written: ObjectCipher | None, read: ObjectCipher | None
) -> None:
    blobs, one = MemoryBlobs(), sample()
    one.write(blobs, written)
    with pytest.raises(ObjectOfAnotherCipher, match="it is encrypted" if written else "it is not encrypted"):
        one.read(blobs, read)


def test_an_object_of_another_key_of_the_operator_is_refused() -> None:
    blobs, one = MemoryBlobs(), sample()
    one.write(blobs, ObjectCipher(bytes(32)))
    with pytest.raises(ObjectOfAnotherCipher, match="it is encrypted with another key"):
        one.read(blobs, CIPHERS[1])


def test_an_encrypted_object_differs_at_each_writing() -> None:
    blobs, one = MemoryBlobs(), sample()
    one.write(blobs, CIPHERS[1])
    first = blobs.blobs[one.key.path]
    one.write(blobs, CIPHERS[1])
    second = blobs.blobs[one.key.path]
    size = len(one.contents[0])
    assert first[-size:] != second[-size:]


def test_a_listed_object_must_lie_under_its_own_path() -> None:
    blobs, one, other = MemoryBlobs(), sample(seed=1), sample(seed=2)
    one.write(blobs)
    blobs.blobs[other.key.path] = blobs.blobs[one.key.path]
    with pytest.raises(ObjectDamaged, match="the object of another path"), open_listed_object(blobs, other.key.path):
        pass


def refused(one: Sample, **changes: object) -> str:
    changed = one._replace(**changes)
    blobs = MemoryBlobs()
    with pytest.raises(ValueError, match="these parts make no object") as error:
        changed.write(blobs)
    assert not blobs.blobs
    return str(error.value)


def test_a_header_whose_text_is_none_is_damaged() -> None:
    """A listing's headers are decoded before their digests can be checked."""
    blobs, one = MemoryBlobs(), sample()
    one.write(blobs)
    blob = blobs.blobs[one.key.path]
    assert blob.count(b"bfloat16") == 1
    blobs.blobs[one.key.path] = blob.replace(b"bfloat16", b"bfl\xe2at16")
    with pytest.raises(ObjectDamaged, match="its header can't be decoded"), open_listed_object(blobs, one.key.path):
        pass


def test_parts_that_make_no_object_are_not_written() -> None:
    one = sample()
    rows, section = one.rows, one.sections[0]
    assert "not that of one rank" in refused(one, layout=PLAIN.over(RankCut(2)))
    assert "there is no such layout" in refused(one, layout=msgspec.structs.replace(PLAIN, dtype="float64"))
    assert "there is no such layout" in refused(one, layout=msgspec.structs.replace(PLAIN, head_dim=0))
    assert "there is no such layout" in refused(one, layout=msgspec.structs.replace(PLAIN, windows=(0,)))
    assert "are not the hashes" in refused(one, rows=rows._replace(row_hashes=rows.row_hashes[1:]))
    assert "are not the hashes" in refused(one, rows=rows._replace(row_hashes=b""))
    assert "not that of the last row" in refused(one, rows=rows._replace(row_hashes=rows.row_hashes[16:]))
    assert "not that of the last row" in refused(one, key=sample(seed=1).key)
    assert "the key's parts" in refused(one, key=one.key._replace(tenant=b""))
    assert "the name of the object before" in refused(one, rows=rows._replace(previous=b"x"))
    assert "the first row is 0" in refused(one, rows=rows._replace(first_row=0))
    assert "the first row is -1" in refused(one, rows=rows._replace(first_row=-1))
    assert "sections of the groups []" in refused(one, sections=[])
    assert "sections of the groups [0, 0]" in refused(one, sections=[section, section])
    assert "sections of the groups [1]" in refused(one, sections=[section._replace(group=1)])
    assert "begins at row 1" in refused(one, sections=[section._replace(first_row=1)])
    assert "begins at row 3" in refused(one, sections=[section._replace(first_row=3)])
    assert "its rows have" in refused(one, sections=[section._replace(buffers=section.buffers[1:])])


def test_a_buffer_that_is_not_contiguous_is_refused() -> None:
    one = sample()
    size = section_bytes(PLAIN, 0, 3)
    striped = SectionData(0, 2, 3, [memoryview(bytes(2 * size))[::2]])
    with pytest.raises(ValueError, match="not contiguous"):
        write_object(MemoryBlobs(), one.key, PLAIN, one.rows, [striped])


@pytest.mark.parametrize("cipher", CIPHERS, ids=layout_name)
def test_a_header_that_claims_to_be_huge_is_not_read(cipher: ObjectCipher | None) -> None:
    blobs, one = MemoryBlobs(), sample()
    one.write(blobs, cipher)
    blob = bytearray(blobs.blobs[one.key.path])
    struct.pack_into("<I", blob, 12, 1 << 31)
    blobs.blobs[one.key.path] = bytes(blob)
    with pytest.raises(ObjectDamaged, match="its header would have 2147483648 bytes"):
        one.read(blobs, cipher)
    assert len(blob) > _PREAMBLE.size


def test_no_mutated_object_is_accepted() -> None:
    mutations = Mutations(seed=0)
    assert mutations.run(5000) == []
    assert min(mutations.tried.values()) > 100, "some kind was hardly tried"


def test_the_mutations_would_be_seen() -> None:
    """A reader without digests accepts many, which shows that the mutations above reach the bytes."""
    mutations = Mutations(seed=0)
    for cipher in mutations.ciphers:
        assert len(mutations.accepted_without_digests(cipher, 200)) > 20
