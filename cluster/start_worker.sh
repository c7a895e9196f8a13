#!/usr/bin/env bash
# Runs on a worker node: starts Ray there and returns when it has joined, or says why it could not.
#
#   [HOROVOD_TUNE_CLOUD=aws|gcp] bash start_worker.sh --address=HEAD:6379 [more of `ray start`]
#
# What it starts is one session, ended as a whole when the head is gone: a plain `ray start` leaves the raylet's
# agents behind then (Ray 2.60). A session of before is ended first. A rented machine whose head is gone for good
# shuts itself down. The output is in ~/.horovod-tune/ray_worker.log.
set -euo pipefail

home=$HOME/.horovod-tune
if [ "${1:-}" = --session ]; then
  shift
  echo $$ > "$home/worker_session"
  for try in 1 2 3; do                          # Ray itself gives a busy machine 30 s to start, once
    if [ -n "${HOROVOD_TUNE_CLOUD:-}" ]; then   # tells Ray when the cloud takes this machine away
      python -m horovod_tune.node.spot_watch --cloud "$HOROVOD_TUNE_CLOUD" --address "$RAY_HEAD_IP:6379" &
    fi
    ray start --block "$@" || echo "start_worker.sh: ray start ended with $?"
    if grep -q 'Ray runtime started' "$home/ray_worker.log"; then break; fi
    for process in $(pgrep -s 0); do [ "$process" = $$ ] || kill -KILL "$process" 2>/dev/null || true; done
    echo "start_worker.sh: try $try of 3 failed"
  done
  rm -f "$home/claim.json"                      # the machine is free again
  if [ -n "${HOROVOD_TUNE_CLOUD:-}" ]; then
    gone=0                                      # half-minutes without a head, which alone could end this machine
    while [ $gone -lt 10 ]; do
      if timeout 5 bash -c "</dev/tcp/$RAY_HEAD_IP/6379" 2>/dev/null; then gone=0; else gone=$((gone + 1)); fi
      [ "$(cat "$home/worker_session")" = $$ ] || exit 0       # Ray was started here again
      sleep 30
    done
    sudo -n shutdown -h now || true
  fi
  trap '' TERM; pkill -TERM -s 0; sleep 3; pkill -KILL -s 0      # this session, this script included
  exit
fi

mkdir -p -m 700 "$home"
if session=$(cat "$home/worker_session" 2>/dev/null) && grep -qs start_worker.sh "/proc/$session/cmdline"; then
  # its claim goes with it, but the machine is this launch's now
  claim=$(cat "$home/claim.json" 2>/dev/null || true)
  pkill -TERM -s "$session" || true
  for _ in $(seq 50); do pgrep -s "$session" >/dev/null || break; sleep 0.2; done
  pkill -KILL -s "$session" || true
  [ -z "$claim" ] || printf '%s\n' "$claim" > "$home/claim.json"
fi
set -a; . "$home/ray.env"; set +a
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)" || true
# The set-up did not get stuck: a rented machine would have shut itself down.
[ -z "${HOROVOD_TUNE_CLOUD:-}" ] || sudo -n shutdown -c 2>/dev/null || true
log=$home/ray_worker.log
: > "$log"
setsid nohup bash "$0" --session "$@" >> "$log" 2>&1 < /dev/null &
session=$!
until grep -q 'Ray runtime started' "$log"; do      # `ray start` itself gives up when it cannot join
  kill -0 "$session" 2>/dev/null && ! grep -q 'try 3 of 3 failed' "$log" ||
    { cat "$log"; echo "start_worker.sh: Ray did not start" >&2; exit 1; }
  sleep 0.2
done
