"""What a decode worker can never serve, whatever else it has to do. Pure."""

from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest


def check_fits(request: GenerateRequest, *, max_context: int, capacity: int) -> None:
    """Raises RequestError for a request that could never run to its end. All in tokens; `capacity` is the cache's."""
    if not request.token_ids:
        raise RequestError("the prompt is empty", param="prompt")
    longest = request.num_prompt_tokens + request.max_tokens
    asked = f"{request.num_prompt_tokens} prompt tokens and max_tokens {request.max_tokens} exceed"
    if longest > max_context:
        raise _too_long(f"{asked} the model's context of {max_context}")
    if longest - 1 > capacity:  # the last token's KV is never needed
        raise _too_long(f"{asked} this worker's whole KV cache, which holds {capacity}")


def _too_long(message: str) -> RequestError:
    return RequestError(message, param="max_tokens", code="context_length_exceeded")
