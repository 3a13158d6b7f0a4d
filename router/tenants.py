"""Who may ask, and who asks: API keys, their limits, and a cache salt for each.

Keys are random, so a plain SHA-256 keeps them secret; only hashes are configured. A given key's hash is compared with
all of them, each in constant time: how long an answer takes tells nothing of them.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConfigError, RequestError
from twostroke.router.limits import KeyLimits

_SALT_BYTES = 16


@dataclass(frozen=True)
class KeyConfig:
    """One API key. Raises ConfigError for values that can't be meant."""

    name: str
    sha256: str  # of the key, in hexadecimal
    slo_class: str | None = None  # of requests that name none; none with a higher priority may be named
    requests_per_minute: float | None = None  # None: no limit
    tokens_per_minute: float | None = None  # prompts and outputs
    max_in_flight: int | None = None  # choices at a time
    admin: bool = False  # may also ask for /metrics, /status and /doctor

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 64 or not self.name.isprintable():
            raise ConfigError(f"name: {self.name!r} must be 1 to 64 printable characters")
        if len(self.sha256) != 64 or not set(self.sha256) <= set("0123456789abcdef"):
            raise ConfigError("sha256: must be the 64 hexadecimal digits that `twostroke key new` prints, not the key")
        for what in ("requests_per_minute", "tokens_per_minute", "max_in_flight"):
            value = getattr(self, what)
            if value is not None and not value >= 1:
                raise ConfigError(f"{what}: {value} must be at least 1")


@dataclass(frozen=True)
class AuthConfig:
    """All keys; without any, everybody may do everything. Raises ConfigError for keys that are alike."""

    keys: tuple[KeyConfig, ...] = field(default_factory=tuple)
    keys_file: str | None = None  # a YAML file with more of them, under `keys`

    def __post_init__(self) -> None:
        for what in ("name", "sha256"):
            values = [getattr(key, what) for key in self.keys]
            for value in values:
                if values.count(value) > 1:
                    raise ConfigError(f"keys: {what} {value} is there twice")


@dataclass(frozen=True, eq=False)
class Tenant:
    """Whom a key belongs to. `cache_salt` keeps his prefixes apart from others'."""

    name: str
    slo_class: str | None
    is_admin: bool
    cache_salt: bytes
    limits: KeyLimits


class Tenants:
    """Finds who asks. Every router has its own: of a key's limits each gives a `num_routers`-th part."""

    def __init__(self, keys: Sequence[KeyConfig], *, secret: bytes, clock: Clock, num_routers: int = 1):
        self._tenants = [(bytes.fromhex(key.sha256), _tenant(key, secret, clock, num_routers)) for key in keys]

    def __bool__(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._tenants)

    def of(self, authorization: str | None) -> Tenant:
        """Who sends this `Authorization` header. Raises RequestError (401)."""
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
        return found


def new_key() -> tuple[str, str]:
    """A fresh key, and the hash of it that is configured."""
    key = f"ts-{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()


def _tenant(key: KeyConfig, secret: bytes, clock: Clock, num_routers: int) -> Tenant:
    salt = hmac.digest(secret, b"cache salt of " + key.name.encode(), "sha256")[:_SALT_BYTES]
    limits = KeyLimits(
        clock=clock,
        requests_per_minute=_part(key.requests_per_minute, num_routers),
        tokens_per_minute=_part(key.tokens_per_minute, num_routers),
        max_in_flight=None if key.max_in_flight is None else -(-key.max_in_flight // num_routers),
    )
    return Tenant(key.name, key.slo_class, key.admin, salt, limits)


def _part(limit: float | None, num_routers: int) -> float | None:
    return None if limit is None else max(1.0, limit / num_routers)


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, code="invalid_api_key", status=401)
