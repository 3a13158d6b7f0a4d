"""Sizes of layers that keep a state instead of keys and values, and where its numbers lie in a block. No torch here.

A state is a matrix for each head, and the last inputs of a short convolution over the layer's tokens. It lies in the
parts that a block of the KV cache has for each kind (keys, values) and KV head, as fp32 numbers: half of each matrix's
rows in either kind, then the inputs of some of the convolution's channels. The last number of the second kind's parts
is the number of tokens that the state has seen.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self


class StateSizes(ABC):
    """Sizes of the state of a layer, or of one rank's heads of it."""

    taps: int
    """Number of tokens that the convolution sees, the last one included."""
    products: ClassVar[int]
    """Number of times that a token multiplies each number of a matrix."""

    @property
    @abstractmethod
    def matrix(self) -> tuple[int, int, int]:
        """Heads, which KV heads share evenly, and rows, an even number, and columns of each head's matrix."""

    @property
    @abstractmethod
    def conv_width(self) -> int:
        """Number of channels of the convolution."""

    @property
    @abstractmethod
    def input_width(self) -> int:
        """Width of all that is projected of a token."""

    @property
    @abstractmethod
    def output_width(self) -> int:
        """Width of a token's result."""

    @abstractmethod
    def channels(self, kind: int, kv_head: int, kv_heads: int) -> list[int]:
        """Return the channels whose inputs lie in a KV head's part of the first or second kind, as many in each."""

    @abstractmethod
    def of_rank(self, ranks: int) -> Self:
        """Return the sizes of each of so many ranks, which KV heads share evenly."""

    def can_be_shared_by(self, ranks: int) -> bool:
        """Return True if ranks that KV heads share evenly can share the state."""
        return True

    def matrix_numbers_in(self, kv_heads: int) -> int:
        """Return the numbers of matrices in a part, which are its first ones."""
        heads, rows, columns = self.matrix
        return heads // kv_heads * (rows // 2) * columns

    def numbers_in(self, kind: int, kv_heads: int) -> int:
        """Return the numbers of one KV head's part of the first or the second kind."""
        channels = self.channels(kind, 0, kv_heads)
        return self.matrix_numbers_in(kv_heads) + (self.taps - 1) * len(channels) + kind


@dataclass(frozen=True)
class DeltaSizes(StateSizes):
    """Gated delta nets (Yang et al. 2024, "Gated Delta Networks"): a matrix [key, value] for each value head.

    Queries and keys of the convolution lie in parts of the first kind, values in the second's.
    """

    key_heads: int  # of queries, and of keys
    value_heads: int
    key: int  # of a head's queries and keys
    value: int  # of a head
    taps: int

    products = 3

    @property
    def matrix(self) -> tuple[int, int, int]:
        return self.value_heads, self.key, self.value

    @property
    def key_width(self) -> int:
        """Width of a token's queries, and of its keys."""
        return self.key_heads * self.key

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value

    @property
    def conv_width(self) -> int:
        """Width of what the convolution takes: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def input_width(self) -> int:
        return self.conv_width + self.value_width + 2 * self.value_heads

    @property
    def output_width(self) -> int:
        return self.value_width

    def channels(self, kind: int, kv_head: int, kv_heads: int) -> list[int]:
        if kind:
            return [2 * self.key_width + place for place in _share(self.value_width, kv_head, kv_heads)]
        keys = _share(self.key_width, kv_head, kv_heads)
        return [first + place for first in (0, self.key_width) for place in keys]

    def of_rank(self, ranks: int) -> "DeltaSizes":
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)


@dataclass(frozen=True)
class MambaSizes(StateSizes):
    """Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): a matrix [head, state] for each head.

    A group of heads shares B and C, which are of the state's size. The convolution takes x of all heads, then B and C
    of all groups: x lies in parts of the first kind; B and C in the second's, those of a group in the parts of all KV
    heads that have heads of it.
    """

    heads: int
    head: int  # of a head's x
    state: int  # of a group's B and C
    groups: int
    taps: int

    products = 2

    @property
    def matrix(self) -> tuple[int, int, int]:
        return self.heads, self.head, self.state

    @property
    def output_width(self) -> int:
        return self.heads * self.head

    @property
    def group_width(self) -> int:
        """Width of all groups' B, and of their C."""
        return self.groups * self.state

    @property
    def conv_width(self) -> int:
        return self.output_width + 2 * self.group_width

    @property
    def input_width(self) -> int:
        return self.output_width + self.conv_width + self.heads

    def channels(self, kind: int, kv_head: int, kv_heads: int) -> list[int]:
        if kind == 0:
            return list(_share(self.output_width, kv_head, kv_heads))
        groups = self.groups_of(kv_head, kv_heads)
        places = range(groups.start * self.state, groups.stop * self.state)
        return [
            first + place for first in (self.output_width, self.output_width + self.group_width) for place in places
        ]

    def groups_of(self, kv_head: int, kv_heads: int) -> range:
        """Return the groups of one KV head's heads."""
        first = kv_head * self.groups // kv_heads
        return range(first, first + max(1, self.groups // kv_heads))

    def of_rank(self, ranks: int) -> "MambaSizes":
        return replace(self, heads=self.heads // ranks, groups=max(1, self.groups // ranks))

    def can_be_shared_by(self, ranks: int) -> bool:
        return self.groups % ranks == 0 or ranks % self.groups == 0


@dataclass(frozen=True)
class ConvolutionSizes(StateSizes):
    """Gated short convolutions (LFM2): the last inputs alone, half of a KV head's channels in either kind."""

    channel_count: int
    taps: int

    products = 0

    @property
    def matrix(self) -> tuple[int, int, int]:
        return 0, 0, 0

    @property
    def conv_width(self) -> int:
        return self.channel_count

    @property
    def input_width(self) -> int:
        return 3 * self.channel_count

    @property
    def output_width(self) -> int:
        return self.channel_count

    def channels(self, kind: int, kv_head: int, kv_heads: int) -> list[int]:
        return list(_share(self.channel_count, 2 * kv_head + kind, 2 * kv_heads))

    def of_rank(self, ranks: int) -> "ConvolutionSizes":
        return replace(self, channel_count=self.channel_count // ranks)


def _share(length: int, index: int, count: int) -> range:
    """Return one of `count` equal shares of so many neighbours."""
    return range(index * length // count, (index + 1) * length // count)
