"""How often each token occurs in a request, kept up to date token by token: what penalties are made of. No torch.

Counting a long history anew for each drawn token would cost more than the step's sampling does.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twostroke.protocol.requests import SamplingParams


def is_penalised(sampling: SamplingParams) -> bool:
    """Whether draws depend on what occurred before."""
    return bool(
        sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    )


class TokenCounts:
    """The distinct tokens of `token_ids`, of which the first `num_prompt_tokens` are the prompt; grows by `append`."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int):
        tokens = np.array(token_ids, np.int64)
        self._ids, places = np.unique(tokens, return_inverse=True)
        self._output_counts = np.bincount(places[num_prompt_tokens:], minlength=len(self._ids)).astype(np.int64)
        self._num_ids = len(self._ids)  # the arrays may be longer
        self._place = {token_id: place for place, token_id in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        """Each token of prompt and output once, in no particular order. A view: only good until the next `append`."""
        return self._ids[: self._num_ids]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """How often each of `ids` occurs among the output tokens. A view: only good until the next `append`."""
        return self._output_counts[: self._num_ids]

    def append(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._num_ids
            if place == len(self._ids):
                room = np.zeros(max(64, place), np.int64)
                self._ids = np.concatenate((self._ids, room))
                self._output_counts = np.concatenate((self._output_counts, room))
            self._ids[place] = token_id
            self._num_ids += 1
        self._output_counts[place] += 1
