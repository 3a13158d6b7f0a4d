"""One run: starts Locust's processes, watches them, samples the server, and leaves a run's folder."""

import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from twostroke.loadtests.errors import LoadTestError, RunLost, unwritable
from twostroke.loadtests.generator.conversation import check_prompts
from twostroke.loadtests.generator.locust_processes import LocustProcesses, check_free, start_locust
from twostroke.loadtests.generator.progress import Progress, ProgressDisplay
from twostroke.loadtests.generator.sampling import Sampler
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.run_folder import RunFolder
from twostroke.loadtests.workloads.sessions import sessions

START_LIMIT_S = 60.0  # until the first word of a run: Locust's processes find each other, and compute the schedule


def run_plan(plan: Plan, folder: Path, *, show: bool = True, web_port: int | None = None) -> RunFolder:
    """Carry out a plan; what it leaves is in `folder`, which must have no run yet.

    Ctrl-C ends the run early: its folder is complete for what was sent, says so, and KeyboardInterrupt goes on.
    Raises LoadTestError where the run can't be carried out; RunLost where it had begun, and a process was lost or the
    disk is full: what was sent then has its records.
    """
    check_prompts(plan)
    sessions(plan)  # raises here rather than in each process
    if web_port is not None:
        check_free(web_port)
    result = RunFolder(folder)
    _begin_folder(result, plan)
    with ExitStack() as ending:
        processes = start_locust(plan, result, web_port)
        ending.callback(processes.end)
        display = ending.enter_context(ProgressDisplay(plan, show))
        sampler = ending.enter_context(Sampler(plan.url, result.samples_path))
        last = _watch(processes, display, sampler)
    if last is None or not last.is_over:
        lost = f"Locust ended before the run did: its first process {processes.fate(processes.head, 'head')}"
        raise LoadTestError(lost) if last is None else RunLost(lost)
    if last.error is not None:
        raise RunLost(last.error)
    return result


def _watch(processes: LocustProcesses, display: ProgressDisplay, sampler: Sampler) -> Progress | None:
    """Until the head has ended. Returns its last word."""
    last: Progress | None = None
    started = time.monotonic()
    try:
        for progress in processes.progress():
            if sampler.error is not None:
                processes.interrupt()
                raise RunLost(sampler.error)
            if progress is None:
                if last is None or not last.is_over:
                    processes.check()
                if last is None and time.monotonic() - started > START_LIMIT_S:
                    raise LoadTestError(f"Locust does not begin: {processes.last_words()}")
                continue
            if last is None:
                sampler.begin(time.monotonic() - progress.elapsed_s)
            last = progress
            display.show(progress)
    except KeyboardInterrupt:
        display.say("stopping: answers under way are given up")
        processes.interrupt()
        raise
    return last


def _begin_folder(folder: RunFolder, plan: Plan) -> None:
    if folder.facts_path.exists() or any(folder.path.glob("records-*.jsonl")):
        raise LoadTestError(f"{folder.path}: has a run already; name another folder")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.plan_path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2))
    except OSError as error:
        raise unwritable(folder.path, error) from error
