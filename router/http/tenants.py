"""API keys, their limits, and a cache salt for each.

Keys are random, so a plain SHA-256 keeps them secret; only hashes are configured. A given key's hash is compared with
all of them, each in constant time: how long an answer takes tells nothing of them.

What one API key may use: requests and tokens a minute, and choices at a time. Pure: the clock is injected.
"""

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import Annotated

from annotated_types import Ge
from pydantic import Field, field_validator, model_validator

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError
from twostroke.protocol.settings import Count, Section

MINUTE_S = 60.0


class RateLimited(RequestError):
    """The key has used up what it may for now (429)."""

    def __init__(self, message: str, *, retry_after_s: float):
        whole_s = max(1, math.ceil(retry_after_s))
        message = f"{message}; try again in {whole_s} s"
        super().__init__(message, code="rate_limit_exceeded", status=429, retry_after_s=whole_s)


class TokenBucket:
    """Holds a minute's worth of `what` at most, is full at first, and is refilled steadily; None: without end."""

    def __init__(self, what: str, per_minute: float | None, clock: Clock):
        self._what = what
        self._clock = clock
        self._capacity = per_minute
        self._level = per_minute or 0.0
        self._at = clock()

    def take(self, amount: float) -> float:
        """Take `amount`, and return how much was taken: the whole bucket where it asks for more than that holds.

        Raises RateLimited where there isn't enough.
        """
        if self._capacity is None:
            return amount
        self._refill(self._capacity)
        amount = min(amount, self._capacity)
        if self._level < amount:
            wait_s = (amount - self._level) / self._capacity * MINUTE_S
            raise RateLimited(f"the API key has used up its {self._what}", retry_after_s=wait_s)
        self._level -= amount
        return amount

    def settle(self, taken: float, used: float) -> None:
        """Give back what was `taken` and not used. What was used beyond it is owed, and delays the next."""
        if self._capacity is not None:
            self._refill(self._capacity)
            self._level = min(self._capacity, self._level + taken - used)

    def _refill(self, capacity: float) -> None:
        now = self._clock()
        self._level = min(capacity, self._level + (now - self._at) * capacity / MINUTE_S)
        self._at = now


_SALT_BYTES = 16


class KeyConfig(Section):
    """One API key."""

    name: str
    """Name of the key's owner, for logs and a prefix cache of its own. `twostroke serve` is the server's own."""
    sha256: str
    """64 hexadecimal digits: the key's SHA-256."""
    slo_class: str | None = None
    """SLO class of the key's requests that name none; they can't name one with a higher priority. null: `slo.default`,
    and any may be named."""
    requests_per_minute: Annotated[float, Ge(1)] | None = None
    """Most requests of the key in a minute; null: no limit. With several router replicas each allows its part."""
    tokens_per_minute: Annotated[float, Ge(1)] | None = None
    """Most tokens of prompts and outputs in a minute; `max_tokens` are set aside when a request begins, and given back
    where it ends before.
    null: no limit."""
    max_in_flight: Count | None = None
    """Choices under way at a time; a request of more choices than that is 400. null: no limit."""
    metrics: bool = False
    """May also ask for `/metrics` and `/status`, as Prometheus does."""
    admin: bool = False
    """May also ask for `/metrics`, `/status` and `/doctor`, and order workers to drain or to change their roles."""
    expires: str | None = None
    """A date or moment of ISO 8601, of UTC where it names no other zone: from then on the key is refused. A date is its
    first moment."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name or len(name) > 64 or not name.isprintable():
            raise ValueError(f"{name!r} must be 1 to 64 printable characters")
        return name

    @field_validator("sha256")
    @classmethod
    def _check_sha256(cls, sha256: str) -> str:
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise ValueError("must be the 64 hexadecimal digits that `twostroke key new` prints, not the key")
        return sha256

    @field_validator("expires", mode="before")
    @classmethod
    def _check_expires(cls, expires: object) -> object:
        """YAML reads dates by itself; as text they travel in JSON, too."""
        if expires is None:
            return None
        try:
            moment = datetime.fromisoformat(expires.isoformat() if isinstance(expires, date) else str(expires))
            return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
        except (ValueError, OverflowError):  # too large: a moment that UTC puts before the year 1 or after 9999
            raise ValueError(f"{expires!r} is no date like 2026-12-31 or 2026-12-31T18:00:00Z") from None

    @property
    def expires_at(self) -> float:
        """Seconds since 1970."""
        return math.inf if self.expires is None else datetime.fromisoformat(self.expires).timestamp()


class AuthConfig(Section):
    """API keys (docs/slo-classes.md#api-keys). Without any, all who reach the endpoint may use it."""

    keys: tuple[KeyConfig, ...] = Field(default=(), strict=False)
    """Those that stand here; `twostroke key new NAME` prints one."""
    keys_file: str | None = None
    """A YAML file with more `keys`, so that they need not be in this one. Every router's node has to have it; routers
    look every 2 s whether it has changed (docs/slo-classes.md#api-keys). A relative path starts where `twostroke
    serve` was started."""

    @model_validator(mode="after")
    def _check(self) -> "AuthConfig":
        for what in ("name", "sha256"):
            values = [getattr(key, what) for key in self.keys]
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"keys: {what} {value} is there twice")
        return self


