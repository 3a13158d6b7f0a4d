"""What the ranks of one engine do together: Megatron's scheme (Shoeybi et al. 2019).

Queries, keys, values, gate and up are cut by output rows, attention's output and down by input columns: a layer needs
one sum over the ranks after its attention and one after its MLP. Embedding and LM head are cut by the vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from twostroke.model.config import ModelConfig
from twostroke.protocol.errors import ConfigError

SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the weights a rank holds."""

    rank: int = 0
    size: int = 1

    def part(self, length: int) -> slice:
        """This rank's equal part of `length` rows or columns. Raises ValueError where they can't be shared evenly."""
        if length % self.size:
            raise ValueError(f"{length} can't be shared evenly by {self.size} tensor-parallel ranks")
        step = length // self.size
        return slice(self.rank * step, (self.rank + 1) * step)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """The KV heads of this rank; ranks beyond their number hold copies. As `KVLayout.first_head`."""
        first = self.rank * num_kv_heads // self.size
        return slice(first, first + max(1, num_kv_heads // self.size))

    def vocabulary(self, vocab_size: int) -> slice:
        """This rank's tokens; all parts have one size but the last, which may be shorter or empty."""
        step = -(-vocab_size // self.size)
        return slice(min(self.rank * step, vocab_size), min((self.rank + 1) * step, vocab_size))


WHOLE_MODEL = Shard()


class TensorParallel(Protocol):
    """The collectives of a step, called by all ranks in one order on their engines' threads."""

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks; may be written into x."""

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Each rank's part [N, its vocabulary] -> [N, vocab_size], whole at least on rank 0, which alone draws."""

    def exchange(self, word: str) -> list[str]:
        """Every rank's word, in their order: for what they have to agree on before they step."""

    def leave(self) -> None:
        """End the group, though others may wait in it. No step runs after this."""


class SingleRank:
    """Implements TensorParallel for an engine of one rank."""

    shard = WHOLE_MODEL

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        return logits

    def exchange(self, word: str) -> list[str]:
        return [word]

    def leave(self) -> None:
        """There is no group."""


def check_size(config: ModelConfig, size: int) -> None:
    """Raises ConfigError with both numbers where `size` ranks can't share the model."""
    if size not in SIZES:
        raise ConfigError(f"tensor_parallel: {size} is none of {', '.join(map(str, SIZES))}")
    fault = None
    if config.num_heads % size:
        fault = f"its {config.num_heads} attention heads"
    elif max(size, config.num_kv_heads) % min(size, config.num_kv_heads):
        fault = f"its {config.num_kv_heads} KV heads"
    elif config.intermediate_size % size:
        fault = f"its MLP's {config.intermediate_size} features"
    elif Shard(size - 1, size).vocabulary(config.vocab_size).start >= config.vocab_size:
        fault = f"its {config.vocab_size} tokens"
    if fault is not None:
        raise ConfigError(f"tensor_parallel: {size} ranks can't share the model evenly, for {fault}: use fewer ranks")
