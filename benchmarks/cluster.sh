#!/bin/bash
# A cluster on one machine. `cluster.sh --help` tells how to use it; `cluster.py` is its Python face.
#
# A host is a process with namespaces of its own for network, host name, IPC, processes and mounts; sshd is its first
# process, so that ending that one ends all that runs there and takes its mounts and links along. The switch is a bridge
# in a further network namespace: nothing is added to the machine's own network, and several clusters can be up at once.
set -euo pipefail

usage() {
  cat <<'EOT'
Hosts node1..nodeN on this machine, made of Linux namespaces: each has its own address (10.77.0.I on eth0), host name,
processes, /tmp, /run, /dev/shm, an sshd, and a link that is shaped in both directions. MPI takes them for separate
machines. Needs root.

  cluster.sh check                   say why a cluster cannot be made here, if so
  cluster.sh up N [--rate R] [--networks K] [--share FOLDER]... [--until PID] [--temporary]
                                     N hosts with links of rate R (default 1gbit, as tc(8) writes rates), on K networks
                                     (default 1: eth0; eth1 is 10.77.1.I, ...); all see a FOLDER that lies in /tmp,
                                     /run or /dev/shm; taken down when process PID ends, with all of HPCDP_CLUSTER
                                     if that is temporary
  cluster.sh sh I CMD...             run CMD on host I, in this working folder if the host sees it
  cluster.sh mpirun SLOTS CMD...     run CMD by the mpirun or mpiexec.hydra that lies beside it, or else is on PATH;
                                     SLOTS are the ranks of each host: 2 for all of them, or 2,0,3
  cluster.sh cut I | join I          pull all cables of host I; plug them in again
  cluster.sh rate I R                give host I's links another rate
  cluster.sh kill I | crash I        host I dies and its connections are closed; dies in silence, as by power loss
  cluster.sh boot I                  host I comes back
  cluster.sh slurm | slurmd I        start munged, slurmctld on node1 and slurmd on all hosts; on a host that came back
  cluster.sh down                    end all hosts and what runs on them

HPCDP_CLUSTER=FOLDER is where the cluster keeps its state (default /var/tmp/hpcdp-cluster), and is seen by all hosts.
TCP_RETRIES2=N up ... sets how soon a host gives up a silent peer (default 15; 4 is some 6 s).
EOT
}

SELF=$(readlink -f "$0")
FOLDER=$(readlink -m "${HPCDP_CLUSTER:-/var/tmp/hpcdp-cluster}")
STATE=$FOLDER/state
ETC=$FOLDER/etc
NET=10.77
PRIVATE=(/tmp /run /dev/shm)
START_LIMIT_S=20

fail() { echo "cluster.sh: $*" >&2; exit 1; }

within_limit() {                       # until "$@" holds; a status of 1 when it takes too long
  local deadline=$((SECONDS + START_LIMIT_S))
  until "$@"; do
    ((SECONDS < deadline)) || return 1
    sleep .02
  done
}

# A process is recorded as its id and its network namespace, since the id may be another's by and by. While a program
# takes another's place (exec) the namespace cannot be read: so wait for that before asking.
record() {                             # NAME ID
  within_limit namespace_of "$2" >/dev/null || fail "process $2, the $1, has ended"
  echo "$2 $(namespace_of "$2")" >"$STATE/$1"
}
namespace_of() { readlink "/proc/$1/ns/net"; }

recorded() {                           # the id of the recorded process, if that is still alive
  local id namespace
  [[ -f $STATE/$1 ]] && read -r id namespace <"$STATE/$1" && [[ $(namespace_of "$id") == "$namespace" ]] &&
    echo "$id"
}

host() { recorded "node$1" || fail "there is no host $1; up: ${ALL:=$(hosts | xargs)}"; }
hosts() { find "$STATE" -name 'node*' -printf '%f\n' 2>/dev/null | sed -n 's/^node\([0-9]*\)$/\1/p' | sort -n; }
switch() { nsenter -t "$(recorded switch)" -n "$@"; }
network_of() { local id; id=$(host "$1"); shift; nsenter -t "$id" -n "$@"; }

on() {                                 # host CMD...; CMD ends when its caller is killed
  local id
  id=$(host "$1")
  shift
  ${EXEC:-} nsenter -t "$id" -m -u -i -n -p -- \
    sh -c 'cd "$0" 2>/dev/null || cd /
      command -v "$1" >/dev/null || {
        echo "cluster.sh: $(hostname) has no $1; of /tmp and /run a host sees only the folders of up --share" >&2
        exit 127
      }
      exec setpriv --pdeathsig TERM "$@"' "$PWD" "$@"
}

