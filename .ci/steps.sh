# Sourced by .ci/run: runs make targets one after the other, and tells at the end what failed.

cpus=$(env -u OMP_NUM_THREADS nproc) # nproc counts OpenMP's threads where their number is set
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

step() { # step TARGET LIMIT_S [VARIABLE=VALUE...]: make TARGET, note in $logs/failed whether it failed, go on
  local name=$1 limit_s=$2 began_s=$SECONDS
  shift 2
  echo
  echo "=== $name"
  timeout --kill-after=30 "$limit_s" make "$name" "$@" </dev/null 2>&1 | tee "$logs/$name"
  local status=${PIPESTATUS[0]}
  [ "$status" = 124 ] && echo "$name took more than $limit_s s"
  [ "$status" = 0 ] || echo "$name" >>"$logs/failed"
  echo "=== $name: exit status $status after $((SECONDS - began_s)) s"
}

may_run_xla() { # torch_xla brings torch's CUDA packages, 7 GB, and compiles for minutes: too much for 2 CPUs
  local free_gb
  free_gb=$(df --output=avail -BG . | tail -n 1 | tr -dc 0-9)
  [ "$free_gb" -ge 20 ] && [ "$SECONDS" -le 2400 ] && [ "$cpus" -ge 4 ] && return
  echo "make test-xla did not run: $free_gb GB free (20 wanted), $SECONDS s gone (2400 at most), $cpus CPUs (4 wanted)."
  return 1
}

finish() { # print once more, where a reader of the last page finds it, what failed and how; exit
  local name
  echo
  if [ -s "$logs/failed" ]; then
    while read -r name; do
      echo "=== $name failed:"
      grep -E '^(FAILED|ERROR) |^E  ' "$logs/$name" | cut -c 1-300 | tail -n 40 | grep . || tail -n 20 "$logs/$name"
    done <"$logs/failed"
  fi
  echo "All of it took $SECONDS s on $cpus CPUs. Failed: $([ -s "$logs/failed" ] && tr '\n' ' ' <"$logs/failed" || echo nothing)"
  for name in test-xla test-hosts examples test; do # pytest's last line; make may have added one of its own
    [ -f "$logs/$name" ] && grep -E '^=+ .* in [0-9.]+s' "$logs/$name" | tail -n 1
  done
  echo "Modules of long tests that there was no time for: $(cat "$logs"/* | grep -cE '^SKIPPED .* left out: ')"
  [ ! -s "$logs/failed" ]
  exit
}
