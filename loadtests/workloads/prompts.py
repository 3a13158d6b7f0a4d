"""Pieces of a prompt made into token ids or words. Equal pieces give equal tokens, so equal beginnings stay equal.

Raw numbers of PCG64 are drawn, not numpy's distributions: numpy promises the former alone to stay as they are.

Prompts of hashed blocks, as the traces with prefix hashes have them.
"""

import secrets
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from twostroke.loadtests.plan import Piece

FIRST_TOKEN_ID = 1000  # below lie bytes and, mostly, control tokens; of small vocabularies the first quarter is left
CACHED_PIECES = 2048  # shared pieces are asked for again and again; of 512 tokens each 8 MiB

# Short common words, each a token of its own with the space before it in the usual vocabularies, the bundled model's
# 4,096 among them.
_COMMON_WORDS = """
the of and to in a is that for it as was with be by on not he but at are this have from or an they which one
you were all there would their we been has when will no more if out so up what its about than into them can
only other time new some could these two may first then do any like now over such man me even most made after
also many must before through back where your way should because long each just those how make year still own
see work men day get here between both being under never same another know while last might us old off since
go right used take three use place found part once high every hand point number side left end field line word
name tree short open close keep start stop show run read write build find help need put set try want win wait
send call follow mean
"""
WORDS = tuple(_COMMON_WORDS.split())


def token_ids(pieces: Sequence[Piece], vocabulary: int) -> list[int]:
    """Return as many ids as the pieces have tokens, below `vocabulary`."""
    parts = [_ids(piece, vocabulary) for piece in pieces[:-1]]
    parts += [_ids.__wrapped__(own, vocabulary) for own in pieces[-1:]]  # not kept: it is mostly this prompt's alone
    return [number for part in parts for number in part.tolist()]


def text(pieces: Sequence[Piece]) -> str:
    """A word for each token: about as many tokens as planned, how many exactly is up to the server's vocabulary."""
    return " ".join([*(_words(piece) for piece in pieces[:-1]), *(_words.__wrapped__(own) for own in pieces[-1:])])


def random_text(tokens: int) -> str:
    """About `tokens` tokens of common words, others each time, so that no server has them cached."""
    return text((Piece(secrets.randbits(63), tokens),))


@lru_cache(CACHED_PIECES)
def _ids(piece: Piece, vocabulary: int) -> NDArray[np.int32]:
    first = min(FIRST_TOKEN_ID, vocabulary // 4)
    return (first + _numbers(piece) % (vocabulary - first)).astype(np.int32)


@lru_cache(CACHED_PIECES)
def _words(piece: Piece) -> str:
    return " ".join([WORDS[number] for number in (_numbers(piece) % len(WORDS)).tolist()])


def _numbers(piece: Piece) -> NDArray[np.int64]:
    return (np.random.PCG64(piece.seed).random_raw(piece.tokens) >> np.uint64(33)).astype(np.int64)


def block_pieces(blocks: Sequence[int], block_tokens: int, tokens: int, own_seed: int) -> tuple[Piece, ...]:
    """A prompt of `tokens` tokens that begins with the blocks of these seeds; the last may be cut short. What goes
    beyond the blocks is the prompt's own."""
    pieces = []
    left = tokens
    for seed in blocks:
        if not left:
            break
        pieces.append(Piece(seed, min(block_tokens, left)))
        left -= pieces[-1].tokens
    if left:
        pieces.append(Piece(own_seed, left))
    return tuple(pieces)
