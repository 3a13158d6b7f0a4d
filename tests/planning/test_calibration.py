"""Costs that are scaled until a simulated load is as slow as a measured one, and the others that slow it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from twostroke.loadtests.plan import SLO, Plan, Poisson
from twostroke.planning import agreement
from twostroke.planning.agreement import figures_of, simulated
from twostroke.planning.calibration import MIXED, Seen, calibrated
from twostroke.planning.modes import Counts, Fleet, slowed
from twostroke.planning.neighbours import Neighbours, share, wanted_s, weight
from twostroke.planning.profiles import SMALL
from twostroke.worker.profile import WorkerProfile

FLEET = Fleet("disaggregated", Counts(1, 1), SMALL)


def load(rate: float) -> Plan:
    return Plan("simulated", "one", 1024, Poisson(rate), MIXED, SLO(), 6.0, seed=3, vocabulary=1000)


def figures(plan: Plan, profile: WorkerProfile, others: float = 0.0) -> dict[str, float]:
    return figures_of(simulated(plan, msgspec.structs.replace(FLEET, profile=profile)), 0.0)[0]


def test_probes_that_were_too_quick_are_mended_by_two_loads() -> None:
    probed = msgspec.structs.replace(SMALL, beside=SMALL.costs, prompt_s=2e-3, http_s=2e-3, call_s=2e-3)
    true = msgspec.structs.replace(
        probed, costs=slowed(SMALL.costs, 1.3, 1.2), beside=slowed(SMALL.costs, 2.0, 1.6), prompt_s=2.6e-3
    )
    low, high = (Seen(load(rate), figures(load(rate), true), 0.0) for rate in (2.0, 12.0))
    found = calibrated(probed, low, high, figures)
    between = load(7.0)  # which it has not seen
    measured, before, after = (figures(between, profile) for profile in (true, probed, found))
    for name in ("ttft_mean_s", "tpot_mean_s"):
        assert before[name] < 0.8 * measured[name]
        assert after[name] == pytest.approx(measured[name], rel=0.12)


def test_a_load_that_nobody_answered_changes_nothing() -> None:
    nothing = Seen(load(2.0), {}, 0.0)
    assert calibrated(SMALL, nothing, nothing, lambda plan, profile, others: {}) == SMALL


def test_a_program_that_computes_wants_a_core_all_the_time_and_one_of_the_idle_class_weighs_nothing() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=_ordinary)
    try:
        process, began = Path(f"/proc/{busy.pid}"), time.monotonic()
        before = wanted_s(process).get(busy.pid, 0.0)
        while time.monotonic() < began + 0.5:
            os.sched_yield()
        assert wanted_s(process)[busy.pid] - before > 0.3
        assert weight(busy.pid) == pytest.approx(1.25 ** -os.getpriority(os.PRIO_PROCESS, busy.pid))
        os.sched_setscheduler(busy.pid, os.SCHED_IDLE, os.sched_param(0))
        assert weight(busy.pid) == 0.0
    finally:
        busy.kill()
        busy.wait()


def _ordinary() -> None:
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def thread(proc: Path, process: int, parent: int, wanted_ns: int) -> None:
    of_thread = proc / str(process) / "task" / str(process)
    of_thread.mkdir(parents=True, exist_ok=True)
    (proc / str(process) / "stat").write_text(f"{process} (a b) S {parent} 1")
    (of_thread / "schedstat").write_text(f"{wanted_ns // 2} {wanted_ns - wanted_ns // 2} 7")


def test_what_came_from_this_process_is_no_other(tmp_path: Path) -> None:
    ours, child, other = os.getpid(), 4_000_001, os.getppid()
    for process, parent in ((ours, other), (child, ours), (other, 1)):
        thread(tmp_path, process, parent, 0)
    with Neighbours(tmp_path) as neighbours:
        for process, parent, wanted_s in ((ours, other, 50), (child, ours, 70), (other, 1, 3)):
            thread(tmp_path, process, parent, wanted_s * 10**9)
        began = time.monotonic()
    assert neighbours.others > 0  # 3 s of the other's within less than that, and none of ours
    assert neighbours.others * max(time.monotonic() - began, 1e-3) < 4.0


def test_cores_are_shared_alike_once_there_are_fewer_than_threads() -> None:
    assert share(1, 0.5, 2) == 1.0
    assert share(2, 2.0, 2) == 0.5


def test_a_calibration_that_was_broken_off_does_not_stand_in_the_way_of_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: list[Path] = []

    def broken_off(plan: Plan, folder: Path, *, show: bool) -> None:
        folders.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(agreement, "run_plan", broken_off)
    plan = Plan("simulated", "160m", 4096, Poisson(1.0), MIXED, SLO(), 10.0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            agreement.calibrate(plan, Fleet("aggregated", Counts(0, 1), SMALL), (1.0, 2.0), tmp_path)
    assert len(set(folders)) == 2
