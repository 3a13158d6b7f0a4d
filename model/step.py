"""Inputs and results of one engine step. No torch here: schedulers and simulations use these too.

Structs and no dataclasses, since each row of each step makes two: a frozen dataclass takes seven times as long to make.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostroke.protocol.requests import PromptScores, SampledToken, SamplingParams, ScoringParams

if TYPE_CHECKING:
    from llguidance import LLMatcher


class SequenceStep(msgspec.Struct, frozen=True):
    """One request's part of a step: some tokens to run through the model, and perhaps a token to draw after them."""

    token_ids: Sequence[int]  # the tokens whose KV this step computes: a chunk of the prompt, or the last drawn token
    start: int  # the position of the first of them; KV of all before it is in `block_ids`
    block_ids: Sequence[int]  # the block table; covers start + len(token_ids) tokens
    draw: "Draw | None"  # None: a chunk that does not end the prompt; no logits are computed
    # The entry of the step before this one that draws this entry's only token, whose place is kept in `token_ids`. So a
    # step can be handed over while the one before it runs.
    follows: int | None = None
    scorer: "PromptScorer | None" = None  # collects the prompt's scores and pooled states
    # A block of the cache to be copied, before all else, into the table's block of the position `start`: another
    # request has computed the tokens before that one in it.
    copied_from: int | None = None


class Draw(msgspec.Struct, frozen=True):
    """Parameters of the draw of the token at position `start + len(token_ids)`."""

    sampling: SamplingParams
    # All token ids so far, prompt first, for the penalties. It may grow meanwhile, and lacks the token of an entry that
    # `follows`: see `settled`.
    history: Sequence[int]
    num_prompt_tokens: int  # how many of `history` are the prompt
    forbidden: tuple[int, ...] = ()  # tokens that may not be drawn (stop tokens before `min_tokens`)
    counts: "TokenCounts | None" = None  # where penalties need them; None: counted when needed, and it follows no entry
    constraint: "Constraint | None" = None  # what the output is held to
    fault: "RowFault | None" = None  # where to note what fails of this row alone; None: it fails the step
    # The last tokens of `history` that are drafts: the token drawn here counts only if the rows before draw them. Such
    # rows stand right behind the row without drafts, in order.
    num_drafted: int = 0
    mtp: "MtpDrafts | None" = None  # where to note what the model's MTP head expects behind the token

    @property
    def takes_largest(self) -> bool:
        """True if the draw is the token of the largest logit whatever the others are, without log-probabilities."""
        return self.is_greedy and not self.is_adjusted and self.sampling.logprobs is None

    @property
    def is_greedy(self) -> bool:
        """True if the draw is not random."""
        return self.sampling.temperature <= 0 or self.sampling.top_k == 1

    @property
    def is_adjusted(self) -> bool:
        """True if logits are adjusted before the draw."""
        sampling = self.sampling
        return bool(
            sampling.logit_bias
            or is_penalised(sampling)
            or self.forbidden
            or sampling.allowed_token_ids
            or sampling.bad_words
            or self.constraint is not None
        )

    def settled(self, last_token: int, position: int) -> "Draw":
        """Return this draw at `position`, with `last_token` right before it, so that penalties count all tokens.

        For the engine, at the launch: the token may have been under way when the step was scheduled. Of the history
        only what `bad_words` look at is left, since a copy of a long one takes a millisecond.
        """
        if self.counts is None:
            return self
        self.counts.advance(self.history, last_token, position)
        longest = max(map(len, self.sampling.bad_words), default=0) - 1
        if longest < 1:
            return self
        begin = max(self.num_prompt_tokens, position - longest)  # they are banned from the output alone
        outputs = [*self.history[begin : position - 1], last_token] if begin < position else []
        return msgspec.structs.replace(self, history=outputs, num_prompt_tokens=0)


def is_penalised(sampling: SamplingParams) -> bool:
    """Return True if draws depend on earlier tokens."""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
        or any(len(word) > 1 for word in sampling.bad_words)
    )


class TokenCounts:
    """Counts of each token of a request, updated token by token: penalties are computed from them.

    Counting a long history anew for each drawn token would cost more than the step's sampling does. The engine advances
    it, as a Constraint: so the next step can be scheduled while a token is being drawn.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int):
        """Count `token_ids`, of which the first `num_prompt_tokens` are the prompt."""
        tokens = np.array(token_ids, np.int64)
        self._ids, places = np.unique(tokens, return_inverse=True)
        self._output_counts = np.bincount(places[num_prompt_tokens:], minlength=len(self._ids)).astype(np.int64)
        self._num_ids = len(self._ids)  # the arrays may be longer
        self._num_tokens = len(tokens)  # that are counted
        self._place = {token_id: place for place, token_id in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        """Each token of prompt and output once, in no particular order. A view: valid until the next `advance`."""
        return self._ids[: self._num_ids]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """Counts of each of `ids` among the output tokens. A view: valid until the next `advance`."""
        return self._output_counts[: self._num_ids]

    def copy(self) -> "TokenCounts":
        """Return counts that go on alone, for tokens that are drafts."""
        copied = TokenCounts((), 0)
        copied._ids, copied._output_counts = self._ids.copy(), self._output_counts.copy()
        copied._num_ids, copied._num_tokens, copied._place = self._num_ids, self._num_tokens, dict(self._place)
        return copied

    def advance(self, history: Sequence[int], last_token: int, position: int) -> None:
        """Count all tokens before `position`. `last_token` stands right before it; `history` has those before that."""
        if position > self._num_tokens:
            for token_id in (*history[self._num_tokens : position - 1], last_token):
                self._append(token_id)
            self._num_tokens = position

    def _append(self, token_id: int) -> None:
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


class ScoredRows(msgspec.Struct, frozen=True):
    """Scores of some tokens, in PromptScores' form."""

    token_ids: NDArray[np.int32]  # [rows, alternatives]
    logprobs: NDArray[np.float32]  # [rows, 1 + alternatives]
    ranks: NDArray[np.int32]  # [rows]


