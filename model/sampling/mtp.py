"""The MTP head's part of a step: once tokens are drawn, the head says which ones it expects behind them.

The head is one more layer over the hidden states, whose input at a position is the hidden state there and the next
token's embedding (DeepSeek-AI 2024, section 2.2). So it runs behind the draw, over all tokens of the step, and its keys
and values lie in the cache as those of any layer. The last token of a prompt's chunk does not know the next one: there
it is given its own. That makes one position in hundreds a little worse, and drafts never decide about tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from twostroke.model.architectures.decoder import Decoder
from twostroke.model.batch import StepInput
from twostroke.model.cache.layer_announcer import LaunchedStep, LaunchedWork
from twostroke.model.parallel.tensor_parallel import TensorParallel
from twostroke.model.sampling.sampler import largest_of_ranks
from twostroke.model.step import MtpDrafts, OnLayer, SequenceStep
from twostroke.protocol.requests import SampledToken


class MtpHead:
    """The MTP head of one rank's decoder."""

    def __init__(self, decoder: Decoder, parallel: TensorParallel):
        self._decoder = decoder
        self._parallel = parallel

    def logits_of_step(
        self, step: StepInput, hidden: Tensor, last_rows: Tensor, drawn: Tensor, *, on_layer: OnLayer | None
    ) -> Tensor | None:
        """Return Decoder.mtp_logits of a step that has run eagerly, and left `hidden` [T, hidden].

        `last_rows` int64 [B] are those of each sequence's last token; `drawn` int64 [N] the tokens that were drawn.
        """
        following = torch.cat((step.token_ids[1:], step.token_ids[-1:]))
        following[last_rows] = step.token_ids[last_rows]
        following[step.drawing.rows] = drawn
        return self._decoder.mtp_logits(replace(step, token_ids=following, on_hidden=None), hidden, on_layer)

    def expected(self, logits: Tensor) -> Tensor | None:
        """Return the tokens int64 [N] that the head's logits, this rank's part, expect; None on other ranks than 0."""
        if self._parallel.shard.size == 1:
            return logits.argmax(1)
        found = largest_of_ranks(logits, self._decoder.vocab_size, self._parallel)
        return None if found is None else found[0]


@dataclass(frozen=True)
class NotedStep(LaunchedStep):
    """A step on a GPU whose drafts are noted once they are known."""

    step: LaunchedStep
    notes: Sequence["_Note"]
    expected: Tensor  # int64 [N], in pinned memory
    computed: LaunchedWork
    is_done: ClassVar[bool] = False

    def result(self) -> list[SampledToken | None]:
        found = self.step.result()
        self.computed.synchronize()
        _note(self.notes, self.expected)
        return found

    def peek(self) -> list[SampledToken | None]:
        return self.step.peek()

    def on_device(self) -> Tensor | None:
        return self.step.on_device()


def noted_step(step: LaunchedStep, drawing: Sequence[SequenceStep], expected: Tensor) -> LaunchedStep:
    """Return the step with `expected` int64 [N], the head's drafts, noted for the requests that drew."""
    notes = [
        _Note(row, one.draw.mtp, one.start + len(one.token_ids) + 1)
        for row, one in enumerate(drawing)
        if one.draw is not None and one.draw.mtp is not None
    ]
    if not notes:
        return step
    if expected.device.type != "cuda":
        _note(notes, expected)
        return step
    host = torch.empty(expected.shape, dtype=torch.int64, pin_memory=True)
    host.copy_(expected, non_blocking=True)
    return NotedStep(step.tokens, step, notes, host, LaunchedWork(expected.device))


@dataclass(frozen=True)
class _Note:
    """A draft to be noted for a request."""

    row: int  # of the step's drafts
    drafts: MtpDrafts
    position: int


def _note(notes: Sequence[_Note], expected: Tensor) -> None:
    token_ids = expected.tolist()
    for note in notes:
        note.drafts.note(note.position, token_ids[note.row])
