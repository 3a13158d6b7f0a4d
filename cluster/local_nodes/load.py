"""A steady load of greedy streams, whose answers are known: to see what becomes of each while nodes die.

Open loop: a request is sent when its time has come, however the server fares.
"""

import json
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from types import TracebackType
from typing import Any

PATIENCE_S = 60.0
"""Between two events of a stream, after which it is lost."""

_FIRST_TOKEN_ID, _NUM_TOKEN_IDS = 300, 700  # ordinary tokens in any vocabulary


@dataclass(frozen=True)
class Answer:
    """What became of one request."""

    prompt: int  # its number
    text: str
    longest_pause_s: float  # between two events of its stream
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
        return {
            "model": self.model,
            "prompt": ids,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }


def ask(url: str, request: Request, prompt: int) -> Answer:
    """Send one and read all of it."""
    text: list[str] = []
    longest, last, is_whole = 0.0, None, False
    error: str | None = None
    body = json.dumps(request.body(prompt)).encode()
    post = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(post, timeout=PATIENCE_S) as answer:
            for line in answer:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    is_whole = True
                elif data:
                    now = time.monotonic()
                    longest = max(longest, 0.0 if last is None else now - last)
                    last = now
                    event = json.loads(data)
                    if "error" in event:
                        error = str(event["error"])
                    text += [choice["text"] for choice in event.get("choices", ())]
    except (OSError, HTTPException, ValueError) as broken:
        error = f"{type(broken).__name__}: {broken}"
    return Answer(prompt, "".join(text), longest, error or (None if is_whole else "the stream has no end"))


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
        """Of what has been answered so far."""
        answers = list(self._answers)
        whole = [answer for answer in answers if answer.error is None]
        return Verdict(
            requests=len(answers),
            lost=len(answers) - len(whole),
            mismatched=sum(answer.text != self._expected[answer.prompt] for answer in whole),
            longest_pause_s=max((answer.longest_pause_s for answer in whole), default=0.0),
            reasons=tuple(sorted({answer.error for answer in answers if answer.error is not None})),
        )

    def _send(self) -> None:
        began, sent = time.monotonic(), 0
        asking: list[threading.Thread] = []
        while not self._ending.wait(max(0.0, began + sent / self._rate - time.monotonic())):
            prompt = sent % self._request.num_prompts
            one = threading.Thread(target=self._ask, args=(prompt,), name=f"request {sent}", daemon=True)
            one.start()
            asking.append(one)
            sent += 1
        for one in asking:
            one.join()

    def _ask(self, prompt: int) -> None:
        self._answers.append(ask(self._url, self._request, prompt))
