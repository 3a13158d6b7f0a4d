"""Reload of API keys that are added, changed and revoked. Each router checks whether the file of keys has changed."""

import asyncio
import logging
import os
import time
from pathlib import Path

from twostroke.cluster.config.config import ClusterConfig, api_keys
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConfigError
from twostroke.router.http.tenants import KeyConfig, Tenants

LOOK_S = 2.0

_log = logging.getLogger(__name__)


class KeyWatch:
    """Made and used on one event loop. Where a file of keys is wrong, or gone, the keys stay as they are.

    No failure ends the watch: it is logged once, shows in `age_s`, and the file is read again at each look until that
    succeeds.
    """

    def __init__(self, config: ClusterConfig, tenants: Tenants, clock: Clock = time.monotonic):
        self._config = config
        self._tenants = tenants
        self._clock = clock
        self._seen: object = None  # stamp of the file whose keys are in use; None: it has to be read
        self._current_at = clock()
        self._told: str | None = None  # the failure that was logged last
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on, where there is a file at all."""
        if self._config.auth.keys_file is not None:
            self._looking = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop looking at the file."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
            self._looking = None

    def age_s(self) -> float:
        """Seconds since the keys in use were last found to be those of the file."""
        return self._clock() - self._current_at

    async def check(self) -> None:
        """Take the file's keys, if it is another one than before or could not be read before. Raises nothing."""
        path = self._config.auth.keys_file
        assert path is not None  # nobody looks otherwise
        try:
            began = self._clock()
            stamp = await asyncio.to_thread(_stamp, Path(path))
            if stamp is None or stamp != self._seen:
                self._seen = None
                self._take(await asyncio.to_thread(api_keys, self._config))
                self._seen = stamp
        except ConfigError as error:
            self._tell(str(error))
        except Exception as error:  # whatever it is, the next look may succeed
            self._tell(f"auth.keys_file: {path}: {type(error).__name__}: {error}")
        else:
            self._current_at = began
            self._told = None

    def _take(self, keys: tuple[KeyConfig, ...]) -> None:
        before = self._tenants.names
        self._tenants.replace(keys)
        for what, changed in (("new", self._tenants.names - before), ("revoked", before - self._tenants.names)):
            if changed:
                _log.info("API keys %s: %s", what, ", ".join(sorted(changed)))

    def _tell(self, failure: str) -> None:
        if failure != self._told:
            _log.error("the API keys stay as they are: %s", failure)
        self._told = failure

    async def _follow(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(LOOK_S)


def _stamp(path: Path) -> object:
    """Return a stamp that changes when the file is written, replaced or made readable; None where there is no file.

    The time of change, which no program can set, also tells of files that were written with the old file's times.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
