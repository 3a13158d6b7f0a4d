"""How routers learn of API keys that are added, changed and revoked: each looks whether the file of keys is another."""

import asyncio
import logging
import os
from pathlib import Path

from twostroke.cluster.config.config import ClusterConfig, keys_of
from twostroke.protocol.errors import ConfigError
from twostroke.router.http.tenants import Tenants

LOOK_S = 2.0

_log = logging.getLogger(__name__)


class KeyWatch:
    """Made and used on one event loop. Where a file of keys is wrong, or gone, the keys stay as they are."""

    def __init__(self, config: ClusterConfig, tenants: Tenants):
        self._config = config
        self._tenants = tenants
        self._seen: object = None
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on, where there is a file at all."""
        if self._config.auth.keys_file is not None:
            self._looking = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
            self._looking = None

    async def look(self) -> None:
        """Once."""
        path = self._config.auth.keys_file
        assert path is not None  # nobody looks otherwise
        stamp = await asyncio.to_thread(_stamp, Path(path))
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            keys = await asyncio.to_thread(keys_of, self._config)
        except ConfigError as error:
            _log.error("the API keys stay as they are: %s", error)
            return
        before = self._tenants.names
        self._tenants.replace(keys)
        for what, changed in (("new", self._tenants.names - before), ("revoked", before - self._tenants.names)):
            if changed:
                _log.info("API keys %s: %s", what, ", ".join(sorted(changed)))

    async def _follow(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)


def _stamp(path: Path) -> object:
    """Another one where the file was written, or another is in its place; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
