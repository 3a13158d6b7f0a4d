"""The part that translations of other APIs into a chat share.

The chat is checked by its own model, so that all bounds are one; errors name the fields as the client sent them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from twostroke.protocol.errors import RequestError
from twostroke.router.openai.schemas import ChatRequest, SamplingFields, explain, shown


class ChatDraft:
    """A chat in the making, from `body`. `names` has the client's paths of the chat's fields, where they differ."""

    def __init__(self, body: SamplingFields, names: Mapping[str, str]):
        common = body.model_dump(include={"model", *SamplingFields.model_fields}, exclude_none=True)
        self.messages: list[dict[str, Any]] = []
        self._fields = {**common, "messages": self.messages}
        self._names = dict(names)

    def add(self, message: dict[str, Any], origin: str) -> dict[str, Any]:
        """Append a message, which the client sent at the path `origin`."""
        self.name(f"messages.{len(self.messages)}", origin)
        self.messages.append(message)
        return message

    def name(self, path: str, origin: str) -> None:
        """The chat's field at `path` is what the client sent at `origin`."""
        self._names[path] = origin

    def set(self, **fields: Any) -> None:
        """Set these fields, but for those that are None."""
        self._fields |= {name: value for name, value in fields.items() if value is not None}

    def chat(self) -> ChatRequest:
        """Return the chat. Raises RequestError, which `naming` has to translate."""
        try:
            return ChatRequest.model_validate(self._fields)
        except ValidationError as error:
            raise explain(error.errors()) from None

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A RequestError that is raised within names the client's field."""
        try:
            yield
        except RequestError as error:
            path = error.param or ""
            inside = [one for one in self._names if path == one or path.startswith(f"{one}.")]
            if inside:
                longest = max(inside, key=len)
                error.param = self._names[longest] + path[len(longest) :]
                error.args = (error.param + str(error).removeprefix(path),)
            raise


def only(known: Collection[str], way_out: str, *, default: str | None = None) -> Callable[[Any], Any]:
    """A validator of objects with a `type`: raises ValueError where it is none of `known`. `default`: of those without.

    The error says what is not supported and `way_out`, where pydantic would tell of all that might have been meant.
    """

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("must be an object")
        kind = value.get("type", default)
        if not isinstance(kind, str):
            raise ValueError("must have a type, which is a string")
        if kind not in known:
            raise ValueError(f"the type {shown(kind)!r} is not supported: {way_out}")
        return value

    return check
