#!/bin/bash -l
# Nodes for an interactive session; run this script with bash. In its shell
# `hpcdp launch -- PROGRAM` uses all nodes, and `exit` releases them.
options=(
  --job-name=interactive
  --nodes=2
  --ntasks-per-node=4
  --cpus-per-task=1
  --time=04:00:00
  --partition=main
  '--account=proj 7'
  --gres=gpu:4
  --constraint=ib
  '--comment=a "b" c\d'
)

module load gcc/12 openmpi/5.0 || exit 1
# shellcheck source=/dev/null
source '/shared/my venv/bin/activate' || exit 1
export SRUN_CPUS_PER_TASK=1  # srun does not inherit it from the job
export OMP_NUM_THREADS=1
export PMIX_MCA_psec=native  # otherwise Open MPI prints that it found no munge
export HPCDP_CACHE_DIR='/scratch/$USER'"'"'s'

exec salloc "${options[@]}" bash
