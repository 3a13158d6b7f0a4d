"""The HTTP endpoints. Each reads as the way of its request: the body is parsed, jobs are made of it, and answered.

Serve's replicas build the app where they run: Starlette's apps can't be pickled.
"""

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from typing_extensions import TypedDict

from twostroke.protocol.errors import RequestError, TwostrokeError
from twostroke.router.fleet import NoPath
from twostroke.router.http.doctor import Doctor
from twostroke.router.http.middleware import (
    Authentication,
    BoundedRoute,
    Deadlines,
    Origins,
    RequestIds,
    admins_only,
    error_response,
    is_anthropic,
    monitors_only,
    streamed,
    tenant_of,
    until_disconnect,
)
from twostroke.router.http.page import feed, page
from twostroke.router.http.service import RouterService
from twostroke.router.http.worker_orders import WorkerOrder, carry_out
from twostroke.router.observe.request_log import CLIENT_GONE, RequestLogging, request_log
from twostroke.router.observe.scrape import exposition
from twostroke.router.openai.answers import (
    ChatCompletion,
    ChatWriter,
    Completion,
    CompletionWriter,
    ErrorObject,
    ResponseWriter,
    StreamWriter,
)
from twostroke.router.openai.embeddings import EmbeddingRequest, Embeddings, EmbeddingWriter, embedding_jobs
from twostroke.router.openai.fields import explain
from twostroke.router.openai.generation import Generation
from twostroke.router.openai.jobs import RequestLimits, chat_prompt
from twostroke.router.openai.messages import (
    CountTokensRequest,
    MessageError,
    MessageObject,
    MessagesRequest,
    MessagesWriter,
)
from twostroke.router.openai.responses import ResponseObject, ResponsesRequest, ResponsesWriter
from twostroke.router.openai.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from twostroke.router.slo.classes import (
    CLASS_HEADER,
    MAX_ASKED_PRIORITY,
    MAX_MS,
    PRIORITY_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
    promise_of,
)
from twostroke.router.text.generation_config import SamplingDefaults

LEFT_OUT_HEADER = "x-schema-left-out"
"""Names the keywords of a schema without `strict` that the answer is not held to."""
TOOLS_LEFT_OUT_HEADER = "x-tools-left-out"
"""Names the types of the tools that the model is not told of, because no server but OpenAI's runs them."""
_JSON_LINES = "application/x-ndjson"


