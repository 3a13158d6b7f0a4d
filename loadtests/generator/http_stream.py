"""One streamed request over a socket of its own: its bytes stamped as they come, and read when all is over.

Nothing is read while it streams: the less a chunk costs, the more streams a core can stamp on time. Under gevent's
monkey patching all of this waits for one request while others run; without it, it just blocks.

Each request has a connection of its own, as each of many users behind a load balancer has: the balancer then spreads
requests, not a few connections, and no request fails since the server has just closed an idle one. What connecting
costs counts in the time to first token.

What is read of the bytes: the response's head, its server-sent events, each with the moment at which its last byte
came, and what these say: the tokens' times, the text, the usage. Also of an answer that failed on its way.
"""

import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import msgspec

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.run_folder import Status

Piece = tuple[float, bytes]
"""Bytes, and when they came (seconds of one clock)."""


class BadResponse(Exception):
    """The response is not a complete, successful stream of completions."""


class UnreadableResponse(BadResponse):
    """The response does not speak HTTP, or its events are no JSON: the client can't say what the server answered."""


@dataclass(frozen=True)
class ServerSentEvent:
    """One server-sent event."""

    at: float  # seconds
    data: bytes


@dataclass(frozen=True)
class ResponseHead:
    """Head of a response, before its body."""

    status: int
    status_line: str
    fields: dict[str, str]  # names in lower case


def read_response(arrivals: Iterable[Piece]) -> tuple[ResponseHead, Iterator[Piece]]:
    """The head, and the body's pieces without the framing of chunks. Raises BadResponse for what is no response."""
    pieces = iter(arrivals)
    head = b""
    at = 0.0
    while b"\r\n\r\n" not in head:
        try:
            at, data = next(pieces)
        except StopIteration:
            raise BadResponse(f"the connection ended within the head: {head[:200]!r}") from None
        head += data
    text, _, rest = head.partition(b"\r\n\r\n")
    status_line, *lines = text.decode(errors="replace").split("\r\n")
    status = status_line.split(" ", 2)[1:2]
    if not status or not status[0].isdecimal():
        raise UnreadableResponse(f"no HTTP response: {status_line[:200]!r}")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body: Iterator[Piece] = chain([(at, rest)], pieces)
    if fields.get("transfer-encoding", "").lower() == "chunked":
        body = _unchunked(body)
    return ResponseHead(int(status[0]), status_line, fields), body


def body_text(body: Iterable[Piece]) -> str:
    """The beginning of a body that tells what is wrong."""
    return b"".join(data for _, data in body).decode(errors="replace")[:300]


