#!/usr/bin/env bash
# The first runs on a GPU host without a network: `bash tests/gpu/first.sh PART [SECONDS]`, from the repository's root.
#   A  does it work, and how fast are steps: packages, tests of the riskiest parts, steps of 8B's shape, their kernels
#   B  right or wrong: all other tests (of fp16's some), a worker's share of memory, NCCL of one rank, speed of kernels
#   C  a worker's start, cold and warm; FP8, int8 and int4, packing, windows; KV handed from one process to another
#   T  chosen tests, rows of `bench gpu`, the hand-over, or all of them, once more: -k EXPRESSION --only KINDS --transfer
# SECONDS are what all of the part's steps may take. On an H200 (2026-11-26) A took 73, B 105 and C 104: so a quarter of
# an hour on such a host holds all three, and T twice, with the defaults of 150, 180, 200 and 120 as upper bounds.
# A step has a limit of its own, and one that fails, hangs or kills its process leaves the others.
# Facts: $OUT/PART.jsonl, an object a step, printed at the end; logs: $OUT/PART_STEP.log. With --dry-run the steps'
# commands are printed instead, which tests/test_gpu_scripts.py tries without a GPU.
# Packages that the host lacks: `tests/gpu/wheels.sh build/wheels` where there is a network, carried along.
set -uo pipefail
usage="usage: bash tests/gpu/first.sh A|B|C|T [SECONDS] [-k EXPRESSION] [--only KINDS] [--transfer] [--dry-run]"
PART=${1:?$usage}
case $PART in
A) BUDGET=150 ;;
B) BUDGET=180 ;;
C) BUDGET=200 ;;
T) BUDGET=120 ;;
*) echo "$usage" >&2; exit 2 ;;
esac
shift
CHOSEN_TESTS="" CHOSEN_ROWS="" TRANSFER="" DRY=""
while [ $# -gt 0 ]; do
  case $1 in
  -k) CHOSEN_TESTS=${2:?$usage}; shift ;;
  --only) CHOSEN_ROWS=${2:?$usage}; shift ;;
  --transfer) TRANSFER=1 ;;
  --dry-run) DRY=1 ;;
  *[!0-9]*) echo "$usage" >&2; exit 2 ;;
  *) BUDGET=$1 ;;
  esac
  shift
done
if [ "$PART" = T ] && [ -z "$CHOSEN_TESTS$CHOSEN_ROWS$TRANSFER" ]; then
  echo "T: nothing is chosen; $usage" >&2
  exit 2
fi
ROOT=$(pwd)
[ -f tests/gpu/first.sh ] || { echo "run it from the repository's root" >&2; exit 2; }
WORK=${TMPDIR:-/tmp}/twostroke-gpu # what parts leave for each other: kernels and a model
OUT=${OUT:-$WORK/facts}
SITE=$WORK/site
FACTS="$OUT/$PART.jsonl"
export PYTHONPATH="$SITE:$WORK/packages:$ROOT" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$WORK/kernels} TOKENIZERS_PARALLELISM=false
CORES=$(nproc)
WORKERS=$((CORES > 15 ? 14 : (CORES > 3 ? CORES - 2 : 1)))
SECONDS=0
left() { echo $((BUDGET - SECONDS)); }
at_least() { echo $(($1 > $2 ? $1 : $2)); } # of two numbers the larger

