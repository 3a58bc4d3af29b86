# Whatever is started ignores USR1 until it takes it: nothing dies of a signal that comes early, and since one that is
# ignored is lost, it is passed on again and again in the first two minutes. The ranks are polled: a `wait` returns at
# every signal.
(
  trap '' USR1
  exec @@launch sh -c 'trap "" USR1; exec "$@"' rank "${program[@]}"
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
