"""The sending side of a Locust process: its share of the plan, and a report of it each second.

It knows Locust by messages alone (loadtests/locust_messages.py).
"""

import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import msgspec
from gevent.event import Event

from loadtests.conversation import Conversation, Line, check_prompts
from loadtests.dispatcher import Dispatcher, Share
from loadtests.errors import LoadTestError
from loadtests.green import Greenlets
from loadtests.http_stream import endpoint_of, stream
from loadtests.live import LiveFigures
from loadtests.locust_messages import PREPARED, REPORT, Prepared, PrepareOrder, Report
from loadtests.records import Record, line_of
from loadtests.run_facts import api_key
from loadtests.run_folder import GeneratorHealth, RunFolder

REPORT_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class Sender:
    """A process's share of a run. `run` is the work of its one Locust user."""

    def __init__(
        self,
        folder: Path,
        send_message: Callable[[str, Any], None],
        on_record: Callable[[Record, str], None],
    ):
        self._folder = RunFolder(folder)
        self._send_message = send_message
        self._on_record = on_record  # beside the file: Locust's own table
        self._begin_asked = Event()
        self._began = 0.0
        self._began_cpu = 0.0
        self._live = LiveFigures()
        self._num_sent = 0

    def prepare(self, order: PrepareOrder) -> None:
        """Compute the share's schedule and its first requests."""
        self._order = order
        try:
            self._dispatcher = self._dispatcher_of(order)
            self._dispatcher.prepare()
        except LoadTestError as error:
            self._tell(PREPARED, Prepared(order.worker, str(error)))
        else:
            self._tell(PREPARED, Prepared(order.worker))

    def begin(self, at: float) -> None:
        """Begin at a moment of the wall clock, which machines share; from then on the monotonic clock counts."""
        # What is loaded stays: the garbage collector needn't look at it again and again while streams are stamped.
        gc.collect()
        gc.freeze()
        self._began = time.monotonic() + (at - time.time())
        self._begin_asked.set()

    def run(self) -> None:
        """Send the share, once `begin` was called. Ended from outside, it still reports all."""
        self._begin_asked.wait()
        self._began_cpu = time.process_time()
        reporter = gevent.spawn(self._report_each_second)
        error: str | None = "ended from outside"
        try:
            self._dispatcher.run(self._began)
            error = None
        except Exception as crash:
            _log.exception("this share of the run is lost")
            error = f"{type(crash).__name__}: {crash}"
        finally:
            reporter.kill()
            self._report(over=True, error=error)
            self._records.close()

    def _dispatcher_of(self, order: PrepareOrder) -> Dispatcher:
        plan = order.plan
        check_prompts(plan)
        endpoint = endpoint_of(plan.url, api_key())
        self._folder.path.mkdir(parents=True, exist_ok=True)
        self._records = self._folder.records_path(order.worker).open("ab", buffering=0)
        line = Line(
            post=lambda path, body, exchange: stream(
                endpoint, endpoint.request(path, body), exchange, plan.request_limit_s
            ),
            asks_stages=order.is_twostroke,
            pause=lambda: gevent.sleep(0),
            on_send=self._sent,
            on_record=self._record,
        )
        return Dispatcher(
            plan,
            Share(order.worker, order.num_workers),
            lambda session: Conversation(plan, session, line),
            Greenlets(),
        )

    def _sent(self, at_s: float) -> None:
        self._num_sent += 1
        self._live.sent(at_s)

    def _record(self, record: Record) -> None:
        self._records.write(line_of(record))
        plan = self._order.plan
        self._live.record(record, plan.slo, plan.warm_up_s)
        self._on_record(record, plan.name)

    def _report_each_second(self) -> None:
        while True:
            gevent.sleep(REPORT_INTERVAL_S)
            self._report()

    def _report(self, *, over: bool = False, error: str | None = None) -> None:
        elapsed_s = time.monotonic() - self._began
        cpu_seconds = time.process_time() - self._began_cpu
        self._tell(
            REPORT,
            Report(
                worker=self._order.worker,
                elapsed_s=elapsed_s,
                seconds=self._live.take(float("inf") if over else elapsed_s),
                health=GeneratorHealth(self._order.worker, self._num_sent, cpu_seconds, elapsed_s),
                over=over,
                error=error,
            ),
        )

    def _tell(self, kind: str, content: msgspec.Struct) -> None:
        # As bytes: Locust's own coding knows no numbers as keys.
        self._send_message(kind, msgspec.msgpack.encode(content))
