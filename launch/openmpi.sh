#!/usr/bin/env bash
# Several nodes with Open MPI's mpirun (4 or 5), which starts its daemons over ssh or through your scheduler.
#
#   printf 'node1 slots=8\nnode2 slots=8\n' > hostfile
#   bash launch/openmpi.sh --dry-run train.py --deepspeed_config ds.json
#
# mpirun itself and not `deepspeed --launcher openmpi`, which needs mpi4py, meets at port 29500 whatever --master_port
# says, and at the first address of `hostname -I` (docs/multinode.md). torch talks over gloo or NCCL all the same.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/checked.sh" openmpi "$@"
# --bind-to none: Open MPI would tie a rank and all its threads to one core
run "$mpirun" --hostfile "$hostfile" -n "$ranks" --bind-to none \
    --mca btl_tcp_if_include "$interface" --mca oob_tcp_if_include "$interface" "${exports[@]}" \
    bash "$here/as_rank.sh" "${job[@]}"
