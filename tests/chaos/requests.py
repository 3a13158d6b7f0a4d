"""Requests of a chaos run's clients, drawn from a seed."""

import random
from typing import Any

from tests.chaos.load import MODEL, KeyedRequest

# Some prompts begin alike, so that caches are hit and prefixes pulled beside all the KV that travels.
NUM_PREFIXES = 4
PREFIX_TOKENS = 192
SHORTEST, LONGEST = 20, 600  # prompts, in tokens
LONG_ANSWER = 1200  # tokens: a few streams live through several faults
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["first", "second", None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}, "maxItems": 4},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
MOST_RECORDS = 8  # some fit into their `max_tokens`, others don't


def draw_requests(seed: int, count: int) -> list[KeyedRequest]:
    """`count` different requests."""
    draw = random.Random(seed)
    prefixes = [_tokens(draw, PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    requests = []
    for key in range(count):
        body = _body(draw, prefixes, is_long=key % 15 == 14)
        if key % 5 == 3 or key % 30 == 14:
            least = LONG_ANSWER if key % 30 == 14 else draw.randint(1, MOST_RECORDS)
            schema = {"type": "array", "items": RECORD, "minItems": least, "maxItems": least + 1}
            body |= {"guided_json": schema, "ignore_eos": False, "stop": []}
        requests.append(KeyedRequest(key, body))
    return requests


def _body(draw: random.Random, prefixes: list[list[int]], *, is_long: bool) -> dict[str, Any]:
    length = round(SHORTEST * (LONGEST / SHORTEST) ** draw.random())
    prompt = _tokens(draw, length)
    if draw.random() < 0.3:
        prompt = (draw.choice(prefixes) + prompt)[:LONGEST]
    n = draw.choices((1, 2, 3), (70, 20, 10))[0]
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": LONG_ANSWER if is_long else draw.randint(30, 300) // n,
        "n": 1 if is_long else n,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": draw.random() < 0.9,
        "seed": draw.getrandbits(31),
        "temperature": draw.choice((0.0, 0.0, 0.7, 1.0)),
    }
    if draw.random() < 0.3:
        body |= {"top_p": 0.9, "top_k": 50}
    if draw.random() < 0.5:  # they show KV that is a little wrong long before a token does
        body["logprobs"] = 2
    if draw.random() < 0.2:
        body["stop"] = draw.sample(["\n\n", "return", ")\n", " the", "self."], 2)
    if draw.random() < 0.15:
        body |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
    return body


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(300, 3300) for _ in range(count)]
