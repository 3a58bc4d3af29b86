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
  if [[ -z $cancelled || -n $ends_soon ]]; then
    echo "hpcdp: stopped with a checkpoint; job $job goes back into the queue"
    scontrol requeue "$job" || echo "hpcdp: job $job was not requeued: submit it again to go on"
  else
    echo "hpcdp: stopped with a checkpoint; job $job was ended from outside, and goes on where it is submitted again"
  fi
fi
exit "$status"
