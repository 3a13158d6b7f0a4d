"""Conversations: a system prompt that many share, a geometric number of turns, and time to think between them. Pure."""

import random
from collections.abc import Iterator
from itertools import count

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import Chat
from twostroke.loadtests.schedule import Piece, Turn
from twostroke.loadtests.workloads.lengths import LogNormal, shrunk
from twostroke.loadtests.workloads.seeds import seed_of

# Of the logarithms of lengths, as in Azure's conversation trace of 2023 (Patel et al., Splitwise, ISCA 2024).
INPUT_SIGMA = 0.985
OUTPUT_SIGMA = 0.859
TEMPLATE_TOKENS = 16  # that a chat template puts around a turn and its answer, about
# Words stand for tokens here, and a vocabulary may take more tokens for them: this share of the context is planned.
PLANNED_SHARE = 0.9


def conversations(chat: Chat, max_context: int, seed: int) -> Iterator[tuple[Turn, ...]]:
    """Each session's turns, endless. A session ends early where the next turn would not fit into the context.

    Raises LoadTestError, at once, where not even the system prompt leaves room.
    """
    room = int(max_context * PLANNED_SHARE)
    if min(chat.input_tokens, chat.output_tokens, chat.system_prompts) < 1 or chat.turns < 1 or chat.think_s < 0:
        raise LoadTestError("chat: lengths, turns and system_prompts are to be at least 1, think_s at least 0")
    if chat.system_tokens + chat.input_tokens + chat.output_tokens + TEMPLATE_TOKENS > room:
        raise LoadTestError(
            f"chat: a first turn has {chat.system_tokens} + {chat.input_tokens} tokens in and {chat.output_tokens} "
            f"out, which is more than {PLANNED_SHARE:.0%} of max_context {max_context}: ask for fewer"
        )
    draw = random.Random(f"chat {seed}")
    return (_session(chat, room, seed, index, draw) for index in count())


def _session(chat: Chat, room: int, seed: int, index: int, draw: random.Random) -> tuple[Turn, ...]:
    inputs, outputs = LogNormal(chat.input_tokens, INPUT_SIGMA), LogNormal(chat.output_tokens, OUTPUT_SIGMA)
    system = draw.randrange(chat.system_prompts)
    before = (Piece(seed_of(seed, "system", system), chat.system_tokens),) if chat.system_tokens else ()
    left = room - chat.system_tokens
    turns: list[Turn] = []
    while True:
        prompt, answer = max(1, round(inputs.at(draw.random()))), max(1, round(outputs.at(draw.random())))
        think_s = draw.expovariate(1 / chat.think_s) if chat.think_s and turns else 0.0
        if not turns:
            prompt, answer = shrunk(prompt, answer, left - TEMPLATE_TOKENS)
        elif prompt + answer + TEMPLATE_TOKENS > left:
            return tuple(turns)
        own = Piece(seed_of(seed, "session", index, len(turns)), prompt)
        turns.append(Turn((*before, own) if not turns else (own,), answer, think_s))
        left -= prompt + answer + TEMPLATE_TOKENS
        if draw.random() < 1 / chat.turns:
            return tuple(turns)
