"""Makes `tests.simulation` importable: these tests run the worker on virtual time."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
