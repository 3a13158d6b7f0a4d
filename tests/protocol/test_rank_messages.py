"""What ranks tell each other fits into frames."""

from twostroke.protocol.messages import encode_message
from twostroke.protocol.rank_messages import RankCopy, RankSequence, RankStep, most_step_bytes

LARGE = 2**32 - 1


def test_no_step_is_longer_than_it_can_be():
    blocks = (LARGE,) * 300
    step = RankStep(
        tuple(RankSequence((LARGE,) * 20, LARGE, blocks, True) for _ in range(50)),
        True,
        tuple(RankCopy(False, blocks, blocks) for _ in range(50)),
    )
    told = len(encode_message(step))
    most = most_step_bytes(max_tokens=20 * 50, max_sequences=50, blocks_of_one=300, host_blocks=300 * 50)
    assert told <= most < 1.05 * told
