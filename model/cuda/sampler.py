"""The sampler of GPUs: tokens are drawn and stay there, and reach the host only when they are collected.

So the next step can be launched before this one's tokens are known. Same draws as model/sampling/sampler.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.model.batch import place
from twostroke.model.cache.layer_announcer import LaunchedWork
from twostroke.model.cuda.graphs import Recorder
from twostroke.model.cuda.kernels.device_sampling import (
    DrawParameters,
    SamplingFeatures,
    draw_on_device,
    mask_on_device,
)
from twostroke.model.sampling.sampler import Sampler, adjust, row_keys, unsound_rows
from twostroke.model.sampling.token_masks import TokenMasks
from twostroke.model.step import Draw, ScoredRows, note_broken
from twostroke.protocol.requests import SampledToken, SamplingParams

_WORD = (1 << 64) - 1
_ROW_BYTES = 36  # of a row's DrawParameters
_ROWS_AT_ONCE = 16  # with log-probabilities, whose float64 temporaries would else take gigabytes in a large batch


@dataclass(frozen=True)
class DrawnTokens:
    """One step's tokens, on the device and on their way to the host."""

    tokens: Tensor  # int64 [N], on the device
    _on_host: Tensor  # int64 [2, N or more]: tokens, and whether their rows were broken; pinned
    _arrived: LaunchedWork | None  # None where nothing is asynchronous
    _sampler: "DeviceSampler"
    _draws: Sequence[Draw]

    def collect(self) -> list[int]:
        """Wait as `wait` does, count broken rows, and note them at their draws. To be called once."""
        tokens, are_broken = self.wait(), self._on_host[1, : len(self.tokens)].tolist()
        if any(are_broken):
            self._sampler.num_broken_drawn += sum(are_broken)
            note_broken(self._draws, unsound_rows(tokens, are_broken))
        return tokens

    def wait(self) -> list[int]:
        """Token ids; blocks the calling thread, without the interpreter's lock."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host[0, : len(self.tokens)].tolist()


class DeviceSampler:
    """Draws for batches of rows over `vocab_size` on `device`, a GPU.

    Belongs to one thread; what it has drawn may be collected on one other.
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._with_logprobs = Sampler(vocab_size)
        self.num_broken_drawn = 0  # of the tokens that have been collected
        self._captured: CapturedDraws | None = None

    @property
    def num_broken_rows(self) -> int:
        """The count of `Sampler.num_broken_rows`."""
        return self.num_broken_drawn + self._with_logprobs.num_broken_rows

    def sample(
        self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], masks: TokenMasks | None = None
    ) -> list[SampledToken]:
        """Implement Sampler.sample, with log-probabilities; waits for the device."""
        tokens: list[SampledToken] = []
        for first in range(0, len(draws), _ROWS_AT_ONCE):
            some = slice(first, first + _ROWS_AT_ONCE)
            of_some = None if masks is None else masks.within(first, first + _ROWS_AT_ONCE)
            tokens += self._with_logprobs.sample(logits[some], draws[some], positions[some], of_some)
        return tokens

    def score(self, logits: Tensor, targets: NDArray[np.int64], num_alternatives: int) -> ScoredRows:
        """Implement Sampler.score."""
        blocks = [slice(first, first + _ROWS_AT_ONCE) for first in range(0, len(targets), _ROWS_AT_ONCE)]
        scored = [self._with_logprobs.score(logits[some], targets[some], num_alternatives) for some in blocks]
        return ScoredRows(
            np.concatenate([one.token_ids for one in scored]),
            np.concatenate([one.logprobs for one in scored]),
            np.concatenate([one.ranks for one in scored]),
        )

    def launch(
        self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], masks: TokenMasks | None = None
    ) -> DrawnTokens:
        """Draw one token for each row of logits fp32 [N, V], changed in place; no log-probabilities. Never waits."""
        adjusted = [i for i, draw in enumerate(draws) if draw.is_adjusted]
        if adjusted:
            adjust(logits, adjusted, [draws[i] for i in adjusted])
        if masks is not None:
            mask_on_device(logits, place(masks.rows, self._device), place(masks.words, self._device))
        drawn = None if self._captured is None else self._captured.draw(logits, draws, positions)
        if drawn is None:
            parameters = _placed(
                _staged(draws, positions, len(draws), self._is_cuda).to(self._device, non_blocking=True)
            )
            drawn = draw_on_device(logits, parameters, _draw_features(draws))
        return self.take(drawn, draws)

    def capture(self, logits: Tensor, sizes: Sequence[int], recorder: Recorder) -> None:
        """Record the draws from these logits, fp32 [largest size, V], which are those of captured steps of `sizes`."""
        few = [size for size in sizes if size <= MAX_CAPTURED_ROWS]
        self._captured = CapturedDraws(logits, few, recorder) if few else None

    def take(self, drawn: Tensor, draws: Sequence[Draw]) -> DrawnTokens:
        """int64 [2, N or more], on the device: tokens, and whether their rows were broken. Never waits."""
        if not self._is_cuda:
            drawn = drawn.clone()  # which captured draws would write anew
            return DrawnTokens(drawn[0, : len(draws)], drawn, None, self, draws)
        on_host = torch.empty(drawn.shape, dtype=torch.int64, pin_memory=True)
        on_host.copy_(drawn, non_blocking=True)
        return DrawnTokens(drawn[0, : len(draws)], on_host, LaunchedWork(self._device), self, draws)