class BrokenLogits(ArithmeticError):
    """A row of logits without a number: the model's weights, or what is cached, are broken."""


class RowFault:
    """The error, if any, that a step met at one request: the engine notes it, and goes on with the others.

    The worker ends the request behind the step, whose token for it is not to be used.
    """

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Keep the first error."""
        if self.error is None:
            self.error = error


def note_broken(draws: Sequence[Draw], rows: Iterable[int]) -> None:
    """Note that these rows have nothing to draw from but NaN."""
    for row in rows:
        if (fault := draws[row].fault) is not None:
            fault.note(BrokenLogits())


class MtpDrafts:
    """Tokens that a model's MTP head expects next in one request: each step notes one behind each token that it draws.

    Notes behind drafts that turn out wrong are overwritten before their position is reached.
    """

    __slots__ = ("_token_ids",)
    _KEPT = 128  # positions: more than a step has rows of a request

    def __init__(self) -> None:
        self._token_ids: dict[int, int] = {}

    def note(self, position: int, token_id: int) -> None:
        """Note the token that is expected at a position."""
        self._token_ids[position] = token_id
        self._token_ids.pop(position - self._KEPT, None)

    def at(self, position: int) -> int | None:
        """Return the token that was expected at a position; None where that is not known."""
        return self._token_ids.get(position)


class PromptScorer:
    """Scores and pooled hidden states of one prompt, which steps collect chunk by chunk until the caller takes them.

    A preempted prompt is computed again: a chunk at position 0 begins anew.
    """

    def __init__(self, params: ScoringParams, token_ids: Sequence[int]):
        """`token_ids` are the whole prompt."""
        self.params = params
        self.fault = RowFault()
        self._token_ids = token_ids
        self._scored: list[ScoredRows] = []
        self._sum: NDArray[np.float32] | None = None  # [hidden]

    def targets(self, start: int, num_tokens: int) -> NDArray[np.int64]:
        """The tokens after each of a chunk's, which its logits score: one fewer where the chunk ends the prompt."""
        if self.params.logprobs is None:
            return np.zeros(0, np.int64)
        return np.array(self._token_ids[start + 1 : start + 1 + num_tokens], np.int64)

    def pooled_rows(self, start: int, num_tokens: int) -> slice:
        """Return the rows of a chunk's hidden states that count for the embedding."""
        if self.params.pooling == "mean":
            return slice(0, num_tokens)
        is_last = self.params.pooling == "last" and start + num_tokens == len(self._token_ids)
        return slice(num_tokens - 1, num_tokens) if is_last else slice(0, 0)

    def begin(self, start: int) -> None:
        """A chunk is about to be read."""
        if start == 0:
            self._scored, self._sum = [], None

    def add_scores(self, scored: ScoredRows) -> None:
        """Append scores of the next targets."""
        self._scored.append(scored)

    def add_hidden(self, row_sum: NDArray[np.float32]) -> None:
        """The sum of a chunk's pooled rows, [hidden]."""
        self._sum = row_sum if self._sum is None else self._sum + row_sum

    def scores(self) -> PromptScores | None:
        """Return all scores, once the prompt is computed; None where none were requested."""
        if (num_alternatives := self.params.logprobs) is None:
            return None
        parts = [(one.token_ids, one.logprobs, one.ranks) for one in self._scored]
        columns = (np.concatenate(column).tobytes() for column in zip(*parts, strict=True)) if parts else (b"",) * 3
        return PromptScores(num_alternatives, *columns)

    def embedding(self) -> bytes:
        """Return PrefillReply.embedding. Hidden states that are no numbers give zeros, as null vectors do."""
        if self._sum is None:
            return b""
        length = float(np.linalg.norm(self._sum))
        unit = self._sum / length if 0 < length < np.inf else np.zeros_like(self._sum)
        return unit.astype("<f4").tobytes()


