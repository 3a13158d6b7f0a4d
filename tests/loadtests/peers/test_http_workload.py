"""The rows, their prompts, and how a row is sent."""

import pytest

from tests.loadtests.generator.scripted_server import HEAD, end, scripted_server, token_event
from twostroke.benchmarks.peers.compare_servers import Length, Row, Target, prompts, rows, send_row


def by_name(name: str) -> Row:
    return next(row for row in rows(output_tokens=64) if row.name == name)


def test_rows_are_what_the_comparison_promises() -> None:
    assert [(row.name, row.concurrency) for row in rows(64)] == [
        ("c1", 1),
        ("c8", 8),
        ("c32", 32),
        ("mixed", 32),
        ("prefill-1k", 1),
    ]
    mixed = by_name("mixed").lengths
    assert len(mixed) == 32
    assert all(64 <= length.prompt <= 1024 and 16 <= length.output <= 128 for length in mixed)
    assert len(set(mixed)) == 32
    assert by_name("mixed") == by_name("mixed")  # the same in every run


def test_no_prompt_shares_its_beginning_with_another_of_any_round() -> None:
    every = [tuple(prompt[:16]) for row in rows(64) for number in range(3) for prompt in prompts(row, number, 32000)]
    assert len(set(every)) == len(every)


def test_all_servers_get_the_same_prompts_in_a_round() -> None:
    assert prompts(by_name("c8"), 2, 32000) == prompts(by_name("c8"), 2, 32000)


def test_prompts_have_their_lengths_and_stay_within_the_vocabulary() -> None:
    row = by_name("mixed")
    drawn = prompts(row, 0, 1010)
    assert [len(prompt) for prompt in drawn] == [length.prompt for length in row.lengths]
    assert all(1000 <= token < 1010 for prompt in drawn for token in prompt)


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_row_is_sent_by_as_many_clients_as_it_says(concurrency: int) -> None:
    row = Row("some", tuple(Length(2, 1 + index) for index in range(6)), concurrency)
    async with scripted_server(
        lambda body: [HEAD, *([token_event("a")] * body["max_tokens"]), end(2, body["max_tokens"])]
    ) as server:
        figures, faults = await send_row(Target("scripted", server.base_url), "m", row, prompts(row, 0, 32000), 10.0)
    assert faults == []
    assert [body["max_tokens"] for body in server.bodies] == [1, 2, 3, 4, 5, 6] or concurrency > 1
    assert sorted(body["max_tokens"] for body in server.bodies) == [1, 2, 3, 4, 5, 6]
    assert server.most_open <= concurrency
    assert (figures.errors, figures.wrong_length, figures.tokens_per_event) == (0, 0, 1.0)


async def test_a_refused_and_a_short_answer_are_told_apart() -> None:
    def answer(body: dict[str, int]) -> list[bytes]:
        if body["max_tokens"] == 1:
            return [b"HTTP/1.1 429 Too Many Requests\r\n\r\nfull"]
        return [HEAD, token_event("a", "stop"), end(2, 1)]

    row = Row("some", (Length(2, 1), Length(2, 9)), 1)
    async with scripted_server(answer) as server:
        figures, faults = await send_row(Target("scripted", server.base_url), "m", row, prompts(row, 0, 32000), 10.0)
    assert faults == ["429 Too Many Requests: full"]
    assert (figures.errors, figures.wrong_length) == (1, 1)
