"""Requests of this machine's commands to a running server: address, key, and the error where none answers."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote, urlsplit

from twostroke.protocol.errors import ConfigError

API_KEY_VARIABLES = ("TWOSTROKE_API_KEY", "OPENAI_API_KEY")  # the first that is set


def endpoint(url: str, path: str) -> str:
    """Return the URL of a path on the server that `--url` names. Raises ConfigError for what is not its address.
    `h:8000` and `http://h:8000/v1` are accepted too."""
    server = url if "://" in url else f"http://{url}"
    server = server.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(server)
        # A single word is rather a mistake than a host that listens on port 80.
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and ("://" in url or bool(parts.port))
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}") from error
    if not is_address:
        raise ConfigError(f"--url {url}: write http://HOST:PORT or https://HOST:PORT")
    return f"{server}/{path}"


def ask(
    url: str, path: str, *, timeout_s: float, api_key: str | None = None, body: Mapping[str, Any] | None = None
) -> HTTPResponse:
    """The open answer of a GET, or of a POST with a `body`, with the API key that is given or in the environment.

    Raises ConfigError, OSError.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(endpoint(url, quote(path)), data)
    key = api_key or next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), None)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
    return answer


@contextmanager
def answered(
    url: str, path: str, *, timeout_s: float, api_key: str | None = None, body: Mapping[str, Any] | None = None
) -> Iterator[HTTPResponse]:
    """Give the answer that `ask` brings. Raises ConfigError, with the server's reason where it refuses."""
    try:
        with ask(url, path, timeout_s=timeout_s, api_key=api_key, body=body) as answer:
            yield answer
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(_refusal(error) or _no_answer(url, error)) from error


def fetch_status(url: str, api_key: str | None = None, *, timeout_s: float = 10.0) -> dict[str, Any]:
    """Return the answer of GET /status. Raises ConfigError where no server of ours answers."""
    with answered(url, "status", timeout_s=timeout_s, api_key=api_key) as answer:
        status: dict[str, Any] = json.load(answer)
    return status


def _refusal(error: Exception) -> str | None:
    """Return the message of OpenAI's error object; None where there is none, or an API key is missing or wrong."""
    if not isinstance(error, urllib.error.HTTPError) or error.code in (401, 403):
        return None
    with error:
        try:
            return str(json.load(error)["error"]["message"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _no_answer(url: str, error: Exception) -> str:
    """Return one line for people, without the library's own wrapping."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    text = (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
    if isinstance(error, urllib.error.HTTPError):
        if error.code in (401, 403):
            used = next((name for name in API_KEY_VARIABLES if os.environ.get(name)), None)
            if used is None:
                return (
                    f"{url} wants an API key with the right `admin` (`metrics` for /status): set {API_KEY_VARIABLES[0]}"
                )
            wrong = (
                "is not known there"
                if error.code == 401
                else "may not: it needs the right `admin`, or `metrics` for /status"
            )
            return f"{url}: the API key in {used} {wrong}"
        text = f"status {error.code}"
    return f"no Twostroke server answers at {url}: {text}"
