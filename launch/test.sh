#!/usr/bin/env bash
# Lint, type check and test the whole repository; needs only Python >= 3.10 and pip.
#
#   bash launch/test.sh                          everything not marked gpu or slow
#   bash launch/test.sh tests/unit/test_mask.py  further arguments go to pytest
#   bash launch/test.sh -m "gpu"                 a later -m replaces the default one
#
# VENV            the virtual environment, made when absent   (default: .venv in the repository)
# PYTHON          the interpreter it is made from             (default: python3)
# TORCH_SPEC      what is installed as torch, before the rest (default: torch==2.13.0)
# DEEPSPEED_SPEC  and as DeepSpeed                            (default: the range of setup.cfg)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${VENV:-$root/.venv}
torch_spec=${TORCH_SPEC:-torch==2.13.0}
deepspeed_spec="${DEEPSPEED_SPEC:-deepspeed>=0.16.9,<0.20}"
stamp=$venv/deepspeed_scape.stamp

say() { printf '== %s (%ds)\n' "$*" "$SECONDS"; }

requirements_hash() {
    # $root too: an environment shared by two clones would test the other one's editable install
    { cat setup.cfg pyproject.toml launch/test.sh; echo "$torch_spec $deepspeed_spec $root"; "$venv/bin/python" -VV; } |
        sha256sum | cut -d' ' -f1
}

install() {
    local pip=("$venv/bin/python" -m pip -qq --disable-pip-version-check --no-input)
    # 26.2 ignores a constraint file in build environments, where a stray torch costs gigabytes
    "${pip[@]}" install "pip<26.2" "setuptools>=77" wheel
    # first and alone: any later "torch" requirement is then met and pulls no CUDA build
    "${pip[@]}" install "$torch_spec"
    # DeepSpeed is a source release whose setup.py looks for torch: let it see this environment's,
    # and build no op ahead of time
    DS_BUILD_OPS=0 "${pip[@]}" install --no-build-isolation "$deepspeed_spec"
    DS_BUILD_OPS=0 "${pip[@]}" install --no-build-isolation -e ".[test]"
}

if ! "$venv/bin/python" -c "" 2>/dev/null; then
    say "new environment in $venv"
    "${PYTHON:-python3}" -m venv --clear "$venv"
fi
if [[ "$(cat "$stamp" 2>/dev/null)" != "$(requirements_hash)" ]]; then
    say "installing"
    rm -f "$stamp" # an install that is cut short must not count
    install
    requirements_hash >"$stamp"
fi
export PATH="$venv/bin:$PATH"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# a killed extension build leaves a lock that hangs every later start: never share this folder
export TORCH_EXTENSIONS_DIR=$scratch/torch_extensions
export OMP_NUM_THREADS=1 WANDB_MODE=offline WANDB_DIR=$scratch HF_HUB_OFFLINE=1
unset PYTHONPATH PYTEST_ADDOPTS

# All checks run, so that one CI run tells all; pytest comes last and its summary is the last line.
failed=()
say "ruff format"; ruff format --check --quiet . || failed+=("ruff format")
say "ruff check";  ruff check --quiet . || failed+=("ruff check")
say "mypy";        mypy || failed+=(mypy)
say "pytest"
if ((${#failed[@]})); then printf '** FAILED before the tests: %s\n' "${failed[*]}" >&2; fi
status=0
python -m pytest -q -m "not gpu and not slow" "$@" || status=$?
if ((status == 0 && ${#failed[@]})); then status=1; fi
exit "$status"
