"""Trace files of each format, made here: what is read of them, and what is said of bad ones."""

import json
from itertools import islice
from pathlib import Path

import pytest

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import SessionTurn
from twostroke.loadtests.workloads.traces import Trace, open_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def jsonl(*rows: dict[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def block_row(timestamp: float, tokens: int, hash_ids: list[int], **more: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 5, "hash_ids": hash_ids, **more}


def first(trace: Trace, number: int, max_context: int = 100_000) -> list[tuple[float, SessionTurn]]:
    return list(islice(trace.timed_turns(max_context, seed=1), number))


def lengths(turn: SessionTurn) -> tuple[int, int]:
    return sum(piece.tokens for piece in turn.prompt), turn.output_tokens


def test_azures_seven_digits_and_zones_are_read(tmp_path: Path) -> None:
    trace = open_trace(
        written(tmp_path, AZURE + "2023-11-16 18:15:47.1805900,396,109\n2023-11-16 18:15:47.680590+00:00,879,55\n")
    )
    timed = first(trace, 3)
    assert [at_s for at_s, _ in timed] == pytest.approx([0.0, 0.5, 1.0])
    assert [lengths(turn) for _, turn in timed] == [(374, 44), (396, 109), (879, 55)]


def test_burstgpts_columns_are_read_and_failed_requests_left_out(tmp_path: Path) -> None:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "5,1,2,ChatGPT,472,18,490,Conversation log\n45,,3,GPT-4,10,0,10,API log\n118,,1,ChatGPT,108,23,131,API log\n"
    trace = open_trace(written(tmp_path, head + rows))
    assert trace.num_requests == 2
    assert [lengths(turn) for _, turn in first(trace, 2)] == [(472, 18), (108, 23)]


def test_equal_hashes_of_mooncakes_blocks_become_equal_pieces(tmp_path: Path) -> None:
    rows = (block_row(0, 1200, [1, 2, 3]), block_row(700, 1100, [1, 2, 4]), block_row(1500, 100, [5]))
    timed = first(open_trace(written(tmp_path, jsonl(*rows))), 6)
    one, other, third = (turn.prompt for _, turn in timed[:3])
    assert [piece.tokens for piece in one] == [512, 512, 176]
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert not set(third) & set(one)
    assert not {piece for _, turn in timed[3:] for piece in turn.prompt} & {*one, *other, *third}  # the repetition
    assert [at_s for at_s, _ in timed[:3]] == pytest.approx([0.0, 0.7, 1.5])


def test_blocks_shrink_with_the_lengths_and_stay_shared(tmp_path: Path) -> None:
    rows = (block_row(0, 5115, list(range(10))), block_row(700, 2560, [0, 1, 2, 3, 44]))
    timed = first(open_trace(written(tmp_path, jsonl(*rows))), 2, max_context=512)
    one, other = (turn.prompt for _, turn in timed)
    assert [piece.tokens for piece in one[:4]] == [51] * 4
    assert one[:4] == other[:4]
    assert lengths(timed[0][1])[0] == pytest.approx(511, abs=1)


def test_bailians_turns_share_what_their_hashes_share(tmp_path: Path) -> None:
    rows = (
        block_row(0.5, 40, [7, 8, 9], chat_id=1, parent_chat_id=-1, type="text", turn=1),
        block_row(3.25, 60, [7, 8, 10, 11], chat_id=2, parent_chat_id=1, type="text", turn=2),
    )
    timed = first(open_trace(written(tmp_path, jsonl(*rows))), 2)
    assert [piece.tokens for piece in timed[0][1].prompt] == [16, 16, 8]
    assert timed[0][1].prompt[:2] == timed[1][1].prompt[:2]
    assert timed[1][0] == pytest.approx(2.75)


def test_requests_bundled_by_a_coarse_clock_are_spread_over_its_ticks(tmp_path: Path) -> None:
    rows = [block_row(3000 * tick, 100, [tick]) for tick in range(40) for _ in range(10)]
    trace = open_trace(written(tmp_path, jsonl(*rows)))
    assert trace.tick_s == 3.0
    times = [at_s for at_s, _ in first(trace, 800)]
    assert times == sorted(times)
    assert len(set(times)) == 800
    assert all(3 * (index // 10) <= at_s < 3 * (index // 10 + 1) for index, at_s in enumerate(times))
    assert sum(at_s % 3 < 1.5 for at_s in times) == pytest.approx(400, abs=60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the columns are of no known trace"),
        ("a,b,c\n1,2,3\n", "line 1: the columns are of no known trace; there are azure, mooncake, burstgpt, bailian"),
        (
            AZURE + "yesterday,1,2\n",
            "line 3: Invalid RFC3339 encoded datetime - at `\\$.TIMESTAMP`; correct or remove the line",
        ),
        (AZURE + "2023-11-16 18:15:47,many,2\n", "line 3: Expected `int`, got `str` - at `\\$.ContextTokens`"),
        (AZURE + "2023-11-16 18:15:47,1\n", "line 3: Expected `int`, got `null` - at `\\$.GeneratedTokens`"),
        (AZURE + "2023-11-16 18:15:40,1,2\n", "request 2 is earlier than the one before it; sort the file"),
        (AZURE.splitlines()[0] + "\n", "has no requests"),
        (jsonl(block_row(0, 10, [1])) + "{nonsense\n", "line 2: JSON is malformed"),
        (jsonl({"timestamp": 0, "input_length": 3}), "line 1: Object missing required field `output_length`"),
        (jsonl(block_row(0, -1, [1])), "line 1: Expected `int` >= 0 - at `\\$.input_length`"),
        (jsonl(block_row(0, 10, ["a"])), "line 1: Expected `int`, got `str` - at `\\$.hash_ids\\[0\\]`"),
        (
            jsonl({**block_row(0, 10, [1]), "timestamp": None}),
            "line 1: Expected `float`, got `null` - at `\\$.timestamp`",
        ),
    ],
    ids=lambda case: case[:50],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LoadTestError, match=message) as raised:
        open_trace(written(tmp_path, text))
    assert str(tmp_path / "trace") in str(raised.value)


def test_a_missing_column_is_named_where_the_format_was_given(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="line 2: Object missing required field `Request tokens`"):
        open_trace(written(tmp_path, "Timestamp,Model\n1,a\n"), "burstgpt")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(LoadTestError, match="can't be read"):
        open_trace(path)
