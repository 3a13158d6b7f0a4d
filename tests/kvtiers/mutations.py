"""Mutated objects, none of which may be accepted: `python -m tests.kvtiers.mutations 100000`.

`make test` tries 5,000. A read counts as accepted if it returns, unless the mutation has changed no byte.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from unittest.mock import patch

from tests.kvtiers.rig import LAYOUTS, MemoryBlobs, Sample, sample
from twostroke.kvtiers.objects import _CHECKSUMS, _PREAMBLE, ObjectCipher, ObjectDamaged

Stored = tuple[Sample, bytes]
Mutation = Callable[[Random, Stored, Stored], bytes]


def parts_of(blob: bytes) -> tuple[bytes, bytes, bytes]:
    """Return preamble, header and sections."""
    header_bytes = _PREAMBLE.unpack_from(blob)[2]
    end = _PREAMBLE.size + header_bytes
    return blob[: _PREAMBLE.size], blob[_PREAMBLE.size : end], blob[end:]


def flip_bits(random: Random, one: Stored, other: Stored) -> bytes:
    blob = bytearray(one[1])
    for _ in range(random.choice((1, 1, 1, 2, 9))):
        bit = random.randrange(8 * len(blob))
        blob[bit // 8] ^= 1 << bit % 8
    return bytes(blob)


def flip_a_bit_of_the_head(random: Random, one: Stored, other: Stored) -> bytes:
    blob = bytearray(one[1])
    bit = random.randrange(8 * (_PREAMBLE.size + 200))
    blob[bit // 8] ^= 1 << bit % 8
    return bytes(blob)


def truncate(random: Random, one: Stored, other: Stored) -> bytes:
    return one[1][: random.randrange(len(one[1]))]


def extend(random: Random, one: Stored, other: Stored) -> bytes:
    return one[1] + random.choice((b"\0", random.randbytes(random.randrange(1, 99)), one[1]))


def zero_a_part(random: Random, one: Stored, other: Stored) -> bytes:
    """Zero some 64 bytes or all to the end, as a page that never came to the disk."""
    blob = bytearray(one[1])
    first = random.randrange(len(blob) - 64)
    last = random.choice((first + 64, len(blob)))
    blob[first:last] = bytes(last - first)
    return bytes(blob)


def swap_whole(random: Random, one: Stored, other: Stored) -> bytes:
    return other[1]


def swap_sections(random: Random, one: Stored, other: Stored) -> bytes:
    """Join the head of one with the sections of another of the same sizes."""
    preamble, header, _ = parts_of(one[1])
    return preamble + header + parts_of(other[1])[2]


def swap_headers(random: Random, one: Stored, other: Stored) -> bytes:
    preamble, header, _ = parts_of(one[1])
    theirs = parts_of(other[1])
    return random.choice((theirs[0] + header, preamble + theirs[1], theirs[0] + theirs[1])) + parts_of(one[1])[2]


def swap_pieces(random: Random, one: Stored, other: Stored) -> bytes:
    """Swap two pieces of its own sections."""
    preamble, header, sections = parts_of(one[1])
    middle = len(sections) // 2
    return preamble + header + sections[middle : 2 * middle] + sections[:middle] + sections[2 * middle :]


def splice(random: Random, one: Stored, other: Stored) -> bytes:
    """Join the beginning of one with the end of another, as of a file that two writers had open."""
    cut = random.randrange(len(one[1]))
    return one[1][:cut] + other[1][cut:]


def change_version(random: Random, one: Stored, other: Stored) -> bytes:
    version = random.choice((0, 2, 3, 1 << 31))
    return one[1][:8] + version.to_bytes(4, "little") + one[1][12:]


def fill(random: Random, one: Stored, other: Stored) -> bytes:
    return random.choice((b"", bytes(len(one[1])), random.randbytes(len(one[1])), b"\xff" * len(one[1])))


MUTATIONS: list[Mutation] = [
    *(flip_bits, flip_a_bit_of_the_head, truncate, extend, zero_a_part, swap_whole, swap_sections, swap_headers),
    *(swap_pieces, splice, change_version, fill),
]


class Mutations:
    """Pairs of whole objects, and what is made of them."""

    def __init__(self, seed: int):
        self._random = Random(seed)
        self.ciphers = [None, ObjectCipher(bytes(range(32)))]
        self.tried: Counter[str] = Counter()
        self._pairs: dict[ObjectCipher | None, list[tuple[Stored, Stored]]] = {}
        for cipher in self.ciphers:
            self._pairs[cipher] = []
            for layout in LAYOUTS:
                blobs = MemoryBlobs()
                # Of another prompt, another tenant, and of another place in a prompt.
                one = sample(layout, seed)
                others = [sample(layout, seed + 1), sample(layout, seed, client=b"other")]
                others.append(sample(layout, seed, first_row=0, num_rows=3))
                for each in (one, *others):
                    each.write(blobs, cipher)
                stored = {each.key: (each, blobs.blobs[each.key.path]) for each in (one, *others)}
                self._pairs[cipher] += [(stored[one.key], stored[other.key]) for other in others]

    def run(self, count: int) -> list[str]:
        """Read so many mutated objects; returns what was accepted."""
        return [name for cipher in self.ciphers for name in self._try(cipher, count // len(self.ciphers))]

    def accepted_without_digests(self, cipher: ObjectCipher | None, count: int) -> list[str]:
        """Return what a reader would accept that trusts every digest."""
        seal = cipher or _CHECKSUMS
        with patch.object(type(seal), "opens", lambda *_: True):
            return self._try(cipher, count)

    def _try(self, cipher: ObjectCipher | None, count: int) -> list[str]:
        accepted = []
        blobs = MemoryBlobs()
        end = self.tried.total() + count
        while self.tried.total() < end:
            one, other = self._random.choice(self._pairs[cipher])
            mutation = self._random.choice(MUTATIONS)
            mutated = mutation(self._random, one, other)
            if mutated == one[1]:
                continue
            self.tried[mutation.__name__] += 1
            blobs.blobs[one[0].key.path] = mutated
            try:
                one[0].read(blobs, cipher)
            except ObjectDamaged:
                continue
            accepted.append(f"{mutation.__name__} of {one[0].layout.model}")
        return accepted


def main(count: int) -> int:
    """Try so many, print how it went, and return 1 if one was accepted."""
    began = time.monotonic()
    mutations = Mutations(seed=count)
    accepted = mutations.run(count)
    for name, tried in sorted(mutations.tried.items()):
        print(f"{tried:8} {name}")
    print(f"{len(accepted)} of {mutations.tried.total()} accepted, {time.monotonic() - began:.1f} s")
    print("\n".join(accepted[:20]), end="")
    return bool(accepted)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
