"""The step from a batch of SequenceSteps to drawn tokens: tensors, decoder, sampler, results in the caller's order.

A step that was launched may still be on its way: its tokens are on a GPU then, where the next step can use them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.model.architectures.decoder import Decoder
from twostroke.model.batch import (
    CheckedTables,
    Drawing,
    StepDecoder,
    StepInput,
    check_batch,
    make_layouts,
    place,
    take_drawn,
)
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.cache.layer_announcer import (
    AnnouncedStep,
    LaunchedStep,
    LaunchedWork,
    SilentStep,
    StepOnDevice,
    layer_announcer,
)
from twostroke.model.cache.swap_space import SwapSpace
from twostroke.model.captured_steps import ALL_EAGER, StepReplays
from twostroke.model.parallel.experts import ExpertHits, ExpertSlots
from twostroke.model.parallel.pipeline import PipelinedSteps
from twostroke.model.parallel.tensor_parallel import SingleRank, TensorParallel
from twostroke.model.sampling.mtp import MtpHead, noted_step
from twostroke.model.sampling.sampler import gather_logits, largest_of_ranks
from twostroke.model.sampling.token_masks import MaskFiller, TokenMasks
from twostroke.model.step import (
    BlockCopy,
    Draw,
    OnLayer,
    PromptScorer,
    ScoredRows,
    SequenceStep,
    with_drawn_tokens,
)
from twostroke.protocol.messages import ArrangeExperts
from twostroke.protocol.requests import SampledToken

if TYPE_CHECKING:  # Triton is imported only where there is a GPU
    from twostroke.model.cuda.sampler import DrawnTokens


class TokenSampler(Protocol):
    """Interface of `model/sampling/sampler.py` that the runner needs."""

    def sample(
        self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], masks: TokenMasks | None = None
    ) -> list[SampledToken]:
        """logits fp32 [N, vocab]; `positions` are the absolute positions of the drawn tokens."""

    def score(self, logits: Tensor, targets: NDArray[np.int64], num_alternatives: int) -> ScoredRows:
        """Return the log-probabilities of the tokens `targets` [N] under logits fp32 [N, vocab], which may be
        modified."""

    def take(self, drawn: Tensor, draws: Sequence[Draw]) -> "list[SampledToken] | DrawnTokens":
        """int64 [2, N]: tokens that were drawn without it, and whether their rows were broken."""

    @property
    def num_broken_rows(self) -> int:
        """Counter: rows that held NaN or +inf."""


MAX_SCORED_ROWS = 256
_SCORED_BYTES = 64 << 20
"""Bytes of prompt tokens' logits in memory at a time."""


@runtime_checkable
class LaunchingSampler(Protocol):
    """A sampler that need not be waited for: model/cuda/sampler.py."""

    def launch(
        self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], masks: TokenMasks | None = None
    ) -> "DrawnTokens":
        """Draw one token for each row, without log-probabilities."""


class NoExtras:
    """Stands in for each part of RankExtras that a rank lacks: nothing is counted, and orders are refused."""

    def copy(self, copy: BlockCopy | None = None) -> None:
        if copy is not None:
            raise ValueError("blocks are to be copied, and there is no swap space")

    def arrange(self, order: ArrangeExperts) -> None:
        raise ValueError("experts are to be copied, and there are no slots for copies")


LACKING = NoExtras()


@dataclass(frozen=True)
class RankExtras:
    """Parts that a rank may have beside its decoder and cache."""

    swap_space: SwapSpace | NoExtras = LACKING
    expert_hits: ExpertHits | NoExtras = LACKING
    expert_slots: ExpertSlots | NoExtras = LACKING


NO_EXTRAS = RankExtras()


