"""Sizes of attention to latents, and of the index that chooses among them. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexSizes:
    """Indexed attention (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1), in numbers a token.

    Small heads score the tokens before a query, and the query attends to those with the highest scores. A token's key,
    which these heads share, is cached behind its latent; of it as much turns as of the attention's own keys.
    """

    heads: int
    key: int  # of a head's queries, and of the key
    top_k: int  # tokens that a query attends to
    sharing: frozenset[int] = frozenset()  # layers without an index, which attend to what the layer before them does


@dataclass(frozen=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1), in numbers a token.

    A token's latent is what the keys and values of all heads are made of. It is cached with the part of the keys that
    turns, which all heads share: one row of `rank + rotary`, and behind them the index's key where there is one.
    """

    rank: int  # of the latent
    rotary: int  # of a head's queries and keys, the part that turns
    key: int  # of a head's queries and keys, the part that does not
    value: int  # of a head
    query_rank: int = 0  # of the queries' own latent, which is not cached; 0: they are made of the layer's input
    index: IndexSizes | None = None  # None: queries attend to all tokens

    @property
    def query(self) -> int:
        """Width of a head's queries as they are projected; the rotated part is the last."""
        return self.key + self.rotary

    @property
    def attended(self) -> int:
        """Width of the part of a cached row that attention reads."""
        return self.rank + self.rotary

    @property
    def row(self) -> int:
        """Width of a cached row."""
        return self.attended + (0 if self.index is None else self.index.key)
