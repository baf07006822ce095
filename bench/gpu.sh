#!/bin/sh
# Measures of the GPU libraries: a line for each number, with its target and whether it is met.
#
#   bench/gpu.sh [--short] [ROW...]               on this machine's GPU
#   bench/gpu.sh --stand-in [--short] [ROW...]    over the tests' stand-in for the driver, which shows that
#                                                 this script works, and nothing about a GPU
#
# Rows: g1 to g15; without any, all. It needs a C compiler, binutils, and Python 3.11 with msgspec (PYTHON,
# .venv/bin/python by default). The frameworks PyTorch and CuPy come from BENCH_PYTHON (python3 by default)
# if it has them. Otherwise, on a machine with a GPU, they are installed into build/gpu/bench-venv. It
# changes no setting of the GPU.
set -eu
cd "$(dirname "$0")/.."

standin=
short=
rows=
for word; do
    case $word in
        --stand-in) standin=yes ;;
        --short) short=--short ;;
        g[1-9] | g1[0-5]) rows="$rows $word" ;;
        *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done
PY=${PYTHON:-.venv/bin/python}
[ -x "$PY" ] || PY=python3
"$PY" -c 'import msgspec' || { echo "gpu.sh: $PY has no msgspec: run make setup, or set PYTHON" >&2; exit 1; }

if [ -n "$standin" ]; then
    real=$("$PY" -c 'from tests.standin import build; print(build.libraries() / "libcuda.so.1")')
    of=
    echo "The driver is the tests' stand-in: these numbers say nothing about a GPU."
else
    real=$(ldconfig -p | awk '/libcuda\.so\.1 / && /x86-64|AArch64/ {print $NF; exit}')
    [ -n "$real" ] || { echo "gpu.sh: this machine has no libcuda.so.1: try --stand-in" >&2; exit 1; }
    of="--real $real"
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo "$real"
fi

# PyTorch and CuPy for rows that need them; without a network these rows are skipped.
frameworks() {
    [ -z "$standin" ] && [ -z "${BENCH_PYTHON:-}" ] || return 0
    python3 -c 'import torch' 2>/dev/null && return 0
    venv=build/gpu/bench-venv
    if [ ! -x "$venv/bin/python" ]; then
        python3 -m venv "$venv" && "$venv/bin/pip" install --quiet torch cupy-cuda12x || return 0
    fi
    BENCH_PYTHON=$PWD/$venv/bin/python
    export BENCH_PYTHON
}

measure() { "$PY" -m bench.gpu.rows "$1" $of $short || true; }

for row in ${rows:-g1 g2 g3 g4 g5 g6 g7 g8 g9 g10 g11 g12 g13 g14 g15}; do
    case $row in
        g1)
            symbolic=no
            readelf -dW "$real" | grep -q SYMBOLIC && symbolic=yes
            versions=$(readelf -VW "$real" | grep -c 'Version definition' || true)
            exports=$(nm -D --defined-only "$real" | awk '$3 ~ /^cu/' | wc -l)
            echo "G1   libcuda: symbolic $symbolic, version definitions $versions, $exports exports | - | ok"
            ;;
        g3) measure g3; frameworks; measure g3t ;;
        g4 | g12) frameworks; measure "$row" ;;
        *) measure "$row" ;;
    esac
done
