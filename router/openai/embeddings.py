"""POST /v1/embeddings: a vector for each text, pooled from the last hidden states where prompts are computed."""

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from twostroke.protocol.requests import GenerateRequest, SamplingParams, ScoringParams
from twostroke.router.openai.answers import ChoiceDelta, PromptTokensDetails, ResponseWriter, Usage, encode_json
from twostroke.router.openai.fields import FieldError, ShortText
from twostroke.router.openai.jobs import JobMaker, RequestLimits
from twostroke.router.openai.schemas import (
    MAX_CHOICES,
    ModelRequest,
    Prompt,
    PromptText,
    TextFields,
    TokenIds,
)
from twostroke.router.request_state import ChoiceJob, PromptToScore
from twostroke.router.text.tokenizer import TextTokenizer

MAX_INPUTS = 2048
"""Most inputs of one request; MAX_CHOICES of them are computed at a time."""

_Texts = Annotated[list[PromptText], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
_Ids = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]


class EmbeddingRequest(ModelRequest, TextFields):
    """POST /v1/embeddings."""

    lacking: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {
        "dimensions": ("this server can't know whether the model is trained for shorter vectors", ()),
        "messages": ("input is text or token ids", ()),
    }
    stream: ClassVar[None] = None  # there is nothing to stream

    input: PromptText | TokenIds | _Texts | _Ids
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["last", "mean"] | None = None
    service_tier: ShortText | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    return_stages: bool | None = None

    @property
    def inputs(self) -> Sequence[Prompt]:
        """The `input` field as a list."""
        body: Any = self.input
        inputs: Sequence[Prompt] = [body] if isinstance(body, str) or isinstance(body[0], int) else body
        return inputs

    @property
    def num_choices(self) -> int:
        """Texts of one request that are under way at a time."""
        return min(len(self.inputs), MAX_CHOICES)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_lacking(cls, fields: Any) -> Any:
        for name, (why, _) in cls.lacking.items():
            if isinstance(fields, dict) and fields.get(name) is not None:
                raise FieldError(name, f"is not supported: {why}")
        return fields


async def embedding_jobs(maker: JobMaker, body: EmbeddingRequest, limits: RequestLimits) -> list[ChoiceJob]:
    """One for each input. Raises RequestError naming the field at fault."""
    params = ScoringParams(pooling=body.pooling or "last")
    jobs: list[ChoiceJob] = []
    for index, text in enumerate(body.inputs):
        token_ids = await maker.prompt_ids(body, text, "input", limits.max_context)
        request = GenerateRequest(
            request_id="",
            router_id="",
            token_ids=tuple(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=0,
            cache_salt=limits.cache_salt,
            promise=limits.promise,
            scoring=params,
        )
        jobs.append(ChoiceJob(request, index, index, prompt=PromptToScore(request)))
    return jobs


class Embedding(TypedDict):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # of length 1; in base64 float32, little-endian


class EmbeddingUsage(TypedDict):
    """`usage`, over all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embeddings(TypedDict):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class EmbeddingWriter(ResponseWriter):
    """Writes embeddings."""

    def __init__(
        self,
        body: EmbeddingRequest,
        jobs: Sequence[ChoiceJob],
        tokenizer: TextTokenizer,
        *,
        model: str,
        created: int,
        service_tier: str | None,
    ):
        """Make a writer (see ChoicesWriter). OpenAI's response has neither id nor time."""
        self._is_base64 = body.encoding_format == "base64"
        self._model = model

    def whole(self, choices: Sequence[Sequence[ChoiceDelta]], usage: Usage) -> bytes:
        data = [
            # Written one by one: as Python's numbers all of them together would take several times their text.
            msgspec.Raw(
                encode_json({"object": "embedding", "index": delta.index, "embedding": self._written(delta.embedding)})
            )
            for (delta,) in choices
        ]
        shown = {name: number for name, number in usage.items() if name != "completion_tokens"}
        return encode_json({"object": "list", "data": data, "model": self._model, "usage": shown})

    def _written(self, embedding: bytes) -> list[float] | str:
        if self._is_base64:
            return base64.b64encode(embedding).decode()
        return [*memoryview(embedding).cast("f")]