def _errors(model: Any) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entry of error responses."""
    return {
        "4XX": {"model": model, "description": "The request can't be served as asked, or not now"},
        "5XX": {"model": model, "description": "The server can't serve the request now, or met a bug"},
    }


def build_app(service: RouterService, doctor: Doctor) -> FastAPI:
    """The app of one router, whose service is started and closed elsewhere."""
    app = FastAPI(
        title="Twostroke",
        version=service.config.version,
        description="OpenAI's API, and Anthropic's Messages. Every error is an error object of the path's API.",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        generate_unique_id_function=lambda route: route.name,
        responses=_errors(ErrorObject),
    )
    app.state.service, app.state.doctor = service, doctor
    app.state.max_body_bytes = int(service.config.http.max_body_mib * 2**20)
    app.include_router(keyed, dependencies=[Security(_key), Security(_x_api_key)] if service.tenants else [])
    app.include_router(_open)
    if service.config.http.page:
        app.include_router(page)
    app.include_router(feed)
    # The last one is passed first.
    app.add_middleware(Authentication, tenants=service.tenants)
    hosts = None if service.tenants else (*service.config.http.hosts, *service.config.own_hosts)
    app.add_middleware(Origins, allowed=service.config.http.cors_origins, hosts=hosts)
    if service.config.http.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.http.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    app.add_middleware(Deadlines, body_s=service.config.http.body_timeout_s, send_s=service.config.http.send_timeout_s)
    app.add_middleware(RequestLogging, clock=service.clock, began=service.began, over=service.over)
    app.add_middleware(RequestIds)
    app.add_exception_handler(TwostrokeError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    return app


_open = APIRouter(route_class=BoundedRoute)
keyed = APIRouter(route_class=BoundedRoute)
# For the document: `Authentication` has checked them.
_key = HTTPBearer(auto_error=False)
_x_api_key = APIKeyHeader(name="x-api-key", auto_error=False)
_ADMINS = [Depends(admins_only)]
_MONITORS = [Depends(monitors_only)]


async def _service_of(request: Request) -> RouterService:
    service: RouterService = request.app.state.service
    return service


Service = Annotated[RouterService, Depends(_service_of)]


async def resources() -> AsyncIterator[ExitStack]:
    """Yield the stack of resources that end with the response."""
    with ExitStack() as resources:
        yield resources


Resources = Annotated[ExitStack, Depends(resources)]


def _take_places(request: Request, resources: ExitStack, num_choices: int) -> None:
    """Take places for so many choices, of the API key and of this router. Raises RequestError where there are none."""
    service: RouterService = request.app.state.service
    if (tenant := tenant_of(request)) is not None:
        resources.enter_context(tenant.in_flight(num_choices))
    resources.enter_context(service.gate.room(num_choices))


async def _placed(request: Request, resources: Resources) -> None:
    _take_places(request, resources, 1)


_PLACED = [Depends(_placed)]
"""Dependencies of endpoints that generate nothing: each of their requests takes the place of a choice."""


async def _generate(
    body: CompletionRequest | ChatRequest | EmbeddingRequest,
    new_writer: Callable[..., ResponseWriter],
    request: Request,
    resources: ExitStack,
    keep_s: float = 0.0,
) -> Response:
    """Make jobs of the request, run them, and write what comes of them in the endpoint's format.

    `keep_s`: see RequestLimits.

    Raises RequestError for what is wrong, what the caller may not have, and what is too much now.
    """
    service: RouterService = request.app.state.service
    log, tenant = request_log(request), tenant_of(request)
    service.check(body)
    promise = promise_of(
        service.slo,
        request.headers,
        body.service_tier,
        body.priority,
        has_key=tenant is not None,
        key_class=None if tenant is None else tenant.slo_class,
    )
    limits = RequestLimits(service.max_context(), promise, b"" if tenant is None else tenant.cache_salt, keep_s)
    _take_places(request, resources, body.num_choices)
    if isinstance(body, EmbeddingRequest):
        jobs = await embedding_jobs(service.jobs, body, limits)
    else:
        jobs = await service.jobs.make(body, limits)
    writer = new_writer(
        body,
        jobs,
        service.tokenizer,
        model=service.config.model_name,
        created=service.now(),
        service_tier=promise.class_name if service.slo.is_set else None,
    )
    generation = Generation(service.runner, body, jobs, writer, log)
    if tenant is not None:
        resources.enter_context(tenant.tokens(generation.most_tokens, generation.used_tokens))
    cut = resources.enter_context(service.gate.cuttable())
    if body.stream and isinstance(writer, StreamWriter):
        response = await streamed(request, generation.events(), cut, writer.failure)
    else:
        content = await until_disconnect(request.receive, generation.whole(), cut)
        response = Response(content, media_type="application/json")
    if jobs[0].left_out:
        response.headers[LEFT_OUT_HEADER] = ", ".join(jobs[0].left_out)
    return response


def _header(name: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema}


_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_GENERATES: dict[str, Any] = {
    "response_description": "The answer; with `stream: true` server-sent events in the API's own format",
    "responses": _STREAMS,
    "openapi_extra": {  # `promise_of` reads them
        "parameters": [
            _header(CLASS_HEADER, type="string"),
            _header(TTFT_HEADER, type="number", exclusiveMinimum=0, maximum=MAX_MS),
            _header(TPOT_HEADER, type="number", exclusiveMinimum=0, maximum=MAX_MS),
            _header(PRIORITY_HEADER, type="integer", minimum=-MAX_ASKED_PRIORITY, maximum=MAX_ASKED_PRIORITY),
        ]
    },
}


@keyed.post("/v1/completions", response_model=Completion, **_GENERATES)
async def completions(body: CompletionRequest, request: Request, resources: Resources) -> Response:
    """Continue a prompt."""
    return await _generate(body, CompletionWriter, request, resources)


@keyed.post("/v1/chat/completions", response_model=ChatCompletion, **_GENERATES)
async def chat_completions(body: ChatRequest, request: Request, resources: Resources) -> Response:
    """Answer a chat."""
    return await _generate(body, ChatWriter, request, resources)


@keyed.post("/v1/responses", response_model=ResponseObject, **_GENERATES)
async def responses(body: ResponsesRequest, request: Request, resources: Resources, service: Service) -> Response:
    """Answer a chat, in the words of OpenAI's Responses API."""
    service.check(body)
    draft = body.draft()
    with draft.naming():
        response = await _generate(draft.chat(), partial(ResponsesWriter, body), request, resources)
    if body.left_out_tools:
        response.headers[TOOLS_LEFT_OUT_HEADER] = ", ".join(body.left_out_tools)
    return response


