"""Fixtures that tests of architectures share with those of the engine."""

from tests.model.conftest import _one_thread as _one_thread
from tests.model.conftest import generate as generate
