"""`twostroke doctor` with a router's answers that are not a router's."""

import json
from typing import Any

import pytest

from tests.cluster.command_line import answering, one_line
from twostroke.cluster.cli import main


def pair(source: str, target: str, **changes: Any) -> dict[str, Any]:
    found = {
        "event": "pair",
        "source": source,
        "source_role": "prefill",
        "target": target,
        "target_role": "decode",
        "transport": "tcp",
        "why": "tcp: it joins any two",
        "missing": ["shm: other machines"],
        "bytes_per_s": 2.5e9,
        "round_trip_s": 0.00125,
        "error": None,
    }
    return found | changes


def report(
    *pairs: dict[str, Any], left_out: int = 0, is_whole: bool = True, missing_workers: tuple[str, ...] = ()
) -> dict[str, bytes]:
    begin = {"event": "begin", "pairs": len(pairs), "left_out": left_out, "missing_workers": missing_workers}
    lines = [begin, *pairs]
    if is_whole:
        lines.append({"event": "end", "failed": 0})
    return {"/doctor": b"".join(json.dumps(line).encode() + b"\n" for line in lines)}


def test_each_pair_has_a_row_and_what_is_missing_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    shm = pair("p1", "d0", transport="shm", missing=[], bytes_per_s=9e9, why="shm: one machine")
    with answering(report(pair("p0", "d0"), pair("p0", "d1"), shm, left_out=3)) as url:
        assert main(["doctor", "--url", url]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "prefill p0 decode d0 tcp 2.50 1.25" in lines
    assert "prefill p1 decode d0 shm 9.00 1.25" in lines
    assert "tcp: it joins any two (2 pairs)" in lines
    assert "shm: other machines (2 pairs)" in lines
    assert "3 more pairs were not tried." in lines
    assert lines[-1] == "All pairs work; 2 of 3 could use a better transport."


def test_pairs_that_lack_nothing_are_summed_up_as_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(report(pair("p0", "d0", missing=[]))) as url:
        assert main(["doctor", "--url", url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "All pairs use the best transport there is."


def test_a_pair_that_fails_shows_why_and_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    broken = pair("p0", "d1", transport="", why="", missing=[], bytes_per_s=0.0, error="the link [broke]")
    with answering(report(pair("p0", "d0"), broken)) as url:
        assert main(["doctor", "--url", url]) == 1
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "d1" in line)
    assert row.split() == ["prefill", "p0", "decode", "d1", "failed"]
    assert "  p0 to d1: the link [broke]" in lines
    assert lines[-1] == "1 of 2 pairs failed."


def test_an_answer_without_its_end_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(report(pair("p0", "d0"), is_whole=False)) as url:
        assert main(["doctor", "--url", url]) == 1
    assert "stopped answering after 1 of 1 pairs" in capsys.readouterr().err


def test_json_is_the_routers_own(capsys: pytest.CaptureFixture[str]) -> None:
    bodies = report(pair("p0", "d0"))
    with answering(bodies) as url:
        assert main(["doctor", "--url", url, "--json"]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line) for line in captured.out.splitlines()] == [
        json.loads(line) for line in bodies["/doctor"].splitlines()
    ]
    assert captured.err == ""


def test_a_fleet_without_pairs_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(report()) as url:
        assert main(["doctor", "--url", url]) == 0
    assert "decode workers compute prompts themselves" in capsys.readouterr().out


@pytest.mark.parametrize("pairs", [(), (pair("p0", "d0"),)])
def test_a_missing_worker_is_told_and_fails_the_command(
    capsys: pytest.CaptureFixture[str], pairs: tuple[dict[str, Any], ...]
) -> None:
    missing = "1 of 2 decode workers that there are to be is missing"
    with answering(report(*pairs, missing_workers=(missing,))) as url:
        assert main(["doctor", "--url", url]) == 1
    out = capsys.readouterr().out
    assert f"{missing}." in out.splitlines()
    assert "compute prompts themselves" not in out


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error": {"message": "the links are being examined already"}}', "the links are being examined already"),
        (b"<html>", "no Twostroke server answers at {url}: status 409"),
        (b"[]", "no Twostroke server answers at {url}: status 409"),
    ],
)
def test_a_refusal_is_told_in_one_line(capsys: pytest.CaptureFixture[str], body: bytes, told: str) -> None:
    with answering({"/doctor": body}, status=409) as url:
        assert main(["doctor", "--url", url]) == 2
    assert one_line(capsys) == f"twostroke: {told.format(url=url)}"
