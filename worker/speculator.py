"""Drafts for the requests that decode: what comes next is guessed, and a step draws several tokens of a request. Pure.

A draw depends on seed and position alone, so verifying is drawing: a drafted token is one more row of the step at the
next position, and it is right if the row before it draws that very token. Answers are the same as without drafts,
greedy or sampled; drafts only decide how many steps they take.

**Rows.** A row costs time, which the worker's step costs tell, corrected by what rows of drafts took.
Of all requests' drafts the likeliest tokens come first, as many as bring the most tokens per second. Where a request
has a TPOT promise, drafts may not lengthen a step beyond it, times the tokens that the request's steps draw. So a busy
worker drafts little, and text that repeats nothing pays next to nothing.

**Costs of rows.** Step costs are linear in rows, which serves schedulers well. Kernels are not: one row may be a
product of a matrix and a vector, and two a product of matrices that takes as long as eight. So steps with drafts are
compared with what the same step would take without, by how many rows decode and how many are drafts, each up to the
next power of two.

**Chances.** A prediction is checked by the token that is drawn anyway, so chances are learnt at no cost, and are known
before the first row is spent on a draft. The chance depends on where the prediction comes from and on the length of
the match, and for each request on how its own predictions turned out.

**Matches.** A text's last tokens are searched for earlier occurrences, whose continuation is likely to come again. A
sequence's own tokens are searched by one comparison of an array, 4 us for 8,000 tokens: there is nothing to build,
and nothing to hold but 16 bytes per token, after a hand-over either. Earlier answers are many more tokens, and have a
table.

The longest match is chosen, and the latest of several (Oliaro et al., SuffixDecoding, 2024; prompt look-up, Saxena
2023). While a match goes on to predict the right tokens it stays the longest one, so nothing is searched.

**Waiting.** A step with drafts can't be scheduled ahead, since its tokens must be known. `is_worth_waiting` says
whether drafts are expected to bring more than scheduling ahead saves.

Models with states beside KV have no drafts: a state takes one token after the other.
"""

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np

from twostroke.model.step import Constraint, is_penalised
from twostroke.protocol.kv_layout import STATE_WINDOW, KVGroups
from twostroke.protocol.stats import StepCosts
from twostroke.worker.config import SpeculationConfig
from twostroke.worker.scheduling.job import SequenceState, WorkerJob

MIN_MATCH = 3
"""Tokens that must agree before a continuation is worth a guess."""
MAX_MATCH = 24
"""Longer matches are no better."""
END = -1
"""Stands behind a text that nothing continues."""
_BITS = 21  # of a token id: three make the key of a table
_KEY = (1 << 3 * _BITS) - 1


class TokenSource(Protocol):
    """Tokens that a match stands in."""

    def token_at(self, place: int) -> int | None:
        """Return the token at a place; None behind the last."""

    def is_growing(self, place: int) -> bool:
        """Return True where the place is the next one of a text that goes on."""


@dataclass(slots=True)
class Match:
    """An earlier occurrence of a text's last `length` tokens."""

    source: TokenSource
    next_place: int  # of the token behind the occurrence
    length: int

    def predict(self, most: int) -> list[int]:
        """Return the tokens expected next. A match that reaches the end of its own text repeats itself."""
        found: list[int] = []
        for step in range(most):
            token = self.source.token_at(self.next_place + step)
            if token is None:
                break
            found.append(token)
        if found and len(found) < most and self.source.is_growing(self.next_place + len(found)):
            found = [found[step % len(found)] for step in range(most)]
        return found

    def follow(self) -> None:
        """Go on by one token, which was the predicted one."""
        self.next_place += 1
        self.length = min(self.length + 1, MAX_MATCH)


