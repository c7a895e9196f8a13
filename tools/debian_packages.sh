#!/usr/bin/env bash
# Installs what some tests need besides Python, if permitted: a browser, sshd, Slurm. Never fails.
set -uo pipefail

# COMMAND:PACKAGE, where the package contains the command
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
apt-get update -q >"$log" 2>&1
failed=()
for package in "${wanted[@]}"; do    # one by one: Ubuntu has no package chromium-driver, for example
  apt-get install -q -y --no-install-recommends "$package" >>"$log" 2>&1 || failed+=("$package")
done
[ ${#failed[@]} -eq 0 ] || { tail -n 3 "$log"; echo "Could not install ${failed[*]}: the tests that need them are skipped."; }
exit 0
