"""Prompts that KV tiers hold, on a fleet of fake workers that tell of their tiers over real token channels."""

from tests.router.generate.collecting_tokens import collect, new_state
from tests.router.routing.knowing import COSTS, TIERS
from twostroke.protocol.block_hash import chain_hashes, pack_hashes
from twostroke.protocol.messages import BlocksChanged, BlocksHeld

PROMPT = tuple(range(330))


async def test_a_prompt_in_a_workers_tiers_is_computed_there_and_its_read_is_counted(fleet_of, a_request, until):
    request = a_request(token_ids=PROMPT, num_prompt_tokens=len(PROMPT))
    async with fleet_of(0, 2) as rig:
        rig.channels.follow(rig.fleet.workers())
        for name in ("d0", "d1"):
            await rig.channels.ensure(rig[name].info)
            rig[name].tell(costs=COSTS, tiers=TIERS)
        names = pack_hashes(chain_hashes(PROMPT, 16, request.cache_salt))
        rig["d1"].connections["router-0"].send(BlocksHeld(names[:80], True, True, 0, is_tier=True))
        rig["d1"].connections["router-0"].send(BlocksChanged(1, names[80:], b"", is_tier=True))
        index = rig.knowledge.tier_blocks
        await until(lambda: len(index) == len(PROMPT) // 16 and rig.knowledge.view.knows_costs)
        assert len(rig.knowledge.blocks) == 0
        state = new_state(request)
        await collect(rig, state)
        assert [len(rig[name].seen) for name in ("d0", "d1")] == [0, 1]
        assert state.tier_read_s == 0.005 + 320 * 0.0001
        assert rig.pipeline.num_tier_reads == 1
        other = new_state(a_request(token_ids=PROMPT[::-1], num_prompt_tokens=len(PROMPT)))
        await collect(rig, other)
        assert (other.tier_read_s, rig.pipeline.num_tier_reads) == (None, 1)
