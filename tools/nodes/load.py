"""A steady load of greedy streams, whose answers are known: to see what becomes of each while nodes die.

Open loop: a request is sent when its time has come, however the server fares, by a thread of its own.
"""

import itertools
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.loadtests.generator.http_stream import Exchange, endpoint_of, read_stream, stream

_FIRST_TOKEN_ID, _NUM_TOKEN_IDS = 300, 700  # ordinary tokens in any vocabulary
PATIENCE_S = 300.0
"""A request that takes longer in all is lost."""


@dataclass(frozen=True)
class Answer:
    """What became of one request."""

    prompt: int  # its number
    text: str
    sent_at: float  # of `time.monotonic`, as the next
    first_token_at: float | None
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
        asked = {"model": self.model, "prompt": ids, "max_tokens": self.max_tokens, "ignore_eos": True}
        return asked | {"temperature": 0, "stream": True}


def ask(url: str, request: Request, prompt: int) -> Answer:
    """Send one and read all of it."""
    endpoint, exchange = endpoint_of(url), Exchange(0.0)
    body = json.dumps(request.body(prompt)).encode()
    stream(endpoint, endpoint.request("/v1/completions", body), exchange, PATIENCE_S)
    answer = read_stream(exchange)
    times = answer.token_times
    pauses_s = (after - before for before, after in itertools.pairwise(times))
    return Answer(
        prompt, answer.text, exchange.sent_at, min(times, default=None), max(pauses_s, default=0.0), answer.error
    )


@dataclass(frozen=True)
class Verdict:
    requests: int
    lost: int  # without a whole answer
    mismatched: int  # whole, and not what the same prompt was answered before
    longest_pause_s: float  # in the stream of any request that was not lost
    reasons: tuple[str, ...]  # of the lost, each once
    lost_new: int  # of the lost, those that were sent after what happened
    answered_again_s: float | None  # from what happened to the first token of a request that was sent after it
    slowest_first_token_s: float  # of those that were sent after it, and not lost


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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ending.set()
        if kind is None:
            self._sender.join()

    def verdict(self, struck_at: float) -> Verdict:
        """Of what was answered while it lasted. `struck_at`: when it happened, by `time.monotonic`."""
        answers = self._answers
        whole = [answer for answer in answers if answer.error is None]
        new = [(one.sent_at, one.first_token_at) for one in whole if one.sent_at >= struck_at]
        firsts = [(sent, first) for sent, first in new if first is not None]
        return Verdict(
            requests=len(answers),
            lost=len(answers) - len(whole),
            mismatched=sum(answer.text != self._expected[answer.prompt] for answer in whole),
            longest_pause_s=max((answer.longest_pause_s for answer in whole), default=0.0),
            reasons=tuple(sorted({answer.error for answer in answers if answer.error is not None})),
            lost_new=sum(answer.error is not None and answer.sent_at >= struck_at for answer in answers),
            answered_again_s=min((first - struck_at for _, first in firsts), default=None),
            slowest_first_token_s=max((first - sent for sent, first in firsts), default=0.0),
        )

    def _send(self) -> None:
        began = time.monotonic()
        asking: list[threading.Thread] = []
        while not self._ending.wait(began + len(asking) / self._rate - time.monotonic()):
            prompt = len(asking) % self._request.num_prompts
            asking.append(threading.Thread(target=self._ask, args=(prompt,), daemon=True))
            asking[-1].start()
        for thread in asking:
            thread.join()

    def _ask(self, prompt: int) -> None:
        self._answers.append(ask(self._url, self._request, prompt))