MAX_CAPTURED_ROWS = 64
"""A draw is up to a dozen launches, of some 20 us each of the host's time: beside larger batches that is little."""
_FEATURES = [
    SamplingFeatures(False, False, False),
    *(SamplingFeatures(True, *filters) for filters in product((False, True), repeat=2)),
]


class CapturedDraws:
    """Draws from the logits of captured decode steps, each one launch whatever its rows ask for.

    What is drawn stays in its place until the next draw of that size.
    """

    def __init__(self, logits: Tensor, sizes: Sequence[int], recorder: Recorder):
        """`sizes` of batches, ascending. Captures a graph for each, and for all that its rows may ask for."""
        self._logits = logits
        self._sizes = sizes
        self._is_pinned = logits.is_cuda
        nothing = {size: _staged([], [], size, False) for size in sizes}
        self._parameters = {size: given.to(logits.device) for size, given in nothing.items()}
        greedy = {size: given.clone() for size, given in self._parameters.items()}
        for given in greedy.values():
            _placed(given).temperature.zero_()
        self._drawn = {size: torch.zeros((2, size), dtype=torch.int64, device=logits.device) for size in sizes}

        def drawing(size: int, features: SamplingFeatures) -> Callable[[], None]:
            given = _placed((self._parameters if features.draws else greedy)[size])

            def draw() -> None:
                self._drawn[size].copy_(draw_on_device(logits[:size], given, features))

            return draw

        self._steps = {(size, features): drawing(size, features) for size in reversed(sizes) for features in _FEATURES}
        with torch.inference_mode():
            self._replays = {key: recorder.record(step) for key, step in self._steps.items()}

    def draw(self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> Tensor | None:
        """int64 [2, N or more], as draw_on_device. None for logits of others, and for a batch of no size."""
        size = next((size for size in self._sizes if size >= len(draws)), None)
        if size is None or logits.data_ptr() != self._logits.data_ptr():
            return None
        features = _draw_features(draws)
        if features.draws:
            self._parameters[size].copy_(_staged(draws, positions, size, self._is_pinned), non_blocking=True)
        self._replays[size, features]()
        return self._drawn[size]


def _staged(draws: Sequence[Draw], positions: Sequence[int], size: int, is_pinned: bool) -> Tensor:
    """The DrawParameters of `size` rows on the host, uint8: one copy brings all fields to a device.

    Each begins at a multiple of 16 bytes: for any other place Triton would compile the kernels anew.
    """
    count = size + size % 2
    sampling = [draw.sampling for draw in draws]
    sampling += [SamplingParams()] * (count - len(draws))
    positions = [*positions, *[0] * (count - len(draws))]
    staged = torch.empty(count * _ROW_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
    columns = staged.numpy()
    seeds = np.fromiter((one.seed & _WORD for one in sampling), np.uint64, count)
    columns[: 8 * count].view(np.uint64)[:] = row_keys(seeds, np.array(positions, np.uint64))
    reals = columns[8 * count : 32 * count].view(np.float64).reshape(3, count)
    reals[0] = [_temperature(one) for one in sampling]
    reals[1] = [one.top_p for one in sampling]
    reals[2] = [math.log(min(one.min_p, 1.0)) if one.min_p > 0 else -math.inf for one in sampling]
    columns[32 * count :].view(np.int32)[:] = [min(one.top_k, 2**31 - 1) for one in sampling]
    return staged


def _placed(staged: Tensor) -> DrawParameters:
    """The fields of what `_staged` gave, wherever it lies."""
    count = staged.numel() // _ROW_BYTES
    reals = staged[8 * count : 32 * count].view(torch.float64).view(3, count)
    return DrawParameters(
        temperature=reals[0],
        top_k=staged[32 * count :].view(torch.int32),
        top_p=reals[1],
        log_min_p=reals[2],
        keys=staged[: 8 * count].view(torch.int64),
    )


def _temperature(sampling: SamplingParams) -> float:
    return 0.0 if sampling.top_k == 1 else sampling.temperature


def _draw_features(draws: Sequence[Draw]) -> SamplingFeatures:
    random = [draw.sampling for draw in draws if _temperature(draw.sampling) > 0]
    return SamplingFeatures(bool(random), any(one.top_k > 0 for one in random), any(one.top_p < 1 for one in random))
