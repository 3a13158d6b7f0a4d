"""Penalties made of counts that are kept up to date are those of the whole history, to the bit."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from twostroke.model.sampling.sampler import adjust
from twostroke.model.step import Draw, TokenCounts
from twostroke.protocol.requests import GenerateRequest, SamplingParams
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import SequenceState

VOCAB = 300


def naively_penalised(
    row: NDArray[np.float32], tokens: list[int], num_prompt_tokens: int, sampling: SamplingParams
) -> NDArray[np.float32]:
    row, outputs = row.copy(), tokens[num_prompt_tokens:]
    factor = np.float32(sampling.repetition_penalty)
    for token_id in set(tokens):
        if token_id < VOCAB:
            row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
            if (times := outputs.count(token_id)) > 0:
                row[token_id] += np.float32(-(sampling.frequency_penalty * times + sampling.presence_penalty))
    return row


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.37},
        {"presence_penalty": -0.9},
        {"repetition_penalty": 0.7, "frequency_penalty": -0.21, "presence_penalty": 1.1},
    ],
    ids=str,
)
def test_a_sequences_draws_are_penalised_to_the_bit_as_its_history_says(penalties: dict[str, float]) -> None:
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, VOCAB + 20, 50).tolist()  # with ids outside the vocabulary
    sampling = SamplingParams(**penalties)
    request = GenerateRequest("r", "router", tuple(prompt), 45, sampling, 200)
    pool = BlockPool(64, 4)
    sequence = SequenceState(request, 4)
    for _ in range(100):
        sequence.reserve(pool, sequence.num_uncomputed)
        kept = sequence.step(sequence.num_uncomputed).draw
        assert kept is not None
        assert kept.counts is not None
        kept = kept.settled(sequence.token_ids[-1], len(sequence.token_ids))
        row = draw.normal(0, 3, VOCAB).astype(np.float32)
        logits = torch.from_numpy(np.stack((row, row)))
        adjust(logits, [0, 1], [kept, Draw(sampling, tuple(sequence.token_ids), 45)])
        expected = naively_penalised(row, sequence.token_ids, 45, sampling)
        assert np.array_equal(logits.numpy(), np.stack((expected, expected)))
        sequence.num_computed = len(sequence.token_ids)
        sequence.append(int(draw.integers(0, VOCAB)))
    sequence.reset(pool)


@pytest.mark.parametrize("is_known", [True, False], ids=["the token is in the history", "it is under way"])
def test_a_draw_ahead_takes_in_the_token_before_it_once(is_known: bool) -> None:
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, bad_words=((4, 5),))
    history = [1, 2, 3]
    counts = TokenCounts(history, 3)
    if is_known:
        history.append(4)
    for _ in range(2):
        draw = Draw(sampling, history, 3, counts=counts).settled(4, 4)
        logits = torch.zeros(1, 8)
        adjust(logits, [0], [draw])
        assert logits[0].tolist() == [0, 0, 0, 0, -0.75, -np.inf, 0, 0]


def test_a_settled_draw_copies_no_more_of_a_history_than_bad_words_look_at() -> None:
    history = [*range(40), 4, 5]
    sampling = SamplingParams(bad_words=((4, 5, 6), (39, 4, 5, 7), (5, 3), (38, 39, 2)))
    for num_prompt_tokens, banned in ((40, {6, 3}), (39, {6, 3, 7}), (41, {3}), (42, set())):
        draw = Draw(sampling, history, num_prompt_tokens, counts=TokenCounts(history, num_prompt_tokens))
        settled = draw.settled(5, 42)
        assert len(settled.history) <= 3
        for one in (draw, settled):
            logits = torch.zeros(1, 8)
            adjust(logits, [0], [one])
            assert {token for token, value in enumerate(logits[0].tolist()) if value == -np.inf} == banned


def test_a_request_without_penalties_counts_nothing() -> None:
    pool = BlockPool(4, 4)
    sequence = SequenceState(GenerateRequest("r", "router", (1, 2, 3), 3, SamplingParams(), 5), 4)
    sequence.reserve(pool, 3)
    drawn = sequence.step(3).draw
    assert drawn is not None
    assert drawn.counts is None
    sequence.reset(pool)