check() {
  local tool password
  [[ $(id -u) == 0 ]] || fail "needs root"
  for tool in ip tc sshd ssh ssh-keygen unshare nsenter setpriv pgrep find; do
    command -v "$tool" >/dev/null || fail "$tool is not installed (Debian: iproute2 openssh-server procps util-linux)"
  done
  password=$(getent shadow root | cut -d: -f2)
  [[ $password != '!'* ]] || fail "sshd refuses root, whose account is locked: usermod -p '*' root"
  unshare --net --uts --ipc --pid --mount --fork true 2>/dev/null || fail "namespaces may not be made here"
  unshare --net sh -c 'ip link add name br0 type bridge && ip link add name port1 type veth peer name eth0 &&
    tc qdisc add dev port1 root tbf rate 1gbit burst 128kb latency 50ms' 2>/dev/null ||
    fail "this kernel has no bridge, no veth or no tbf"
}

require_rate() { [[ $1 =~ ^[0-9.]+([kmg]?(bit|bps))$ ]] || fail "expected a rate such as 1gbit or 100mbit, got '$1'"; }

networks() { seq 0 $(($(<"$STATE/networks") - 1)); }

shape() {                              # what leaves the host, and what the switch sends to it
  local how=(root tbf rate "$2" burst 128kb latency 50ms) k
  for k in $(networks); do
    network_of "$1" tc qdisc replace dev "eth$k" "${how[@]}"
    switch tc qdisc replace dev "port$1-$k" "${how[@]}"
  done
}

forget_address() {                     # of a host that has come back, in the tables of the others
  local other k
  for other in $(hosts); do
    for k in $(networks); do network_of "$other" ip neigh flush to "$NET.$k.$1" || true; done
  done
}

_host() {                              # the first process of host $1
  local place shared k
  mapfile -t shared <"$STATE/shared"
  hostname "node$1"
  mount --make-rprivate /
  mount -t sysfs sysfs /sys
  mount -t tmpfs none /mnt             # holds what is shared while the private folders cover it
  for k in "${!shared[@]}"; do
    mkdir "/mnt/$k"
    mount --rbind "${shared[k]}" "/mnt/$k"
  done
  for place in "${PRIVATE[@]}"; do mount -t tmpfs -o mode=1777 none "$place"; done
  for k in "${!shared[@]}"; do
    mkdir -p "${shared[k]}"
    mount --rbind "/mnt/$k" "${shared[k]}"
  done
  umount -l /mnt
  # sshd's shells read these at every command; what they start may be slow, and locks of theirs would outlive a host.
  for place in ~root/.bashrc ~root/.zshenv; do [[ ! -e $place ]] || mount --bind /dev/null "$place"; done
  mkdir -m 755 /run/sshd /run/munge
  for place in ssh slurm hosts; do [[ ! -e /etc/$place ]] || mount --bind "$ETC/$place" "/etc/$place"; done
  exec "$(command -v sshd)" -D -f "$ETC/ssh/sshd_config" -E /run/sshd.log
}

child_of() { ID=$(pgrep -P "$1") || ! kill -0 "$1" 2>/dev/null; }
answers() { nsenter -t "$1" -m test -s /run/sshd.log || ! kill -0 "$1" 2>/dev/null; }
runs_sleep() { [[ $(<"/proc/$1/comm") == sleep ]]; }

boot() {
  local i=$1 k first starter ID=
  first=$(recorded "node$i") && fail "host $i is up already, as process $first"
  unplug "$i"                          # connections that nobody has answered keep a dead host's links for minutes
  setsid unshare --net --uts --ipc --pid --mount --fork --mount-proc bash "$SELF" _host "$i" \
    </dev/null &>"$STATE/log$i" &
  starter=$!
  within_limit child_of "$starter" && [[ -n $ID ]] || fail "host $i does not start: $(tail -1 "$STATE/log$i")"
  record "node$i" "$ID"
  disown
  nsenter -t "$ID" -n sh -c "echo ${TCP_RETRIES2:-15} >/proc/sys/net/ipv4/tcp_retries2; ip link set lo up"
  for k in $(networks); do
    switch ip link add "port$i-$k" type veth peer name "eth$k" \
      address "$(printf 02:00:0a:4d:%02x:%02x "$k" "$i")" netns "$ID"
    switch ip link set "port$i-$k" master "br$k" up
    nsenter -t "$ID" -n sh -c "ip addr add $NET.$k.$i/24 dev eth$k; ip link set eth$k up"
  done
  within_limit answers "$ID" && kill -0 "$ID" 2>/dev/null || fail "host $i does not start: $(tail -1 "$STATE/log$i")"
  shape "$i" "$(<"$STATE/rate")"
  forget_address "$i"
}