@keyed.post("/v1/embeddings", response_model=Embeddings, openapi_extra=_GENERATES["openapi_extra"])
async def embeddings(body: EmbeddingRequest, request: Request, resources: Resources) -> Response:
    """A vector for each text."""
    return await _generate(body, EmbeddingWriter, request, resources)


@keyed.post(
    "/v1/messages", response_model=MessageObject, **_GENERATES | {"responses": _STREAMS | _errors(MessageError)}
)
async def messages(body: MessagesRequest, request: Request, resources: Resources, service: Service) -> Response:
    """Answer a chat, in the words of Anthropic's Messages API."""
    service.check(body)
    draft = body.draft()
    with draft.naming():
        return await _generate(draft.chat(), MessagesWriter, request, resources, body.keep_s)


class TokenCount(TypedDict):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


@keyed.post("/v1/messages/count_tokens", dependencies=_PLACED, responses=_errors(MessageError))
async def count_tokens(body: CountTokensRequest, service: Service) -> TokenCount:
    """The tokens of a message's prompt."""
    service.check(body)
    draft = body.draft()
    with draft.naming():
        text = chat_prompt(service.tokenizer, draft.chat())
        # What may fit is tokenised, and counted though it is too long: to know that is what clients ask for.
        token_ids = await service.jobs.encode(text, "messages", service.max_context(), add_special_tokens=False)
    return {"input_tokens": len(token_ids)}


class ModelCard(TypedDict):
    """A model, as OpenAI lists them."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["twostroke"]
    max_model_len: int | None  # tokens, prompt and output together; None until a decode worker is known
    vocab_size: int  # all token ids are below it
    sampling_defaults: SamplingDefaults  # where a request says nothing
    end_token_ids: list[int]  # that end an answer, unless ignore_eos
    response_template: str | None  # how calls and thoughts are read; None: not at all


class ModelList(TypedDict):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class MessageModel(TypedDict):
    """A model, as Anthropic lists them."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str  # RFC 3339


class MessageModelList(TypedDict):
    """GET /v1/models of Anthropic's API."""

    data: list[MessageModel]
    has_more: bool
    first_id: str
    last_id: str


