"""`python -m twostroke.benchmarks.gpu.start FOLDER DEVICE`: load the model, which draws a token, and end."""

import sys
from pathlib import Path
from typing import Literal

from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import load_engine


def main(folder: str, device: Literal["cpu", "cuda"]) -> int:
    """The cache is large enough for a prompt and little more: its zeros would be no part of a start."""
    loaded = load_engine(EngineConfig(Path(folder), device=device, num_blocks=256, block_size=64))
    loaded.engine.close()
    return 0


if __name__ == "__main__":
    choice: Literal["cpu", "cuda"] = "cuda" if sys.argv[2] == "cuda" else "cpu"
    sys.exit(main(sys.argv[1], choice))