write_configuration() {
  local i key
  mkdir -p "$ETC/ssh" "$ETC/slurm"
  for key in id host_key; do [[ -f $ETC/ssh/$key ]] || ssh-keygen -qt ed25519 -N '' -f "$ETC/ssh/$key"; done
  printf '%s\n' "HostKey $ETC/ssh/host_key" "AuthorizedKeysFile $ETC/ssh/id.pub" 'StrictModes no' 'UsePAM no' \
    'PasswordAuthentication no' 'PermitRootLogin prohibit-password' 'MaxStartups 100' >"$ETC/ssh/sshd_config"
  printf '%s\n' "IdentityFile $ETC/ssh/id" 'StrictHostKeyChecking no' 'UserKnownHostsFile /dev/null' \
    'LogLevel ERROR' 'BatchMode yes' 'ConnectTimeout 5' >"$ETC/ssh/ssh_config"
  { echo 127.0.0.1 localhost; for i in $(seq "$1"); do echo "$NET.0.$i node$i"; done; } >"$ETC/hosts"
}

up() {
  local n=${1:-} rate=1gbit networks=1 until='' temporary='' shared=("$FOLDER") i
  [[ $n =~ ^[1-9][0-9]?$ ]] || fail "up: how many hosts? expected 1 to 99, got '$n'"
  shift
  while (($#)); do
    case $1:${2:+given} in
      --temporary:*) temporary=1; shift; continue ;;
      --rate:given) rate=$2 ;;
      --networks:given) networks=$2 ;;
      --share:given) shared+=("$(readlink -e "$2")") || fail "up: there is no folder $2" ;;
      --until:given) until=$2 ;;
      *) fail "up: expected --rate R, --networks K, --share FOLDER, --until PID or --temporary, got '$*'" ;;
    esac
    shift 2
  done
  require_rate "$rate"
  [[ $networks =~ ^[1-9]$ ]] || fail "up: expected 1 to 9 networks, got '$networks'"
  check
  if recorded switch >/dev/null; then fail "a cluster is up already in $FOLDER"; fi
  umask 077
  mkdir -p "$STATE"
  rm -f "$STATE"/*
  trap down EXIT                       # of a cluster that does not come up
  printf '%s\n' "${shared[@]}" >"$STATE/shared"
  echo "$rate" >"$STATE/rate"
  echo "$networks" >"$STATE/networks"
  [[ -z $temporary ]] || touch "$STATE/temporary"
  write_configuration "$n"
  setsid unshare --net sleep infinity </dev/null &>/dev/null &
  within_limit runs_sleep $! || fail "the switch does not start"
  record switch $!
  disown
  for i in $(networks); do
    switch ip link add "br$i" type bridge
    switch ip link set "br$i" up
  done
  if [[ -n $until ]]; then
    setsid sh -c 'tail --pid="$1" -f /dev/null; exec bash "$0" down' "$SELF" "$until" </dev/null &>/dev/null &
    record watcher $!
    disown
  fi
  for i in $(seq "$n"); do boot "$i"; done
  trap - EXIT
}

down() {
  local name id
  for name in $(hosts | sed s/^/node/) switch watcher; do
    if id=$(recorded "$name") && ((id != $$)); then
      kill -9 -"$id" "$id" 2>/dev/null || true
      while recorded "$name" >/dev/null; do sleep .01; done
    fi
    rm -f "$STATE/$name"
  done
  [[ ! -f $STATE/temporary ]] || rm -rf "$FOLDER"
  rm -rf "$STATE" "$ETC"
  rmdir --ignore-fail-on-non-empty "$FOLDER" 2>/dev/null || true
}

mpi() {                                # SLOTS CMD...
  local slots=$1 program launcher directory list i rank=0 names=() variables=()
  shift
  program=$(command -v "$1") || fail "mpirun: there is no program $1"
  directory=$(dirname "$program")
  launcher=$(PATH=$directory:$PATH command -v mpiexec.hydra || PATH=$directory:$PATH command -v mpirun) ||
    fail "mpirun: neither beside $program nor on PATH"
  [[ ! -x $directory/mpirun || -x $directory/mpiexec.hydra ]] || launcher=$directory/mpirun
  mapfile -t names < <(hosts)
  IFS=, read -ra list <<<"$slots"
  if ((${#list[@]} == 1)); then for i in "${names[@]}"; do list[i - 1]=$slots; done; fi
  ((${#list[@]} == ${#names[@]})) || fail "mpirun: ${#names[@]} hosts are up, and SLOTS '$slots' names ${#list[@]}"
  for i in "${list[@]}"; do rank=$((rank + i)); done
  export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0
  if [[ $launcher == */mpiexec.hydra ]]; then
    for i in "${!names[@]}"; do ((!list[i])) || echo "node${names[i]}:${list[i]}"; done >"$STATE/machines"
    EXEC=exec on "${names[0]}" "$launcher" -f "$STATE/machines" -iface eth0 -n "$rank" "$@"
  fi
  for i in "${!names[@]}"; do ((!list[i])) || echo "node${names[i]} slots=${list[i]}"; done >"$STATE/machines"
  # Open MPI hands on only its own settings.
  for i in $(compgen -e | grep -E '^(HPCDP_|PYTHON|OPENBLAS_|OMP_|GLOO_)'); do variables+=(-x "$i"); done
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 PMIX_MCA_psec=native
  export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp OMPI_MCA_btl_tcp_if_include=${OMPI_MCA_btl_tcp_if_include:-eth0} OMPI_MCA_osc=^ucx
  # All hosts share this machine's cores: a rank that spins or is bound would keep the others from them.
  export OMPI_MCA_mpi_yield_when_idle=1 PRTE_MCA_hwloc_default_binding_policy=none
  EXEC=exec on "${names[0]}" "$launcher" --hostfile "$STATE/machines" -np "$rank" "${variables[@]}" "$@"
}

