#!/usr/bin/env bash
# Installs what some tests need besides Python, if permitted: a browser, sshd, Slurm. Never fails.
set -uo pipefail

# COMMAND:PACKAGE that has it
commands=(
  "chromium:chromium" "chromedriver:chromium-driver" "sshd:openssh-server" "rsync:rsync" "iptables:iptables" "ip:iproute2" "pgrep:procps"
  "nsenter:util-linux" "slurmctld:slurm-wlm" "munged:munge"
)
wanted=()
for pair in "${commands[@]}"; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null || wanted+=("${pair#*:}")
done
[ ${#wanted[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "Not root, or no apt-get: the tests that need ${wanted[*]} are skipped."
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt-get update -q >"$log" 2>&1 &&
  apt-get install -q -y --no-install-recommends "${wanted[@]}" >>"$log" 2>&1 ||
  { tail -n 3 "$log"; echo "Without ${wanted[*]}: the tests that need them are skipped."; }
exit 0
