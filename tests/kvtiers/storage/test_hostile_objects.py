"""Objects that somebody made on purpose: their digests are right, and their numbers are not.

`python -m tests.kvtiers.storage.test_hostile_objects 100000` reads so many in a process whose memory is limited.
"""

import asyncio
import re
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from tests.kvtiers.rig import LAYOUTS, PLAIN, MemoryBlobs, Sample, sample
from twostroke.kvtiers.identity import FORMAT_VERSION, ObjectKey
from twostroke.kvtiers.objects import (
    _CHECKSUMS,
    _NO_NONCE,
    _PREAMBLE,
    MAGIC,
    ObjectDamaged,
    _header_context,
    open_object,
    rows_key,
    verify_listed_object,
)
from twostroke.kvtiers.storage.threads import BlockingCalls
from twostroke.kvtiers.storage_tier import StorageTier
from twostroke.kvtiers.tier_index import TierIndex
from twostroke.protocol.kv_layout import KVLayout

ROOM_BYTES = 512 << 20
NAME, LAYOUT, ROW_HASHES = 2, 4, 7  # places in a header
NUM_LAYERS, BLOCK_SIZE = 2, 5  # in its layout
NUMBERS = (0, 1, -1, 3, 255, 4095, 1 << 20, 2_000_000_000, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def places(value: Any, above: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Return where numbers and lists stand in a header."""
    if not isinstance(value, list):
        return [above] if isinstance(value, int) else []
    inner = [place for index, one in enumerate(value) for place in places(one, (*above, index))]
    return [above, *inner] if above else inner


def hostile(random: Random, one: Sample, whole: bytes) -> tuple[ObjectKey, bytes]:
    """Return an object with some numbers of its header changed, and everything that binds them made anew."""
    length = _PREAMBLE.unpack_from(whole)[2]
    header = msgspec.msgpack.decode(whole[_PREAMBLE.size : _PREAMBLE.size + length])
    payload = whole[_PREAMBLE.size + length :]
    changed = random.sample(places(header), random.choice((1, 1, 2, 3)))
    for *way, last in sorted(changed, reverse=True):  # the inner ones first
        inner = header
        for index in way:
            inner = inner[index]
        many = [random.choice(NUMBERS)] * random.choice((0, 9, 3000))
        inner[last] = many if isinstance(inner[last], list) else random.choice(NUMBERS)
    layout, rows = header[LAYOUT], header[ROW_HASHES]
    size = layout[BLOCK_SIZE] if isinstance(layout, list) and len(layout) > BLOCK_SIZE else 1
    if isinstance(size, int) and size < 1 << 40 and isinstance(rows, bytes):
        header[NAME] = rows_key(header[0], header[1], msgspec.structs.replace(one.layout, block_size=size), rows).name
    return bound(header, payload)


def bound(header: list[Any], payload: bytes) -> tuple[ObjectKey, bytes]:
    """Return the object of this header with the right digest."""
    packed, key = msgspec.msgpack.encode(header), ObjectKey(header[0], header[1], header[NAME])
    lengths = len(packed), len(payload)
    digest = _CHECKSUMS.seal(_header_context(key, *lengths, packed), []).digest
    preamble = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, *lengths, _CHECKSUMS.mark, _NO_NONCE, digest)
    return key, preamble + packed + payload


def of_two_thousand_million_layers(layout: KVLayout) -> tuple[ObjectKey, bytes]:
    """Return an object of some hundred bytes whose layout is huge."""
    one, blobs = sample(layout), MemoryBlobs()
    one.write(blobs)
    whole = blobs.blobs[one.key.path]
    header = msgspec.msgpack.decode(whole[_PREAMBLE.size : _PREAMBLE.size + _PREAMBLE.unpack_from(whole)[2]])
    header[LAYOUT][NUM_LAYERS] = 2_000_000_000
    return bound(header, b"")


async def scanned(blobs: MemoryBlobs, one: Sample) -> StorageTier:
    calls = BlockingCalls("calls", 1)
    tier = StorageTier("disk", lambda: blobs, one.layout, calls, calls, time.monotonic, index=TierIndex())
    await tier.scan(one.key.identity)
    calls.close()
    return tier


def read_many(count: int) -> None:
    """Read so many in all ways. Fails where anything but damage is told, or a scan takes one for an object."""
    random = Random(count)
    for number in range(count):
        one = sample(random.choice(LAYOUTS), seed=number % 7)
        blobs = MemoryBlobs()
        one.write(blobs)
        whole = blobs.blobs[one.key.path]
        if number % 100:
            key, raw = hostile(random, one, whole)
        else:
            key, raw = of_two_thousand_million_layers(one.layout)
        blobs.blobs = {key.path: raw}
        with suppress(ObjectDamaged):
            verify_listed_object(blobs, key.path)
        with suppress(ObjectDamaged), open_object(blobs, key, one.layout):
            pass
        tier = asyncio.run(scanned(blobs, one))
        assert tier.stats().errors == 0
        assert tier.index is not None
        assert len(blobs.quarantined) + len(tier.index) <= 1


def scan_beside_a_huge_one() -> None:
    """Check that a scan puts an object of a huge layout aside, and goes on."""
    key, raw = of_two_thousand_million_layers(PLAIN)
    blobs, other = MemoryBlobs(), sample(seed=2)
    blobs.blobs[key.path] = raw
    other.write(blobs)
    tier = asyncio.run(scanned(blobs, other))
    assert tier.index is not None
    assert tier.index.object_names() == [other.key.name]
    assert blobs.quarantined == [key.path]
    assert tier.stats().quarantined == 1


def main(count: int) -> None:
    used = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    scan_beside_a_huge_one()
    read_many(count)


def run_limited(count: int) -> None:
    command = [sys.executable, "-m", "tests.kvtiers.storage.test_hostile_objects", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_header_takes_more_memory_than_an_object_has() -> None:
    run_limited(300)


def test_a_scan_puts_an_object_of_a_huge_layout_aside_and_goes_on() -> None:
    run_limited(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
