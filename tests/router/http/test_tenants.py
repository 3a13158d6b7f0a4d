"""API keys: who is known, what tells tenants apart, and a key's limits on a clock that a test sets."""

import hashlib
import hmac
import subprocess
import sys
from datetime import UTC, date, datetime

import pytest

from tests.router.routing.knowing import Clock
from twostroke.protocol.errors import RequestError
from twostroke.router.http.tenants import (
    AuthConfig,
    KeyConfig,
    RateLimited,
    Tenant,
    Tenants,
    TokenBucket,
    cache_salt,
    new_key,
)


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


ALICE = KeyConfig(
    name="alice", sha256=hashed("key-a"), slo_class="interactive", max_in_flight=5, requests_per_minute=60
)
BOB = KeyConfig(name="bob", sha256=hashed("key-b"), admin=True)


def tenants(num_routers: int = 1) -> Tenants:
    return Tenants([ALICE, BOB], clock=lambda: 0.0, num_routers=num_routers)


def test_a_key_names_its_tenant() -> None:
    alice = tenants().of("Bearer key-a")
    assert (alice.name, alice.slo_class, alice.is_admin) == ("alice", "interactive", False)
    assert tenants().of("bearer  key-b ").is_admin


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "key-a",
        "Basic key-a",
        "Bearer",
        "Bearer ",
        "Bearer key-c",
        "Bearer KEY-A",
        f"Bearer {hashed('key-a')}",
    ],
)
def test_anything_else_is_unauthorized(header: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        tenants().of(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_a_given_key_is_compared_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr("twostroke.router.http.tenants.hmac.compare_digest", compare)
    tenants().of("Bearer key-a")
    assert len(compared) == 2


def test_salts_differ_by_key_and_by_name_and_stay_over_restarts() -> None:
    salts = [tenants().of("Bearer key-a").cache_salt, tenants().of("Bearer key-b").cache_salt]
    salts += [cache_salt(ALICE.model_copy(update=new)) for new in ({"name": "carol"}, {"sha256": hashed("key-c")})]
    assert len(set(salts)) == 4
    assert all(len(salt) == 16 for salt in salts)
    # Another process, which knows nothing but the configuration, finds the same.
    script = (
        "import sys; from twostroke.router.http.tenants import *\n"
        "print(Tenants([KeyConfig(name='alice', sha256=sys.argv[1])], clock=lambda: 0.0)"
        ".of('Bearer key-a').cache_salt.hex())"
    )
    done = subprocess.run([sys.executable, "-c", script, ALICE.sha256], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == salts[0].hex()


def test_a_salt_is_none_that_a_name_alone_leads_to() -> None:
    """Any tenant could compute the names of another's prefixes otherwise."""
    unkeyed = hashlib.sha256(b"cache salt of alice").digest()[:16]
    assert cache_salt(ALICE) not in (unkeyed, hmac.digest(b"", b"cache salt of alice", "sha256")[:16])


def test_each_of_many_routers_gives_its_part_of_a_limit() -> None:
    limits = tenants(num_routers=2).of("Bearer key-a")
    with limits.in_flight(3), pytest.raises(RequestError), limits.in_flight(1):
        raise AssertionError("has no place")
    for _ in range(30):
        limits.count_request()
    with pytest.raises(RequestError):
        limits.count_request()


def test_a_fresh_key_is_known_by_its_hash_and_never_twice_the_same() -> None:
    key, sha256 = new_key()
    assert sha256 == hashed(key)
    assert len(key) > 40
    assert new_key()[0] != key
    new = KeyConfig(name="new", sha256=sha256)
    assert Tenants([new], clock=lambda: 0.0).of(f"Bearer {key}").name == "new"


@pytest.mark.parametrize(
    ("given", "moment"),
    [
        (date(2026, 12, 31), "2026-12-31T00:00:00+00:00"),
        (datetime(2026, 12, 31, 18, tzinfo=UTC), "2026-12-31T18:00:00+00:00"),
        ("2026-12-31T18:00:00+02:00", "2026-12-31T16:00:00+00:00"),
        ("2026-12-31", "2026-12-31T00:00:00+00:00"),
    ],
)
def test_a_key_is_refused_from_the_moment_on_at_which_it_expires(given: object, moment: str) -> None:
    key = KeyConfig(name="alice", sha256=ALICE.sha256, expires=given)  # type: ignore[arg-type]
    assert key.expires == moment
    assert KeyConfig.model_validate(key.model_dump(mode="json")) == key
    clock = Clock()
    clock.now = key.expires_at - 1
    known = Tenants([key], clock=lambda: 0.0, wall_clock=clock)
    assert known.of("Bearer key-a").name == "alice"
    clock.now += 1
    with pytest.raises(RequestError, match="has expired") as caught:
        known.of("Bearer key-a")
    assert caught.value.status == 401


@pytest.mark.parametrize("given", ["soon", "2026-13-01", 7, True])
def test_what_is_no_moment_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="is no date like 2026-12-31"):
        KeyConfig(name="alice", sha256=ALICE.sha256, expires=given)  # type: ignore[arg-type]


def test_keys_that_stay_keep_what_they_have_used_up_and_others_start_anew() -> None:
    known = tenants()
    for _ in range(60):
        known.of("Bearer key-a").count_request()
    known.replace([ALICE])
    with pytest.raises(RateLimited):
        known.of("Bearer key-a").count_request()
    with pytest.raises(RequestError, match="not known"):
        known.of("Bearer key-b")
    known.replace([KeyConfig(name="alice", sha256=ALICE.sha256, requests_per_minute=120)])
    known.of("Bearer key-a").count_request()
    known.replace([])
    assert known, "without any key nobody gets in, not everybody"


def test_keys_that_are_alike_are_refused() -> None:
    with pytest.raises(ValueError, match="name alice is there twice"):
        AuthConfig(keys=(ALICE, KeyConfig(name="alice", sha256=hashed("x"))))
    with pytest.raises(ValueError, match="sha256"):
        AuthConfig(keys=(ALICE, KeyConfig(name="carol", sha256=ALICE.sha256)))


def limited(clock: Clock, **limits: float) -> Tenant:
    key = KeyConfig(name="alice", sha256=ALICE.sha256, **limits)
    return Tenant(key, clock=clock, num_routers=1)


def test_a_bucket_holds_a_minutes_worth_and_is_refilled_steadily() -> None:
    clock = Clock()
    bucket = TokenBucket("tokens", 60, clock)
    for _ in range(60):
        bucket.take(1)
    with pytest.raises(RateLimited, match="used up its tokens; try again in 1 s"):
        bucket.take(1)
    clock.now += 1
    bucket.take(1)
    clock.now += 600
    assert bucket.take(1000) == 60  # all there is, and no more


def test_what_was_set_aside_and_not_used_comes_back_and_what_was_used_beyond_is_owed() -> None:
    bucket = TokenBucket("tokens", 60, Clock())
    bucket.settle(bucket.take(60), used=20)
    assert bucket.take(40) == 40
    bucket.settle(40, used=100)
    with pytest.raises(RateLimited) as caught:
        bucket.take(1)
    assert caught.value.retry_after_s == 61


def test_places_come_back_however_a_request_ends() -> None:
    own = limited(Clock(), max_in_flight=2)
    with own.in_flight(2), pytest.raises(RateLimited, match="2 choices"), own.in_flight(1):
        raise AssertionError("has no place")
    with pytest.raises(ZeroDivisionError), own.in_flight(2):
        raise ZeroDivisionError
    with own.in_flight(2):
        pass