slurm() {
  local tool i
  for tool in munged slurmctld slurmd; do
    command -v "$tool" >/dev/null || fail "$tool is not installed (Debian: slurm-wlm munge libpmix2 libpmix-dev)"
  done
  [[ -f $FOLDER/munge.key ]] || (umask 377 && head -c 1024 /dev/urandom >"$FOLDER/munge.key")
  cat >"$ETC/slurm/slurm.conf" <<EOT
ClusterName=hpcdp
SlurmctldHost=node1
SlurmUser=root
AuthInfo=cred_expire=5
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldLogFile=/run/slurmctld.log
SlurmdLogFile=/run/slurmd.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=node[1-$(hosts | tail -1)] CPUs=4 RealMemory=2000
PartitionName=main Nodes=ALL Default=YES
EOT
  echo CgroupPlugin=cgroup/v1 >"$ETC/slurm/cgroup.conf"
  for i in $(hosts); do slurmd "$i"; done
}

slurmd() {
  local folder=/run/munge
  on "$1" munged --key-file="$FOLDER/munge.key" --log-file=$folder/log --pid-file=$folder/pid --seed-file=$folder/seed
  [[ $1 != 1 ]] || on 1 slurmctld -c
  on "$1" slurmd -N "node$1"
}

cables() {                             # of host $1: $2 is up or down
  local k
  host "$1" >/dev/null
  for k in $(networks); do switch ip link set "port$1-$k" "$2"; done
}
unplug() {                             # the links of host $1, for good
  local k
  for k in $(networks); do switch ip link del "port$1-$k" 2>/dev/null || true; done
}
end_host() {                           # returns when all that ran there has ended
  kill -9 "$(host "$1")"
  while recorded "node$1" >/dev/null; do sleep .01; done
  rm "$STATE/node$1"
}

given=("${@:---help}")
command=${1:---help}
(($# == 0)) || shift
case $command:$# in
  --help:* | -h:*) usage ;;
  check:0 | slurm:0 | down:0) "$command" ;;
  up:*) up "$@" ;;
  _host:1 | boot:1 | slurmd:1) "$command" "$1" ;;
  sh:0 | sh:1 | mpirun:0 | mpirun:1) fail "$command: a command is missing; see --help" ;;
  sh:*) EXEC=exec on "$@" ;;
  mpirun:*) mpi "$@" ;;
  rate:2) require_rate "$2"; shape "$1" "$2" ;;
  cut:1) cables "$1" down ;;
  join:1) cables "$1" up; forget_address "$1" ;;
  kill:1) end_host "$1" ;;
  crash:1) host "$1" >/dev/null; unplug "$1"; end_host "$1" ;;
  *) fail "expected a command and what it takes, got '${given[*]}'; see --help" ;;
esac
