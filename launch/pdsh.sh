#!/usr/bin/env bash
# Several nodes over ssh, by DeepSpeed's own way: pdsh. Start it on the first node of the hostfile.
#
#   printf 'node1 slots=8\nnode2 slots=8\n' > hostfile
#   echo GLOO_SOCKET_IFNAME=eth0 >> .deepspeed_env      # nothing else of this shell reaches the ranks
#   bash launch/pdsh.sh --dry-run train.py --deepspeed_config ds.json
#
# Needs pdsh here, ssh without a password to every node, and this folder, Python and script at the same path there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/checked.sh" pdsh "$@"
# --force_multi: over ssh even if the hostfile has one node, which need not be this one
run "$deepspeed" --force_multi --launcher pdsh --hostfile "$hostfile" "${ssh_port[@]}" \
    --master_addr "$master_addr" --master_port "$master_port" "${job[@]}"
