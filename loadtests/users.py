"""Users for locustfiles: they ask over OpenAI's API, stream the answers, and tell Locust when the tokens came.

    from locust import between, task
    from twostroke.loadtests.users import LLMUser

    class Curious(LLMUser):
        wait_time = between(1, 3)

        @task
        def ask(self):
            self.chat("Why is the sky blue?", max_tokens=64)

Each request is a request of Locust's. Beside it stand rows TTFT, TPOT and ITL of the same name, in Locust's table, CSV
files, page and report, from workers, too; they don't count as requests. Without `wait_time` a user is a closed loop: it
asks again as soon as it has its answer.
"""

import gc
import logging
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import gevent
import msgspec
from gevent.lock import Semaphore
from locust import User, events
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator import live
from twostroke.loadtests.generator.dispatcher import UNANSWERED_S
from twostroke.loadtests.generator.http_stream import (
    ClientExchange,
    Endpoint,
    StreamedAnswer,
    make_endpoint,
    read_stream,
    stream,
)
from twostroke.loadtests.generator.run_facts import DEFAULT_URL, AdvertisedModel, api_key, served_model, server_url
from twostroke.loadtests.run_folder import Record

NO_SERVER = "twostroke_no_server"  # a worker's message to the master, with the reason

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TestedServer:
    """Server and model of the requests. Each process looks them up once a test: it costs more than a request."""

    endpoint: Endpoint
    model: AdvertisedModel


# By host and the model's name, as they were given; None: there is no such server.
_servers: dict[tuple[str, str], TestedServer | None] = {}
_looking_up = Semaphore()


class LLMUser(User):
    """One user of an LLM server, to be subclassed with tasks that call `chat` or `complete`.

    The server's API key is in the environment variable TWOSTROKE_API_KEY, or else in OPENAI_API_KEY.
    """

    abstract = True
    host = DEFAULT_URL  # --host and Locust's page name another one
    model = ""  # empty: the first that the server lists
    request_limit_s = 300.0  # a slower answer is a failure
    fields: ClassVar[dict[str, Any]] = {}  # sent with each request, also such as other servers have beside OpenAI's

    @cached_property
    def server(self) -> TestedServer:
        """The server of this test. Where there is none the test ends, with one failed request that says why."""
        key = (self.host, self.model or getattr(self.environment.parsed_options, "model", ""))
        with _looking_up:
            if key not in _servers:
                _servers[key] = self._look_up(*key)
        server = _servers[key]
        if server is None:
            raise StopUser
        return server

    def chat(
        self, messages: str | list[dict[str, Any]], *, name: str = "/v1/chat/completions", **fields: Any
    ) -> StreamedAnswer:
        """Ask a question, or go on with a conversation, and wait for the answer's end.

        `fields` are the API's: max_tokens, temperature, tools, ... Locust's rows are called `name`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._ask("/v1/chat/completions", {"messages": messages} | fields, name)

    def complete(self, prompt: str | list[int], *, name: str = "/v1/completions", **fields: Any) -> StreamedAnswer:
        """Have a text continued, or token ids, as `chat` does otherwise. Base models have this alone."""
        return self._ask("/v1/completions", {"prompt": prompt} | fields, name)

    def _ask(self, path: str, fields: dict[str, Any], name: str) -> StreamedAnswer:
        """Send one request. A user whose request was refused or failed pauses for a second, whatever its wait_time:
        a server that is gone is not asked thousands of times a second."""
        body = {"model": self.server.model.name, "stream": True, "stream_options": {"include_usage": True}}
        request = self.server.endpoint.request(path, msgspec.json.encode(body | self.fields | fields))
        exchange = ClientExchange(0.0)
        try:
            stream(self.server.endpoint, request, exchange, self.request_limit_s)
        except BaseException:
            # The test ends. As with Locust's own clients this is no request, but what had come by now was measured.
            live.tell_times(self.environment, _locust_record(exchange, read_stream(exchange), time.monotonic()), name)
            raise
        end_s = time.monotonic()
        answer = read_stream(exchange, lambda: gevent.sleep(0))
        record = _locust_record(exchange, answer, end_s)
        live.tell_locust(self.environment, record, "POST", name, sum(len(data) for _, data in exchange.arrivals))
        if answer.status != "ok":
            gevent.sleep(UNANSWERED_S)
        return answer

    def _look_up(self, host: str, model: str) -> TestedServer | None:
        url = server_url(host)
        try:
            return TestedServer(make_endpoint(url, api_key()), served_model(url, model or None))
        except LoadTestError as error:
            reason = str(error)
        request = {"request_type": "GET", "name": "/v1/models", "response_time": 0, "response_length": 0}
        self.environment.events.request.fire(**request, exception=LoadTestError(reason), context={})
        if isinstance(self.environment.runner, WorkerRunner):
            self.environment.runner.send_message(NO_SERVER, reason)
        else:
            # Not before this user's own end, whom Locust would miss as it stops the others.
            self.greenlet.link(lambda _: _end_test(self.environment, reason))
        return None


def _locust_record(exchange: ClientExchange, answer: StreamedAnswer, end_s: float) -> Record:
    """Make a record whose request was due when it was sent: in a closed loop nothing is scheduled."""
    return Record(
        session=0,
        turn=0,
        scheduled_s=exchange.sent_at,
        sent_s=exchange.sent_at,
        end_s=end_s,
        status=answer.status,
        error=answer.error,
        output_tokens=answer.usage.completion_tokens,
        token_s=tuple(answer.token_times),
    )


@events.test_start.add_listener
def _begin_test(**_: Any) -> None:
    _servers.clear()  # between tests a server may have been started with another model
    # What is loaded stays: the garbage collector needn't look at it again and again while streams are stamped.
    gc.collect()
    gc.freeze()


@events.init.add_listener
def _init(runner: Any, **_: Any) -> None:
    # Timers count from when gevent last looked at the clock. That was before the imports, which took up to seconds of
    # a short --run-time.
    gevent.get_hub().loop.update_now()
    if isinstance(runner, MasterRunner):
        # Concurrent: to quit from the greenlet that receives messages would end that greenlet first.
        runner.register_message(NO_SERVER, lambda environment, msg: _end_test(environment, msg.data), concurrent=True)


@events.quitting.add_listener
def _complete_csv(environment: Any, **_: Any) -> None:
    """Locust writes its CSV files each second, and would end without what came after the last time."""
    if environment.parsed_options.csv_prefix:
        gevent.sleep(CSV_STATS_INTERVAL_SEC + 0.1)


def _end_test(environment: Any, reason: str) -> None:
    _log.error("%s", reason)
    if environment.parsed_options.headless:
        environment.runner.quit()
    else:
        environment.runner.stop()
