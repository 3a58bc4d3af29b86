#!/bin/bash -l
# A sweep: the same program once for every line of settings, as tasks of a job array. Each one is stopped two minutes
# before the time is up, requeued and resumed for itself.
#SBATCH --job-name=sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=04:00:00
#SBATCH --partition=main
#SBATCH --account="proj 7"
#SBATCH --output=runs/sweep-%A_%a.out
#SBATCH --constraint=ib
#SBATCH --comment="a \"b\" c\\d"
#SBATCH --array=1-3%2
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

ends_soon='' cancelled=''
trap 'ends_soon=1' USR1
trap 'cancelled=${cancelled:-now}' TERM
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # SLURM_JOB_ID of one of the tasks is the number of the whole array
echo "hpcdp: job $job, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"

module load gcc/12 openmpi/5.0 || exit 1
# shellcheck source=/dev/null
source '/shared/my venv/bin/activate' || exit 1
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun does not inherit it from the job
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export PMIX_MCA_psec=native  # otherwise Open MPI prints that it found no munge
export HPCDP_CACHE_DIR='/scratch/$USER'"'"'s'

case $SLURM_ARRAY_TASK_ID in
  1) settings=(--lr 0.1) ;;
  2) settings=(--lr 0.2 --seed 3) ;;
  3) settings=(--model 'it'"'"'s $HOME') ;;
  *) echo "hpcdp: task $SLURM_ARRAY_TASK_ID has no settings" >&2; exit 2 ;;
esac
run=${1:-runs/sweep-$SLURM_ARRAY_JOB_ID}
checkpoints=$run/$SLURM_ARRAY_TASK_ID/checkpoints
requeues=3
program=(hpcdp train lenet --data digits "${settings[@]}" --run-dir "$run/$SLURM_ARRAY_TASK_ID" --resume auto)

# The newest complete checkpoint, empty where there is none, or this script does not know where they are.
newest() {
  local each found=''
  for each in "$checkpoints"/step-*; do
    if [[ -n $checkpoints && $each =~ /step-[0-9]+$ && -f $each/manifest.json ]]; then
      found=${each##*/}
    fi
  done
  echo "$found"
}

# Which of this job's nodes do not answer where Slurm's daemon is.
unanswering() {
  local line port
  port=$(scontrol show config | sed -n 's/^SlurmdPort *= *//p')
  while read -r line; do
    [[ $line =~ NodeName=([^ ]+).*\ NodeAddr=([^ ]+) ]] || continue
    timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "${BASH_REMATCH[2]}" "${port:-6818}" 2>/dev/null ||
      echo "${BASH_REMATCH[1]}" &
  done < <(scontrol --oneliner show node "$SLURM_JOB_NODELIST")
  wait
}

# Whether Slurm itself says that each of these nodes does not answer, or is down.
has_named() {
  local node
  for node in "$@"; do
    [[ $(scontrol --oneliner show node "$node") =~ \ State=[^\ ]*(\*|DOWN|FAIL|NOT_RESPONDING) ]] || return 1
  done
}

# The rank that failed first by what srun says, whose own status is the largest of all, or 14 of a rank whose peer has
# gone: one that ended by itself, else one that was killed, as srun kills others of one that has failed.
blame() {
  local line how code rank=3 of_line
  while IFS= read -r line; do
    [[ $line =~ ^srun:\ error:\ ([^:]+):\ (tasks?\ [^:]+):\ (.*)$ ]] || continue
    how=${BASH_REMATCH[3]} of_line=1
    case $how in
      'Exited with exit code '[0-9]*) code=${how//[^0-9]/} ;;
      Hangup*) code=129 ;;
      'Illegal instruction'*) code=132 ;;
      'Trace/breakpoint trap'*) code=133 ;;
      Aborted*) code=134 ;;
      'Bus error'*) code=135 ;;
      'Floating point exception'*) code=136 ;;
      Killed* | 'Out Of Memory'*) code=137 of_line=2 ;;
      'User defined signal 1'*) code=138 ;;
      'Segmentation fault'*) code=139 ;;
      'User defined signal 2'*) code=140 ;;
      'Broken pipe'*) code=141 ;;
      'Alarm clock'*) code=142 ;;
      Terminated*) code=143 of_line=2 ;;
      'CPU time limit exceeded'*) code=152 ;;
      'File size limit exceeded'*) code=153 ;;
      'Bad system call'*) code=159 ;;
      *) continue ;;
    esac
    if ((code == 14)); then of_line=3; fi
    if ((of_line < rank)); then
      rank=$of_line status=$code failed="${BASH_REMATCH[2]} on ${BASH_REMATCH[1]}: $how"
    fi
  done <"$words"
}

