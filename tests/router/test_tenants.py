"""API keys: who is known, and what tells tenants apart."""

import hashlib

import pytest

from twostroke.protocol.errors import RequestError
from twostroke.router.http.tenants import AuthConfig, KeyConfig, Tenants, new_key

SECRET = b"the cluster's secret"


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


ALICE = KeyConfig(
    name="alice", sha256=hashed("key-a"), slo_class="interactive", max_in_flight=5, requests_per_minute=60
)
BOB = KeyConfig(name="bob", sha256=hashed("key-b"), admin=True)


def tenants(secret: bytes = SECRET, num_routers: int = 1) -> Tenants:
    return Tenants([ALICE, BOB], secret=secret, clock=lambda: 0.0, num_routers=num_routers)


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


def test_salts_differ_by_tenant_and_by_secret_and_stay() -> None:
    salts = [tenants().of("Bearer key-a").cache_salt, tenants().of("Bearer key-b").cache_salt]
    salts.append(tenants(b"another secret").of("Bearer key-a").cache_salt)
    assert len(set(salts)) == 3
    assert tenants().of("Bearer key-a").cache_salt == salts[0]
    assert all(len(salt) == 16 for salt in salts)


def test_each_of_many_routers_gives_its_part_of_a_limit() -> None:
    limits = tenants(num_routers=2).of("Bearer key-a").limits
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
    assert (
        Tenants([KeyConfig(name="new", sha256=sha256)], secret=SECRET, clock=lambda: 0.0).of(f"Bearer {key}").name
        == "new"
    )


def test_keys_that_are_alike_are_refused() -> None:
    with pytest.raises(ValueError, match="name alice is there twice"):
        AuthConfig(keys=(ALICE, KeyConfig(name="alice", sha256=hashed("x"))))
    with pytest.raises(ValueError, match="sha256"):
        AuthConfig(keys=(ALICE, KeyConfig(name="carol", sha256=ALICE.sha256)))
