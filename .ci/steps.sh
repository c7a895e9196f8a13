# Sourced by .ci/run: runs make targets one after the other, and lists at the end what failed and what was left out.

begin_by_s=4600 # no step begins later,
end_by_s=5280   # and none runs longer, so that all end within 90 minutes
cpus=$(env -u OMP_NUM_THREADS nproc) # nproc returns OpenMP's number of threads if that is set
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

step() { # step TARGET LIMIT_S [VARIABLE=VALUE...]: make TARGET, record in $logs/failed if it failed, continue
  local target=$1 limit_s=$2 began_s=$SECONDS status shard name
  shift 2
  shard=$(printf '%s\n' "$@" | sed -n 's|^SHARD=\(.*\)/.*|-\1|p')
  name=$target$shard
  if [ "$SECONDS" -gt "$begin_by_s" ]; then
    skip "$name" "$SECONDS s have passed, and no step begins after $begin_by_s s"
    return
  fi
  [ "$limit_s" -le $((end_by_s - SECONDS)) ] || limit_s=$((end_by_s - SECONDS))
  echo
  echo "=== $name"
  timeout --kill-after=30 "$limit_s" make "$target" "$@" </dev/null 2>&1 | tee "$logs/$name"
  status=${PIPESTATUS[0]}
  [ "$status" = 124 ] && echo "$name took more than $limit_s s"
  [ "$status" = 0 ] || echo "$name" >>"$logs/failed"
  echo "=== $name: exit status $status after $((SECONDS - began_s)) s"
}

skip() { # skip NAME REASON
  echo "$1: $2" | tee -a "$logs/skipped"
}

xla_step() { # torch_xla brings torch's CUDA packages, 7 GB, and compiles for minutes: too much for 2 CPUs
  local free_gb
  free_gb=$(df --output=avail -BG . | tail -n 1 | tr -dc 0-9)
  if [ "$cpus" -lt 4 ]; then
    skip test-xla "needs 4 CPUs, but there are $cpus"
  elif [ "$free_gb" -lt 20 ]; then
    skip test-xla "needs 20 GB of free disk, but $free_gb GB are free"
  else
    step test-xla "$1" PYTEST_ARGS="-rs --durations 10"
  fi
}

finish() { # repeat at the end of the log what failed, and why; exit
  local name
  echo
  if [ -s build/durations.json ]; then
    echo "The 25 slowest tests, in seconds (all: build/durations.json):"
    sed -n '2,26p' build/durations.json
  fi
  if [ -s "$logs/failed" ]; then
    while read -r name; do
      echo "=== $name failed:"
      grep -E '^(FAILED|ERROR) |^E  ' "$logs/$name" | cut -c 1-300 | tail -n 40 | grep . || tail -n 20 "$logs/$name"
    done <"$logs/failed"
  fi
  for name in "$logs"/test*; do # pytest's last line; make may have added a line after it
    [ -f "$name" ] && echo "$(basename "$name"): $(grep -E '^=+ .* in [0-9.]+s' "$name" | tail -n 1)"
  done
  echo "Left out: $([ -s "$logs/skipped" ] && cat "$logs/skipped" || echo nothing)"
  grep -hE '^SKIPPED ' "$logs"/* | sed -E 's/^SKIPPED \[[0-9]+\] [^ ]+ /Skipped: /' | sort | uniq -c | sort -rn | head -n 30
  echo "All steps took $SECONDS s on $cpus CPUs. Failed: $([ -s "$logs/failed" ] && tr '\n' ' ' <"$logs/failed" || echo nothing)"
  [ ! -s "$logs/failed" ]
  exit
}