class SuffixTokens:
    """The tokens of one sequence, which grows. Token ids are below 2 ** 21."""

    def __init__(self, token_ids: Sequence[int]):
        self._count = 0
        self._tokens = np.empty(0, np.int64)
        self._keys = np.empty(0, np.int64)  # of each token and the two before it
        self.extend(token_ids)

    def __len__(self) -> int:
        return self._count

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        begin, end = self._count, self._count + len(token_ids)
        if end > len(self._tokens):
            room = end + end // 4 + 64
            self._tokens = np.concatenate((self._tokens[:begin], np.zeros(room - begin, np.int64)))
            self._keys = np.concatenate((self._keys[:begin], np.zeros(room - begin, np.int64)))
        self._tokens[begin:end] = token_ids
        self._count = end
        first = max(begin, MIN_MATCH - 1)
        if first < end:
            wide = self._tokens[first - 2 : end]
            self._keys[first:end] = wide[:-2] << 2 * _BITS | wide[1:-1] << _BITS | wide[2:]
        self._keys[begin : min(end, MIN_MATCH - 1)] = -1

    def token_at(self, place: int) -> int | None:
        """Implement TokenSource."""
        token = int(self._tokens[place]) if place < self._count else END
        return None if token == END else token

    def is_growing(self, place: int) -> bool:
        """Implement TokenSource."""
        return place == self._count

    def last(self, count: int) -> list[int]:
        """Return the last tokens, in order."""
        tail: list[int] = self._tokens[max(0, self._count - count) : self._count].tolist()
        return tail

    def longest_match(self) -> Match | None:
        """Return the longest earlier occurrence of the last tokens, the latest of several."""
        count = self._count
        if count <= MIN_MATCH or (key := self._keys[count - 1]) < 0:
            return None
        ends = np.flatnonzero(self._keys[: count - 1] == key)
        if not len(ends):
            return None
        length = MIN_MATCH
        while length < min(MAX_MATCH, count - 1):
            longer = ends[ends >= length]
            longer = longer[self._tokens[longer - length] == self._tokens[count - 1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return Match(self, int(ends[-1]) + 1, length)


class _Answers:
    """Answers behind each other, and the place behind each three tokens' last occurrence."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def token_at(self, place: int) -> int | None:
        """Implement TokenSource."""
        token = self._tokens[place] if place < len(self._tokens) else END
        return None if token == END else token

    def is_growing(self, place: int) -> bool:
        """Implement TokenSource."""
        return False

    def add(self, token_ids: Sequence[int]) -> None:
        """Append an answer."""
        key, begin = 0, len(self._tokens)
        self._tokens += token_ids
        for offset, token_id in enumerate(token_ids):
            key = (key << _BITS | token_id) & _KEY
            if offset >= MIN_MATCH - 1:
                self._places[key] = begin + offset + 1
        self._tokens.append(END)  # no match goes over into the next answer

    def longest_match(self, tail: Sequence[int]) -> Match | None:
        """Return the last occurrence of the end of `tail`."""
        key = 0
        for token_id in tail[-MIN_MATCH:]:
            key = key << _BITS | token_id
        place = self._places.get(key)
        if place is None or self.token_at(place) is None:
            return None
        length = MIN_MATCH
        while length < min(len(tail), place) and self._tokens[place - 1 - length] == tail[-1 - length]:
            length += 1
        return Match(self, place, length)


class AnswerCorpus:
    """Earlier answers of each tenant, the latest ones. A tenant is told apart by its requests' cache salt.

    Each tenant has a young and an old part; the old one is dropped once the young one is full. Over the bound of all
    tenants, the one that has been idle longest is dropped.
    """

    def __init__(self, most_tokens: int):
        """`most_tokens` bounds all tenants together; one may have half of them."""
        self._most = most_tokens
        self._tenants: OrderedDict[bytes, tuple[_Answers, _Answers]] = OrderedDict()  # young, old
        self.num_tokens = 0

    def add(self, salt: bytes, token_ids: Sequence[int]) -> None:
        """Keep an answer. One that is too short to be found, or larger than a part, is not kept."""
        part = self._most // 4
        if not MIN_MATCH < len(token_ids) < part:
            return
        young, old = self._tenants.pop(salt) if salt in self._tenants else (_Answers(), _Answers())
        if len(young) + len(token_ids) >= part:
            self.num_tokens -= len(old)
            young, old = _Answers(), young
        before = len(young)
        young.add(token_ids)
        self.num_tokens += len(young) - before
        self._tenants[salt] = young, old
        while self.num_tokens > self._most:
            _, idle = self._tenants.popitem(last=False)
            self.num_tokens -= sum(map(len, idle))

    def longest_match(self, salt: bytes, tail: Sequence[int]) -> Match | None:
        """Return the occurrence of the end of `tail` in the tenant's answers, a young one first."""
        if len(tail) < MIN_MATCH or salt not in self._tenants:
            return None
        self._tenants.move_to_end(salt)
        young, old = self._tenants[salt]
        return young.longest_match(tail) or old.longest_match(tail)


DraftSource = Literal["own", "answers", "prediction", "grammar", "mtp"]
"""The request's own tokens, earlier answers, the client's prediction from its beginning on, a grammar's forced text, or
the model's MTP head."""

MEMORY = 0.995
"""Weight of all earlier predictions of a kind after one more."""
OWN_MEMORY = 0.9
"""The same for a request's own."""
_PRIOR = 4.0  # predictions that the first guess counts as
_OWN_PRIOR = 3.0  # right ones
_SURE = 0.98
_LIMITS = (3, 4, 6, 9, 15, MAX_MATCH)  # the longest match of each kind
_KIND = tuple(next(kind for kind, most in enumerate(_LIMITS) if length <= most) for length in range(MAX_MATCH + 1))
_FIRST_GUESS = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
MTP_LENGTH = _LIMITS[3]
"""Length of the match that a prediction of an MTP head counts as: heads are first taken to be right so often."""
_FIRST_GUESS_OF_FORCED = (0.6, 0.8, 0.9, 0.9, 0.9, 0.9)  # by how many tokens are left of the text, the last one first


class AcceptanceRates:
    """Rates at which predictions were right, over all requests of a worker."""

    def __init__(self) -> None:
        self._right = {
            source: [_PRIOR * guess for guess in (_FIRST_GUESS_OF_FORCED if source == "grammar" else _FIRST_GUESS)]
            for source in get_args(DraftSource)
        }
        self._all = {source: [_PRIOR] * len(_FIRST_GUESS) for source in get_args(DraftSource)}

    def rate(self, source: DraftSource, length: int) -> float:
        """Return the chance that a match of so many tokens predicts the next one."""
        kind = _KIND[min(length, MAX_MATCH)]
        return self._right[source][kind] / self._all[source][kind]

    def note(self, source: DraftSource, length: int, *, is_right: bool) -> None:
        """Learn from one prediction."""
        kind = _KIND[min(length, MAX_MATCH)]
        self._right[source][kind] = MEMORY * self._right[source][kind] + is_right
        self._all[source][kind] = MEMORY * self._all[source][kind] + 1.0


class OwnAcceptance:
    """Compares how often a request's predictions were right with what was expected of them."""

    __slots__ = ("_expected", "_right")

    def __init__(self) -> None:
        self._right = 0.0
        self._expected = 0.0

    def note(self, expected: float, *, is_right: bool) -> None:
        """Learn from one prediction with a chance of `expected` by all requests' rates."""
        self._right = OWN_MEMORY * self._right + is_right
        self._expected = OWN_MEMORY * self._expected + expected

    def chance(self, rate: float) -> float:
        """Return the chance of a prediction that is right at `rate` over all requests."""
        return min(_SURE, rate * (self._right + _OWN_PRIOR) / (self._expected + _OWN_PRIOR))


WEIGHT = 0.2
"""Weight of a new step beside all earlier ones of its kind."""
FORGET = 0.998
"""Share of a correction that is left after one more decision: one slow step must not end all drafts for good."""
_LEAST, _MOST = 0.1, 30.0  # of a correction


class DraftRowCosts:
    """Corrections to the seconds that drafts add to a step, of one worker."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # by requests that decode: measured over expected, without drafts
        self._corrections: dict[tuple[int, int], float] = {}  # by these and by rows of drafts

    def note(self, num_decodes: int, num_drafted: int, seconds: float, plain_s: float, drafted_s: float) -> None:
        """Learn from a step of decodes and drafts alone.

        By the step costs it takes `plain_s` without drafts, and `drafted_s` more with them.
        """
        kind = num_decodes.bit_length()
        if plain_s <= 0:
            return
        if not num_drafted:
            self._plain[kind] = _moved(self._plain.get(kind), seconds / plain_s)
        elif drafted_s > 0 and kind in self._plain:
            added_s = seconds - self._plain[kind] * plain_s
            place = kind, num_drafted.bit_length()
            correction = min(_MOST, max(_LEAST, added_s / drafted_s))
            self._corrections[place] = _moved(self._corrections.get(place), correction)

    def correction(self, num_decodes: int, num_drafted: int) -> float:
        """Return the factor to the seconds that drafts add by the step costs; 1 where it is not known."""
        return self._corrections.get((num_decodes.bit_length(), num_drafted.bit_length()), 1.0)

    def forget(self) -> None:
        """Let corrections fade a little."""
        for place, correction in self._corrections.items():
            self._corrections[place] = 1.0 + FORGET * (correction - 1.0)


def _moved(before: float | None, new: float) -> float:
    return new if before is None else (1.0 - WEIGHT) * before + WEIGHT * new


GAP_S, SEARCH_S, FORCED_S = 0.0006, 10e-6, 150e-6
"""Seconds that the engine waits for the event loop where a step is not scheduled ahead, more for each request, and more
for each whose grammar's forced text is looked for."""
FORCED_SHARE = 0.1
"""Share of a step that may pass while grammars' forced text is looked for; requests beyond go on without."""
PATIENCE, SELDOM = 16, 4
"""Requests whose text has repeated nothing for so many tokens are searched at each fourth token alone."""
MIN_CHANCE = 0.05
"""Less likely tokens are never drafted."""
MAX_COUNTED = 8192
"""Longest context that is drafted with penalties: each row counts the tokens before it."""
MAX_KEPT = 4096
"""Last tokens of an answer that later ones may draft from."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Draft:
    """Tokens that may come next in one request, each with the chance that it is reached and right."""

    job: WorkerJob
    token_ids: list[int]
    chances: list[float]
    constraint: Constraint | None = None  # of the rows, where the request has a grammar


@dataclass(slots=True)
class SpeculationCounters:
    """Counters of drafts that steps have run."""

    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)


class RequestPredictor:
    """Predicts one request's next tokens, and learns how often it is right."""

    def __init__(self, sequence: SequenceState, corpus: AnswerCorpus | None, rates: AcceptanceRates):
        request = sequence.request
        self._salt = request.cache_salt
        self._corpus = corpus
        self._rates = rates
        self._own = OwnAcceptance()
        self._sequence = sequence
        self._match: Match | None = None
        self._source: DraftSource = "own"
        self._num_missed = 0  # tokens in a row that nothing predicted
        self._mtp = sequence.mtp
        self._own_mtp = OwnAcceptance()
        # What the client expects stands before the prompt, and is where the answer is expected to begin.
        self._num_before = 0
        self._tokens = SuffixTokens(())
        if request.prediction:
            self._tokens.extend((*request.prediction, END))
            self._num_before = len(self._tokens)
            self._tokens.extend(sequence.token_ids[: request.num_prompt_tokens])
            self._match, self._source = Match(self._tokens, 0, MAX_MATCH), "prediction"
            self.catch_up()
        else:
            self._tokens.extend(sequence.token_ids)
            self._search()
            self.catch_up()

    def catch_up(self) -> None:
        """Take in the tokens that the request has got since the last call."""
        token_ids = self._sequence.token_ids
        for token_id in token_ids[len(self._tokens) - self._num_before :]:
            self._take(token_id)
        if (forced_text := self._sequence.forced_text) is not None:
            forced_text.catch_up(token_ids, self._sequence.request.num_prompt_tokens, self._rates)

    def predict(self, most: int, skip: int = 0) -> tuple[list[int], list[float]]:
        """Return the tokens after the next `skip` ones that are expected next, and the chance of each.

        A chance counts the skipped tokens, too. Of the MTP head only the chance is known where tokens are skipped.
        """
        token_ids, chances = self._predict_text(most, skip)
        if self._mtp is None or most < 1 or sum(chances) >= (chance := self._mtp_chance):
            return token_ids, chances
        token_id = END if skip else self._mtp.at(len(self._tokens) - self._num_before)
        return (token_ids, chances) if token_id is None else ([token_id], [chance])

    @property
    def _mtp_chance(self) -> float:
        return self._own_mtp.chance(self._rates.rate("mtp", MTP_LENGTH))

    def _predict_text(self, most: int, skip: int) -> tuple[list[int], list[float]]:
        token_ids: list[int] = []
        chances: list[float] = []
        chance = 1.0
        for step, (token_id, right) in enumerate(self._predicted(most + skip)):
            chance *= right
            if chance < MIN_CHANCE:
                break
            if step >= skip:
                token_ids.append(token_id)
                chances.append(chance)
        return token_ids, chances

    def chances_soon(self, most: int) -> list[float]:
        """Return the chances of tokens that the grammar may force behind the next one, where nothing tells that one."""
        forced_text = self._sequence.forced_text
        return [] if forced_text is None else forced_text.chances_soon()[:most]

    def _predicted(self, most: int) -> list[tuple[int, float]]:
        """Return the next tokens, each with the chance that it is right if those before it are."""
        matched: list[tuple[int, float]] = []
        if (match := self._match) is not None:
            matched = [
                (token_id, self._own.chance(self._rates.rate(self._source, match.length + step)))
                for step, token_id in enumerate(match.predict(most))
            ]
        forced_text = self._sequence.forced_text
        forced = [] if forced_text is None else forced_text.predict(most, self._rates)
        for place, (one, other) in enumerate(zip(matched, forced, strict=False)):
            if one[0] != other[0]:
                return matched if one[1] > other[1] else forced
            matched[place] = forced[place] = max(one, other)
        return max(matched, forced, key=len)

    def _take(self, token_id: int) -> None:
        if self._mtp is not None:
            expected = self._mtp.at(len(self._tokens) - self._num_before)
            if expected is not None:
                self._own_mtp.note(self._rates.rate("mtp", MTP_LENGTH), is_right=expected == token_id)
                self._rates.note("mtp", MTP_LENGTH, is_right=expected == token_id)
        match, self._match = self._match, None
        predicted = None if match is None else match.source.token_at(match.next_place)
        if match is not None and predicted is not None:
            is_right = predicted == token_id
            self._own.note(self._rates.rate(self._source, match.length), is_right=is_right)
            self._rates.note(self._source, match.length, is_right=is_right)
            if is_right:
                match.follow()
                self._match, self._num_missed = match, 0
        self._tokens.extend((token_id,))
        if self._match is None:
            self._num_missed += 1
            if self._num_missed <= PATIENCE or len(self._tokens) % SELDOM == 0:
                self._search()

    def _search(self) -> None:
        self._match, self._source = self._tokens.longest_match(), "own"
        if self._corpus is not None and (self._match is None or self._match.length < MAX_MATCH):
            other = self._corpus.longest_match(self._salt, self._tokens.last(MAX_MATCH))
            if other is not None and (self._match is None or other.length > self._match.length):
                self._match, self._source = other, "answers"


class Speculator:
    """Decides a worker's drafts, and counts what becomes of them."""

    def __init__(self, config: SpeculationConfig, costs: Callable[[], StepCosts | None], safety: float):
        """`costs` are the worker's; `safety` is the share of a TPOT promise that a step may take."""
        self.uses_mtp = config.uses_mtp
        self.counters = SpeculationCounters(accepted_by_position=[0] * config.num_speculative_tokens)
        self._most = config.num_speculative_tokens
        self._costs = costs
        self._safety = safety
        self._rates = AcceptanceRates()
        self._row_costs = DraftRowCosts()
        self.corpus = AnswerCorpus(config.corpus_tokens) if config.uses_answers else None

    def is_worth_waiting(self, decodes: Sequence[WorkerJob], room: int) -> bool:
        """Return True where the step after the one that runs is better decided at its end, with drafts.

        `room` is how many rows may be added.
        """
        costs = self._costs()
        if costs is None or room <= 0 or (plain_s := _step_s(costs, decodes)) <= 0:
            return False
        num_forced = _follow_grammars(decodes, plain_s)
        drafts = [draft for job in decodes if (draft := self._draft(job, job.num_drawing)) is not None]
        if not drafts:
            return False
        taken, step_s, expected = self._choose_num_drafts(drafts, decodes, costs, room)
        waited_s = step_s + GAP_S + SEARCH_S * len(decodes) + FORCED_S * num_forced
        return bool(taken) and (len(decodes) + expected) * plain_s > len(decodes) * waited_s

    def drafts(self, decodes: Sequence[WorkerJob], room: int) -> dict[WorkerJob, Draft]:
        """Return what to draft for each of these requests, at most `room` tokens in all. No step may be under way."""
        costs = self._costs()
        if costs is None or room <= 0 or (plain_s := _step_s(costs, decodes)) <= 0:
            return {}
        _follow_grammars(decodes, plain_s)
        drafts = [draft for job in decodes if (draft := self._draft(job)) is not None]
        self._row_costs.forget()
        taken, _, _ = self._choose_num_drafts(drafts, decodes, costs, room) if drafts else ({}, 0.0, 0.0)
        for draft in taken.values():
            self._constrain(draft)
        return taken

    def step_ended(self, decodes: Sequence[WorkerJob], num_drafted: int, seconds: float) -> None:
        """Learn what rows cost from a step in which these requests decoded, with drafts or without, and no others."""
        costs = self._costs()
        if costs is not None and decodes:
            context = sum(len(job.sequence.token_ids) for job in decodes) // len(decodes)
            num_rows = len(decodes) + num_drafted
            reading_s = costs.reading_s(num_rows) - costs.reading_s(len(decodes))
            drafted_s = reading_s + costs.decode_s(num_drafted, num_drafted * context)
            self._row_costs.note(len(decodes), num_drafted, seconds, _step_s(costs, decodes), drafted_s)

    def accepted(self, num_drafted: int, num_accepted: int) -> None:
        """Count a draft that a step has run."""
        counters = self.counters
        counters.num_drafts += 1
        counters.draft_tokens += num_drafted
        counters.accepted_tokens += num_accepted
        for place in range(num_accepted):
            counters.accepted_by_position[place] += 1

    def ended(self, job: WorkerJob) -> None:
        """Keep a request's answer for later ones, and forget the request."""
        job.predictor = None
        if self.corpus is not None:
            begin = max(job.request.num_prompt_tokens, len(job.sequence.token_ids) - MAX_KEPT)
            self.corpus.add(job.request.cache_salt, job.sequence.token_ids[begin:])

    def _predictor(self, job: WorkerJob) -> RequestPredictor:
        if job.predictor is None:
            job.predictor = RequestPredictor(job.sequence, self.corpus, self._rates)
        else:
            job.predictor.catch_up()
        return job.predictor

    def _draft(self, job: WorkerJob, skip: int = 0) -> Draft | None:
        """Return what may be drafted for a request, behind the next `skip` tokens."""
        most = min(self._most, _most_useful(job) - skip)
        if most <= 0 or (is_penalised(job.request.sampling) and len(job.sequence.token_ids) > MAX_COUNTED):
            return None
        predictor = self._predictor(job)
        token_ids, chances = predictor.predict(most, skip)
        if skip and not token_ids:  # it is asked for how many rows there will be, not which
            chances = predictor.chances_soon(most)
            token_ids = [END] * len(chances)
        stops = job.request.stop_token_ids
        end = next((place for place, token_id in enumerate(token_ids) if token_id in stops), len(token_ids))
        return Draft(job, token_ids[:end], chances[:end]) if end else None

    def _constrain(self, draft: Draft) -> None:
        """Cut a draft at the first token that its request's grammar does not allow."""
        sequence = draft.job.sequence
        if sequence.constraint is None:
            return
        try:
            draft.constraint = sequence.constraint.for_drafts(sequence.token_ids, sequence.request.num_prompt_tokens)
            del draft.token_ids[draft.constraint.num_valid(draft.token_ids) :]
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # llguidance may panic, which is no Exception; the row without drafts meets it again
            _log.exception("no draft for request %s: its grammar can't be followed", sequence.request.request_id)
            draft.token_ids.clear()

    def _choose_num_drafts(
        self, drafts: Sequence[Draft], decodes: Sequence[WorkerJob], costs: StepCosts, room: int
    ) -> tuple[dict[WorkerJob, Draft], float, float]:
        """Return the tokens to draft, the step's seconds with them, and how many tokens they are expected to bring.

        The likeliest rows come first, as many as bring the most tokens per second.
        """
        plain_s, num_decodes = _step_s(costs, decodes), len(decodes)
        bounds = _StepBounds(decodes, plain_s, self._safety)
        rows = sorted(
            ((chance, draft) for draft in drafts for chance in draft.chances), key=lambda row: row[0], reverse=True
        )[:room]
        best, best_s, best_expected, best_rate = 0, plain_s, 0.0, num_decodes / plain_s
        added_s = expected = 0.0
        for number, (chance, draft) in enumerate(rows, 1):
            added_s += _row_s(costs, num_decodes + number - 1, len(draft.job.sequence.token_ids))
            expected += chance
            bounds.add(draft.job, chance)
            step_s = plain_s + added_s * self._row_costs.correction(num_decodes, number)
            if step_s <= bounds.most_s and (num_decodes + expected) / step_s > best_rate:
                best, best_s, best_expected = number, step_s, expected
                best_rate = (num_decodes + expected) / step_s
        taken = Counter(draft.job for _, draft in rows[:best])
        found = {
            draft.job: Draft(draft.job, draft.token_ids[:count], draft.chances[:count])
            for draft in drafts
            if (count := taken[draft.job])
        }
        return found, best_s, best_expected


def speculator_of(
    config: SpeculationConfig, safety: float, costs: Callable[[], StepCosts | None], groups: KVGroups
) -> Speculator | None:
    """Return what decides a worker's drafts; None where there are to be none.

    A model with states has none: a state takes one token after the other, and a step's rows come at once.
    """
    return Speculator(config, costs, safety) if config.is_on and STATE_WINDOW not in groups.windows else None


class _StepBounds:
    """The longest step that keeps each promise per token, or keeps it no worse than a step without drafts does.

    A request's own drafts make room, and so do those that its steps have had of late.
    """

    def __init__(self, decodes: Sequence[WorkerJob], plain_s: float, safety: float):
        self._token_s = {job: max(plain_s, job.promised_s * safety) for job in decodes if job.promised_s < math.inf}
        self._tokens = dict.fromkeys(self._token_s, 1.0)  # that the step is expected to bring
        self._longest_s = {job: self._longest(job) for job in self._token_s}
        self.most_s = min(self._longest_s.values(), default=math.inf)

    def add(self, job: WorkerJob, chance: float) -> None:
        """Count a drafted token of a request, with its chance to be right."""
        if job not in self._tokens:
            return
        self._tokens[job] += chance
        before_s, self._longest_s[job] = self._longest_s[job], self._longest(job)
        if before_s == self.most_s:
            self.most_s = min(self._longest_s.values())

    def _longest(self, job: WorkerJob) -> float:
        return self._token_s[job] * max(self._tokens[job], job.tokens_per_step)


def _follow_grammars(decodes: Sequence[WorkerJob], plain_s: float) -> int:
    """Return for how many requests forced text is looked for: as many as a step of `plain_s` has time for, first come
    first served. The others go on without it to their ends."""
    following = [job for job in decodes if job.sequence.forced_text is not None]
    most = int(FORCED_SHARE * plain_s / FORCED_S)
    for job in following[most:]:
        job.sequence.forced_text = None
    return min(len(following), most)


def _most_useful(job: WorkerJob) -> int:
    """Return how many tokens the request may still get beside the one that is drawn anyway."""
    return job.request.max_tokens - job.sequence.num_output_tokens - 1


def _step_s(costs: StepCosts, decodes: Sequence[WorkerJob]) -> float:
    """Return the seconds of a step in which these requests decode."""
    contexts = sum(len(job.sequence.token_ids) for job in decodes)
    return costs.reading_s(len(decodes)) + costs.decode_s(len(decodes), contexts)


def _row_s(costs: StepCosts, num_rows: int, num_context_tokens: int) -> float:
    """Return the seconds that one more row adds to a step of `num_rows`."""
    reading_s = costs.reading_s(num_rows + 1) - costs.reading_s(num_rows)
    return reading_s + costs.decode_s(1, num_context_tokens)
