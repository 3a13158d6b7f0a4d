"""Faults that take more than arming one: how a rig's transfer is struck. Each returns once the fault has fired."""

import asyncio

from tests.faults.children import LIMIT_S, Child
from tests.faults.pattern_store import CONFIG
from tests.faults.rig import Rig, Transfer
from tests.rigs.proxy import Proxy, draw_byte

MID_CHUNK = CONFIG.max_chunk_bytes * 5 // 2  # of some chunk, not the first

READ_BY_TARGETS = ("shm", "nixl")  # out of the source's memory

NEVER = 1 << 40  # bytes: more than there are

# The points of `injection` at which a side stops.
MOMENTS = {
    "source": {
        "before offer": "before send Offer",
        "between grant and first chunk": "received Grant",
        "between last chunk and commit": "before send Commit",
        "just after the commit": "after send Commit",  # its last chunks may be under way
        "between commit and verify": "received Verified",
    },
    "target": {
        "before offer": "received Offer",
        "between grant and first chunk": "after send Grant",
        "between last chunk and commit": "received Commit",
        "between commit and verify": "before send Verified",
    },
}


async def stop_at(rig: Rig, transfer: Transfer, side: str, moment: str) -> Child:
    """Begin the transfer, and stop one side's whole process at that moment, at the very instruction."""
    name = f"{side}-0"
    victim = rig[name]
    if moment != "mid-chunk":
        await rig.arm(name, MOMENTS[side][moment], "freeze", transfer_id=transfer.transfer_id)
    elif rig.transport not in READ_BY_TARGETS:
        at = "during send" if side == "source" else "during receive"
        await rig.arm(name, at, "freeze", num_bytes=MID_CHUNK)
        if side == "target":  # whose peer must not have sent everything by then
            await rig.arm("source-0", "during send", "slow", num_bytes=NEVER)
    elif side == "target":
        await rig.arm(name, "during copy", "freeze", skip=1)
    else:  # the target copies, and is held up in the middle of the second chunk; the source stops before one behind it
        await rig.arm("target-0", "during copy", "wait", skip=1)
        await rig.arm(name, "before send", "freeze", skip=3 if rig.transport == "shm" else 2)  # nixl has two buffers
        transfer.begin()
        await asyncio.gather(victim.has_fired(), rig["target-0"].has_fired())
        await victim.is_stopped()
        return victim
    transfer.begin()
    await victim.has_fired()
    await victim.is_stopped()
    return victim


async def cut_data_link(rig: Rig, transfer: Transfer, at: int) -> None:
    """Begin the transfer, whose link breaks after about so many of its 4 million bytes."""
    if rig.transport == "shm":  # what goes over its socket are the units' ids
        await rig.arm("source-0", "before send", "cut", skip=at // 1_000_000, num_bytes=at % 128)
    elif rig.transport == "nixl":  # six bytes a chunk
        await rig.arm("source-0", "during send", "cut", num_bytes=at // 100_000)
    else:
        await rig.arm("source-0", "during send", "cut", num_bytes=at)
    transfer.begin()
    await rig["source-0"].has_fired()


async def flip_a_bit(rig: Rig, transfer: Transfer) -> None:
    """Begin the transfer, one bit of which is flipped on its way, after it was sealed."""
    if rig.transport in ("torch_distributed", "nixl"):
        await rig.arm("source-0", "pack", "flip", skip=1)
        transfer.begin()
        await rig["source-0"].has_fired()
    elif rig.transport == "shm":  # in the source's memory, before the target reads it
        await rig["source-0"].call("arm", faults=[{"at": "after send", "action": "flip"}])
        await rig.arm("target-0", "before receive", "wait")
        transfer.begin()
        await rig["target-0"].has_fired()
        await rig["source-0"].has_fired()
        await rig["target-0"].call("resume")
    else:
        proxy = Proxy()
        address = await proxy.start()
        await rig["source-0"].call("reconnect")
        await rig["source-0"].call("arm", faults=[], via_port=address.port)
        proxy.flip_at(100_000 + draw_byte("flip", 3_000_000))
        transfer.begin()
        proxy.upstream.set_result(await rig["source-0"].is_joining())
        async with asyncio.timeout(LIMIT_S):
            await proxy.fired.wait()
        await transfer.has_failed()
        await proxy.close()
