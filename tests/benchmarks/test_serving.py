"""What the serving bench makes of raw streams."""

from twostroke.benchmarks.serving import Load, summarise
from twostroke.loadtests.generator.http_stream import Exchange

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
LOAD = Load("m", concurrency=1, requests=1, prompt_tokens=4, max_tokens=3)


def event(text: str) -> bytes:
    return b'data: {"choices":[{"text":"%s"}]}\n\n' % text.encode()


END = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'


def test_a_token_counts_when_its_last_byte_is_there() -> None:
    first = event("a")
    result = Exchange(10.0, [(10.5, HEAD + first[:9]), (11.0, first[9:]), (12.0, event("b")), (12.5, event("c") + END)])
    figures = summarise([result], LOAD, wall_s=2.0)
    assert figures["errors"] == 0
    assert figures["out_tok_s"] == 1.5
    assert figures["ttft_p50_s"] == 1.0
    assert figures["itl_p50_s"] == 0.5
    assert figures["itl_p99_s"] == 1.0


def test_refused_broken_and_short_streams_are_errors_and_count_for_nothing() -> None:
    refused = Exchange(0.0, [(1.0, b'HTTP/1.1 503 no\r\n\r\n{"error":{}}')])
    cut = Exchange(0.0, [(1.0, HEAD + event("a"))])
    broken = Exchange(0.0, [(1.0, HEAD + event("a"))], broken="reset by peer")
    short = Exchange(0.0, [(1.0, HEAD + event("a") + END.replace(b":3}", b":2}"))])
    figures = summarise([refused, cut, broken, short], LOAD, wall_s=1.0)
    assert figures["errors"] == 4
    assert figures["output_tokens"] == 0
    assert figures["ttft_p50_s"] is None
