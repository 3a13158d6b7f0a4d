"""Cost of TTFT, TPOT and ITL as rows of Locust's table: `python -m tests.loadtests.generator.events_cost [SECONDS]`.

One Locust process asks the stub server, which answers at once, and tells Locust of the tokens' times in every second
slice of 0.5 s. The requests that a core can send are one by the CPU seconds of each, in either kind of slice: the stub
shares the machine, and so do others. The last line is JSON. Locust runs this file, too.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.loadtests.stub_server import stub_server

SLICE_S = 0.5
USERS = 50
TOKENS = 64  # of an answer


def measure(seconds: float) -> dict[str, Any]:
    with stub_server("immediate") as (url, _):
        command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).resolve()), "--headless", "--only-summary"]
        command += ["-u", str(USERS), "-r", str(USERS), "-t", f"{seconds:g}s", "--host", url]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60)
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"with')))
    return found | {"ratio": found["with"] / found["without"]}


if __name__ == "__main__":
    print(json.dumps(measure(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)))
else:
    import gevent
    from locust import events, task

    from twostroke.loadtests import users
    from twostroke.loadtests.workloads.prompts import random_text

    SPENT = {True: [0.0, 0], False: [0.0, 0]}  # whether times are told: CPU seconds, requests
    tell_times = users.live.tell_times

    class Asking(users.LLMUser):
        @task
        def ask(self) -> None:
            self.chat(random_text(TOKENS), max_tokens=TOKENS)

    @events.test_start.add_listener
    def take_turns(environment: Any, **_: Any) -> None:
        gevent.spawn(_take_turns, environment)

    def _take_turns(environment: Any) -> None:
        told = True
        while True:
            users.live.tell_times = tell_times if told else lambda *_: None
            cpu_s, requests = time.process_time(), environment.stats.total.num_requests
            gevent.sleep(SLICE_S)
            SPENT[told][0] += time.process_time() - cpu_s
            SPENT[told][1] += environment.stats.total.num_requests - requests
            told = not told

    @events.quitting.add_listener
    def report(**_: Any) -> None:
        rates = {told: requests / cpu_s for told, (cpu_s, requests) in SPENT.items()}
        print(json.dumps({"with": rates[True], "without": rates[False]}), flush=True)
