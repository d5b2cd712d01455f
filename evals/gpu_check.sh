#!/usr/bin/env bash
# Everything that needs a GPU, in one go, on a machine with one GPU and no package registry: under 6 minutes.
#
#   bash evals/carry_wheels.sh            before, where pip works; .wheels travels with the repository
#   OUT=results bash evals/gpu_check.sh   there: torch >= 2.11, Triton >= 3.6, pytest, hypothesis; DeepSpeed from .wheels
#
# Parts: 1 kernels against their twins, on the GPU   2 what only a GPU shows   3 the table of evals/kernels.py
#        4 training with the real engine, a world of one over NCCL   5 two ranks, if there are two GPUs
#        6 the residual in host memory: bits, memory, time
# Every part runs whatever the others said; the last line names those that failed. QUICK=1 leaves 1 B elements out.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-gpu_check}
python=${PYTHON:-python3}
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export TORCH_EXTENSIONS_DIR=$scratch/extensions HF_HUB_OFFLINE=1 WANDB_MODE=offline PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD TRITON_CACHE_DIR=$scratch/triton
if compgen -G ".wheels/*.whl" >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --target "$scratch/packages" .wheels/*.whl
    PYTHONPATH=$scratch/packages:$PWD
fi
"$python" - <<'PYTHON' || exit 1
import torch, triton
assert torch.cuda.is_available(), "no GPU"
print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
PYTHON

failed=()
part() {  # name, seconds, command...
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
        echo "== $name: passed ($((SECONDS - start)) s)"
    else
        echo "== $name: FAILED with $? ($((SECONDS - start)) s)"
        failed+=("$name")
    fi
    tail -n 15 "$out/$name.log"
}
sizes=(10000000 100000000)
[[ ${QUICK:-0} = 1 ]] || sizes+=(1000000000)
export -n TRITON_INTERPRET
# the table first: it is what the machine was lent for
part table 85 "$python" -m evals.kernels --elements "${sizes[@]}" --seconds 0.1 --output "$out/kernels.csv"
part kernels 95 "$python" -m pytest -q -x -p no:cacheprovider tests/unit/test_kernels.py tests/unit/test_kernels_masks.py
part gpu 50 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu
part engine 45 "$python" -m evals.gpu_engine
part two_ranks 40 "$python" -m evals.gpu_engine --ranks 2
part residual 45 "$python" -m evals.gpu_residual
if ((${#failed[@]})); then echo "FAILED: ${failed[*]}"; exit 1; fi
echo "all parts passed"