def _message_model(name: str, started_at: int) -> MessageModel:
    """Return the model served since `started_at`, in seconds since 1970."""
    created_at = datetime.datetime.fromtimestamp(started_at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": created_at}


@keyed.get("/v1/models/", include_in_schema=False)
@keyed.get("/v1/models")
async def models(request: Request, service: Service) -> ModelList | MessageModelList:
    """The model served, in the form of Anthropic's API where the header `anthropic-version` asks for it."""
    if is_anthropic(request.scope):
        card = _message_model(service.config.model_name, service.started_at)
        return {"data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}
    return {"object": "list", "data": [_card(service)]}


def _card(service: RouterService) -> ModelCard:
    try:
        max_context = service.max_context()
    except NoPath:  # the model is known before its workers are
        max_context = None
    return {
        "id": service.config.model_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "twostroke",
        "max_model_len": max_context,
        "vocab_size": service.vocab_size(),
        "sampling_defaults": service.sampling_defaults,
        "end_token_ids": list(service.tokenizer.eos_token_ids),
        "response_template": service.tokenizer.response_template,
    }


@keyed.get("/v1/models/{name:path}")
async def model(name: str, request: Request, service: Service) -> ModelCard | MessageModel:
    """One model."""
    service.check_model(name)
    return _message_model(name, service.started_at) if is_anthropic(request.scope) else _card(service)


class TokenIds(TypedDict):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


@keyed.post("/tokenize", dependencies=_PLACED)
async def tokenize(body: TokenizeRequest, service: Service) -> TokenIds:
    """Text to token ids."""
    service.check(body)
    tokenizer, max_context = service.tokenizer, service.max_context()
    if body.messages is not None:
        text = chat_prompt(tokenizer, body)
        param, add_special_tokens = "messages", bool(body.add_special_tokens)
    else:
        text = body.prompt or ""
        param, add_special_tokens = "prompt", body.add_special_tokens is not False
    token_ids = await service.jobs.encode(text, param, max_context, add_special_tokens=add_special_tokens)
    names = [tokenizer.token(one) for one in token_ids] if body.return_token_strs else None
    return {"count": len(token_ids), "max_model_len": max_context, "tokens": token_ids, "token_strs": names}


class DetokenizedText(TypedDict):
    """POST /detokenize."""

    prompt: str


@keyed.get("/tokenizer_info")
async def tokenizer_info(service: Service) -> dict[str, Any]:
    """The tokenizer's settings, special tokens and chat template, as vLLM tells them."""
    return dict(service.tokenizer.info)


@keyed.post("/detokenize", dependencies=_PLACED)
async def detokenize(body: DetokenizeRequest, service: Service) -> DetokenizedText:
    """Token ids to text."""
    service.check(body)
    token_ids = service.jobs.checked(body.tokens, "tokens", service.max_context())
    return {"prompt": service.tokenizer.decode(token_ids, skip_special_tokens=False)}


class Health(TypedDict):
    """GET /health and /ready."""

    status: Literal["ok", "ready"]


@_open.get("/health")
async def health() -> Health:
    """This process is alive."""
    return {"status": "ok"}


@_open.get("/ready")
async def ready(service: Service) -> Health:
    """A whole path to an answer is there."""
    missing = service.missing()
    if missing:
        raise NoPath("not ready: " + "; ".join(missing))
    return {"status": "ready"}


def _told_as(media_type: str) -> dict[str, Any]:
    """Return the options of an endpoint that writes its answer itself."""
    content = {media_type: {"schema": {"type": "string"}}}
    return {"response_class": Response, "responses": {200: {"content": content}}}


@keyed.get("/metrics", dependencies=_MONITORS, **_told_as("text/plain"))
async def metrics(service: Service) -> Response:
    """Prometheus' text, of all routers, whichever is asked."""
    samples = await service.samples()
    # Of 8 routers and 64 workers 50 ms, for which no stream is to stand still.
    return Response(await asyncio.to_thread(exposition, samples), media_type=CONTENT_TYPE_LATEST)


@keyed.get("/status", dependencies=_MONITORS)
async def status(service: Service) -> dict[str, Any]:
    """The workers and their numbers."""
    return service.status()


@keyed.post("/workers/{worker_id:path}", dependencies=_ADMINS)
async def order_worker(worker_id: str, body: WorkerOrder, service: Service) -> dict[str, Any]:
    """A worker is to drain, to resume, or to change its role."""
    return await carry_out(body, worker_id, service)


@keyed.get("/doctor", dependencies=_ADMINS, **_told_as(_JSON_LINES))
async def doctor(request: Request) -> Response:
    """Every way of KV, tried out: one line of JSON for each, as soon as it is known."""
    if request.method == "HEAD":  # a HEAD request wants no probes
        return Response(media_type=_JSON_LINES)
    examiner: Doctor = request.app.state.doctor
    return await streamed(request, examiner.examine(), media_type=_JSON_LINES)


class Version(TypedDict):
    """GET /version."""

    version: str


@keyed.get("/version")
async def version(service: Service) -> Version:
    """The server's version."""
    return {"version": service.config.version}


def _add_heads(router: APIRouter) -> None:
    """Load balancers ask for heads, of which the document need not tell."""
    for route in [one for one in router.routes if isinstance(one, APIRoute) and one.methods == {"GET"}]:
        router.add_api_route(
            route.path, route.endpoint, methods=["HEAD"], dependencies=route.dependencies, include_in_schema=False
        )


_add_heads(_open)
_add_heads(page)
_add_heads(keyed)


async def _on_error(request: Request, error: Exception) -> Response:
    """Every error of our own is answered as an OpenAI error object, and counted."""
    assert isinstance(error, TwostrokeError)
    request_log(request).refuses(error)
    return error_response(error, request.scope)


async def _on_invalid(request: Request, error: Exception) -> Response:
    """Bodies that their models refuse."""
    assert isinstance(error, RequestValidationError)
    errors = [{**one, "loc": one["loc"][1:]} for one in error.errors()]  # without the word `body`
    return await _on_error(request, explain(errors, error.body))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    code, message = {
        404: ("not_found", "there is no such path"),
        405: ("method_not_allowed", "the path does not take this method"),
    }.get(error.status_code, ("http_error", "refused"))
    failure = RequestError(message, param="path", code=code, status=error.status_code)
    request_log(request).fails(failure)
    response = error_response(failure, request.scope)
    response.headers.update(error.headers or {})  # which methods the path takes
    return response


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # only logs see it
