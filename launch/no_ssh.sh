#!/usr/bin/env bash
# Several nodes without ssh: run the same line on every node, by hand or by whatever starts your containers.
#
#   printf 'node1 slots=8\nnode2 slots=8\n' > hostfile      # the same on every node
#   bash launch/no_ssh.sh --master-port 29600 train.py --deepspeed_config ds.json
#
# Which node this is follows from its address. The port (29500 by default) has to be the same on all.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/checked.sh" no-ssh "$@"
run "$deepspeed" --no_ssh --node_rank "$node_rank" --hostfile "$hostfile" \
    --master_addr "$master_addr" --master_port "$master_port" "${job[@]}"
