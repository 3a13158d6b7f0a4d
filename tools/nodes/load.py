"""A steady load of greedy streams, whose answers are known: to see what becomes of each while nodes die.

Open loop: a request is sent when its time has come, however the server fares.
"""

import asyncio
import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from twostroke.benchmarks.clients import completion_body, send_at_moments, stream_completion
from twostroke.loadtests.generator.http_stream import read_stream

_FIRST_TOKEN_ID, _NUM_TOKEN_IDS = 300, 700  # ordinary tokens in any vocabulary


@dataclass(frozen=True)
class Answer:
    """What became of one request."""

    prompt: int  # its number
    text: str
    longest_pause_s: float  # between two tokens of its stream
    error: str | None  # None: it is whole


@dataclass(frozen=True)
class Request:
    """All are alike but for their prompts, of which there are `num_prompts`."""

    model: str
    num_prompts: int = 8
    prompt_tokens: int = 100
    max_tokens: int = 400

    def body(self, prompt: int) -> dict[str, Any]:
        ids = [_FIRST_TOKEN_ID + (prompt * 37 + i * 11) % _NUM_TOKEN_IDS for i in range(self.prompt_tokens)]
        return completion_body(self.model, ids, self.max_tokens)


def ask(url: str, request: Request, prompt: int) -> Answer:
    """Send one and read all of it."""
    return asyncio.run(_ask(url, request, prompt))


async def _ask(url: str, request: Request, prompt: int) -> Answer:
    answer = read_stream(await stream_completion(url, request.body(prompt)))
    pauses_s = (after - before for before, after in itertools.pairwise(answer.token_times))
    return Answer(prompt, answer.text, max(pauses_s, default=0.0), answer.error)


@dataclass(frozen=True)
class Verdict:
    requests: int
    lost: int  # without a whole answer
    mismatched: int  # whole, and not what the same prompt was answered before
    longest_pause_s: float  # in the stream of any request that was not lost
    reasons: tuple[str, ...]  # of the lost, each once


class SteadyLoad:
    """A context manager that sends requests, so many a second, while it lasts; then it waits for the last answers.

    Left by an error, it waits for none: they end with the server.
    """

    def __init__(self, url: str, request: Request, rate: float, expected: Mapping[int, str]):
        """`expected` has the answer to each prompt."""
        self._url = url
        self._request = request
        self._rate = rate
        self._expected = expected
        self._answers: list[Answer] = []
        self._ending = threading.Event()
        self._sender = threading.Thread(target=self._send, name="load", daemon=True)

    def __enter__(self) -> "SteadyLoad":
        self._sender.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        if error is None:
            self._sender.join()

    def verdict(self) -> Verdict:
        """Of what was answered while it lasted."""
        answers = self._answers
        whole = [answer for answer in answers if answer.error is None]
        return Verdict(
            requests=len(answers),
            lost=len(answers) - len(whole),
            mismatched=sum(answer.text != self._expected[answer.prompt] for answer in whole),
            longest_pause_s=max((answer.longest_pause_s for answer in whole), default=0.0),
            reasons=tuple(sorted({answer.error for answer in answers if answer.error is not None})),
        )

    def _send(self) -> None:
        moments = (number / self._rate for number in itertools.count())
        until = itertools.takewhile(lambda _: not self._ending.is_set(), moments)
        self._answers = asyncio.run(send_at_moments(until, self._ask))

    async def _ask(self, number: int, _: float) -> Answer:
        return await _ask(self._url, self._request, number % self._request.num_prompts)
