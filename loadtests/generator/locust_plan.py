"""A plan, carried out by Locust: `locust -f loadtests/locustfile.py --plan plan.json [--master | --worker]`.

Locust gives processes, messages between them, its web page and its table. When requests are sent, and how they are
measured, is ours (dispatcher.py, http_stream.py): each process has one user, who sends the process's share of the plan.
"""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import gevent
import msgspec
from locust import LoadTestShape, User, task
from locust.exception import StopUser
from locust.runners import STATE_MISSING, LocalRunner, MasterRunner, WorkerRunner

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator import locust_head as live_page
from twostroke.loadtests.generator.live import tell_locust
from twostroke.loadtests.generator.locust_head import LocustHead
from twostroke.loadtests.generator.locust_sender import BEGIN, PREPARE, PREPARED, REPORT, PrepareOrder, Sender
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.run_folder import RunFolder, read_json

_log = logging.getLogger(__name__)

_heads: list[LocustHead] = []  # of this process: one, or none in a worker
_senders: list[Sender] = []  # one, or none in a master


def add_arguments(parser: Any) -> None:
    """The open loop's own options, on the command line alone."""
    for name, kind, help_text in (
        ("--plan", str, "send what this plan.json says, at its instants; workers are sent the master's"),
        (
            "--folder",
            str,
            "with a plan: where records and run.json go (default: the plan's folder, or the current one)",
        ),
        ("--progress-fd", int, "with a plan: an open file, to which a line of JSON goes each second"),
    ):
        parser.add_argument(name, type=kind, help=help_text, include_in_web_ui=False)


def add_to(environment: Any, runner: Any, web_ui: Any) -> None:
    """Have a process take part in a plan where one is given; else its locustfile's users are all that there is.

    A worker learns of its master's plan as the test starts. Exits where the plan can't be carried out.
    """
    options = environment.parsed_options
    # Strings: the master sends its options to workers.
    folder = RunFolder(Path(options.folder) if options.folder else Path(options.plan or "").parent)
    if isinstance(runner, WorkerRunner):
        environment.events.test_start.add_listener(_take_over)
    elif options.plan is None:
        return
    if not isinstance(runner, MasterRunner):
        _senders.append(_make_sender(environment, runner, folder))
    if not isinstance(runner, WorkerRunner):
        try:
            head = _make_head(environment, runner, read_json(Path(options.plan), Plan), folder)
        except LoadTestError as error:
            raise SystemExit(f"locustfile: {error}") from error
        _heads.append(head)
        _take_over(environment)
        if options.num_users or options.spawn_rate or options.run_time:
            _log.warning("--users, --spawn-rate and --run-time do nothing beside --plan")
        environment.shape_class = ProcessShares()
        environment.shape_class.runner = runner
        # Locust would end a master without its workers' last reports, or, while a shape runs, heed no SIGTERM at all.
        gevent.signal_handler(signal.SIGTERM, head.give_up, "ended from outside")
        environment.events.quitting.add_listener(lambda **_: _stop_workers(runner))
        options.expect_workers = head.plan.num_workers
        if web_ui is not None:
            live_page.add_to(web_ui, head)


def _take_over(environment: Any, **_: Any) -> None:
    if environment.parsed_options.plan is not None:
        environment.user_classes = [ShareSender]


def _make_sender(environment: Any, runner: Any, folder: RunFolder) -> Sender:
    sender = Sender(folder, runner.send_message, lambda record, name: tell_locust(environment, record, "E2E", name))
    decode = msgspec.msgpack.Decoder(PrepareOrder).decode
    runner.register_message(PREPARE, lambda environment, msg: sender.prepare(decode(msg.data)))
    runner.register_message(BEGIN, lambda environment, msg: sender.begin(msgspec.msgpack.decode(msg.data)))
    return sender


def _make_head(environment: Any, runner: Any, plan: Plan, folder: RunFolder) -> LocustHead:
    progress_fd = environment.parsed_options.progress_fd

    def send_to(kind: str, content: bytes, client: str | None) -> None:
        runner.send_message(kind, content, client)

    def tell_progress(head: LocustHead) -> None:
        if progress_fd is None:
            return
        try:
            os.write(progress_fd, msgspec.json.encode(head.progress) + b"\n")
        except BrokenPipeError:
            if not head.is_over:
                head.give_up("who started this run is gone")

    head = LocustHead(plan, folder, send_to, tell_progress)
    runner.register_message(PREPARED, lambda environment, msg: head.on_prepared(msg.data))
    runner.register_message(REPORT, lambda environment, msg: head.on_report(msg.data))

    def start(**_: Any) -> None:
        """All processes have their user: from here on the plan alone says what is sent."""
        head.start([None] if isinstance(runner, LocalRunner) else list(runner.clients))

    environment.events.spawning_complete.add_listener(start)
    return head


def _stop_workers(runner: Any) -> None:
    """Waits for their last reports. A master that quits gives them half a second, whatever they still have to do."""
    if isinstance(runner, MasterRunner):
        runner.stop()


class ShareSender(User):
    """The one user of a process."""

    @task
    def send_share(self) -> None:
        _senders[0].run()
        raise StopUser


class ProcessShares(LoadTestShape):
    """Shape that keeps one user a process until all shares are sent."""

    def tick(self) -> tuple[int, float] | None:
        head = _heads[0]
        if isinstance(self.runner, MasterRunner):
            head.lose_all_but({name for name, node in self.runner.clients.items() if node.state != STATE_MISSING})
        if head.is_over:
            if head.error is not None:
                _stop_workers(self.runner)
            self.runner.environment.process_exit_code = 0 if head.error is None else 1
            return None
        return head.plan.num_workers, float(head.plan.num_workers)
