"""python -m tests.http_fuzz --url URL: requests by schemathesis over a live server's own document.

Prints what an answer does that it must not, with the request to repeat it; the last line is one JSON object. Its
`slowest_s` is of paths that generate nothing: what an answer takes beyond its model can't be told from outside.
"""

import argparse
import json
import sys
import time
from collections import Counter

import schemathesis
from schemathesis import Case
from schemathesis.core.failures import FailureGroup

from tests.http_fuzz.cases import CHECKS, run_each, sound, unsound

HANG_S = 1.0
TIMEOUT_S = 120.0


def main() -> int:
    """Returns 0 where every answer was as it must be, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.http_fuzz")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--key", help="the API key, where the server asks for one")
    parser.add_argument("--cases", type=int, default=500, help="for each path, sound and as many unsound")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    url = arguments.url.rstrip("/")
    headers = {"Authorization": f"Bearer {arguments.key}"} if arguments.key else {}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    slowest_s = 0.0

    def check(case: Case) -> None:
        nonlocal slowest_s
        began = time.monotonic()
        response = case.call(base_url=url, headers=headers, timeout=TIMEOUT_S)
        took_s = time.monotonic() - began
        statuses[response.status_code] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as failures:
            faults.append(str(failures))
            print(failures)
        if "completions" not in case.path and case.path != "/doctor":
            slowest_s = max(slowest_s, took_s)
            if took_s > HANG_S:
                faults.append(f"{case.path} took {took_s:.1f} s")
                print(faults[-1])

    for path, methods in schema.raw_schema["paths"].items():
        for method, operation in methods.items():
            kinds = [sound(schema, path, method)]
            if "requestBody" in operation:
                kinds.append(unsound(schema, path, method))
            for kind, cases in enumerate(kinds):
                count = arguments.cases if "requestBody" in operation else max(1, arguments.cases // 20)
                run_each(check, cases, count, seed_of=f"{arguments.seed} {kind} {method} {path}")
    told = {"cases": statuses.total(), "statuses": dict(sorted(statuses.items())), "faults": len(faults)}
    print(json.dumps({**told, "slowest_s": round(slowest_s, 3)}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
