#!/bin/bash
# Grid Engine on the hosts of a cluster of cluster.sh: a cell of its own in FOLDER, which all hosts see, its master on
# node1, a queue all.q of 4 slots a host, and the parallel environments mpi (hosts filled up) and spread (one after the
# other). Debian: gridengine-master gridengine-exec gridengine-client.
#
#   grid_engine.sh FOLDER HOSTS   makes the cell and starts the daemons; run on the machine, HPCDP_CLUSTER being set
#
# What uses the cell sources FOLDER/settings.sh on a host.
set -euo pipefail

FOLDER=$1
HOSTS=$2
CLUSTER=$(dirname "$(readlink -f "$0")")/../../benchmarks/cluster.sh
GIVEN=/usr/share/gridengine
BINARIES=/usr/lib/gridengine

on() { bash "$CLUSTER" sh "$1" env SGE_ROOT="$SGE_ROOT" SGE_CELL=default SGE_QMASTER_PORT=6444 SGE_EXECD_PORT=6445 \
  LD_LIBRARY_PATH=$BINARIES "${@:2}"; }

within() {                             # SECONDS CMD...
  local deadline=$((SECONDS + $1))
  until "${@:2}" &>/dev/null; do
    ((SECONDS < deadline)) || { echo "grid_engine.sh: ${*:2} does not succeed in $1 s" >&2; "${@:2}"; exit 1; }
    sleep .1
  done
}

SGE_ROOT=$FOLDER/grid
COMMON=$SGE_ROOT/default/common
SPOOL=$SGE_ROOT/spool
mkdir -p "$COMMON" "$SPOOL/qmaster" "$SGE_ROOT/bin" "$SGE_ROOT/utilbin" "$SGE_ROOT/configuration"
ln -s $BINARIES "$SGE_ROOT/bin/lx-amd64"
ln -s $GIVEN/util "$SGE_ROOT/util"
ln -s $BINARIES "$SGE_ROOT/utilbin/lx-amd64"
printf '%s\n' "admin_user none" "default_domain none" "ignore_fqdn true" "spooling_method classic" \
  "spooling_lib libspoolc" "spooling_params $COMMON;$SPOOL/qmaster" "binary_path $SGE_ROOT/bin" \
  "qmaster_spool_dir $SPOOL/qmaster" "security_mode none" "listener_threads 2" "worker_threads 2" \
  "scheduler_threads 1" >"$COMMON/bootstrap"
echo node1 >"$COMMON/act_qmaster"
printf 'export %s\n' "SGE_ROOT='$SGE_ROOT'" SGE_CELL=default SGE_QMASTER_PORT=6444 SGE_EXECD_PORT=6445 \
  >"$FOLDER/settings.sh"

# Root submits here, and each host spools in a place of its own. Tasks on other hosts (qrsh -inherit) come by ssh: the
# way that is built into Debian's 8.1.9 does not start them, "job-pid: 0" says the trace of the shepherd.
sed -e 's/^min_uid .*/min_uid 0/; s/^min_gid .*/min_gid 0/; s/^load_report_time .*/load_report_time 00:00:02/' \
  -e 's|^execd_spool_dir .*|execd_spool_dir /run/sge|; s|^rsh_command .*|rsh_command /usr/bin/ssh -x|' \
  -e 's|^rsh_daemon .*|rsh_daemon /usr/sbin/sshd -i -f /etc/ssh/sshd_config|' \
  -e 's/flush_time=[0-9:]*/flush_time=00:00:01/' "$GIVEN/default-configuration" >"$SGE_ROOT/configuration/global"
on 1 $BINARIES/spoolinit classic libspoolc "$COMMON;$SPOOL/qmaster" init
on 1 $BINARIES/spooldefaults.bin configuration "$SGE_ROOT/configuration/global"
on 1 $BINARIES/spooldefaults.bin complexes $GIVEN/util/resources/centry
on 1 $BINARIES/spooldefaults.bin usersets $GIVEN/util/resources/usersets
on 1 $BINARIES/spooldefaults.bin managers root
on 1 $BINARIES/sge_qmaster
within 20 on 1 $BINARIES/qconf -sh

names=()
for i in $(seq "$HOSTS"); do names+=("node$i"); done
for name in "${names[@]}"; do
  on 1 $BINARIES/qconf -ah "$name" >/dev/null || true
  on 1 $BINARIES/qconf -as "$name" >/dev/null
done
for i in $(seq "$HOSTS"); do on "$i" $BINARIES/sge_execd; done
add() { on 1 $BINARIES/qconf "$1" "$SGE_ROOT/configuration/$2" >/dev/null; }
printf '%s\n' "group_name @allhosts" "hostlist ${names[*]}" >"$SGE_ROOT/configuration/hosts"
add -Ahgrp hosts
for name in mpi spread; do
  rule='$fill_up'
  [[ $name == mpi ]] || rule='$round_robin'
  printf '%s\n' "pe_name $name" "slots 999" "user_lists NONE" "xuser_lists NONE" "start_proc_args NONE" \
    "stop_proc_args NONE" "allocation_rule $rule" "control_slaves TRUE" "job_is_first_task FALSE" \
    "urgency_slots min" "accounting_summary FALSE" "qsort_args NONE" >"$SGE_ROOT/configuration/$name"
  add -Ap "$name"
done
on 1 $BINARIES/qconf -ssconf >"$SGE_ROOT/configuration/scheduler"
sed -i 's/^schedule_interval .*/schedule_interval 0:0:1/' "$SGE_ROOT/configuration/scheduler"
add -Msconf scheduler
# A queue has many attributes, which qconf has an editor change in the template that it knows.
cat >"$SGE_ROOT/configuration/edit" <<'EOT'
#!/bin/sh
exec sed -i -e 's/^hostlist .*/hostlist @allhosts/' -e 's/^slots .*/slots 4/' -e 's/^pe_list .*/pe_list mpi spread/' \
  -e 's/^notify .*/notify 00:00:05/' -e 's/^load_thresholds .*/load_thresholds NONE/' "$1"
EOT
chmod +x "$SGE_ROOT/configuration/edit"
on 1 EDITOR="$SGE_ROOT/configuration/edit" $BINARIES/qconf -aq all.q >/dev/null
slots() { [[ $(on 1 $BINARIES/qstat -f | grep -c '0/0/4 .* lx-amd64 *$') == "$HOSTS" ]]; }
within 30 slots
