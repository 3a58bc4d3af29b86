#!/bin/bash
# Training on CPUs: stops two minutes before the time limit, is requeued, and
# resumes until it is complete.
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=30
#SBATCH --output=runs/train-%j.out
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

ends_soon='' canceled=''
trap 'ends_soon=1' USR1
trap 'canceled=${canceled:-now}' TERM
job=$SLURM_JOB_ID
echo "hpcdp: job $job, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun does not inherit it from the job
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

run=${1:-runs/train-$job}
checkpoints=$run/checkpoints
requeues=3
program=(hpcdp train lenet --data digits --run-dir "$run" --resume auto)

# Print the name of the newest complete checkpoint; nothing if there is none.
newest() {
  local each found=''
  for each in "$checkpoints"/step-*; do
    if [[ -n $checkpoints && $each =~ /step-[0-9]+$ && -f $each/manifest.json ]]; then
      found=${each##*/}
    fi
  done
  echo "$found"
}

# Print the nodes of this job whose Slurm daemon does not accept connections.
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

# Return whether Slurm reports each of these nodes as down or not responding.
has_named() {
  local node
  for node in "$@"; do
    [[ $(scontrol --oneliner show node "$node") =~ \ State=[^\ ]*(\*|DOWN|FAIL|NOT_RESPONDING) ]] || return 1
  done
}

# Set `status` and `failed` from srun's messages, to the task that failed first:
# one that ended by itself, else one that was killed (srun kills the others after
# a failure), else one with status 14 (the connection to another rank closed).
# srun's own exit status is only the largest of all.
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
# A child of this shell, because the launcher ends its own children.
exec 3> >(trap '' USR1 TERM; exec tee "$words" >&2)

# Ranks start with USR1 ignored, so an early signal cannot kill them. An ignored
# signal is lost, so it is repeated in their first two minutes. The loop polls,
# because `wait` returns at every signal.
(
  trap '' USR1
  exec srun --mpi=pmi2 --wait=30 sh -c 'trap "" USR1; exec "$@"' rank "${program[@]}"
) 2>&3 3>&- &
ranks=$!
exec 3>&-
SECONDS=0 told=''
while sleep 2; [[ -n $(jobs -pr) ]]; do
  if [[ $canceled == now ]]; then
    kill -s TERM "$ranks"
    canceled=told
  elif [[ -n $ends_soon && -z $canceled ]] && [[ -z $told || $SECONDS -lt 120 ]]; then
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

# Status 75: stopped early, with a checkpoint. After a failure a job is requeued
# a limited number of times, if it has saved since its start. A canceled job is
# not requeued. Slurm requeues preempted jobs itself.
saved=$(newest) requeues_job='' why='' failed='' lost=()
known=$(scontrol show job "$job")
count=${checkpoints%/*}/requeues-$job
faults=$(cat "$count" 2>/dev/null)
[[ $faults =~ ^[0-9]+$ ]] || faults=0
if ((status == 75)); then
  echo "hpcdp: job $job has stopped with a checkpoint"
  requeues_job=1
elif [[ -z $canceled ]]; then
  sleep 1  # until the last messages are copied
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
if [[ $known == *' Requeue=0 '* || (-n $canceled && -z $ends_soon) ]]; then
  requeues_job=''
fi
if [[ -n $requeues_job && $status -ne 75 ]]; then
  echo $((faults + 1)) >"$count"
  # Otherwise the job could start on the lost nodes again. Slurm may requeue it
  # meanwhile, and end this script.
  if ((${#lost[@]})); then
    limit=$(scontrol show config | sed -n 's/^SlurmdTimeout *= *\([0-9]*\).*/\1/p')
    echo "hpcdp: job $job waits until Slurm reports that ${lost[*]} is down"
    trap 'canceled=now' TERM
    SECONDS=0
    until has_named "${lost[@]}" || [[ -n $canceled ]] || ((SECONDS > ${limit:-300} + 60)); do
      sleep 2
    done
    trap '' TERM
    if [[ -n $canceled ]]; then
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
elif [[ -n $canceled && -z $ends_soon && ($status -eq 75 || -n $saved) ]]; then
  echo "hpcdp: job $job was ended from outside; unless Slurm requeues it, resume with: $again"
elif [[ $status -eq 75 || -n $saved ]]; then
  echo "hpcdp: job $job is not requeued${why:+: $why}; resume with: $again"
fi
exit "$status"
