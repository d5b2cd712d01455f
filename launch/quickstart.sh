#!/usr/bin/env bash
# From a bare Python 3.10+ to a table of four optimizers, on two CPU cores, in seven to twenty minutes, by what else they do.
#
#   bash launch/quickstart.sh
#
# VENV              where the environment goes (default .venv-quickstart); an existing one is used as it is
# PYTHON            the interpreter to make it with (default python3)
# TORCH_SPEC        what pip installs as torch (default torch==2.13.0)
# QUICKSTART_STEPS  optimizer steps of each run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-.venv-quickstart}"
PYTHON="${PYTHON:-python3}"
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "quickstart: PYTHON=$PYTHON is older than 3.10; set PYTHON to a newer one" >&2
    exit 1
fi

pip() { # installs, and shows of what pip prints that which takes time
    "$VENV/bin/pip" install --disable-pip-version-check --progress-bar off "$@" | while read -r line; do
        case $line in
        Downloading*[MG]B\) | "Building wheel"*started*) echo "  $line" ;;
        Processing*.whl) echo "  ${line##*/}" ;; # from a folder
        "Installing collected packages"*) echo "  unpacking: minutes, and the longest silence" ;;
        esac
    done
}

if [ ! -e "$VENV/.complete" ]; then
    echo "quickstart: installing into $VENV (about 2.5 GB, two to eight minutes)"
    "$PYTHON" -m venv "$VENV"
    pip "${TORCH_SPEC:-torch==2.13.0}"
    # DS_BUILD_OPS=0: DeepSpeed's C++/CUDA extensions are not needed
    DS_BUILD_OPS=0 pip -e '.[train,cpu]'
    touch "$VENV/.complete"
    echo "quickstart: installed"
fi

exec "$VENV/bin/python" launch/quickstart.py
