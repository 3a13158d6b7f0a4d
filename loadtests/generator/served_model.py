"""What a plan must know of the model that a server serves."""

import json
import urllib.error
from dataclasses import dataclass
from http.client import HTTPException

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.run_facts import get, is_ours, models_of

LARGEST_VOCABULARY = 1 << 22


@dataclass(frozen=True)
class ServedModel:
    """None or 0: the server does not tell."""

    name: str
    max_context: int | None  # tokens, prompt and output together
    vocabulary: int


def served_model(url: str, name: str | None = None) -> ServedModel:
    """The model of this name, or the first. Raises LoadTestError where no server answers, or it has no such model."""
    models = models_of(url)
    names = [str(model.get("id")) for model in models]
    if not names or (name is not None and name not in names):
        raise LoadTestError(f"{url} serves {', '.join(names) or 'no model'}, not {name or 'any'}: give --model")
    model = models[names.index(name) if name is not None else 0]
    max_context = model.get("max_model_len")
    if max_context is None and is_ours(models):
        raise LoadTestError(f"{url} has no decode worker, and can't serve: wait until /ready says so")
    return ServedModel(str(model["id"]), max_context, _vocabulary_of(url) if is_ours(models) else 0)


def _vocabulary_of(url: str) -> int:
    """How many token ids our server knows: it refuses to make text of others. 0 where it does not let us ask."""
    try:
        known, unknown = -1, 1
        while unknown < LARGEST_VOCABULARY and _is_known(url, unknown):
            known, unknown = unknown, unknown * 2
        while unknown - known > 1:
            middle = (known + unknown) // 2
            known, unknown = (middle, unknown) if _is_known(url, middle) else (known, middle)
    except (OSError, HTTPException):
        return 0  # behind a load balancer that shows /v1 alone
    return unknown


def _is_known(url: str, token_id: int) -> bool:
    try:
        get(url, "/detokenize", body=json.dumps({"tokens": [token_id]}).encode())
    except urllib.error.HTTPError as error:
        if error.code == 400:
            return False
        raise
    return True
