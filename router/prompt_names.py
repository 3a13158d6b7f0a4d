"""The names of a prompt's blocks, for the block sizes that workers have. Computed once a prompt, not once a choice, a
worker or an attempt.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.protocol.block_hashes import BlockHash, ShortName, chain_hashes, next_hash, root_hash, short_name

_MOST_TOKENS = 1 << 20  # of the prompts whose names are kept


@dataclass(slots=True)
class _Prompt:
    token_ids: tuple[int, ...]  # kept, so that no other tuple can have its id
    chains: dict[int, tuple[list[ShortName], BlockHash]] = field(default_factory=dict)  # by block size; the last's hash


class PromptNames:
    """Remembers the prompts that were asked for last. Sequences of one request share their tuple of tokens."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[tuple[int, bytes], _Prompt] = OrderedDict()
        self._num_tokens = 0

    def of(
        self, token_ids: tuple[int, ...], cache_salt: bytes, block_size: int, sent: Sequence[int] = ()
    ) -> list[ShortName]:
        """Names of all full blocks of a prompt, with the outputs `sent` after it. Not to be changed."""
        prompt = self._prompt(token_ids, cache_salt)
        chain = prompt.chains.get(block_size)
        if chain is None:
            hashes = chain_hashes(token_ids, block_size, cache_salt)
            last = hashes[-1] if hashes else root_hash(cache_salt)
            chain = prompt.chains[block_size] = [short_name(one) for one in hashes], last
        names, parent = chain
        rest = len(names) * block_size
        if len(token_ids) + len(sent) < rest + block_size:
            return names
        names = names.copy()
        tail = (*token_ids[rest:], *sent)
        for end in range(block_size, len(tail) + 1, block_size):
            parent = next_hash(parent, tail[end - block_size : end])
            names.append(short_name(parent))
        return names

    def _prompt(self, token_ids: tuple[int, ...], cache_salt: bytes) -> _Prompt:
        key = id(token_ids), cache_salt
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _Prompt(token_ids)
            self._num_tokens += len(token_ids)
            while self._num_tokens > _MOST_TOKENS and len(self._prompts) > 1:
                _, oldest = self._prompts.popitem(last=False)
                self._num_tokens -= len(oldest.token_ids)
        else:
            self._prompts.move_to_end(key)
        return prompt
