#!/usr/bin/env bash
# Several nodes with MPICH's mpirun (Hydra), which starts its daemons over ssh or through your scheduler.
#
#   printf 'node1 slots=8\nnode2 slots=8\n' > hostfile
#   bash launch/mpich.sh --dry-run train.py --deepspeed_config ds.json
#
# mpirun itself and not `deepspeed --launcher mpich`, which can't start a module, and ends with status 0 whatever
# happens to the ranks (docs/multinode.md). Hydra passes this shell's whole environment on. When a rank fails it waits for
# the others, which SCAPE's `timeout` ends.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/checked.sh" mpich "$@"
run "$mpirun" -hosts "$hosts" -n "$ranks" -iface "$interface" bash "$here/as_rank.sh" "${job[@]}"
