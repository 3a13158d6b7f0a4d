"""What stands around Serve's own ASGI middleware, in its proxies and in router replicas that take requests themselves.

Serve appends an `X-Request-Id` of its own to every answer, and echoes whatever the client sent. `RequestIds` outside of
it lets it see sound ids alone, and answers with one.
"""

from starlette.middleware import Middleware

from twostroke.router.http_io import RequestIds


def http_middlewares() -> list[Middleware]:
    """For Serve: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=cluster.http_middlewares:http_middlewares`."""
    return [Middleware(RequestIds)]
