"""Names of KV objects. A name binds everything that a byte of the KV depends on.

A name is the SHA-256 of a record of tagged, length-prefixed fields (`pack_record`), so that two different sets of
values can't make the same bytes. The fields are those of the model as it was loaded (`KVIdentity`), and the keyed hash
of all tokens up to the object's end (protocol/block_hash.py), which a tenant's salt keys.
"""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from twostroke.protocol.block_hash import BlockHash
from twostroke.protocol.kv_layout import ONE_RANK, KVLayout

FORMAT_VERSION = 1
"""Version of objects. Another one names other objects, so nothing reads files of another format."""

NUMERICS_VERSION = 1
"""Version of what our kernels compute. It is raised with a mend that changes KV by more than rounding, so that KV from
before is found no more."""

NAME_BYTES = 32
TENANT_BYTES = 8


class KVIdentity(NamedTuple):
    """The model as it was loaded, as far as the bytes of its KV depend on it."""

    layout: KVLayout  # of one rank: digest of configuration and weights, dtype and geometry of the KV, block size
    weights: str  # storage format of quantised weights; empty: as in the checkpoint
    compute_dtype: str  # of activations, as torch names it
    object_tokens: int = 256  # of each object: others are of no use to a worker
    adapter: str = ""  # digest of an adapter's weights; empty: none

    @property
    def digest(self) -> bytes:
        """32 bytes that differ where any field does."""
        layout = self.layout.over(ONE_RANK)
        fields = {f"layout.{name}": repr(getattr(layout, name)).encode() for name in layout.__struct_fields__}
        fields |= {
            "format": str(FORMAT_VERSION).encode(),
            "numerics": str(NUMERICS_VERSION).encode(),
            "object_tokens": str(self.object_tokens).encode(),
            "weights": self.weights.encode(),
            "compute_dtype": self.compute_dtype.encode(),
            "adapter": self.adapter.encode(),
        }
        return hashlib.sha256(pack_record(fields)).digest()


class ObjectKey(NamedTuple):
    """The place of an object in every tier: objects of a model lie together, and of a tenant within it."""

    identity: bytes  # KVIdentity.digest
    tenant: bytes  # 8 bytes: tenant_digest
    name: bytes  # 32 bytes: object_name

    @property
    def path(self) -> str:
        """Relative path, of hexadecimal digits: `<model>/<tenant>/<2 of the name>/<name>.kv`."""
        name = self.name.hex()
        return f"{self.identity[:8].hex()}/{self.tenant.hex()}/{name[:2]}/{name}.kv"


def model_prefix(identity: bytes) -> str:
    """Return the beginning of the paths of a model's objects."""
    return f"{identity[:8].hex()}/"


def name_in(path: str) -> bytes:
    """Return the object's name in ObjectKey.path."""
    return bytes.fromhex(path.rpartition("/")[2].removesuffix(".kv"))


def object_name(identity: bytes, last_hash: BlockHash, num_tokens: int) -> bytes:
    """Return the name of the object that ends with the block `last_hash`; `num_tokens` are its own.

    `identity` is KVIdentity.digest. `last_hash` binds the salt and all tokens up to the object's end.
    """
    record = {"identity": identity, "blocks": last_hash, "tokens": str(num_tokens).encode()}
    return hashlib.sha256(pack_record(record)).digest()


def tenant_digest(client: bytes) -> bytes:
    """Return 8 bytes that name a tenant's directory; `client` is GenerateRequest.client."""
    return hashlib.sha256(pack_record({"tenant": client})).digest()[:TENANT_BYTES]


def pack_record(fields: Mapping[str, bytes]) -> bytes:
    """Return the fields as bytes: tag and value of each, with their lengths (u32, little-endian) before them."""
    packed = bytearray()
    for tag, value in sorted(fields.items()):
        for part in (tag.encode(), value):
            packed += len(part).to_bytes(4, "little") + part
    return bytes(packed)
