"""Names of objects differ where anything differs that a byte of the KV depends on."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.kvtiers.identity import KVIdentity, ObjectKey, object_name, pack_record, tenant_digest
from twostroke.protocol.block_hash import chain_hashes
from twostroke.protocol.kv_layout import KVLayout, RankCut

LAYOUT = KVLayout("digest", "bfloat16", num_layers=2, num_kv_heads=2, head_dim=4, block_size=4)
IDENTITY = KVIdentity(LAYOUT, "", "bfloat16")
OTHER_LAYOUTS: dict[str, Any] = {
    "model": "other",
    "dtype": "float16",
    "num_layers": 3,
    "num_kv_heads": 1,
    "head_dim": 8,
    "block_size": 8,
    "version": 2,
    "windows": (0, 8),
    "kinds": 1,
    "state_numbers": 4,
    "parts": (0, 1),
}
OF_THE_CUT = {"tp_size", "pp_size", "context_ranks"}
OTHERS = {"object_tokens": 512, "layout": None, "weights": "int8", "compute_dtype": "float32", "adapter": "some"}

records = st.dictionaries(st.text(max_size=3), st.binary(max_size=6), max_size=4)


@pytest.mark.parametrize("field", KVLayout.__struct_fields__)
def test_every_field_of_the_layout_changes_the_digest_but_its_cut(field: str) -> None:
    if field in OF_THE_CUT:
        other = LAYOUT.over(
            RankCut(2, 2) if field == "pp_size" else RankCut(2, 1, 2 if field == "context_ranks" else 1)
        )
        assert IDENTITY._replace(layout=other).digest == IDENTITY.digest
    else:
        other = msgspec.structs.replace(LAYOUT, **{field: OTHER_LAYOUTS[field]})
        assert IDENTITY._replace(layout=other).digest != IDENTITY.digest


@pytest.mark.parametrize("field", KVIdentity._fields)
def test_every_field_of_the_identity_changes_the_digest(field: str) -> None:
    other = msgspec.structs.replace(LAYOUT, model="other") if field == "layout" else OTHERS[field]
    assert IDENTITY._replace(**{field: other}).digest != IDENTITY.digest


identities = st.builds(
    KVIdentity,
    st.builds(
        KVLayout,
        *(st.text(max_size=3), st.text(max_size=3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
        block_size=st.integers(1, 3),
        windows=st.lists(st.integers(0, 3), max_size=3).map(tuple),
        parts=st.lists(st.integers(0, 3), max_size=3).map(tuple),
        state_numbers=st.integers(0, 3),
    ),
    *(st.text(max_size=3), st.text(max_size=3), st.text(max_size=3)),
)


@given(identities, identities)
def test_two_identities_have_one_digest_only_if_they_are_equal(one: KVIdentity, other: KVIdentity) -> None:
    assert (one.digest == other.digest) == (one == other)


@given(records, records)
def test_two_records_have_the_same_bytes_only_if_they_are_equal(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    assert (pack_record(one) == pack_record(other)) == (one == other)


@given(st.binary(max_size=4), st.binary(min_size=1, max_size=4), st.binary(max_size=4))
def test_bytes_can_not_move_from_one_field_to_the_next(one: bytes, moved: bytes, other: bytes) -> None:
    assert pack_record({"a": one + moved, "b": other}) != pack_record({"a": one, "b": moved + other})
    assert pack_record({"ab": one}) != pack_record({"a": b"b" + one})


def test_a_name_binds_the_model_all_tokens_the_salt_and_the_objects_length() -> None:
    hashes = chain_hashes(range(32), 4, b"salt")
    name = object_name(IDENTITY.digest, hashes[-1], 16)
    others = [
        object_name(IDENTITY._replace(adapter="some").digest, hashes[-1], 16),
        object_name(IDENTITY.digest, hashes[-2], 16),
        object_name(IDENTITY.digest, hashes[-1], 32),
        object_name(IDENTITY.digest, chain_hashes(range(32), 4, b"pepper")[-1], 16),
        object_name(IDENTITY.digest, chain_hashes([99, *range(1, 32)], 4, b"salt")[-1], 16),
    ]
    assert len({name, *others}) == 6
    assert {len(each) for each in others} == {32}


def test_a_path_has_hexadecimal_digits_alone() -> None:
    key = ObjectKey(IDENTITY.digest, tenant_digest(b"../../etc"), object_name(IDENTITY.digest, bytes(16), 4))
    parts = key.path.removesuffix(".kv").split("/")
    assert [len(part) for part in parts] == [16, 16, 2, 64]
    assert set("".join(parts)) <= set("0123456789abcdef")
    assert tenant_digest(b"a") != tenant_digest(b"b") != tenant_digest(b"")
