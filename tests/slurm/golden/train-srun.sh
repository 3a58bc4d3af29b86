#!/bin/bash -l
# Training on CPUs, as long as it takes: stopped two minutes before the time is up, requeued, resumed.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=04:00:00
#SBATCH --partition=main
#SBATCH --account="proj 7"
#SBATCH --output=runs/train-%j.out
#SBATCH --constraint=ib
#SBATCH --comment="a \"b\" c\\d"
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

ends_soon='' cancelled=''
trap 'ends_soon=1' USR1
trap 'cancelled=${cancelled:-now}' TERM
job=$SLURM_JOB_ID
echo "hpcdp: job $job, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"

module load gcc/12 openmpi/5.0 || exit 1
# shellcheck source=/dev/null
source '/shared/my venv/bin/activate' || exit 1
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun does not take it from the job
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export PMIX_MCA_psec=native  # or Open MPI says that it found no munge
export HPCDP_CACHE_DIR='/scratch/$USER'"'"'s'

run=${1:-runs/train-$job}
program=(hpcdp train lenet --data digits --run-dir "$run" --resume auto)

# Whatever is started ignores USR1 until it takes it: nothing dies of a signal that comes early, and since one that is
# ignored is lost, it is passed on again and again in the first two minutes. The ranks are polled: a `wait` returns at
# every signal.
(
  trap '' USR1
  exec srun --mpi=pmix --wait=30 sh -c 'trap "" USR1; exec "$@"' rank "${program[@]}"
) &
ranks=$!
SECONDS=0 told=''
while sleep 2; [[ -n $(jobs -pr) ]]; do
  if [[ $cancelled == now ]]; then
    kill -s TERM "$ranks"
    cancelled=told
  elif [[ -n $ends_soon && -z $cancelled ]] && [[ -z $told || $SECONDS -lt 120 ]]; then
    kill -s USR1 "$ranks"
    told=1
  fi
done
trap '' USR1 TERM
wait "$ranks"
status=$?

# 75: stopped early, with a checkpoint. A job that was cancelled must not come back; one that is preempted does anyway.
if ((status == 75)); then
  known=$(scontrol show job "$job")
  script=$(sed -n 's/^ *Command=//p' <<<"$known")
  script=${script%"${1:+ $1}"}
  printf -v again 'cd %q && sbatch%s %q%s' "$SLURM_SUBMIT_DIR" \
    "${SLURM_ARRAY_TASK_ID:+ --array=$SLURM_ARRAY_TASK_ID}" "$script" "${run:+ $run}"
  echo "hpcdp: job $job has stopped with a checkpoint"
  if [[ -n $cancelled && -z $ends_soon ]]; then
    echo "hpcdp: job $job was ended from outside; unless Slurm requeues it, go on with: $again"
  elif [[ $known == *' Requeue=0 '* ]]; then
    echo "hpcdp: job $job does not come back; go on with: $again"
  else
    echo "hpcdp: job $job goes back into the queue"
    scontrol requeue "$job" || echo "hpcdp: job $job was not requeued; go on with: $again"
  fi
fi
exit "$status"
