"""Facts of a run: what the server reports of itself and its model, the machine, and versions."""

import json
import os
import platform
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException, InvalidURL
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.run_folder import RunFacts

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLES = ("TWOSTROKE_API_KEY", "OPENAI_API_KEY")  # the first that is set
TIMEOUT_S = 10.0
OWNER = "twostroke"  # what our server's models are `owned_by`


def api_key() -> str | None:
    """The secret that servers with API keys want."""
    return next((key for name in API_KEY_VARIABLES if (key := os.environ.get(name))), None)


def get(url: str, path: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the body of a GET. Raises HTTPException and OSError for everything but 200."""
    request = urllib.request.Request(url.rstrip("/") + path)
    key = api_key()
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        content: bytes = answer.read()
        return content


def server_url(text: str) -> str:
    """The server's address, also from what clients of OpenAI's API are given (http://h:8000/v1), or h:8000 alone."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def list_models(url: str) -> list[dict[str, Any]]:
    """The models that a server lists. Raises LoadTestError where none answers."""
    if not re.match("https?://[^/]", url):
        raise LoadTestError(f"{url}: write http://HOST:PORT or https://HOST:PORT, with a path where there is one")
    if url.rstrip("/").endswith("/v1"):
        raise LoadTestError(f"{url}: leave /v1 away, it is added")
    try:
        return list(json.loads(get(url, "/v1/models"))["data"])
    except urllib.error.HTTPError as error:
        hint = f": {_key_hint()}" if error.code in (401, 403) else ""
        raise LoadTestError(f"{url}/v1/models answers {error.code}{hint}") from error
    except InvalidURL as error:
        raise LoadTestError(f"{url}: {error}") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        text = (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
        raise LoadTestError(f"no server answers at {url}: {text}; is it started?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise LoadTestError(f"{url}/v1/models is no list of models of an OpenAI API") from error


def _key_hint() -> str:
    used = next((name for name in API_KEY_VARIABLES if os.environ.get(name)), None)
    return f"it does not take the API key in {used}" if used else f"set {' or '.join(API_KEY_VARIABLES)}"


def is_ours(models: list[dict[str, Any]]) -> bool:
    """Return whether the server takes fields that OpenAI's API lacks. A load balancer lets this be seen, but not
    /status."""
    return any(model.get("owned_by") == OWNER for model in models)


def server_facts(url: str, models: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the server reports: of any server the models, of ours also version, workers and classes."""
    facts: dict[str, Any] = {"models": models}
    if not is_ours(models):
        return facts
    for path in ("/version", "/status"):
        try:
            facts |= json.loads(get(url, path))
        except (OSError, HTTPException, ValueError) as error:
            facts[f"{path} says"] = str(error)  # behind a load balancer, or to others than admins
    return facts


def begin_facts(url: str, models: list[dict[str, Any]]) -> RunFacts:
    """Return the facts of a run that begins now. Until it is completed it counts as ended early."""
    return RunFacts(
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        server=server_facts(url, models),
        machine=machine_facts(),
        versions={name: _version(name) for name in ("twostroke", "locust")} | {"python": platform.python_version()},
        ended_early=True,
    )


def machine_facts() -> dict[str, Any]:
    """Return the facts of this process's machine."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _proc_field(Path("/proc/cpuinfo"), "model name"),
        "memory": _proc_field(Path("/proc/meminfo"), "MemTotal"),
        "load_average": os.getloadavg()[0],
    }


def _proc_field(path: Path, name: str) -> str:
    """Return a field of a file of lines `name : value`; empty if there is none."""
    if not path.exists():
        return ""
    fields = (line.partition(":") for line in path.read_text().splitlines())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class AdvertisedModel:
    """None or 0: the server does not tell."""

    name: str
    max_context: int | None  # tokens, prompt and output together
    vocabulary: int


def served_model(url: str, name: str | None = None) -> AdvertisedModel:
    """The model of this name, or the first. Raises LoadTestError where no server answers, or it has no such model."""
    models = list_models(url)
    names = [str(model.get("id")) for model in models]
    if not names:
        raise LoadTestError(f"{url} serves no model: /v1/models is an empty list")
    if name is not None and name not in names:
        raise LoadTestError(f"{url} serves {', '.join(names)}, not {name}: give --model")
    model = models[names.index(name) if name is not None else 0]
    max_context = model.get("max_model_len")
    if max_context is None and is_ours(models):
        raise LoadTestError(f"{url} has no decode worker, and can't serve: wait until /ready says so")
    return AdvertisedModel(str(model["id"]), max_context, model.get("vocab_size", 0))
