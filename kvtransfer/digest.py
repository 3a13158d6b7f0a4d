"""Digests of chunks: xxh3-128 of the bytes on the wire, seeded with the chunk's seal.

The digest finds damage, not malice: who may send at all is settled by tickets and by the link's one-time token. xxhash
picks the widest vector instructions at run time; it reads faster than memory copies.
"""

import struct

import xxhash

from twostroke.protocol.messages import Chunk, encode_message
from twostroke.protocol.requests import Peer

DIGEST_BYTES = 16
_EPOCHS = struct.Struct("<QQ")


def chunk_seal(chunk: Chunk, source: Peer, target: Peer) -> int:
    """64 bits of everything that the chunk's message says, and of both epochs.

    So bytes of another chunk, attempt, layer, order, request or incarnation don't fit, however whole they are.
    """
    return int(xxhash.xxh3_64_intdigest(encode_message(chunk) + _EPOCHS.pack(source.epoch, target.epoch)))
