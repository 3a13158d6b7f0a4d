"""What the endpoints answer that generate nothing."""

from typing import Literal

import msgspec


class ModelCard(msgspec.Struct):
    """A model, as OpenAI lists them."""

    id: str
    created: int
    max_model_len: int | None  # tokens, prompt and output together; None until a decode worker is known
    object: Literal["model"] = "model"
    owned_by: Literal["twostroke"] = "twostroke"


class ModelList(msgspec.Struct):
    """GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenIds(msgspec.Struct):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Text(msgspec.Struct):
    """POST /detokenize."""

    prompt: str


class Health(msgspec.Struct):
    """GET /health."""

    status: Literal["ok"] = "ok"


class Ready(msgspec.Struct):
    """GET /ready."""

    status: Literal["ready"] = "ready"


class Version(msgspec.Struct):
    """GET /version."""

    version: str