def sse_events(body: Iterable[Piece]) -> Iterator[ServerSentEvent]:
    """The events of a body: lines `data: ...`, an empty line after each event; comments and other fields are skipped.

    An event that is cut off is none.
    """
    buffered = b""
    data_lines: list[bytes] = []
    for at, piece in body:
        *lines, buffered = (buffered + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data_lines.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data_lines:
                yield ServerSentEvent(at, b"\n".join(data_lines))
                data_lines = []


def _unchunked(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The content of HTTP/1.1 chunks, each part of it as soon as it is there. Ends at the empty chunk."""
    buffered = b""
    left = 0  # bytes of the current chunk that have not come yet
    for at, data in pieces:
        buffered += data
        while buffered:
            if left:
                content, buffered = buffered[:left], buffered[left:]
                left -= len(content)
                yield at, content
                continue
            line, end, rest = buffered.removeprefix(b"\r\n").partition(b"\r\n")
            if not end:
                break
            try:
                left = int(line.partition(b";")[0], 16)
            except ValueError:
                left = -1
            if left < 0:
                raise UnreadableResponse(f"no length of a chunk: {line[:50]!r}")
            if left == 0:
                return
            buffered = rest


@dataclass
class ClientExchange:
    """A request and the raw bytes that came back. Times are of `time.perf_counter`."""

    sent_at: float
    arrivals: list[Piece] = field(default_factory=list)
    broken: str | None = None  # why the connection failed


RECEIVE_BYTES = 65536
TRIAL_LIMIT_S = 2.0  # to connect to one of several addresses of a name


@dataclass(frozen=True)
class Endpoint:
    """A server, looked up once: asking the resolver for each request would cost the generator more than sending it."""

    family: socket.AddressFamily
    address: Any  # of that family
    host: str
    base_path: str
    head: str  # the fields that all requests have
    tls: ssl.SSLContext | None

    def request(self, path: str, body: bytes) -> bytes:
        """All bytes of a POST to `path`, which begins with a slash."""
        head = f"POST {self.base_path}{path} HTTP/1.1\r\n{self.head}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body


def make_endpoint(url: str, api_key: str | None = None) -> Endpoint:
    """The server at `url`, which has no /v1. Raises LoadTestError for what is no address, or can't be looked up."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise LoadTestError(f"url {url}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LoadTestError(f"url {url}: write http://HOST:PORT or https://HOST:PORT, with a path where there is one")
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LoadTestError(f"url {url}: {parts.hostname} can't be looked up: {error.strerror}") from error
    family, address = _first_that_answers([(family, address) for family, _, _, _, address in found])
    head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    if api_key:
        head += f"Authorization: Bearer {api_key}\r\n"
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Endpoint(family, address, parts.hostname, parts.path.rstrip("/"), head, tls)


def stream(
    endpoint: Endpoint,
    request: bytes,
    exchange: ClientExchange,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send `request` and put all that comes into `exchange`, until the server closes the connection.

    Stamps `exchange.sent_at` as it begins to connect. Raises nothing for what the server or the network does:
    `exchange.broken` then says why. Whoever ends this from outside finds in `exchange` what had come by then.
    """
    exchange.sent_at = clock()
    deadline = exchange.sent_at + limit_s
    arrivals = exchange.arrivals
    try:
        with _connect(endpoint, limit_s) as connection:
            connection.sendall(request)
            while data := connection.recv(RECEIVE_BYTES):
                now = clock()
                arrivals.append((now, data))
                if now >= deadline:
                    raise TimeoutError
                connection.settimeout(deadline - now)
    except TimeoutError:
        exchange.broken = f"no whole answer within {limit_s:g} s"
    except OSError as error:  # ssl.SSLError is one
        what = "the connection broke" if arrivals else "no connection"
        exchange.broken = f"{what}: {error.strerror or error}"


def _first_that_answers(addresses: list[tuple[socket.AddressFamily, Any]]) -> tuple[socket.AddressFamily, Any]:
    """`localhost` is ::1, too, where many a server does not listen. Where none answers the first says why, later."""
    for family, address in addresses if len(addresses) > 1 else ():
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.settimeout(TRIAL_LIMIT_S)
            if trial.connect_ex(address) == 0:
                return family, address
    return addresses[0]


def _connect(endpoint: Endpoint, limit_s: float) -> socket.socket:
    connection = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        connection.settimeout(limit_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect(endpoint.address)
        if endpoint.tls is not None:
            return endpoint.tls.wrap_socket(connection, server_hostname=endpoint.host)
        return connection
    except BaseException:
        connection.close()
        raise


REFUSED = (429, 503)
PIECES_AT_ONCE = 64
MAX_ERROR_CHARACTERS = 300


class ReportedUsage(msgspec.Struct, frozen=True):
    """Usage that the server reports. None means that it reports none."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    stages: dict[str, float] | None = None  # the server's own durations of our one choice, in seconds


def reported_usage(usage: Any) -> ReportedUsage:
    """Return what is known of a response's `usage`. Members that others add or have in other forms are ignored."""
    members = usage if isinstance(usage, dict) else {}
    details = members.get("prompt_tokens_details")
    choices = members.get("stages")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return ReportedUsage(
        _count(members.get("prompt_tokens")),
        _count(members.get("completion_tokens")),
        _count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        {name: float(value) for name, value in first.items() if type(value) in (int, float)} or None,
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


class StreamDelta(msgspec.Struct, frozen=True):
    content: Any = None
    reasoning_content: Any = None  # what a model thinks before it answers, by two names
    reasoning: Any = None


class StreamChoice(msgspec.Struct, frozen=True):
    text: Any = None
    delta: StreamDelta | None = None
    finish_reason: Any = None

    @property
    def new_text(self) -> str:
        """Text of a completion's or a chat's chunk. A model's thoughts are text that a user sees."""
        delta = self.delta or StreamDelta()
        texts = (self.text, delta.content, delta.reasoning_content, delta.reasoning)
        return next((text for text in texts if text and isinstance(text, str)), "")


class StreamChunk(msgspec.Struct, frozen=True):
    """Fields of an event that are read. Servers add more, and have these in forms that are ignored."""

    choices: list[StreamChoice] | None = None
    usage: Any = None
    error: Any = None


@dataclass
class StreamedAnswer:
    """The answer as far as it came. Times are those of the stamps."""

    status: Status = "failed"
    error: str | None = None  # of one that was refused or failed
    http_status: int | None = None
    request_id: str | None = None
    token_times: list[float] = field(default_factory=list)  # the first: of the first text
    text: str = ""
    usage: ReportedUsage = field(default_factory=ReportedUsage)
    is_unreadable: bool = False  # the client could not read it, which says nothing of the server


_DECODE = msgspec.json.Decoder(StreamChunk).decode


def read_stream(exchange: ClientExchange, pause: Callable[[], None] = lambda: None) -> StreamedAnswer:
    """Parse the bytes of an exchange. `pause` is called now and then, to let others run. It never raises
    BadResponse: the answer then has an error."""
    answer = StreamedAnswer()
    try:
        _read(_with_pauses(exchange.arrivals, pause), answer)
    except BadResponse as error:
        # Why the connection broke says more than that the answer is not whole.
        answer.error = one_line(exchange.broken or str(error))
        answer.is_unreadable = exchange.broken is None and isinstance(error, UnreadableResponse)
    return answer


def _read(arrivals: Iterable[Piece], answer: StreamedAnswer) -> None:
    head, body = read_response(arrivals)
    answer.http_status = head.status
    answer.request_id = head.fields.get("x-request-id")
    if head.status != 200:
        answer.status = "refused" if head.status in REFUSED else "failed"
        answer.error = one_line(f"{head.status_line.partition(' ')[2]}: {body_text(body)}")
        return
    texts: list[str] = []
    ended_at: float | None = None  # the event with the reason for the end
    complete = False
    unknown: bytes | None = None  # the first event of an unknown form
    try:
        for event in sse_events(body):
            if event.data == b"[DONE]":
                complete = True
                break
            chunk = _read_chunk(event)
            if chunk is None:
                unknown = unknown or event.data
                continue
            if chunk.usage is not None:
                answer.usage = reported_usage(chunk.usage)
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
        if ended_at is None and unknown is not None:
            raise UnreadableResponse(f"no event is a chunk of an answer, as {unknown[:100]!r} is none")
        if ended_at is None:
            raise BadResponse("the stream has no tokens")
        # Tokens without any text, such as half a character: all that a user sees is the end.
        answer.token_times.append(ended_at)
    answer.status = "ok"


def _read_chunk(event: ServerSentEvent) -> StreamChunk | None:
    """Return the event's chunk, or None for JSON of another form. Raises BadResponse for the server's errors, and
    UnreadableResponse for what is no JSON."""
    try:
        chunk = _DECODE(event.data)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, ValueError) as error:
        raise UnreadableResponse(f"an event is no JSON ({error}): {event.data[:100]!r}") from None
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
