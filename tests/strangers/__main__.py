"""python -m tests.strangers URL: odd requests of strangers to a live server, and whether it answers them rightly.

Each is followed by a plain one now and then, so that a server that was hurt shows it. The last line is one JSON object:
how many cases there were, and how many failed.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import httpx

from tests.strangers.cases import COMPLETION, cases
from tests.strangers.checks import MAX_S, Case, Response, answered

PATIENCE_S = 120.0
PLAIN_EVERY = 10


def variations(case: Case) -> Iterator[Case]:
    """The case itself, and as a stream where that changes no status."""
    yield case
    is_answer = isinstance(case.body, dict) and case.check is answered and case.path.startswith("/v1/")
    if is_answer and "count_tokens" not in case.path:
        yield replace(case, name=f"{case.name}, as a stream", body=case.body | {"stream": True})


def send(client: httpx.Client, case: Case) -> Response:
    """The response to a case."""
    content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    began = time.monotonic()
    response = client.request(case.method, case.path, content=content, headers=dict(case.headers))
    return Response(response.status_code, response.headers, response.content, time.monotonic() - began)


def problem_of(client: httpx.Client, case: Case) -> str | None:
    """Return the fault of the answer to a case; None where there is none."""
    try:
        response = send(client, case)
        problem = case.check(response)
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    if problem is None and response.took_s > MAX_S:
        return f"took {response.took_s:.1f} s"
    return problem


def run(url: str, key: str | None, every_nth: int = 1) -> dict[str, int]:
    """Send each nth case; says what failed. Returns `cases` and `failed`."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    every = [one for case in cases() for one in variations(case)][::every_nth]
    num_failed = 0
    parts = urlsplit(url)
    with httpx.Client(base_url=f"{parts.scheme}://{parts.netloc}", headers=headers, timeout=PATIENCE_S) as client:
        for number, case in enumerate(every):
            problem = problem_of(client, case)
            if problem is None and number % PLAIN_EVERY == 0:
                plain = Case("a plain request", "/v1/completions", COMPLETION, answered)
                problem = problem_of(client, plain)
                problem = problem and f"and a plain request after it: {problem}"
            if problem is not None:
                num_failed += 1
                print(f"{case.path}: {case.name}: {problem}", flush=True)
    return {"cases": len(every), "failed": num_failed}


def main() -> int:
    """Returns 0 where all was answered rightly, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.strangers", description=__doc__)
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--key", help="the API key, where the server asks for one")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth case (default: all)")
    arguments = parser.parse_args()
    told = run(arguments.url, arguments.key, arguments.every)
    print(json.dumps(told))
    return int(told["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