# step NAME LIMIT COMMAND...: under its limit, as far as the budget has so much; never ends the script.
step() {
  local name=$1 limit=$2 room began rc
  shift 2
  if [ -n "$DRY" ]; then
    printf '%q ' "$name" "$@"
    echo
    return 0
  fi
  room=$(($(left) - 4))
  [ "$limit" -gt "$room" ] && limit=$room
  if [ "$limit" -lt 8 ]; then
    python3 -m tests.gpu.first.facts add "$FACTS" "$name (no time left)" 0 0 /nonexistent
    return 0
  fi
  began=$SECONDS
  timeout -k 5 "$limit" "$@" >"$OUT/${PART}_$name.log" 2>&1
  rc=$?
  python3 -m tests.gpu.first.facts add "$FACTS" "$name" "$rc" $((SECONDS - began)) "$OUT/${PART}_$name.log" || true
  echo "== $name: rc $rc, $((SECONDS - began)) s (limit $limit)"
  if [ $rc -ne 0 ]; then tail -c 700 "$OUT/${PART}_$name.log"; echo; fi
  return $rc
}
program() { # NAME LIMIT PROGRAM ARGUMENTS...
  local name=$1 limit=$2 module=$3
  shift 3
  step "$name" "$limit" python3 -m "tests.gpu.first.$module" "$@"
}
tests() { # NAME LIMIT WORKERS EXPRESSION; a test that hangs ends its own process alone
  step "$1" "$2" python3 -m pytest tests/gpu -m gpu -v -W default -p no:cacheprovider -n "$3" --dist worksteal \
    --timeout "${TEST_S:-75}" --timeout-method thread --tb short --maxfail 60 -k "$4"
}
rows() { # NAME SECONDS KINDS
  program "$1" $(($2 + 22)) bench gpu --only "$3" --budget "$2"
}
transfer() {
  program transfer 90 bench transfer --device cuda --transport cuda_ipc
}

SMOKE='long_contexts or short_chunks or captured_decode_step or splits_give or captured_steps_have or small_steps_with or launched_ahead or draws_are_captured or cuda_ipc or layers_are_announced or (chunks_are_packed and raw) or draws_nothing'

if [ -z "$DRY" ]; then
  mkdir -p "$OUT" "$WORK/packages"
  ln -sfn "$ROOT" "$WORK/packages/twostroke"
  : >"$FACTS"
  if [ ! -d "$SITE/msgspec" ]; then
    wheels=${WHEELS:-build/wheels}
    if ls "$wheels"/*.whl >/dev/null 2>&1; then
      timeout 60 python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$wheels"/*.whl 2>&1 | tail -3
    else
      echo "no wheels in $wheels: whatever this host lacks is missing" >&2
    fi
  fi
fi

case $PART in
A)
  [ -n "$DRY" ] || nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu --format=csv,noheader
  program environment 60 environment
  TEST_S=55 tests smoke 100 $((WORKERS < 12 ? WORKERS : 12)) "$SMOKE"
  budget=$(($(left) - 52))
  rows steps "$(at_least 20 $((budget < 70 ? budget : 70)))" steps
  program kernels 50 kernel_times
  ;;
B)
  program collectives 30 collectives
  step share 40 python3 -m pytest tests/gpu -m gpu -v -W default -p no:cacheprovider --timeout 38 -k keeps_to_its_share
  # The greedy ones compile the CPU engine's kernels, which takes most of a minute: beside the others it costs nothing.
  TEST_S=110 tests tests 130 "$WORKERS" "not dtype1 and not keeps_to_its_share and not ($SMOKE)"
  rows rates "$(at_least 25 $(($(left) - 26)))" attention,decode-attention,sampling
  ;;
C)
  [ -n "$DRY" ] || rm -rf "$WORK/cold"
  TRITON_CACHE_DIR=$WORK/cold program start_cold 70 start "$WORK/model"
  TRITON_CACHE_DIR=$WORK/cold program start_warm 40 start "$WORK/model"
  transfer
  rows more "$(at_least 25 $(($(left) - 26)))" quantized,fp8,gated,gated-codes,experts,packing,prefix,windows
  ;;
T)
  [ -n "$CHOSEN_TESTS" ] && TEST_S=60 tests chosen 100 $((WORKERS < 12 ? WORKERS : 12)) "$CHOSEN_TESTS"
  [ -n "$TRANSFER" ] && transfer
  [ -n "$CHOSEN_ROWS" ] && rows rows "$(at_least 20 $(($(left) - 26)))" "$CHOSEN_ROWS"
  ;;
esac

[ -n "$DRY" ] && exit 0
echo "== $PART took $SECONDS s"
python3 -m tests.gpu.first.facts show "$FACTS"
exit 0
