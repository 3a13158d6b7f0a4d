"""What the comparison takes of an answer: whole ones only, with the server's own counts of tokens."""

from dataclasses import dataclass

from twostroke.loadtests.generator.answers import read_stream
from twostroke.loadtests.generator.completions import Exchange
from twostroke.loadtests.generator.sse import BadResponse


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    sent_at: float
    token_times: tuple[float, ...]  # one for each event that brought tokens; some servers put several into one
    prompt_tokens: int
    completion_tokens: int  # as the server's `usage` says

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first text."""
        return self.token_times[0] - self.sent_at

    @property
    def ended_at(self) -> float:
        return self.token_times[-1]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between events with tokens, just as they came."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


def read_answer(exchange: Exchange) -> Answer:
    """What the bytes of an exchange say. Raises BadResponse for all but a complete answer over a sound connection."""
    answer = read_stream(exchange)
    fault = exchange.broken or answer.error
    if fault is not None:
        raise BadResponse(fault)
    usage = answer.usage
    if usage.prompt_tokens is None or usage.completion_tokens is None:
        raise BadResponse("the stream tells no usage, which says how many tokens it had")
    return Answer(exchange.sent_at, tuple(answer.token_times), usage.prompt_tokens, usage.completion_tokens)
