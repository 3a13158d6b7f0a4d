"""What a worker keeps of one request: its tokens, its blocks, and how far its KV is computed.

Both schedulers build on this. No torch, no I/O; the owner of a sequence ends it with `reset`, on every path.
"""

from twostroke.model.step import Draw, SequenceStep, TokenCounts, is_penalised
from twostroke.protocol.blocks import BlockHash, next_hash, root_hash
from twostroke.protocol.requests import GenerateRequest, forbidden_tokens
from twostroke.worker.block_pool import BlockPool


class SequenceState:
    """One request between its arrival at a worker and its end there.

    `token_ids` grows by `append`, also beyond what is computed. `block_ids` holds one pool reference on each block.
    The KV of the first `num_computed` tokens is in those blocks; whoever ran a step advances it, then publishes.
    """

    def __init__(self, request: GenerateRequest, block_size: int):
        self.request = request
        self.block_size = block_size
        self.token_ids: list[int] = list(request.token_ids)
        self.block_ids: list[int] = []
        self.num_computed = 0
        self._block_hashes: list[BlockHash] = []
        self._token_counts: TokenCounts | None = None  # made for the first draw with penalties
        self._num_published = 0  # the first blocks of the table: matched, published, or found to be named elsewhere

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, those of earlier attempts included."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is still to be computed: 1 for a running decode."""
        return len(self.token_ids) - self.num_computed

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Names of all full blocks of `token_ids`, computed or not. Each is hashed once; not to be modified."""
        for index in range(len(self._block_hashes), len(self.token_ids) // self.block_size):
            parent = self._block_hashes[-1] if self._block_hashes else root_hash(self.request.cache_salt)
            start = index * self.block_size
            self._block_hashes.append(next_hash(parent, self.token_ids[start : start + self.block_size]))
        return self._block_hashes

    @property
    def matchable_hashes(self) -> list[BlockHash]:
        """The names worth looking up: at least one token must be computed, or there is nothing to draw from."""
        return self.block_hashes[: (len(self.token_ids) - 1) // self.block_size]

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks to allocate before the next `num_tokens` uncomputed tokens fit; 0 where they fit already."""
        covered = -(-(self.num_computed + num_tokens) // self.block_size)
        return max(0, covered - len(self.block_ids))

    def match_prefix(self, pool: BlockPool) -> int:
        """Take over the blocks of the longest cached prefix; returns how many tokens they hold.

        Raises ValueError for a sequence that has blocks already.
        """
        if self.block_ids:
            raise ValueError(f"request {self.request.request_id} already has blocks")
        self.block_ids = pool.match(self.matchable_hashes)
        self._num_published = len(self.block_ids)
        self.num_computed = self._num_published * self.block_size
        return self.num_computed

    def reserve(self, pool: BlockPool, num_tokens: int) -> None:
        """Allocate what `blocks_needed(num_tokens)` says. Raises OutOfBlocks with nothing changed."""
        if missing := self.blocks_needed(num_tokens):  # a decode needs one every `block_size` steps
            self.block_ids.extend(pool.allocate(missing))

    def publish_full_blocks(self, pool: BlockPool) -> None:
        """Name each block that has become full since the last call, as far as KV is computed."""
        full = self.num_computed // self.block_size
        hashes = self.block_hashes if full > self._num_published else self._block_hashes
        for index in range(self._num_published, full):
            pool.publish(self.block_ids[index], hashes[index])
            self._num_published = index + 1

    def append(self, token_id: int) -> None:
        """Add a drawn (or received) token; its KV is not computed yet."""
        self.token_ids.append(token_id)
        if self._token_counts is not None:
            self._token_counts.append(token_id)

    def reset(self, pool: BlockPool) -> None:
        """Give all blocks back: for preemption (to be computed again, prompt and outputs) and for every ending.

        Harmless when repeated. Only once no step or transfer that writes into the blocks is under way.
        """
        # A new list, since a step's record may still hold the old one.
        released, self.block_ids = self.block_ids, []
        self.num_computed = 0
        self._num_published = 0
        pool.release(released)

    def step(self, num_tokens: int, *, start: int | None = None, follows: int | None = None) -> SequenceStep:
        """The next `num_tokens` uncomputed tokens as part of an engine step, with a draw if they are the last.

        While earlier steps of this sequence are under way, `start` is where the last of them ends; and if it draws,
        `follows` is its index in its batch: what it draws is then the one token of this step.
        The step refers to this sequence's own lists: until the engine is done with it, they may only grow, and nothing
        may be appended to `token_ids` where `counts` are given.
        Raises ValueError where there are fewer tokens, or blocks for fewer.
        """
        start = self.num_computed if start is None else start
        num_drawn = 0 if follows is None else 1  # by the step before
        end, last = start + num_tokens, len(self.token_ids) + num_drawn
        if not 1 <= num_tokens <= last - start or num_drawn * num_tokens > 1:
            raise ValueError(f"{num_tokens} tokens asked for, {last - start} left to compute")
        if end > len(self.block_ids) * self.block_size:
            raise ValueError(f"{len(self.block_ids)} blocks don't hold {end} tokens")
        draw = None
        if end == last:
            draw = Draw(
                sampling=self.request.sampling,
                history=self.token_ids,
                num_prompt_tokens=self.request.num_prompt_tokens,
                forbidden=forbidden_tokens(self.request, self.num_output_tokens + num_drawn),
                counts=self._counts_for_draw(),
            )
        token_ids = self.token_ids[start:end] if follows is None else (0,)
        return SequenceStep(token_ids=token_ids, start=start, block_ids=self.block_ids, draw=draw, follows=follows)

    def _counts_for_draw(self) -> TokenCounts | None:
        if self._token_counts is None and is_penalised(self.request.sampling):
            self._token_counts = TokenCounts(self.token_ids, self.request.num_prompt_tokens)
        return self._token_counts
