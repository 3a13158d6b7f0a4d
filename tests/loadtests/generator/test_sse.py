"""The events in an HTTP response's bytes, however these are cut."""

import pytest

from twostroke.loadtests.generator.http_stream import BadResponse, Event, events_of, response_of

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def events(pieces: list[tuple[float, bytes]]) -> list[Event]:
    _, body = response_of(pieces)
    return list(events_of(body))


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def test_an_event_has_come_when_its_last_byte_has() -> None:
    pieces = [(1.0, HEAD + b"data: a\n"), (2.0, b"\ndata: "), (3.0, b"b\n\ndata: c\n\n")]
    assert events(pieces) == [Event(2.0, b"a"), Event(3.0, b"b"), Event(3.0, b"c")]


def test_bytes_that_come_one_by_one_make_the_same_events() -> None:
    raw = CHUNKED + chunk(b"data: a\n\nda") + chunk(b"ta: b\r\n\r\n") + b"0\r\n\r\n"
    together = events([(1.0, raw)])
    apart = events([(float(index), raw[index : index + 1]) for index in range(len(raw))])
    assert [event.data for event in apart] == [event.data for event in together] == [b"a", b"b"]
    assert apart[0].at == raw.index(b"\n\nda") + 1
    assert apart[1].at == raw.index(b"\r\n\r\n", len(CHUNKED)) + 3


def test_a_chunks_length_in_the_middle_of_an_event_is_no_part_of_it() -> None:
    pieces = [(1.0, CHUNKED + chunk(b'data: {"te')), (2.0, chunk(b'xt":1}\n\n') + b"0\r\n\r\n")]
    assert events(pieces) == [Event(2.0, b'{"text":1}')]


def test_what_comes_after_the_last_chunk_is_ignored() -> None:
    assert events([(1.0, CHUNKED + chunk(b"data: a\n\n") + b"0\r\nX: y\r\n\r\n")]) == [Event(1.0, b"a")]


def test_comments_and_other_fields_are_skipped_and_lines_of_data_joined() -> None:
    body = b": ping\n\nevent: token\nid: 7\ndata: a\ndata:b\n\n"
    assert events([(1.0, HEAD + body)]) == [Event(1.0, b"a\nb")]


def test_an_event_that_is_cut_off_is_none() -> None:
    assert events([(1.0, HEAD + b"data: a\n\ndata: b\n")]) == [Event(1.0, b"a")]


@pytest.mark.parametrize("pieces", [[], [(1.0, b"HTTP/1.1 200 OK\r\n")], [(1.0, CHUNKED + b"zz\r\nabc")]])
def test_what_is_no_http_response_is_bad(pieces: list[tuple[float, bytes]]) -> None:
    with pytest.raises(BadResponse):
        events(pieces)
