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


def body_of(arrivals: Iterable[Piece]) -> Iterator[Piece]:
    """The body's pieces, without the head and the framing of chunks. Raises BadResponse for any status but 200."""
    pieces = iter(arrivals)
    head = b""
    at = 0.0
    while b"\r\n\r\n" not in head:
        try:
            at, data = next(pieces)
        except StopIteration:
            raise BadResponse(f"the connection ended within the head: {head[:200]!r}") from None
        head += data
    head, _, rest = head.partition(b"\r\n\r\n")
    remaining = _prepend((at, rest), pieces)
    status_line, *fields = head.split(b"\r\n")
    chunked = any(field.lower().replace(b" ", b"") == b"transfer-encoding:chunked" for field in fields)
    body = _unchunked(remaining) if chunked else remaining
    status = status_line.split(b" ", 2)[1:2]
    if status != [b"200"]:
        text = b"".join(data for _, data in body).decode(errors="replace")
        raise BadResponse(f"{status_line.decode(errors='replace')}: {text[:300]}")
    yield from body


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
                raise BadResponse(f"no length of a chunk: {line[:50]!r}") from None
            if left == 0:
                return
            buffered = rest


def _prepend(first: Piece, rest: Iterable[Piece]) -> Iterator[Piece]:
    yield first
    yield from rest
