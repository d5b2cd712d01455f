#!/usr/bin/env bash
# All GPUs of this machine, or 2 ranks on its processors.
#
#   bash launch/one_node.sh                                                   launch/pretrain.py with SCAPE at 99%
#   bash launch/one_node.sh -- --preset small --steps 8000                    the same with its own options
#   bash launch/one_node.sh train.py --deepspeed_config ds.json               your script, which imports deepspeed_scape
#   bash launch/one_node.sh --module deepspeed_scape.run train.py --deepspeed_config ds.json     your script as it is
#
# --dry-run checks and prints the command; --help lists the options.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/checked.sh" one-node "$@"
run "$deepspeed" --hostfile "$hostfile" "${which_gpus[@]}" --master_port "$master_port" "${job[@]}"
