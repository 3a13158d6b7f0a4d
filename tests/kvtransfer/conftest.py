"""Makes `transfer_harness` importable from the tests of this folder: with importlib mode pytest does not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
