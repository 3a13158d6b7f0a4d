"""The page at `/`, to talk to the model and to see its requests on their way, and the feed that it shows.

Its files come with the package, and nothing that it loads is anywhere else. It has no data of its own: with API keys
it is open, asks for one, and sends that with everything it asks for.
"""

import hashlib
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from twostroke.router.http.middleware import BoundedRoute, streamed, tenant_of
from twostroke.router.http.service import RouterService

FOLDER = Path(__file__).resolve().parent.parent / "page"
_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # asked for each time, and told that it is the same
}

page = APIRouter(route_class=BoundedRoute)
"""Routes that are open to everybody, where the server has a page."""
feed = APIRouter(route_class=BoundedRoute)
"""Routes that need a key where keys are configured."""


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """Content, media type and ETag of every file, by name."""
    found = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in FOLDER.iterdir() if path.suffix in _TYPES}
    return {
        name: (content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
        for name, (content, kind) in found.items()
    }


def _file(name: str, request: Request) -> Response:
    if name not in _files():
        raise HTTPException(404)
    content, kind, etag = _files()[name]
    headers = {**_HEADERS, "etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=kind)


@page.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """The page."""
    return _file("index.html", request)


@page.get("/page/{name}", include_in_schema=False)
async def file(name: str, request: Request) -> Response:
    """Serve a file that the page loads."""
    return _file(name, request)


@feed.get("/events", include_in_schema=False)
async def events(request: Request) -> Response:
    """Stream this router's activity as server-sent events: docs/start.md#the-page."""
    service: RouterService = request.app.state.service
    tenant = tenant_of(request)
    name, sees_all = (None, True) if tenant is None else (tenant.name, tenant.is_admin)
    return await streamed(request, service.feed.events(name, sees_all=sees_all), is_endless=True)
