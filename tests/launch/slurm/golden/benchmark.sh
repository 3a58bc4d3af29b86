#!/bin/bash -l
# A benchmark on exclusive nodes, never requeued.
#SBATCH --job-name=benchmark
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=04:00:00
#SBATCH --partition=main
#SBATCH --account="proj 7"
#SBATCH --output=runs/benchmark-%j.out
#SBATCH --constraint=ib
#SBATCH --comment="a \"b\" c\\d"
#SBATCH --exclusive

echo "hpcdp: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"

module load gcc/12 openmpi/5.0 || exit 1
# shellcheck source=/dev/null
source '/shared/my venv/bin/activate' || exit 1
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-2}"  # srun does not inherit it from the job
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-2}"
export PMIX_MCA_psec=native  # otherwise Open MPI prints that it found no munge
export HPCDP_CACHE_DIR='/scratch/$USER'"'"'s'

exec srun --mpi=pmix --wait=30 hpcdp bench allreduce
