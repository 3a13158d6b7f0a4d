"""The HTTP endpoints. `build_app()` makes an app without live state, which takes its service from `app.state.service`.

So an app can be built before its service exists; until it does, everything but /health answers 503. (Under Ray Serve,
build it in the replica: Starlette's apps can't be pickled.)
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from twostroke.protocol.errors import RequestError, TwostrokeError
from twostroke.router.fleet import NoPath
from twostroke.router.http.authentication import Authentication, check_admin, tenant_of
from twostroke.router.http.doctor import doctor
from twostroke.router.http.io import (
    Belongings,
    ClientGone,
    EventStream,
    RequestIds,
    error_response,
    json_response,
    read_body,
    until_disconnect,
    until_responded,
)
from twostroke.router.http.openapi import (
    OPERATIONS,
    Health,
    ModelCard,
    ModelList,
    Ready,
    Text,
    TokenIds,
    Version,
    document,
)
from twostroke.router.http.scrape import exposition
from twostroke.router.http.service import RouterService
from twostroke.router.observe.access_log import Exchanges
from twostroke.router.observe.exchange import exchange_of
from twostroke.router.openai.chat import ChatFormat
from twostroke.router.openai.common import INTERNAL_ERROR, Format
from twostroke.router.openai.completions import CompletionFormat
from twostroke.router.openai.generation import Generation
from twostroke.router.openai.jobs import Job, Terms
from twostroke.router.openai.parsing import parse, token_ids_of
from twostroke.router.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from twostroke.router.slo.promises import promise_of

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(service: RouterService | None = None) -> FastAPI:
    """The app. Set `app.state.service` before the first request where it is not given here."""
    app = FastAPI(title="Twostroke", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.add_middleware(Authentication)
    app.add_middleware(Exchanges)
    app.add_middleware(RequestIds)
    app.add_middleware(Belongings)
    app.add_exception_handler(HTTPException, _on_http_error)
    for operation in OPERATIONS:
        # Load balancers ask for heads.
        methods = ["GET", "HEAD"] if operation.method == "GET" else [operation.method]
        endpoint = _guarded(_ENDPOINTS[operation.name], for_admins=operation.for_admins)
        app.add_api_route(operation.path, endpoint, methods=methods, response_model=None)
    return app


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    service = _service(request)
    arrive = service.clock()
    asked = parse(CompletionRequest, await read_body(request, service.config.max_body_bytes))
    service.check_model(asked.model)
    terms = _terms(request, asked)
    jobs = await service.jobs.of_completion(asked, service.max_context(), _reserve(request), terms)
    form = _format(CompletionFormat, "cmpl", service, asked, jobs)
    return await _answer(request, asked, jobs, form, arrive)


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    service = _service(request)
    arrive = service.clock()
    asked = parse(ChatRequest, await read_body(request, service.config.max_body_bytes))
    service.check_model(asked.model)
    terms = _terms(request, asked)
    jobs = await service.jobs.of_chat(asked, service.max_context(), _reserve(request), terms)
    form = _format(ChatFormat, "chatcmpl", service, asked, jobs)
    return await _answer(request, asked, jobs, form, arrive)


async def tokenize(request: Request) -> Response:
    """POST /tokenize."""
    service = _service(request)
    asked = parse(TokenizeRequest, await read_body(request, service.config.max_body_bytes))
    if asked.model is not None:
        service.check_model(asked.model)
    tokenizer = service.tokenizer
    max_context = service.max_context()
    if asked.messages is not None:
        text = tokenizer.render_chat(
            [message.as_template_sees() for message in asked.messages],
            add_generation_prompt=asked.add_generation_prompt is not False,
        )
        param, add_special_tokens = "messages", bool(asked.add_special_tokens)
    else:
        text = asked.prompt or ""
        param, add_special_tokens = "prompt", asked.add_special_tokens is not False
    token_ids = await service.jobs.encode(text, param, max_context, add_special_tokens=add_special_tokens)
    names = [tokenizer.token(one) for one in token_ids] if asked.return_token_strs else None
    return json_response(TokenIds(len(token_ids), max_context, token_ids, names))


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    service = _service(request)
    asked = parse(DetokenizeRequest, await read_body(request, service.config.max_body_bytes))
    if asked.model is not None:
        service.check_model(asked.model)
    token_ids = token_ids_of(asked.tokens, "tokens", service.max_context())
    service.jobs.check_vocabulary(token_ids, "tokens")
    return json_response(Text(service.tokenizer.decode(token_ids, skip_special_tokens=False)))


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return json_response(ModelList([_model(_service(request))]))


async def model(request: Request) -> Response:
    """GET /v1/models/{name}."""
    service = _service(request)
    service.check_model(request.path_params["name"])
    return json_response(_model(service))


async def health(request: Request) -> Response:
    """GET /health: this process is alive."""
    return json_response(Health())


async def ready(request: Request) -> Response:
    """GET /ready: a whole path to an answer is there."""
    missing = _service(request).missing()
    if missing:
        raise NoPath("not ready: " + "; ".join(missing))
    return json_response(Ready())


async def metrics(request: Request) -> Response:
    """GET /metrics: of all routers, whichever is asked."""
    readings = await _service(request).readings()
    # Of 8 routers and 64 workers 50 ms, for which no stream is to stand still.
    return Response(await asyncio.to_thread(exposition, readings), media_type=CONTENT_TYPE_LATEST)


async def status(request: Request) -> Response:
    """GET /status: the workers and their numbers."""
    return json_response(_service(request).status())


async def show_version(request: Request) -> Response:
    """GET /version."""
    return json_response(Version(_service(request).config.version))


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    config = _service(request).config
    has_keys, slo_classes = bool(_service(request).tenants), [one.name for one in _service(request).slo.classes]
    return json_response(
        document(version=config.version, model=config.model_name, has_keys=has_keys, slo_classes=slo_classes)
    )


_ENDPOINTS: Mapping[str, Endpoint] = {
    endpoint.__name__: endpoint
    for endpoint in (
        completions,
        chat_completions,
        models,
        model,
        tokenize,
        detokenize,
        health,
        ready,
        metrics,
        status,
        doctor,
        show_version,
        openapi,
    )
}


def _service(request: Request) -> RouterService:
    service = request.app.state.service
    if not isinstance(service, RouterService):
        raise NoPath("the server is starting; try again shortly")
    return service


def _model(service: RouterService) -> ModelCard:
    try:
        max_context = service.max_context()
    except NoPath:  # the model is known before its workers are
        max_context = None
    return ModelCard(service.config.model_name, service.started_at, max_context)


def _include_usage(asked: GenerationFields) -> bool:
    return asked.stream_options is not None and bool(asked.stream_options.include_usage)


def _terms(request: Request, asked: GenerationFields) -> Terms:
    tenant = tenant_of(request)
    promise = promise_of(
        _service(request).slo,
        request.headers,
        asked.service_tier,
        asked.priority,
        has_key=tenant is not None,
        key_class=None if tenant is None else tenant.slo_class,
    )
    return Terms(promise, b"" if tenant is None else tenant.cache_salt)


def _reserve(request: Request) -> Callable[[int], None]:
    """Takes places that are given back when the response is over, whichever way."""
    tenant, belongings = tenant_of(request), until_responded(request)

    def reserve(num_choices: int) -> None:
        if tenant is not None:
            belongings.enter_context(tenant.limits.in_flight(num_choices))
        belongings.enter_context(_service(request).gate.room(num_choices))

    return reserve


def _format(
    kind: type[CompletionFormat] | type[ChatFormat],
    prefix: str,
    service: RouterService,
    asked: GenerationFields,
    jobs: Sequence[Job],
) -> Format:
    """Who writes the response, under an id of its own that begins with `prefix`."""
    return kind(
        f"{prefix}-{secrets.token_hex(12)}",
        service.now(),
        service.config.model_name,
        jobs,
        service.tokenizer,
        return_token_ids=bool(asked.return_token_ids),
        usage_in_chunks=_include_usage(asked),
        service_tier=jobs[0].request.promise.class_name if service.slo.is_set else None,
    )


async def _answer(
    request: Request, asked: GenerationFields, jobs: Sequence[Job], form: Format, arrive: float
) -> Response:
    generation = Generation(
        _service(request),
        jobs,
        form,
        include_usage=_include_usage(asked),
        return_stages=bool(asked.return_stages),
        return_token_ids=bool(asked.return_token_ids),
        arrive=arrive,
        on_failure=exchange_of(request).fails,
    )
    exchange_of(request).generates(jobs, generation.stages, is_stream=bool(asked.stream))
    tenant = tenant_of(request)
    if tenant is not None:
        tokens = tenant.limits.tokens(generation.most_tokens, generation.used_tokens)
        until_responded(request).enter_context(tokens)
    cut = until_responded(request).enter_context(_service(request).gate.cuttable())
    if asked.stream:
        return EventStream(generation.events(), lambda error: _count(request, error), cut)

    async def whole() -> Response:
        return Response(await generation.whole(), media_type="application/json")

    return await until_disconnect(request.receive, whole(), cut)


def _guarded(endpoint: Endpoint, *, for_admins: bool) -> Endpoint:
    """Every error of our own becomes an OpenAI error object, and is counted."""

    async def guarded(request: Request) -> Response:
        try:
            if for_admins:
                check_admin(request)
            tenant = tenant_of(request)
            if tenant is not None and request.method == "POST":
                tenant.limits.count_request()
            return await endpoint(request)
        except ClientGone:
            return Response(status_code=499)  # nobody reads it; logs do
        except TwostrokeError as error:
            failure = error
        except Exception:
            _log.exception("a request to %s met a bug", request.url.path)
            failure = INTERNAL_ERROR
        if isinstance(request.app.state.service, RouterService):
            _count(request, failure)
        return error_response(failure)

    guarded.__name__ = endpoint.__name__
    guarded.__doc__ = endpoint.__doc__
    return guarded


def _count(request: Request, error: TwostrokeError) -> None:
    """The request is answered with an error."""
    _service(request).metrics.refused(error)
    exchange_of(request).fails(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    status_code = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "method_not_allowed"}.get(status_code, "http_error")
    message = {404: "there is no such path", 405: "the path does not take this method"}.get(status_code, "refused")
    failure = RequestError(message, param="path", code=code, status=status_code)
    if isinstance(request.app.state.service, RouterService):
        exchange_of(request).fails(failure)
    response = error_response(failure)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})  # which methods the path takes
    return response
