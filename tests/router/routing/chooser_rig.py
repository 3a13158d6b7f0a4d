"""A chooser whose channels lead to nobody: the workers' words are put into their mouths."""

import msgspec

from tests.router.routing.knowing import COSTS, info
from twostroke.protocol.blocks import chain_hashes, pack_hashes
from twostroke.protocol.messages import BlocksHeld
from twostroke.protocol.requests import GenerateRequest, Peer, SamplingParams
from twostroke.protocol.stats import WorkerStats
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.routing.chooser import PathChooser

PROMPT = tuple(range(400))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Channels(TokenChannels):
    """Channels to nobody."""

    def __init__(self, clock):
        super().__init__(network=None, peer=Peer("router", 1), clock=clock)
        self.numbers, self.down = {}, set()

    def listen(self, listener):
        self.listener = listener

    def follow(self, workers):
        pass

    async def ensure(self, info):
        pass

    def stats(self, worker):
        return self.numbers.get(worker)

    def is_down(self, worker):
        return worker in self.down


class Rig:
    """p0, p1, d0, d1 have told their numbers, costs among them."""

    def __init__(self, **config):
        self.clock = Clock()
        self.channels = Channels(self.clock)
        self.infos = {name: self.info(name) for name in ("p0", "p1", "d0", "d1")}
        settings = {
            "policy": "kv_aware",
            "decodes_alone": True,
            "min_pull_tokens": 128,
            "index_blocks": 1000,
            "expected_s": 5.0,
        } | config
        self.chooser = PathChooser(
            workers=lambda: list(self.infos.values()), channels=self.channels, clock=self.clock, **settings
        )
        for name in self.infos:
            self.tell(name)

    def info(self, name, **changes):
        return info(name, **changes)

    def tell(self, name, **numbers):
        stats = WorkerStats(**{"free_blocks": 100, "total_blocks": 100, "costs": COSTS} | numbers)
        peer = self.infos[name].peer
        self.channels.numbers[peer] = stats
        self.channels.listener.told(peer, stats)

    def tell_blocks(self, name, token_ids, *, block_size=16, salt=b""):
        held = BlocksHeld(pack_hashes(chain_hashes(token_ids, block_size, salt)), True, True, 0)
        return self.channels.listener.blocks(self.infos[name].peer, held)

    def choose(self, token_ids=PROMPT, sent=(), **options):
        path = self.chooser.choose(request(token_ids), sent, **options)
        return tuple(info and info.peer.worker_id for info in (path.prefill, path.decode, path.source))

    def take(self, asked, sent=(), failed=()):
        """The path chosen, and the hold on its workers."""
        path = self.chooser.choose(asked, sent, failed)
        return path, self.chooser.hold(path, asked, sent)


def request(token_ids=PROMPT, **changes):
    base = GenerateRequest("template", "", token_ids, len(token_ids), SamplingParams(), 50)
    return msgspec.structs.replace(base, **changes)
