#!/usr/bin/env bash
# Runs on a worker node: starts Ray there and returns when it has joined, or fails with Ray's output.
#
#   [RENTED=yes] bash start_worker.sh --address=HEAD:6379 [more options of `ray start`]
#
# Ray runs in one session (setsid), which ends as a whole when the head is gone: a plain `ray start` would leave the
# raylet's agents behind (Ray 2.60). An earlier session is ended first. A rented machine whose head has been gone for
# five minutes shuts itself down. The output is in ~/.horovod-tune/ray_worker.log.
set -euo pipefail

home=$HOME/.horovod-tune
if [ "${1:-}" = --session ]; then
  shift
  echo $$ > "$home/worker_session"
  for try in 1 2 3; do                          # Ray itself tries once, for 30 s: not enough on a busy machine
    ray start --block "$@" || echo "start_worker.sh: ray start ended with $?"
    if grep -q 'Ray runtime started' "$home/ray_worker.log"; then break; fi
    for process in $(pgrep -s 0); do [ "$process" = $$ ] || kill -KILL "$process" 2>/dev/null || true; done
    echo "start_worker.sh: try $try of 3 failed"
  done
  if [ -n "${RENTED:-}" ]; then
    gone=0                                      # half-minutes without a head
    while [ $gone -lt 10 ]; do
      if timeout 5 bash -c "</dev/tcp/$RAY_HEAD_IP/6379" 2>/dev/null; then gone=0; else gone=$((gone + 1)); fi
      [ "$(cat "$home/worker_session")" = $$ ] || exit 0       # this script has started Ray here again
      sleep 30
    done
    sudo -n shutdown -h now || true
  fi
  trap '' TERM; pkill -TERM -s 0; sleep 3; pkill -KILL -s 0      # this session, this script included
  exit
fi

mkdir -p -m 700 "$home"
if session=$(cat "$home/worker_session" 2>/dev/null) && grep -qs start_worker.sh "/proc/$session/cmdline"; then
  pkill -TERM -s "$session" || true
  for _ in $(seq 50); do pgrep -s "$session" >/dev/null || break; sleep 0.2; done
  pkill -KILL -s "$session" || true
fi
set -a; . "$home/ray.env"; set +a
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)" || true
log=$home/ray_worker.log
: > "$log"
setsid nohup bash "$0" --session "$@" >> "$log" 2>&1 < /dev/null &
session=$!
until grep -q 'Ray runtime started' "$log"; do      # `ray start` itself gives up when it cannot join
  kill -0 "$session" 2>/dev/null && ! grep -q 'try 3 of 3 failed' "$log" ||
    { cat "$log"; echo "start_worker.sh: Ray did not start" >&2; exit 1; }
  sleep 0.2
done
