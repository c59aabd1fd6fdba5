#!/usr/bin/env bash
# Everything a GPU has to say about the loss, in at most 8 minutes on one H200 and without a network:
# correctness, ceilings, the table beside the peers.
#
#     bash benchmarks/gpu_session.sh [--wheels DIR] [--out DIR] [--dry-run]
#
# --wheels: wheels of the peers (trl, liger-kernel, verl, cut-cross-entropy), installed without their
#   dependencies into a temporary folder; Liger's scaled CE also wants those of nvidia-cutlass-dsl
#   and apache-tvm-ffi. --out: default benchmarks/results.
# --dry-run: the same on a CPU at toy sizes, kernels interpreted, results into a temporary folder.
# Results are written as they come, so a session that is cut off loses nothing.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
wheels="" out="$here/results" dry=0
while [ $# -gt 0 ]; do
    case $1 in
    --wheels) wheels=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --dry-run) dry=1; shift ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
    esac
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [ -n "$wheels" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$scratch/site" \
        "$wheels"/*.whl || exit 1
    export PYTHONPATH="$PYTHONPATH:$scratch/site"
fi
if [ $dry = 1 ]; then
    export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1 OMP_NUM_THREADS=1
    out="$scratch/results"
elif ! python3 -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    echo "no GPU is visible to torch; --dry-run works without one" >&2
    exit 1
else
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit --format=csv || true
fi

status=0
part() { # name, seconds it gives itself
    timeout "$(($2 + 25))" python3 "$here/gpu_$1.py" --out "$out" --budget "$2" || {
        echo "== $1: exit code $?" >&2
        status=1
    }
}
part ceilings 30
part correctness 130
part table 230
echo "results in $out after $SECONDS s"
exit $status
