"""Answers of a live server, and what is right of them: each check returns the fault of a response, or None."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema

Check = Callable[["Response"], str | None]
"""Returns the fault of a response; None where there is none."""

MAX_S = 90.0  # for an answer of a few tokens: more is a request that hangs, and no busy machine


@dataclass(frozen=True)
class Response:
    """The response to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    took_s: float

    @property
    def json(self) -> Any:
        """The body. Raises ValueError where it is no JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; empty where there is none."""
        try:
            told = self.json
        except ValueError:
            return {}
        error = told.get("error") if isinstance(told, dict) else None
        return error if isinstance(error, dict) else {}


@dataclass(frozen=True)
class Case:
    """One request. `body` is sent as it is where it is bytes, else as JSON."""

    name: str
    path: str
    body: Any
    check: Check
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"


# --- what is right ---


def answered(response: Response) -> str | None:
    """200, with an answer."""
    return None if response.status == 200 else f"status {response.status}: {response.body[:200]!r}"


def refused(*params: str, status: int = 400) -> Check:
    """A 4xx that names one of these fields."""

    def check(response: Response) -> str | None:
        if response.status != status:
            return f"status {response.status}, not {status}: {response.body[:200]!r}"
        told = f"{response.error.get('param')} {response.error.get('message')}"
        return None if not params or any(param in told for param in params) else f"no field named: {told}"

    return check


def no_bug(response: Response) -> str | None:
    """Anything but a 5xx."""
    return None if response.status < 500 else f"status {response.status}: {response.body[:200]!r}"


def held(is_right: Callable[[str], bool]) -> Check:
    """An answer that ends by `stop` is right; one that was cut off may be anything."""

    def check(response: Response) -> str | None:
        if problem := answered(response):
            return problem
        choice = response.json["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
        if choice["finish_reason"] == "stop" and not is_right(text):
            return f"ended by stop with {text!r}"
        return None

    return check


def of_schema(schema: Any) -> Check:
    """Check that the answer is JSON of a schema (see `held`)."""

    def is_right(text: str) -> bool:
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    return held(is_right)


def of_schema_or_refused(schema: Any) -> Check:
    """Check an answer of a schema (see `of_schema`); 400 is right, too, where answers can't follow it."""
    check = of_schema(schema)
    return lambda response: None if response.status == 400 else check(response)


def called(name: str) -> Check:
    """The first call is of this function, with an object as arguments, unless the answer was cut off."""

    def check(response: Response) -> str | None:
        if problem := answered(response):
            return problem
        choice = response.json["choices"][0]
        if choice["finish_reason"] == "length":
            return None
        calls = choice["message"].get("tool_calls") or []
        if not calls or calls[0]["function"]["name"] != name:
            return f"no call of {name}: {choice['message']}"
        return None if isinstance(json.loads(calls[0]["function"]["arguments"]), dict) else "arguments are no object"

    return check


def says(*words: str, status: int = 400) -> Check:
    """The response has this status and these words."""

    def check(response: Response) -> str | None:
        missing = [word for word in words if word not in response.body.decode()]
        is_right = response.status == status and not missing
        return None if is_right else f"status {response.status}, without {missing}: {response.body[:200]!r}"

    return check


def leaves_out(tools: str) -> Check:
    """The answer says which tools it was made without."""
    return lambda response: (
        answered(response)
        or (None if response.headers.get("x-tools-left-out") == tools else f"told: {dict(response.headers)}")
    )