class Constraint:
    """A request's grammar, and how far its output has got in it.

    The engine advances it, when it launches a draw: so the next step can be scheduled while a token is being drawn.
    Positions say how far, since the request's list of tokens grows meanwhile.
    """

    def __init__(
        self, matcher: "LLMatcher", renew: "Callable[[], LLMatcher] | None", stop_token_ids: Sequence[int] = ()
    ):
        """`matcher` is at the grammar's beginning, and belongs to this object. `renew` makes another one, that shares
        nothing with those before it, and blocks meanwhile; None: nothing is tried again. `stop_token_ids` end the
        answer when they are drawn."""
        self.matcher = matcher
        self._stop_token_ids = stop_token_ids
        self._renew = renew  # None, too: it has been renewed
        self._num_outputs = 0  # that the matcher has seen
        self._failed_at: int | None = None  # the first position that the grammar says nothing about any more

    def advance(self, history: Sequence[int], num_prompt_tokens: int, last_token: int, position: int) -> None:
        """Take in all output tokens before `position`, where one is to be drawn.

        `last_token` stands right before it; `history` has at least those before that one.
        """
        outputs = [*history[num_prompt_tokens + self._num_outputs : position - 1], last_token]
        num_outputs = position - num_prompt_tokens
        # Of an answer that has ended, a row may have been launched ahead.
        if num_outputs > self._num_outputs and not self.matcher.is_stopped():
            self.matcher.consume_tokens(outputs)
        self._num_outputs = num_outputs

    def for_drafts(self, history: Sequence[int], num_prompt_tokens: int) -> "Constraint":
        """Return a constraint for the draft behind `history`, which stands in for this one and fails alone.

        This one is advanced to the end of `history`. No step may be under way.
        """
        if len(history) > num_prompt_tokens:
            self.advance(history, num_prompt_tokens, history[-1], len(history))
        copied = Constraint(self.matcher.deep_copy(), None, self._stop_token_ids)
        copied._num_outputs = self._num_outputs
        return copied

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens the grammar allows one after the other, from where it is."""
        if self.matcher.is_error() or self.matcher.is_stopped():
            return 0
        return int(self.matcher.validate_tokens(list(token_ids)))

    def may_try_again(self) -> bool:
        """Return True if the matcher had failed and begins anew: another request of its grammar may have caused the
        failure."""
        if self._renew is None or not self.matcher.is_error():
            return False
        self.matcher, self._renew, self._num_outputs = self._renew(), None, 0
        return True

    def early_stops(self, is_allowed: Callable[[int], bool]) -> list[int]:
        """Stop tokens that the mask allows as text where the grammar does not let the answer end.

        A stop token may be an ordinary token with text, which a grammar takes inside of strings.
        """
        stops = [token_id for token_id in self._stop_token_ids if is_allowed(token_id)]
        return [] if not stops or self.matcher.is_accepting() else stops

    def fail(self, position: int) -> None:
        """Give up the grammar from the token at `position` on."""
        if self._failed_at is None:
            self._failed_at = position

    def masks_failed(self, position: int) -> bool:
        """Note that there is a mask for `position`; return True if the mask failed because the grammar takes too
        much."""
        if self.matcher.is_error():
            self.fail(position)
        return self._failed_at is not None

    def has_failed(self, position: int) -> bool:
        """Return True if the token drawn there must not be used: the grammar could no longer be followed."""
        return self._failed_at is not None and position >= self._failed_at


class BlockCopy(msgspec.Struct, frozen=True):
    """KV to be copied between blocks of the cache and blocks of host memory, pair by pair."""

    is_out: bool  # out of the cache
    cache_blocks: Sequence[int]
    host_blocks: Sequence[int]


OnLayer = Callable[[int], None]
"""Called on the event loop once a layer's KV of the whole batch is in the cache, with the layer's index, in order."""


class Engine(Protocol):
    """Runs steps, one after the other, in the order in which they are asked for; the next may be before one has ended.

    Live: `model/engine.py`, on its own thread. Simulated: tests/simulation.
    """

    async def step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> list[SampledToken | None]:
        """Compute KV for the batch into the cache and draw tokens; one result per entry, None where it draws none.

        Before that `copies` are made; there may be nothing but them.
        All `on_layer` calls are made before this returns. Cancelling the caller does not stop a step under way:
        the step runs to its end, and the next call waits for it. A raised error means that the engine is dead, and
        does nothing of what it still has been asked for.
        """

    @property
    def num_broken_rows(self) -> int:
        """Rows of logits so far that tokens were drawn from, with NaN or +inf: 0 with a sound model and cache."""


def with_drawn_tokens(batch: Sequence[SequenceStep], drawn: Sequence[SampledToken | None]) -> Sequence[SequenceStep]:
    """The batch with what the step before it has `drawn` in the place of tokens that were not known yet.

    Raises ValueError for an entry that follows one without a token.
    """
    if all(one.follows is None for one in batch):
        return batch
    return [
        one if one.follows is None else SequenceStep(_drawn_by(one.follows, drawn), one.start, one.block_ids, one.draw)
        for one in batch
    ]


def _drawn_by(entry: int, drawn: Sequence[SampledToken | None]) -> tuple[int]:
    token = drawn[entry] if entry < len(drawn) else None
    if token is None:
        raise ValueError(f"entry {entry} of the step before drew no token to go on from")
    return (token.token_id,)
