"""Tokens that follow a client's prediction."""

import pytest

from twostroke.router.text.prediction import PredictedTokens

PREDICTION = list(range(10, 30))


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        (PREDICTION, 20),
        ([*PREDICTION, 1, 2], 20),
        (PREDICTION[:8], 8),
        ([1, 2, 3], 0),
        ([*PREDICTION[:5], 99, *PREDICTION[6:]], 5 + 14 - 3),  # three tokens tell where the answer is again
        (PREDICTION[10:], 10 - 3),
        ([], 0),
    ],
)
def test_tokens_count_where_the_answer_follows_the_prediction(answer: list[int], accepted: int) -> None:
    predicted = PredictedTokens(PREDICTION)
    for token_id in answer:
        predicted.add(token_id)
    assert (predicted.num_accepted, predicted.num_rejected) == (accepted, 20 - accepted)


def test_a_short_prediction_is_followed_from_its_beginning_alone() -> None:
    predicted = PredictedTokens([1, 2])
    for token_id in (1, 2, 1, 2):
        predicted.add(token_id)
    assert (predicted.num_accepted, predicted.num_rejected) == (2, 0)


def test_each_token_of_a_prediction_counts_once() -> None:
    for prediction, answer in (([5] * 50, [5] * 400), (list(range(100)), list(range(10)) * 10)):
        predicted = PredictedTokens(prediction)
        for token_id in answer:
            predicted.add(token_id)
        assert predicted.num_accepted <= len(set(enumerate(prediction)))
        assert predicted.num_accepted + predicted.num_rejected == len(prediction)
    assert predicted.num_accepted == 10
