"""The sending side of a Locust process, and what it and the head of the run say to each other.

The head sends `prepare` and, when all have answered `prepared`, `begin` with one instant for all. Each second it gets a
report from everybody, the last when the share is over. All of it is msgpack within Locust's own messages. Requests are
sent by greenlets: Locust has patched all blocking calls.
"""

import gc
import logging
import time
from collections.abc import Callable

import gevent
import msgspec
from gevent.event import AsyncResult

from twostroke.loadtests import LoadTestError, unwritable
from twostroke.loadtests.generator.alone import Greenlets
from twostroke.loadtests.generator.dispatcher import Dispatcher, Line, check_prompts
from twostroke.loadtests.generator.http_stream import ClientExchange, make_endpoint, stream
from twostroke.loadtests.generator.live import LiveFigures, Second
from twostroke.loadtests.generator.run_facts import api_key
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.run_folder import GeneratorHealth, Record, RunFolder, append, make_folder

PREPARE, PREPARED, BEGIN, REPORT = (f"twostroke_{word}" for word in ("prepare", "prepared", "begin", "report"))


class PrepareOrder(msgspec.Struct, frozen=True):
    """The part of the plan that one process is to send."""

    plan: Plan
    worker: int
    is_twostroke: bool  # the server


class Prepared(msgspec.Struct, frozen=True):
    worker: int
    error: str | None = None


class SenderReport(msgspec.Struct, frozen=True):
    """Figures since the last report."""

    worker: int
    elapsed_s: float
    seconds: dict[int, Second]  # of the run
    health: GeneratorHealth
    over: bool = False
    error: str | None = None


REPORT_INTERVAL_S = 1.0

SendMessage = Callable[[str, bytes], None]
OnRecord = Callable[[Record, str], None]

_log = logging.getLogger(__name__)


class Sender:
    """Does what the head says: prepares a share of a plan, sends it, and reports it each second.

    `run` is the work of the process's one Locust user.
    """

    def __init__(self, folder: RunFolder, send_message: SendMessage, on_record: OnRecord):
        self._folder = folder
        self._send_message = send_message
        self._on_record = on_record  # is told each record and the run's name, beside the file
        self._live = LiveFigures()
        self._num_sent = 0
        self._begins_at: AsyncResult[float] = AsyncResult()

    def prepare(self, order: PrepareOrder) -> None:
        """Compute the share's schedule and its first requests; says so, or what is wrong."""
        error: str | None = None
        try:
            self._prepare(order)
        except LoadTestError as fault:
            error = str(fault)
        self._send_message(PREPARED, msgspec.msgpack.encode(Prepared(order.worker, error)))

    def begin(self, at: float) -> None:
        """Begin at a moment of the wall clock, which machines share; from then on the monotonic clock counts."""
        # What is loaded stays: the garbage collector needn't look at it again and again while streams are stamped.
        gc.collect()
        gc.freeze()
        self._begins_at.set(time.monotonic() + (at - time.time()))

    def run(self) -> None:
        """Send all, once told to begin. What goes wrong is in the report; ended from outside, it still reports all."""
        began = self._begins_at.get()
        began_cpu = time.process_time()
        reporter = gevent.spawn(self._report_each_second, began, began_cpu)
        error: str | None = "ended from outside"
        try:
            self._dispatcher.run(began)
            error = None
        except LoadTestError as fault:
            error = str(fault)
        except Exception as crash:
            _log.exception("this share of the run is lost")
            error = f"{type(crash).__name__}: {crash}"
        finally:
            reporter.kill()
            self._report(began, began_cpu, over=True, error=error)
            self._records.close()

    def _prepare(self, order: PrepareOrder) -> None:
        self._order = order
        plan = order.plan
        check_prompts(plan)
        endpoint = make_endpoint(plan.url, api_key())

        def post(path: str, body: bytes, exchange: ClientExchange) -> None:
            stream(endpoint, endpoint.request(path, body), exchange, plan.request_limit_s)

        line = Line(post, order.is_twostroke, self._sent, self._record)
        self._dispatcher = Dispatcher(plan, order.worker, line, Greenlets())
        self._dispatcher.prepare()
        path = self._folder.records_path(order.worker)
        make_folder(path.parent)
        try:
            self._records = path.open("ab", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from error

    def _sent(self, at_s: float) -> None:
        self._num_sent += 1
        self._live.sent(at_s)

    def _record(self, record: Record) -> None:
        append(self._records, record)
        plan = self._order.plan
        self._live.record(record, plan.slo, plan.warm_up_s)
        self._on_record(record, plan.name)

    def _report_each_second(self, began: float, began_cpu: float) -> None:
        while True:
            gevent.sleep(REPORT_INTERVAL_S)
            self._report(began, began_cpu)

    def _report(self, began: float, began_cpu: float, *, over: bool = False, error: str | None = None) -> None:
        elapsed_s = time.monotonic() - began
        cpu_seconds = time.process_time() - began_cpu
        report = SenderReport(
            worker=self._order.worker,
            elapsed_s=elapsed_s,
            seconds=self._live.take(float("inf") if over else elapsed_s),
            health=GeneratorHealth(self._order.worker, self._num_sent, cpu_seconds, elapsed_s),
            over=over,
            error=error,
        )
        self._send_message(REPORT, msgspec.msgpack.encode(report))
