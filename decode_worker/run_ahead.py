"""Whether a step may be decided while another is under way, and what it goes on from. Pure."""

from twostroke.decode_worker.jobs import DecodeJob, DecodeStep
from twostroke.model.token_counts import is_penalised


def must_be_awaited(in_flight: DecodeStep) -> bool:
    """Whether the next step can't be decided before the end of this one, however many blocks are free."""
    if any(len(entry.step.token_ids) > 1 for entry in in_flight.entries):
        return True  # prompts take long: the little that running ahead gains isn't worth a newcomer's wait
    if in_flight.swaps:
        return True  # nobody knows yet which blocks that frees
    # All wait for a draw that needs to know the tokens before it: were it left out, it would get every other step only.
    return any(
        one.step.draw is not None
        and is_penalised(one.step.draw.sampling)
        and not (one.job.has_ended or one.job.is_drawing_its_last)
        for one in in_flight.entries
    )


def drawn_for(step: DecodeStep | None) -> dict[DecodeJob, int]:
    """The jobs that a step draws a token for, with the entry that does."""
    return {} if step is None else {one.job: i for i, one in enumerate(step.entries) if one.step.draw is not None}
