"""The division of a model among an engine's ranks: the one place that knows the parallel settings. No torch here.

An engine has stages x tensor-parallel ranks. Rank r is shard r % tensor_ranks of stage r // tensor_ranks. Settings make
one ParallelForm; everybody else asks it, or is handed a rank's Shard and Stage.
"""

from dataclasses import dataclass

from twostroke.protocol.kv_layout import RankCut, stage_layers


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of the layers that a rank holds."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage."""
        return stage_layers(num_layers, self.count, self.index)


ONLY_STAGE = Stage()


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of each layer's weights that a rank holds."""

    rank: int = 0
    size: int = 1
    has_whole_experts: bool = False  # a part of a layer's experts, and not a part of each

    def part(self, length: int) -> slice:
        """Return this rank's equal part of `length` rows or columns, which `check_size` has found to be divisible."""
        step = length // self.size
        return slice(self.rank * step, (self.rank + 1) * step)

    def experts(self, number: int) -> slice:
        """Return the experts that this rank has, whole or in part. Numbers of whole experts differ by at most one among
        ranks."""
        if not self.has_whole_experts:
            return slice(0, number)
        return slice(self.rank * number // self.size, (self.rank + 1) * number // self.size)

    def inside_experts(self, size: int) -> slice:
        """The features between projections that it holds of each of them."""
        return slice(0, size) if self.has_whole_experts else self.part(size)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """The KV heads of this rank; ranks beyond their number hold copies. As `KVLayout.first_head`."""
        first = self.rank * num_kv_heads // self.size
        return slice(first, first + max(1, num_kv_heads // self.size))

    def vocabulary(self, vocab_size: int) -> slice:
        """Return this rank's tokens; all parts have one size but the last, which may be shorter or empty."""
        step = -(-vocab_size // self.size)
        return slice(min(self.rank * step, vocab_size), min((self.rank + 1) * step, vocab_size))

    def vocabulary_size(self, vocab_size: int) -> int:
        """Return the number of this rank's tokens."""
        part = self.vocabulary(vocab_size)
        return int(part.stop - part.start)


WHOLE_MODEL = Shard()


def of_heads(heads: slice, width: int) -> slice:
    """Return the rows, or columns, of these heads, each of which has `width`."""
    return slice(heads.start * width, heads.stop * width)


def shifted(rows: slice, first: int) -> slice:
    """Return rows that begin behind `first` others."""
    return slice(first + rows.start, first + rows.stop)


@dataclass(frozen=True)
class ParallelForm:
    """Division of a model among the ranks of one engine."""

    tensor_ranks: int = 1
    """Ranks that share each stage."""
    stages: int = 1
    """Stages that share the layers."""
    has_whole_experts: bool = False
    """Each rank of a stage has some experts whole, instead of a part of each."""
    shares_contexts: bool = False
    """Each rank of a stage has its part of the cached tokens of each block, instead of all of them."""
    spare_experts: int = 0
    """Slots of each rank, in each layer, for copies of other ranks' experts."""

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages together."""
        return self.tensor_ranks * self.stages

    @property
    def context_ranks(self) -> int:
        """Ranks that share the tokens of each block, as KVLayout.context_ranks."""
        return self.tensor_ranks if self.shares_contexts else 1

    @property
    def has_stages(self) -> bool:
        return self.stages > 1

    @property
    def cut(self) -> RankCut:
        """The division of the KV cache among the ranks."""
        return RankCut(self.num_ranks, self.stages, self.context_ranks)

    def most_peers(self, other: "ParallelForm") -> int:
        """Return the most ranks of a worker of form `other` that any one rank here has KV in common with."""
        if other.stages % self.stages == 0:
            stages = other.stages // self.stages
        else:
            stages = 1 if self.stages % other.stages == 0 else other.stages // self.stages + 2
        if self.shares_contexts != other.shares_contexts:
            return stages * other.tensor_ranks
        return stages * max(1, other.tensor_ranks // self.tensor_ranks)

    def place(self, rank: int) -> tuple[Stage, Shard]:
        """Return what `rank` holds: its part of the layers, and its part of each of them."""
        stage, index = divmod(rank, self.tensor_ranks)
        return Stage(stage, self.stages), Shard(index, self.tensor_ranks, self.has_whole_experts)


ONE_RANK = ParallelForm()
