#!/usr/bin/env bash
# Packs what tests/gpu/first.sh needs and a GPU host without a network lacks: about 6 MB of wheels.
# Such a host has Python 3.12 with torch 2.11, Triton 3.6, numba, pytest, pytest-xdist and pytest-timeout.
# usage: tests/gpu/wheels.sh FOLDER      tests/gpu/first.sh finds them in build/wheels, or where WHEELS says
set -euo pipefail
PACKED=(
  msgspec==0.22.0
  pytest-asyncio
  llguidance==1.9.1
  annotated-types
  pydantic==2.14.3
  pydantic-core==2.50.4
  typing-inspection
  "typing-extensions>=4.16"
)
out=${1:?usage: tests/gpu/wheels.sh FOLDER}
mkdir -p "$out"
platforms=()
for tag in manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do # llguidance: 2_31 alone
  platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
  -d "$out" "${PACKED[@]}"
ls -la "$out"