began=$(newest)
words=$(mktemp) || exit 1
trap 'rm -f "$words"' EXIT
exec 3> >(trap '' USR1 TERM; exec tee "$words" >&2)  # a child of this shell: what starts ranks ends its own children

# Whatever is started ignores USR1 until it takes it: nothing dies of a signal that comes early, and since one that is
# ignored is lost, it is passed on again and again in the first two minutes. The ranks are polled: a `wait` returns at
# every signal.
(
  trap '' USR1
  exec srun --mpi=pmix --wait=30 sh -c 'trap "" USR1; exec "$@"' rank "${program[@]}"
) 2>&3 3>&- &
ranks=$!
exec 3>&-
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
if ((status == 0)); then
  exit 0
fi

# 75: stopped early, with a checkpoint. After a failure a job is requeued if it has saved since its start,
# a limited number of times; a cancelled one is not. Slurm requeues preempted jobs itself.
saved=$(newest) requeues_job='' why='' failed='' lost=()
known=$(scontrol show job "$job")
count=${checkpoints%/*}/requeues-$job
faults=$(cat "$count" 2>/dev/null)
[[ $faults =~ ^[0-9]+$ ]] || faults=0
if ((status == 75)); then
  echo "hpcdp: job $job has stopped with a checkpoint"
  requeues_job=1
elif [[ -z $cancelled ]]; then
  sleep 1  # for the last words
  blame
  mapfile -t lost < <(unanswering)
  echo "hpcdp: job $job has failed with status $status${failed:+: $failed}${lost[0]:+; no answer from ${lost[*]}}"
  if [[ -z $saved ]]; then
    why='it has no checkpoint'
  elif [[ ! $saved > $began ]]; then
    why='it has not saved since its start'
  elif ((faults >= requeues)); then
    why="it was requeued $requeues times after failures"
  else
    requeues_job=1
  fi
fi
if [[ $known == *' Requeue=0 '* || (-n $cancelled && -z $ends_soon) ]]; then
  requeues_job=''
fi
if [[ -n $requeues_job && $status -ne 75 ]]; then
  echo $((faults + 1)) >"$count"
  if ((${#lost[@]})); then  # else the job could start there again; Slurm may requeue it by itself, and end this script
    limit=$(scontrol show config | sed -n 's/^SlurmdTimeout *= *\([0-9]*\).*/\1/p')
    echo "hpcdp: job $job waits until Slurm says that it has lost ${lost[*]}"
    trap 'cancelled=now' TERM
    SECONDS=0
    until has_named "${lost[@]}" || [[ -n $cancelled ]] || ((SECONDS > ${limit:-300} + 60)); do
      sleep 2
    done
    trap '' TERM
    if [[ -n $cancelled ]]; then
      requeues_job='' ends_soon=''
    fi
  fi
fi
script=$(sed -n 's/^ *Command=//p' <<<"$known")
script=${script%"${1:+ $1}"}
printf -v again 'cd %q && sbatch%s %q%s' "$SLURM_SUBMIT_DIR" \
  "${SLURM_ARRAY_TASK_ID:+ --array=$SLURM_ARRAY_TASK_ID}" "$script" "${run:+ $run}"
if [[ -n $requeues_job ]]; then
  echo "hpcdp: job $job is requeued"
  scontrol requeue "$job" || echo "hpcdp: job $job was not requeued; resume with: $again"
elif [[ -n $cancelled && -z $ends_soon && ($status -eq 75 || -n $saved) ]]; then
  echo "hpcdp: job $job was ended from outside; unless Slurm requeues it, resume with: $again"
elif [[ $status -eq 75 || -n $saved ]]; then
  echo "hpcdp: job $job is not requeued${why:+: $why}; resume with: $again"
fi
exit "$status"
