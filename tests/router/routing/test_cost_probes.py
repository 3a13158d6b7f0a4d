"""Cost probes: workers with wrong costs get requests, and learn better ones."""

import msgspec
import pytest

from tests.router.routing.knowing import Rig, info, request
from twostroke.protocol.stats import StepCosts
from twostroke.router.routing.chooser import PROBE_AFTER_S
from twostroke.worker.step_costs import StepContent, StepCostFit

TRUE = StepCosts(2e-3, 6e-5, 1.6e-8, 1e-4, 1e-7, 100)
SLOW = msgspec.structs.replace(TRUE, token_s=30 * TRUE.token_s)
LONG = tuple(range(3000))


def a_rig(prefill=TRUE, decode=TRUE):
    """Return a rig in which p0 has the costs `prefill`, p1 none of its own, and the decode workers `decode`."""
    rig = Rig(pulls=False)
    costs_of = {"p0": prefill, "p1": None, "d0": decode, "d1": decode}
    for name in rig.infos:
        rig.infos[name] = info(name, max_step_tokens=2048, num_blocks=1000)
        rig.tell(name, costs=costs_of[name], free_blocks=1000)
    return rig


async def sent(rig, times, every_s=0.5, prompt=LONG):
    """Return the paths of prompts that come one after another; each is over before the next."""
    found = []
    for _ in range(times):
        rig.clock.now += every_s
        path, hold = rig.take(request((int(10_000 + 2 * rig.clock.now), *prompt)))
        hold.release()
        for name in rig.infos:  # as half a second later
            rig.tell(name, costs=rig.view._stats[rig.infos[name].peer].costs, free_blocks=1000)
        found.append(path)
    return found


def by(path):
    return None if path.prefill is None else path.prefill.peer.worker_id


async def test_workers_thought_slow_are_tried_the_less_often_the_slower_they_are_thought():
    rig = a_rig(prefill=SLOW)
    paths = await sent(rig, 1700)
    tried = [path for path in paths if path.is_cost_probe]
    assert {by(path) for path in paths if not path.is_cost_probe} == {None}
    assert {by(path) for path in tried} == {"p0", "p1"}
    slower = tried[0].estimate.ttft_s / paths[0].estimate.ttft_s
    assert slower > 10
    assert len(tried) == pytest.approx(2 * 1700 * 0.5 / (PROBE_AFTER_S * slower), abs=2)


async def test_a_worker_that_is_as_quick_but_has_no_turn_is_tried_every_ten_seconds():
    rig = a_rig(decode=msgspec.structs.replace(TRUE, token_s=TRUE.token_s * 0.3))
    paths = await sent(rig, 200)
    assert 4 <= len([path for path in paths if path.is_cost_probe]) <= 20


async def test_short_prompts_do_not_probe_the_costs_of_long_ones():
    rig = a_rig(prefill=SLOW)
    probes = rig.chooser._cost_probes
    await sent(rig, 1)
    for _ in range(1000):
        rig.clock.now += 1.0
        for name in ("p0", "p1"):
            probes.worked(rig.infos[name].peer, 100, rig.clock.now)
    assert [by(path) for path in await sent(rig, 3)].count(None) < 3


class Learns:
    """A prefill worker's fit, told of steps that take `factor` times what they should."""

    def __init__(self):
        self.fit = StepCostFit()

    def computes(self, num_tokens, num_before=0, factor=1.0):
        content = StepContent(num_tokens, num_tokens * (num_before + num_tokens / 2), 0, 0)
        self.fit.add(content, factor * content.expected_s(TRUE))

    def computes_short_ones(self, factor):
        for number in range(45):
            self.computes(5 + number % 50, factor=factor * (1.15 if number % 2 else 0.85))

    def costs(self):
        self.fit.take_in()
        return self.fit.costs()


async def test_after_many_short_prompts_long_ones_go_to_the_prefill_workers():
    learns = Learns()
    learns.computes_short_ones(1.0)
    assert {by(path) for path in await sent(a_rig(prefill=learns.costs()), 8)} == {"p0", "p1"}


async def test_prefill_workers_that_began_slowly_get_long_prompts_again():
    """The history that once locked long prompts out of all prefill workers for good."""
    learns = Learns()
    learns.computes_short_ones(10.0)
    rig = a_rig(prefill=learns.costs())
    assert {by(path) for path in await sent(rig, 8)} == {None}
    for _ in range(500):
        (path,) = await sent(rig, 1)
        if by(path) == "p0":
            learns.computes(2048)
            learns.computes(952, 2048)
            rig.tell("p0", costs=learns.costs(), free_blocks=1000)
    assert {by(path) for path in await sent(rig, 8)} == {"p0", "p1"}
