import pytest

from twostroke.protocol.requests import GenerateRequest, SamplingParams, finish_reason, forbidden_tokens


def make_request(**changes: object) -> GenerateRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "router_id": "router",
        "token_ids": (1, 2, 3),
        "num_prompt_tokens": 3,
        "sampling": SamplingParams(),
        "max_tokens": 4,
        "stop_token_ids": (0,),
    }
    return GenerateRequest(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_output_tokens", "token", "expected"),
    [(1, 5, None), (1, 0, "stop"), (3, 5, None), (4, 5, "length"), (4, 0, "stop"), (5, 5, "length")],
)
def test_a_request_ends_at_a_stop_token_or_at_its_length(num_output_tokens: int, token: int, expected: str | None):
    assert finish_reason(make_request(), num_output_tokens, token) == expected


def test_stop_tokens_are_forbidden_until_min_tokens_are_out():
    request = make_request(min_tokens=2)
    assert [forbidden_tokens(request, n) for n in (0, 1, 2)] == [(0,), (0,), ()]


def test_a_stop_token_ends_the_request_from_the_first_draw_that_allows_it():
    request = make_request(min_tokens=2)
    assert [finish_reason(request, n, 0) for n in (1, 2, 3)] == [None, None, "stop"]


def test_a_resumed_request_knows_what_was_already_sent():
    assert make_request(token_ids=(1, 2, 3, 9, 9)).num_output_tokens_given == 2