class ModelRunner:
    """Runs one step at a time, on whatever thread calls it."""

    def __init__(
        self,
        decoder: StepDecoder,
        sampler: TokenSampler | None,
        kv_cache: KVCache,
        max_context: int,
        replays: StepReplays = ALL_EAGER,
        extras: RankExtras = NO_EXTRAS,
        parallel: TensorParallel | None = None,
    ):
        """`sampler` is rank 0's, which alone draws: None on all other ranks of `parallel`, which are the decoder's.

        `replays` and `extras` belong to the same decoder and cache.
        """
        self._decoder = decoder
        self._sampler = sampler
        self._kv_cache = kv_cache
        self._max_context = max_context
        self._replays = replays
        self._extras = extras
        self._parallel = SingleRank() if parallel is None else parallel
        self._pipeline: PipelinedSteps | None = None
        if self._parallel.link is not None:
            if not isinstance(decoder, Decoder):
                raise ValueError("only a decoder of ours can be one of several stages")
            self._pipeline = PipelinedSteps(decoder, kv_cache, self._parallel.link)
        self._masks = MaskFiller(decoder.vocab_size)
        self._tables = CheckedTables()
        self._device = kv_cache.tensors[0].device
        self._announcer = layer_announcer(self._device)
        self._mtp: MtpHead | None = None
        if isinstance(decoder, Decoder) and decoder.has_mtp:
            self._mtp = MtpHead(decoder, self._parallel)
        self.groups = kv_cache.groups  # of layers: block tables have a block for each in a row

    @property
    def num_broken_rows(self) -> int:
        """Number of rows of logits so far that held NaN or +inf. Only rank 0 has whole rows."""
        return 0 if self._sampler is None else self._sampler.num_broken_rows

    def run(self, batch: Sequence[SequenceStep], on_layer: OnLayer | None = None) -> list[SampledToken | None]:
        """Run a step as `Engine.step`. Raises ValueError as `check_batch` does."""
        return self.launch(batch, on_layer).result()

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Make the copies, one after the other. Raises ValueError where there is no swap space."""
        for copy in copies:
            self._extras.swap_space.copy(copy)

    @torch.inference_mode()
    def arrange_experts(self, order: ArrangeExperts) -> None:
        """Change which copies of experts the next step uses, and move weights, with all ranks. Raises ValueError where
        there are no slots for copies."""
        self._extras.expert_slots.arrange(order)

    def close(self) -> None:
        """End the runner's threads; its steps have ended."""
        if self._announcer is not None:
            self._announcer.close()

    def launch(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        earlier: LaunchedStep | None = None,
    ) -> LaunchedStep:
        """Begin a step after `earlier`, the one before it. Raises ValueError as `check_batch` does.

        Where the sampler need not be waited for and no log-probabilities are asked for, the step may still be under way
        on the device when this returns, and layers may still be announced.
        """
        if on_layer is None or self._announcer is None:
            return self._launch(batch, on_layer, earlier)
        announcements = self._announcer.step(on_layer)
        step = self._launch(batch, announcements.announce, earlier)
        return AnnouncedStep(step.tokens, step, announcements)

    @torch.inference_mode()
    def _launch(
        self, batch: Sequence[SequenceStep], on_layer: OnLayer | None, earlier: LaunchedStep | None
    ) -> LaunchedStep:
        self._extras.expert_hits.copy()
        # Only the stage with the embedding needs tokens.
        follows = self._parallel.stage.is_first and any(step.follows is not None for step in batch)
        drawn = None
        if follows and self._parallel.shard.size > 1:
            if earlier is None:
                raise ValueError("a step follows one that is not there")
            drawn = self._drawn_tokens(earlier)
        elif follows and earlier is not None:
            drawn = earlier.on_device()
        if follows and drawn is None:
            batch = with_drawn_tokens(batch, () if earlier is None else earlier.peek())
        cache = self._kv_cache
        check_batch(batch, cache.block_size, cache.num_blocks, self._max_context, self.groups, self._tables)
        if copied := [step for step in batch if step.copied_from is not None]:
            targets = [step.block_ids[step.start // cache.block_size] for step in copied]
            cache.copy_blocks([step.copied_from for step in copied if step.copied_from is not None], targets)
        if on_layer is None and all(step.scorer is None for step in batch):
            draws = [step.draw for step in batch if step.draw is not None and len(step.token_ids) == 1]
            if len(draws) == len(batch) and (logits := self._replays.decodes.logits(batch, drawn)) is not None:
                entries = list(range(len(batch)))
                step = self._sample(logits, batch, entries, earlier)
                return self._with_mtp(step, batch, entries, self._replays.decodes.mtp_logits)
        return self._run_with_prompts(batch, on_layer, drawn, earlier)

    def _run_with_prompts(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None,
        drawn: Tensor | None,
        earlier: LaunchedStep | None,
    ) -> LaunchedStep:
        """Run a step that is no captured decode step: by a graph of prompts where one fits, else eagerly."""
        order = sorted(range(len(batch)), key=lambda i: len(batch[i].token_ids) != 1)  # stable: decodes first
        steps = [batch[i] for i in order]
        if self._pipeline is not None:
            return self._run_over_stages(self._pipeline, batch, steps, order, on_layer, drawn, earlier)
        drawing = [i for i, step in enumerate(steps) if step.draw is not None]
        if all(step.scorer is None for step in steps):
            logits = self._replays.prompts.logits(steps, drawing, drawn)
            if logits is not None:
                self._announce_all(on_layer)  # their KV is written once the whole graph has run
                return self._sample(logits, batch, [order[i] for i in drawing], earlier)
        last_rows = np.cumsum([len(step.token_ids) for step in steps]) - 1
        hidden: list[Tensor] = []
        score_all = self._scoring(steps)

        def on_hidden(found: Tensor) -> None:
            hidden.append(found)
            if score_all is not None:
                score_all(found)

        found = StepInput(
            self._token_ids(steps, drawn),
            make_layouts(steps, self._kv_cache.block_size, self._device, self.groups, self._kv_cache.local_tokens),
            self._kv_cache.tensors,
            Drawing(place(last_rows[drawing], self._device), place(np.array(drawing, np.int64), self._device)),
            score_all if self._mtp is None else on_hidden,
        )
        logits, entries = self._decoder.forward(found, on_layer), [order[i] for i in drawing]
        step = self._silent(len(batch)) if logits is None else self._sample(logits, batch, entries, earlier)
        if self._mtp is None:
            return step
        ends = place(last_rows, self._device)
        return self._with_mtp(
            step, batch, entries, partial(self._mtp.logits_of_step, found, hidden[0], ends, on_layer=on_layer)
        )

    def _with_mtp(
        self,
        step: LaunchedStep,
        batch: Sequence[SequenceStep],
        entries: Sequence[int],
        logits_behind: Callable[[Tensor], Tensor | None],
    ) -> LaunchedStep:
        """Run the MTP head, if there is one, behind a step in which `entries` of the batch drew, and have its drafts
        noted. `logits_behind` takes their tokens int64 [N] and returns the head's logits."""
        if self._mtp is None:
            return step
        drawn = torch.empty(0, dtype=torch.int64, device=self._device)
        if entries:
            drawn = self._drawn_tokens(step)
            if list(entries) != list(range(len(batch))):
                drawn = drawn.index_select(0, place(np.array(entries, np.int64), self._device))
        logits = logits_behind(drawn)
        expected = None if logits is None else self._mtp.expected(logits)
        if expected is None:
            return self._silent(len(batch))  # all work so far, the head's, too
        return noted_step(step, [batch[entry] for entry in entries], expected)

    def _run_over_stages(
        self,
        pipeline: PipelinedSteps,
        batch: Sequence[SequenceStep],
        steps: Sequence[SequenceStep],
        order: Sequence[int],
        on_layer: OnLayer | None,
        drawn: Tensor | None,
        earlier: LaunchedStep | None,
    ) -> LaunchedStep:
        """Run a step over stages, as `_run_with_prompts`; `order` gives the place of each of `steps` in the batch."""
        entries: list[int] = []
        rows: list[Tensor] = []
        for found in pipeline.run(steps, lambda some: self._token_ids(some, drawn), on_layer):
            score_all = self._scoring(found.batch.steps)
            if score_all is not None:
                score_all(found.hidden)
            rows.append(found.drawn)
            entries += [order[found.batch.entries[i]] for i in found.batch.drawing]
        if not entries:
            return self._silent(len(batch))
        return self._sample(self._decoder.logits(torch.cat(rows)), batch, entries, earlier)

    def _announce_all(self, on_layer: OnLayer | None) -> None:
        if on_layer is not None:
            for layer in range(self._kv_cache.layout.num_layers):
                on_layer(layer)

    def _scoring(self, steps: Sequence[SequenceStep]) -> Callable[[Tensor], None] | None:
        """Return a function that scores and pools the step's prompts from their hidden states; None where there are
        none."""
        ends = np.cumsum([len(step.token_ids) for step in steps]).tolist()
        chunks = [(one.scorer, one.start, end - len(one.token_ids), end) for one, end in zip(steps, ends, strict=True)]

        def score_all(hidden: Tensor) -> None:
            for scorer, start, first, end in chunks:
                if scorer is not None and scorer.fault.error is None:
                    try:
                        self._score_chunk(scorer, start, hidden[first:end])
                    except RuntimeError:
                        raise  # a device's failure, which fails the whole step
                    except Exception as error:
                        scorer.fault.note(error)

        return None if all(scorer is None for scorer, *_ in chunks) else score_all

    def _score_chunk(self, scorer: PromptScorer, start: int, hidden: Tensor) -> None:
        """Score and pool a prompt's chunk at position `start`, hidden states [its tokens, hidden]. Logits are computed
        in blocks of rows: those of a whole chunk would be gigabytes."""
        scorer.begin(start)
        pooled = hidden[scorer.pooled_rows(start, len(hidden))]
        if len(pooled):
            scorer.add_hidden(pooled.float().sum(0).cpu().numpy())
        targets = scorer.targets(start, len(hidden))
        most = max(1, min(MAX_SCORED_ROWS, _SCORED_BYTES // (4 * self._decoder.vocab_size)))
        for first in range(0, len(targets), most):
            block = targets[first : first + most]
            logits = self._decoder.logits(hidden[first : first + len(block)])
            logits = gather_logits(logits, self._decoder.vocab_size, self._parallel)
            if self._sampler is not None:
                scorer.add_scores(self._sampler.score(logits, block, scorer.params.logprobs or 0))

    def _token_ids(self, steps: Sequence[SequenceStep], drawn: Tensor | None) -> Tensor:
        """int64 [T]; those that follow the step before are taken from its tokens `drawn`, if they aren't known yet."""
        token_ids = place(np.fromiter(chain.from_iterable(step.token_ids for step in steps), np.int64), self._device)
        if drawn is not None:
            take_drawn(token_ids, steps, drawn)  # single tokens come first: a row each
        return token_ids

    def _drawn_tokens(self, step: LaunchedStep) -> Tensor:
        """Return LaunchedStep.on_device on every rank, whether the tokens are known or not; on GPUs no host waits for
        those that are not."""
        if self._sampler is None:
            drawn = torch.empty(len(step.tokens), dtype=torch.int64, device=self._device)
        elif (on_device := step.on_device()) is not None:
            drawn = on_device
        else:
            tokens = [0 if token is None else token.token_id for token in step.peek()]
            drawn = place(np.array(tokens, np.int64), self._device)
        return self._parallel.from_rank_0(drawn)

    def _silent(self, count: int) -> LaunchedStep:
        """A step of `count` entries that draws nothing here."""
        tokens: list[SampledToken | None] = [None] * count
        if self._device.type != "cuda":
            return LaunchedStep(tokens)
        return SilentStep(tokens, LaunchedWork(self._device))

    def _sample(
        self, logits: Tensor, batch: Sequence[SequenceStep], entries: list[int], earlier: LaunchedStep | None
    ) -> LaunchedStep:
        """Draw a token for each of `entries` of the batch, whose logits, as far as this rank has them, are the rows;
        none on other ranks than 0."""
        drawing = [batch[i] for i in entries]
        draws = [step.draw for step in drawing if step.draw is not None]
        if self._parallel.shard.size > 1:
            if all(draw.takes_largest for draw in draws):
                found = largest_of_ranks(logits, self._decoder.vocab_size, self._parallel)
                if self._sampler is None or found is None:
                    return self._silent(len(batch))
                return self._drawn(self._sampler.take(found, draws), batch, entries)
            logits = gather_logits(logits, self._decoder.vocab_size, self._parallel)
        if self._sampler is None:
            return self._silent(len(batch))
        positions = [step.start + len(step.token_ids) for step in drawing]
        masks = None
        if any(draw.constraint is not None or draw.counts is not None for draw in draws):
            # On a GPU the model computes meanwhile; only the step before must have drawn.
            if earlier is not None and any(step.follows is not None for step in drawing):
                drawing = list(with_drawn_tokens(drawing, earlier.peek()))
            last_tokens = [step.token_ids[-1] for step in drawing]
            masks = self._masks.fill(draws, positions, last_tokens)
            draws = [draw.settled(*before) for draw, *before in zip(draws, last_tokens, positions, strict=True)]
        if isinstance(self._sampler, LaunchingSampler) and all(draw.sampling.logprobs is None for draw in draws):
            return self._drawn(self._sampler.launch(logits, draws, positions, masks), batch, entries)
        return self._drawn(self._sampler.sample(logits, draws, positions, masks), batch, entries)

    def _drawn(
        self, drawn: "list[SampledToken] | DrawnTokens", batch: Sequence[SequenceStep], entries: list[int]
    ) -> LaunchedStep:
        """The step whose `entries` drew these tokens."""
        tokens: list[SampledToken | None] = [None] * len(batch)
        if not isinstance(drawn, list):
            return StepOnDevice(tokens, drawn, entries)
        for entry, token in zip(entries, drawn, strict=True):
            tokens[entry] = token
        return LaunchedStep(tokens)
