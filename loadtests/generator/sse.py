"""From the raw bytes of an HTTP response to its server-sent events, each with the moment at which its last byte came.

Nothing here does I/O: bytes are stamped when they come and read when all is over, so that the client takes next to
nothing of the cores that it shares with the server.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Piece = tuple[float, bytes]
"""Bytes, and when they came (seconds of one clock)."""


class BadResponse(Exception):
    """What came is no complete, successful stream of completions."""


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    at: float  # seconds
    data: bytes


@dataclass(frozen=True)
class Head:
    """What comes before the body."""

    status: int
    status_line: str
    fields: dict[str, str]  # names in lower case


def response_of(arrivals: Iterable[Piece]) -> tuple[Head, Iterator[Piece]]:
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
        raise BadResponse(f"no HTTP response: {status_line[:200]!r}")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = _prepend((at, rest), pieces)
    if fields.get("transfer-encoding", "").lower() == "chunked":
        body = _unchunked(body)
    return Head(int(status[0]), status_line, fields), body


def text_of(body: Iterable[Piece]) -> str:
    """The beginning of a body that tells what is wrong."""
    return b"".join(data for _, data in body).decode(errors="replace")[:300]


def events_of(body: Iterable[Piece]) -> Iterator[Event]:
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
                yield Event(at, b"\n".join(data_lines))
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
                raise BadResponse(f"no length of a chunk: {line[:50]!r}")
            if left == 0:
                return
            buffered = rest


def _prepend(first: Piece, rest: Iterable[Piece]) -> Iterator[Piece]:
    yield first
    yield from rest
