"""Seeds that follow from a plan's own, the same in every process and on every machine."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """63 bits; other parts, other bits."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
