#!/usr/bin/env bash
# Runs on a worker node: starts Ray there and returns when it has joined, or says why it could not.
#
#   [HOROVOD_TUNE_CLOUD=aws|gcp] bash start_worker.sh --address=HEAD:6379 [more of `ray start`]
#
# What it starts is one session, ended as a whole when the head is gone: a plain `ray start` leaves the raylet's
# agents behind then (Ray 2.60). The output is in ~/.horovod-tune/ray_worker.log.
set -euo pipefail

if [ "${1:-}" = --session ]; then
  shift
  if [ -n "${HOROVOD_TUNE_CLOUD:-}" ]; then     # tells Ray when the cloud takes this machine away
    python -m horovod_tune.node.spot_watch --cloud "$HOROVOD_TUNE_CLOUD" --address "$RAY_HEAD_IP:6379" &
  fi
  ray start --block "$@" || echo "start_worker.sh: ray start ended with $?"
  trap '' TERM; pkill -TERM -s 0; sleep 3; pkill -KILL -s 0      # this session, this script included
  exit
fi

set -a; . ~/.horovod-tune/ray.env; set +a
ulimit -n 65536 2>/dev/null || true
log=$HOME/.horovod-tune/ray_worker.log
: > "$log"
setsid nohup bash "$0" --session "$@" >> "$log" 2>&1 < /dev/null &
session=$!
until grep -q 'Ray runtime started' "$log"; do      # `ray start` itself gives up when it cannot join
  kill -0 "$session" 2>/dev/null && ! grep -q 'ray start ended' "$log" ||
    { cat "$log"; echo "start_worker.sh: Ray did not start" >&2; exit 1; }
  sleep 0.2
done
