"""Load for an LLM server, by Locust: TTFT, TPOT and ITL beside requests in its table, page, CSV files and report.

    locust -f loadtests/locustfile.py --host http://127.0.0.1:8000                                # from Locust's page
    locust -f loadtests/locustfile.py --headless -u 20 -r 5 -t 60s --host URL --html report.html  # from a terminal
    locust -f loadtests/locustfile.py --headless -u 200 -t 60s --host URL --processes 4           # by several processes
    locust -f loadtests/locustfile.py,loadtests/stages.py --headless --host URL                   # users by a shape
    locust -f loadtests/locustfile.py --headless --plan plan.json                                 # an open loop

The last sends each request at an instant of its own, however slow the server is, and judges SLOs: docs/loadtests.md.
For prompts of your own, write a locustfile with a subclass of `LLMUser`.
"""

import random
from typing import Any

from locust import events, task

from twostroke.loadtests.generator import locust_plan
from twostroke.loadtests.users import LLMUser
from twostroke.loadtests.workloads.prompts import random_text
from twostroke.loadtests.workloads.sessions import INPUT_SIGMA, PLANNED_SHARE
from twostroke.loadtests.workloads.synthetic import LogNormal


@events.init_command_line_parser.add_listener
def add_arguments(parser: Any) -> None:
    """Add our flags. Those of the closed loop stand on Locust's page, too."""
    parser.add_argument("--model", default="", help="name of the model (default: the first that the server lists)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="median of a prompt's tokens")
    parser.add_argument("--max-tokens", type=int, default=64, help="at most so many tokens of an answer")
    locust_plan.add_arguments(parser)


@events.init.add_listener
def follow_the_plan(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    """Carry out the plan, if there is one. Else Locust's own flags say how many users there are, and for how long."""
    locust_plan.add_to(environment, runner, web_ui)


class ChatUser(LLMUser):
    """Asks, waits for the whole answer, and asks something else: a closed loop."""

    @task
    def ask(self) -> None:
        """Prompts are of mixed lengths, as those of people are: log-normal, spread as in Azure's trace of 2023."""
        options = self.environment.parsed_options
        length = LogNormal(options.prompt_tokens, INPUT_SIGMA).at(random.random())
        context = self.server.model.max_context  # None: the server does not tell
        room = length if context is None else PLANNED_SHARE * context - options.max_tokens
        self.chat(random_text(max(1, round(min(length, room)))), max_tokens=options.max_tokens)
