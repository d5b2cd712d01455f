#!/usr/bin/env bash
# Become a command as one rank of an mpirun or srun: what they call rank and size, under the names that torch and
# DeepSpeed read. MASTER_ADDR and MASTER_PORT come with the environment.
set -euo pipefail
if [ -n "${OMPI_COMM_WORLD_RANK:-}" ]; then # Open MPI
    export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
    export LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
elif [ -n "${PMI_RANK:-}" ] && [ -n "${MPI_LOCALRANKID:-}" ]; then # MPICH
    export RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE LOCAL_RANK=$MPI_LOCALRANKID LOCAL_WORLD_SIZE=$MPI_LOCALNRANKS
elif [ -n "${SLURM_PROCID:-}" ]; then # srun
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    case ${SLURM_STEP_TASKS_PER_NODE:-,} in
    *,*) ;;                                                      # nodes differ: no one number
    *) export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%(*} ;; # 8(x4) is 8 on each
    esac
else
    echo "as_rank.sh: neither Open MPI, MPICH nor srun has started this (OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID)" >&2
    exit 2
fi
exec "$@"
