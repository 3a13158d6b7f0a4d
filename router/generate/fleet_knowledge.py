"""The knowledge of one router replica about its workers: the channels, and the parts that they feed."""

from twostroke.protocol.blocked_requests import BlockedRequests
from twostroke.protocol.clock import Clock
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Peer
from twostroke.router.channels.token_channels import ChannelListener, TokenChannelConfig, TokenChannels
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.routing.block_index import BlockIndex
from twostroke.router.routing.workers import FleetView

_DEFAULTS = PipelineConfig()
_CHANNEL_DEFAULTS = TokenChannelConfig()


class FleetKnowledge:
    """The workers' numbers (`view`), their cached blocks, and requests that are blocked, all fed by `channels`.

    `router` is this replica's id and epoch. Without the policy kv_aware no worker is asked for its blocks.
    """

    def __init__(
        self,
        *,
        network: Network,
        router: Peer,
        clock: Clock,
        config: PipelineConfig = _DEFAULTS,
        channel: TokenChannelConfig = _CHANNEL_DEFAULTS,
    ):
        self.clock = clock
        self.config = config
        self.view = FleetView(clock)
        self.blocks: BlockIndex | None = None
        if config.policy == "kv_aware":
            self.blocks = BlockIndex(clock=clock, max_blocks=config.index_blocks, expected_s=config.expected_s)
        self.blocked = BlockedRequests(clock, most=config.suspects.max_refused, longest_s=config.suspects.refuse_s)
        self.channels = TokenChannels(
            network=network,
            peer=router,
            clock=clock,
            config=channel,
            listener=ChannelListener(
                on_stats=self.view.on_stats,
                on_connection=self.view.on_connection,
                on_blocks=None if self.blocks is None else self.blocks.heard,
            ),
            blocked=self.blocked,
        )
