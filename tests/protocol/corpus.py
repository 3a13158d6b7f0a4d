"""A message of every kind, with values of every shape."""

from twostroke.protocol import messages
from twostroke.protocol.kv_layout import KVLayout, RankCut
from twostroke.protocol.messages import Message
from twostroke.protocol.requests import Address, BlockedRequest, Peer, SampledToken, Ticket, TokenEvent
from twostroke.protocol.stats import TransferStats, WorkerStats

_SOURCE, _TARGET = Peer("prefill-1", 2**62), Peer("decode-1", 7)
TRANSFER_ID = _ID = bytes(range(200, 216))
_ENDS = Address("127.0.0.1", 65535), Address("::1", 1)
_TICKET = Ticket(_ID, "request", _SOURCE, _TARGET, _ENDS, RankCut(2, 2), RankCut(4, 1, 4), b"m" * 16)
_LAYOUT = KVLayout("0123abcd", "bfloat16", 32, 8, 128, 16, 2)
_PARAMS: dict[str, str | int] = {"host": "127.0.0.1", "port": 65535, "token": "ff" * 16}
_TOKEN = SampledToken(151935, -0.5, ((42, -0.5), (7, -1.5)))
_REACH = messages.Reach(("shm", "tcp"), "machine", "cpu")
_SEQUENCES = (
    messages.RankSequence((7, 9), 70_000, (1, 2, 3), True),
    messages.RankSequence((0,), 70_002, (1, 2, 3), True, True, None, 70_000),
    messages.RankSequence(tuple(range(90)), 0, (5,), False),
)

CORPUS: tuple[Message, ...] = (
    messages.Hello(_SOURCE, _TARGET),
    messages.Hello(_SOURCE, _TARGET, messages.KVHello(_LAYOUT, 1, "int8", _REACH)),
    messages.Welcome(_TARGET),
    messages.Welcome(_TARGET, messages.KVWelcome(_LAYOUT, 0, "tcp", "it joins any", ("shm: elsewhere",), _PARAMS)),
    messages.Refuse("the layouts differ: größer"),
    messages.Ping(),
    messages.TokenFrame((TokenEvent("r", 3, (_TOKEN,), "stop"), TokenEvent("s", 0, (SampledToken(5),), None, "gone"))),
    messages.TokenFrame(tuple(TokenEvent(f"request-{i}", i, (SampledToken(i),)) for i in range(64))),
    messages.StatsFrame(WorkerStats(num_running=2, step_seconds=0.25, transfer_bytes=2**40)),
    messages.KVNotSent("r"),
    messages.BlocksHeld(b"8 bytes.another.", True, False, 3),
    messages.BlocksHeld(b"", True, True, 0, is_tier=True),
    messages.BlocksChanged(4, b"8 bytes.", b""),
    messages.BlocksChanged(1, b"", b"8 bytes.", is_tier=True),
    messages.ReportBlocks(),
    messages.ReportBlocks(cache=False),
    messages.Cancel("r"),
    messages.Drain(),
    messages.Drain(is_ordered=True),
    messages.Resume(),
    messages.ChangeRole("even"),
    messages.PrefillFailed("r"),
    messages.SendPrefix(_TICKET, tuple(range(0, 60_000, 600)), b"salt"),
    messages.RequestsBlocked((BlockedRequest(_ID, 599.5), BlockedRequest(_ID[::-1], 0.25))),
    messages.Offer(_TICKET, 17),
    messages.Chunk(_ID, 0, (messages.Run(0, 1, 2), messages.Run(31, 0, 70_000)), 2**22),
    messages.Chunk(_ID, 2**20, tuple(messages.Run(layer, 0, 300) for layer in range(32)), 2**33),
    messages.Commit(_ID, 9, _TOKEN),
    messages.Commit(_ID, 0, None),
    messages.Grant(_ID, 4096),
    messages.Awaited(_ID),
    messages.Verified(_ID),
    messages.Abort(_ID, "reason"),
    messages.RankHello(_SOURCE, 3),
    messages.RankLoaded(Address("127.0.0.1", 65535)),
    messages.RankFailed("no memory"),
    messages.StageExpertHits(((0, 2**40), (3, 1))),
    messages.RankStep(_SEQUENCES, True),
    messages.RankStep(
        (), False, (messages.RankCopy(True, (70_000, 5), (0, 300)), messages.RankCopy(False, (1,), (2,)))
    ),
    messages.StepEnded(),
    messages.ArrangeExperts(
        (messages.LayerCopies(3, ((5, messages.NOBODY), (70_000, 0))),),
        (messages.ExpertMove(60, 1, 33, 0, 300, 2**33, 2**22),),
    ),
    messages.TransferCall("begin_transfer", 2**33, _TICKET, (4, 5), 17, 16),
    messages.TransferCall("layer_ready", 3, num_tokens=17),
    messages.TransferCall("windows_moved", 3, block_ids=(4, -1)),
    messages.TransferCall("commit", 3, first_token=_TOKEN),
    messages.TransferCall("decline_transfer", ticket=_TICKET, reason="nothing is cached"),
    messages.TransferCall("abort", 4, reason="reason"),
    messages.TransferEnded(4, None, _TOKEN, TransferStats(bytes=2**40, links_lost=1)),
    messages.TransferEnded(3, "the peer is gone", None, TransferStats()),
)
