"""What a streamed answer says: its tokens' times, its text, its usage. Also of one that failed on its way."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from twostroke.loadtests.generator.http_stream import (
    BadResponse,
    Event,
    Exchange,
    Piece,
    events_of,
    response_of,
    text_of,
)
from twostroke.loadtests.records import Status

REFUSED = (429, 503)
PIECES_AT_ONCE = 64
MAX_ERROR_CHARACTERS = 300


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """What the server says that it took; None: it doesn't say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    stages: list[dict[str, float]] | None = None  # of each choice; we ask for one

    @property
    def cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens

    @property
    def choice_stages(self) -> dict[str, float] | None:
        """The server's own durations."""
        return self.stages[0] if self.stages else None


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None  # what a model thinks before it answers, by two names
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        """Of a completion's or a chat's chunk; what a model thinks is text that a user sees."""
        delta = self.delta or Delta()
        return self.text or delta.content or delta.reasoning_content or delta.reasoning or ""


class Chunk(msgspec.Struct, frozen=True):
    """What is read of an event; servers add more. Another type of one of these is no answer of an OpenAI server."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


@dataclass
class StreamedAnswer:
    """As far as it came. Times are those of the stamps."""

    status: Status = "failed"
    error: str | None = None  # of one that was refused or failed
    http_status: int | None = None
    request_id: str | None = None
    token_times: list[float] = field(default_factory=list)  # the first: of the first text
    text: str = ""
    usage: Usage = field(default_factory=Usage)


_DECODE = msgspec.json.Decoder(Chunk).decode


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
            chunk = _chunk_of(event)
            answer.usage = chunk.usage or answer.usage
            for choice in chunk.choices or ():
                text = choice.new_text
                if text or (answer.token_times and choice.finish_reason is None):
                    answer.token_times.append(event.at)
                    texts.append(text)
                if choice.finish_reason is not None:
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


def _chunk_of(event: Event) -> Chunk:
    """Raises BadResponse for anything else, the server's errors too."""
    try:
        chunk = _DECODE(event.data)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadResponse(f"an event is no chunk of an answer ({error}): {event.data[:100]!r}") from None
    if chunk.error:
        raise BadResponse(f"the server says {event.data[:300].decode(errors='replace')}")
    return chunk


def _with_pauses(arrivals: Iterable[Piece], pause: Callable[[], None]) -> Iterator[Piece]:
    for number, piece in enumerate(arrivals, start=1):
        yield piece
        if number % PIECES_AT_ONCE == 0:
            pause()


def one_line(text: str) -> str:
    """Whatever a server says, as a record has it."""
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]
