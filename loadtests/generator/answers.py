"""What a streamed answer says: its tokens' times, its text, its usage. Also of one that failed on its way."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loadtests.generator.completions import Exchange, message_of
from loadtests.generator.sse import BadResponse, Piece, events_of, response_of, text_of
from loadtests.records import Status

REFUSED = (429, 503)
PIECES_AT_ONCE = 64
MAX_ERROR_CHARACTERS = 300


@dataclass
class StreamedAnswer:
    """As far as it came. Times are those of the stamps."""

    status: Status = "failed"
    error: str | None = None  # of one that was refused or failed
    http_status: int | None = None
    request_id: str | None = None
    token_times: list[float] = field(default_factory=list)  # the first: of the first text
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.get("prompt_tokens_details") or {}
        cached: int | None = details.get("cached_tokens")
        return cached

    @property
    def stages(self) -> dict[str, float] | None:
        """The server's own durations, of one choice."""
        stages = self.usage.get("stages")
        return stages[0] if stages else None


def read_stream(exchange: Exchange, pause: Callable[[], None] = lambda: None) -> StreamedAnswer:
    """What the bytes of an exchange say; `pause` is called now and then, to let others run. Never raises BadResponse:
    the answer then has an error."""
    answer = StreamedAnswer()
    try:
        _read(_with_pauses(exchange.arrivals, pause), answer)
    except BadResponse as error:
        # Why the connection broke says more than that the answer is not whole.
        answer.error = one_line(exchange.broken or str(error))
    return answer


def _read(arrivals: Iterable[Piece], answer: StreamedAnswer) -> None:
    head, body = response_of(arrivals)
    answer.http_status = head.status
    answer.request_id = head.fields.get("x-request-id")
    if head.status != 200:
        answer.status = "refused" if head.status in REFUSED else "failed"
        answer.error = one_line(f"{head.status_line.partition(' ')[2]}: {text_of(body)}")
        return
    texts: list[str] = []
    ended_at: float | None = None  # the event with the reason for the end
    complete = False
    try:
        for event in events_of(body):
            if event.data == b"[DONE]":
                complete = True
                break
            message = message_of(event)
            answer.usage = message.get("usage") or answer.usage
            for choice in message.get("choices", ()):
                text = _text_of(choice)
                if text or (answer.token_times and choice.get("finish_reason") is None):
                    answer.token_times.append(event.at)
                    texts.append(text)
                if choice.get("finish_reason") is not None:
                    ended_at = event.at
    finally:
        answer.text = "".join(texts)
    if not complete:
        raise BadResponse("the stream has no end")
    if not answer.token_times:
        if ended_at is None:
            raise BadResponse("the stream has no tokens")
        # Tokens without any text, such as half a character: all that a user sees is the end.
        answer.token_times.append(ended_at)
    answer.status = "ok"


def _text_of(choice: dict[str, Any]) -> str:
    """Of a completion's or a chat's chunk; what a model thinks before it answers is text that a user sees."""
    delta = choice.get("delta") or {}
    text: str = (
        choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    )
    return text


def _with_pauses(arrivals: Iterable[Piece], pause: Callable[[], None]) -> Iterator[Piece]:
    for number, piece in enumerate(arrivals, start=1):
        yield piece
        if number % PIECES_AT_ONCE == 0:
            pause()


def one_line(text: str) -> str:
    """Whatever a server says, as a record has it."""
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]
