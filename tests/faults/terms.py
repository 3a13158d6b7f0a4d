"""What the worker processes and their parent agree on."""

from twostroke.kvtransfer.config import TransferConfig
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import SampledToken

SECRET = b"a secret of these tests"
LAYOUT = KVLayout(
    model="patterns", dtype="float32", num_layers=4, num_kv_heads=2, head_dim=64, block_size=16
)  # 16 KiB a block
NUM_BLOCKS = 192
CONFIG = TransferConfig(lease_s=0.5, progress_s=1.0, max_chunk_bytes=40 * LAYOUT.block_bytes)


def token_of(seed: int) -> SampledToken:
    """The first token that transfer `seed` commits."""
    return SampledToken(seed % 1000)