class Tenant:
    """The owner of a key, and the equal part of each limit that one of `num_routers` routers allows it.

    `cache_salt` keeps its prefixes apart from others'.
    """

    def __init__(self, key: KeyConfig, *, clock: Clock, num_routers: int):
        self.key = key
        self.name = key.name
        self.slo_class = key.slo_class
        self.is_admin = key.admin
        self.may_monitor = key.admin or key.metrics
        self.cache_salt = cache_salt(key)
        self._requests = TokenBucket("requests", _part(key.requests_per_minute, num_routers), clock)
        self._tokens = TokenBucket("tokens", _part(key.tokens_per_minute, num_routers), clock)
        self._max_in_flight = math.inf if key.max_in_flight is None else -(-key.max_in_flight // num_routers)
        self._in_flight = 0

    def count_request(self) -> None:
        """Raises RateLimited where the key sends more requests than it may."""
        self._requests.take(1)

    @contextmanager
    def in_flight(self, num_choices: int) -> Iterator[None]:
        """Places for so many choices. Raises RateLimited where there are not so many now, RequestError where never."""
        if num_choices > self._max_in_flight:
            message = f"{num_choices} choices, and the API key may have {self._max_in_flight} under way at a time"
            raise RequestError(message, param="n")
        if self._in_flight + num_choices > self._max_in_flight:
            message = f"the API key may have {self._max_in_flight} choices under way at a time"
            raise RateLimited(message, retry_after_s=1)
        self._in_flight += num_choices
        try:
            yield
        finally:
            self._in_flight -= num_choices

    @contextmanager
    def tokens(self, most: int, used: Callable[[], int]) -> Iterator[None]:
        """Set tokens aside for a request that takes `most`; at the end it is asked how many it `used`.

        Raises RateLimited where the key has too few left.
        """
        taken = self._tokens.take(most)
        try:
            yield
        finally:
            self._tokens.settle(taken, used())


class Tenants:
    """Finds the tenant of a request. Every router has its own, which allows a `num_routers`-th part of a key's limits.

    Where a key `is_needed` no request gets in without one, even while there are none; by default where there are some.
    """

    def __init__(
        self,
        keys: Sequence[KeyConfig],
        *,
        clock: Clock,
        num_routers: int = 1,
        is_needed: bool | None = None,
        wall_clock: Clock = time.time,
    ):
        self._clock = clock
        self._num_routers = num_routers
        self._is_needed = bool(keys) if is_needed is None else is_needed
        self._wall_clock = wall_clock
        self._tenants: list[tuple[bytes, Tenant]] = []
        self.replace(keys)

    def __bool__(self) -> bool:
        """Return whether a key is needed at all."""
        return self._is_needed

    @property
    def names(self) -> set[str]:
        """Names of the tenants."""
        return {tenant.name for _, tenant in self._tenants}

    def replace(self, keys: Sequence[KeyConfig]) -> None:
        """These are the keys from now on. Those that stay as they were keep what they have used up and under way."""
        known = {tenant.key: tenant for _, tenant in self._tenants}
        self._tenants = [
            (
                bytes.fromhex(key.sha256),
                known.get(key) or Tenant(key, clock=self._clock, num_routers=self._num_routers),
            )
            for key in keys
        ]

    def of(self, authorization: str | None) -> Tenant:
        """Return the tenant that sends this `Authorization` header. Raises RequestError (401)."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("an API key is needed: send it as `Authorization: Bearer KEY`")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for digest, tenant in self._tenants:  # to the end, whichever it is
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise _unauthorized("the API key is not known here")
        if self._wall_clock() >= found.key.expires_at:
            raise _unauthorized("the API key has expired: ask those who run the server for a new one")
        return found


def cache_salt(key: KeyConfig) -> bytes:
    """Return the 16 bytes that keep the prefixes of this key's owner apart from others'.

    They stay over restarts, so that KV which outlives the server is found again, and only who knows the key or its hash
    can compute them. A new key of the same owner has others.
    """
    return hmac.digest(bytes.fromhex(key.sha256), b"cache salt of " + key.name.encode(), "sha256")[:_SALT_BYTES]


def new_key() -> tuple[str, str]:
    """A fresh key, and the hash of it that is configured."""
    key = f"ts-{secrets.token_urlsafe(32)}"
    return key, key_hash(key)


def key_hash(key: str) -> str:
    """Return the hash of a key, which is configured in its place."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _part(limit: float | None, num_routers: int) -> float | None:
    return None if limit is None else max(1.0, limit / num_routers)


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, code="invalid_api_key", status=401)
