"""Which answers the comparison takes, and what it reads of them."""

import pytest

from tests.loadtests.generator.scripted_server import HEAD, end, event, token_event
from twostroke.benchmarks.peers.compare_servers import read_answer
from twostroke.loadtests.generator.http_stream import BadResponse, Exchange


def answer_of(*pieces: tuple[float, bytes], broken: str | None = None) -> Exchange:
    return Exchange(10.0, [(10.0, HEAD), *pieces], broken)


def test_times_are_those_of_the_events_with_tokens() -> None:
    answer = read_answer(
        answer_of((10.5, token_event("a")), (11.0, token_event("b")), (13.0, token_event("c", "length") + end(7, 3)))
    )
    assert answer.ttft_s == 0.5
    assert answer.gaps_s == [0.5, 2.0]
    assert answer.ended_at == 13.0
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 3)


def test_tokens_are_counted_by_usage_where_events_bring_several() -> None:
    answer = read_answer(answer_of((11.0, token_event("a b c")), (12.0, token_event("d e f", "length") + end(7, 6))))
    assert answer.completion_tokens == 6
    assert len(answer.token_times) == 2


def test_usage_may_stand_in_every_event() -> None:
    first = event({"choices": [{"text": "a", "finish_reason": None}], "usage": {"completion_tokens": 1}})
    assert read_answer(answer_of((11.0, first + token_event("b") + end(7, 2)))).completion_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([(11.0, token_event("a"))], "no end"),
        ([(11.0, end(7, 0))], "no tokens"),
        ([(11.0, token_event("a") + end(7, 1).replace(b"usage", b"other"))], "no usage"),
        ([(11.0, event({"error": {"message": "out of blocks"}}))], "out of blocks"),
        ([(11.0, end(7, 1).replace(b'{"choices', b'+"choices'))], "no chunk"),
    ],
)
def test_an_answer_that_is_not_whole_is_bad(pieces: list[tuple[float, bytes]], fault: str) -> None:
    with pytest.raises(BadResponse, match=fault):
        read_answer(answer_of(*pieces))


def test_a_broken_connection_is_bad_even_after_a_whole_answer() -> None:
    with pytest.raises(BadResponse, match="reset by peer"):
        read_answer(answer_of((11.0, token_event("a") + end(7, 1)), broken="reset by peer"))
