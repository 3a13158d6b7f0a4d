"""The small model that ships with the repository: a Llama of about 6 M parameters trained on CPython's own library.

The folder is an ordinary Hugging Face model folder (config, safetensors, tokenizer, chat template), so it is loaded
by the same code path as any other model. tools/train_bundled made it.
"""

from pathlib import Path

BUNDLED_MODEL_DIR: Path = Path(__file__).resolve().parent
