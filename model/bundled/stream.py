"""The order in which training reads the corpus: every document once an epoch, shuffled, packed without padding."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor


class TokenStream:
    """An endless stream of documents, a pure function of (documents, seed, position): resuming needs the position."""

    def __init__(self, documents: Sequence[Sequence[int]], seed: int, position: int = 0) -> None:
        self.documents = documents
        self.seed = seed
        self.position = position  # tokens read so far
        self.epoch_tokens = sum(map(len, documents))
        self._epoch = -1
        self._tokens = torch.empty(0, dtype=torch.int32)

    def batch(self, rows: int, length: int) -> Tensor:
        """The next rows x length tokens as int64 [rows, length + 1]; the last column is the next row's first token.

        Advances the position. Near an epoch's end, the few tokens that do not fill a batch are passed over.
        """
        needed = rows * length + 1
        if needed > self.epoch_tokens:
            raise ValueError(f"a batch of {needed} tokens is larger than the corpus of {self.epoch_tokens}")
        if self.epoch_tokens - self.position % self.epoch_tokens < needed:
            self.position += self.epoch_tokens - self.position % self.epoch_tokens
        epoch, offset = divmod(self.position, self.epoch_tokens)
        if epoch != self._epoch:
            order = list(range(len(self.documents)))
            random.Random(self.seed * 1_000_003 + epoch).shuffle(order)
            flat = [token for index in order for token in self.documents[index]]
            self._tokens, self._epoch = torch.tensor(flat, dtype=torch.int32), epoch
        window = self._tokens[offset : offset + needed].long()
        self.position += rows * length
        return torch.stack([window[row * length : (row + 1) * length + 1] for row in range(rows)])
