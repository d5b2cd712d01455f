#!/usr/bin/env bash
# Wheels for a GPU machine without a package registry: what DeepSpeed and SCAPE need beyond a usual PyTorch image.
#
#   bash evals/carry_wheels.sh [FOLDER]      (default .wheels, which git ignores); run where pip works, copy it along
#
# PYTHON_VERSION of that machine (default 3.12), DEEPSPEED (default 0.19.8). DeepSpeed is a source release: its wheel is
# built here, with no op ahead of time, so it is the same on every platform.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-.wheels}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$folder"
"$python" -m pip download -q --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$folder" "pydantic>=2,<3" hjson
DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps --no-build-isolation "deepspeed==${DEEPSPEED:-0.19.8}" -w "$folder"
ls -lh "$folder"
