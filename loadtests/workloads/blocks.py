"""Prompts of hashed blocks, as the traces with prefix hashes have them."""

from collections.abc import Sequence

from twostroke.loadtests.schedule import Piece


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
