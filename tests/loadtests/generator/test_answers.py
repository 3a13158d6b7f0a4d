"""What the bytes of an answer say, also of one that failed on its way."""

import pytest

from tests.loadtests.generator.fake_server import REFUSAL, delta_event
from tests.loadtests.generator.scripted_server import HEAD, chunk, end, event, token_event
from twostroke.loadtests.generator.answers import PIECES_AT_ONCE, Usage, read_stream
from twostroke.loadtests.generator.http_stream import Exchange

HEAD_WITH_ID = HEAD.replace(b"\r\n\r\n", b"\r\nX-Request-Id: r7\r\n\r\n")


def came(*pieces: tuple[float, bytes], head: bytes = HEAD_WITH_ID, broken: str | None = None) -> Exchange:
    return Exchange(10.0, [(10.0, head), *pieces], broken)


def test_a_whole_answer() -> None:
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
        "stages": [{"prefill_s": 0.25}],
    }
    last = event({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    answer = read_stream(came((11.0, token_event("a")), (12.5, token_event("b", "length") + last)))
    assert (answer.status, answer.error, answer.http_status, answer.request_id) == ("ok", None, 200, "r7")
    assert (answer.token_times, answer.text) == ([11.0, 12.5], "ab")
    assert (answer.usage.completion_tokens, answer.usage.cached_tokens) == (2, 4)
    assert answer.usage.choice_stages == {"prefill_s": 0.25}


def test_the_first_time_is_that_of_the_first_text_and_later_tokens_without_text_count() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    pieces = ((11.0, role), (12.0, delta_event("a")), (13.0, delta_event("")), (14.0, delta_event("b", "stop")))
    answer = read_stream(came(*pieces, (15.0, delta_event("", "stop") + end(7, 3))))
    assert answer.token_times == [12.0, 13.0, 14.0]
    assert answer.text == "ab"


def test_what_a_model_thinks_is_text() -> None:
    thought = event({"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
    assert read_stream(came((11.0, thought), (12.0, delta_event("a", "stop") + end(7, 2)))).token_times == [11.0, 12.0]


def test_an_answer_without_any_text_has_its_end_as_its_only_time() -> None:
    answer = read_stream(came((11.0, token_event("")), (12.0, token_event("", "length") + end(7, 2))))
    assert (answer.status, answer.token_times) == ("ok", [12.0])


def test_nulls_are_as_what_is_not_there() -> None:
    nulls = event({"choices": None, "usage": None, "error": None})
    answer = read_stream(came((11.0, token_event("a", "stop") + nulls + end(7, 1))))
    assert (answer.status, answer.text) == ("ok", "a")


def test_a_server_may_tell_no_usage() -> None:
    answer = read_stream(came((11.0, token_event("a", "stop") + chunk(b"data: [DONE]\n\n"))))
    assert (answer.status, answer.usage) == ("ok", Usage())


@pytest.mark.parametrize(("status", "verdict"), [(429, "refused"), (503, "refused"), (500, "failed"), (400, "failed")])
def test_a_status_says_whether_the_server_would_not_or_could_not(status: int, verdict: str) -> None:
    answer = read_stream(Exchange(10.0, [(10.0, REFUSAL.replace(b"429", str(status).encode()))]))
    assert (answer.status, answer.http_status) == (verdict, status)
    assert answer.error == f"{status} Too Many Requests: full"


@pytest.mark.parametrize(
    ("last", "broken", "fault"),
    [
        (b"", None, "the stream has no end"),
        (b"", "the connection broke: reset by peer", "reset by peer"),
        (event({"error": {"message": "worker\nlost"}}), None, "worker"),
        (chunk(b"data: {broken\n\n"), None, "no chunk"),
        (chunk(b"data: \xff\n\n"), None, "no chunk"),
        (
            event({"choices": "none"}),
            None,
            "no chunk of an answer (Expected `array | null`, got `str` - at `$.choices`",
        ),
        (event({"choices": [{"delta": {"content": ["a"]}}]}), None, "no chunk"),
        (event({"usage": {"completion_tokens": "two"}}), None, "no chunk"),
        (b"-5\r\nhello\r\n", None, "no length"),
    ],
)
def test_an_answer_that_breaks_keeps_what_had_come(last: bytes, broken: str | None, fault: str) -> None:
    answer = read_stream(came((11.0, token_event("a")), (12.0, last), broken=broken))
    assert answer.status == "failed"
    assert (answer.token_times, answer.text) == ([11.0], "a")
    assert answer.error is not None
    assert fault in answer.error
    assert "\n" not in answer.error


def test_no_answer_at_all_has_the_reason() -> None:
    answer = read_stream(Exchange(10.0, [], "no connection: Connection refused"))
    assert (answer.status, answer.error, answer.http_status) == ("failed", "no connection: Connection refused", None)


def test_while_a_long_answer_is_read_others_may_run() -> None:
    pauses: list[int] = []
    pieces = [(11.0 + number, token_event("a")) for number in range(2 * PIECES_AT_ONCE)]
    read_stream(came(*pieces, (500.0, end(7, 128))), lambda: pauses.append(1))
    assert len(pauses) == 2
