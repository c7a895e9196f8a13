#!/usr/bin/env bash
# hosts.sh - N throw-away "hosts" with real sshd on one Debian machine.
#
#   hosts.sh up N            start an isolated lab: 1 "laptop" + hosts n1..nN
#   hosts.sh exec HOST CMD…  run CMD in host n1..nN, or in "laptop"
#   hosts.sh cut HOST [down|drop|local]   unplug: switch port down (default) / silent packet loss /
#                                    `ip link set eth0 down` inside the host
#   hosts.sh heal HOST       plug back in
#   hosts.sh off HOST        pull the power cord (SIGKILL of the host's PID 1)
#   hosts.sh down            remove everything
#
# Hosts are reached by name (n1…), from the laptop as root with ~/.ssh/id_nc; /shared is common to all.
# Every host has its own network, PID, mount, UTS and IPC namespace, an overlay copy of / on tmpfs
# (writes vanish), its own /tmp, /dev/shm, ~/.ssh, ~/.ray and an sshd. All of them, and the bridge,
# live below ONE outer PID+network namespace that has no route to the machine's own network: killing
# its init removes every process, mount, veth and bridge at once. Needs root + openssh-server, iproute2,
# iptables, util-linux.
#
# Settings (environment of `up`): NC_STATE (a folder of its own under the temporary directory)  NC_NET=10.77.0  NC_FIRST=11 (n1 is .11)  NC_NICS=1 (2: second, also routable,
# NIC eth1 on $NC_NET2)  NC_DECOY=0 (1: a docker0-like bridge with the SAME address on every host)
# NC_BIND=""  (live read-only view of these paths: venv, repository)  NC_PATH (prepended to PATH on login)
# Of the machine's ~ the hosts see nothing but what NC_BIND names.
set -euo pipefail
NC_STATE=${NC_STATE:-${TMPDIR:-/tmp}/horovod-tune-lab}
NC_NET=${NC_NET:-10.77.0} NC_NET2=${NC_NET2:-10.88.0}
NC_FIRST=${NC_FIRST:-11} NC_NICS=${NC_NICS:-1} NC_DECOY=${NC_DECOY:-0}
NC_BIND=${NC_BIND:-} NC_PATH=${NC_PATH:-}
NC_TMPFS=${NC_TMPFS:-4g}
export NC_STATE NC_NET NC_NET2 NC_FIRST NC_NICS NC_DECOY NC_BIND NC_PATH NC_TMPFS
SELF=$(readlink -f "$0")

die() { echo "hosts.sh: $*" >&2; exit 1; }
within() {  # SECONDS COMMAND…: repeat the command until it succeeds, or say that it did not in time
  local end=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || { echo "hosts.sh: not in time: $*" >&2; return 1; }
    sleep 0.05
  done
}
lab_pid() { cat "$NC_STATE/lab.pid" 2>/dev/null; }
alive() { [ -n "${1:-}" ] && [ -d "/proc/$1/ns" ]; }
in_lab() { nsenter -t "$(lab_pid)" -n -m -p -- "$@"; }     # inside the outer ns: PIDs are lab-relative

# --- private root: overlay of / on tmpfs, own /tmp /proc /sys /dev/shm /run; then pivot_root ----------
fresh_root() {  # $1 = name
  mount --make-rprivate /
  local r=/mnt b t; mount -t tmpfs -o "size=$NC_TMPFS" "nc-$1" $r
  mkdir $r/u $r/w $r/m $r/t
  mount -t overlay overlay -o "lowerdir=/,upperdir=$r/u,workdir=$r/w" $r/m
  chmod 1777 $r/t
  mkdir -m 700 $r/h                         # a bare HOME: no dotfiles, no credentials of this machine
  for b in $NC_BIND; do                     # live read-only view (an overlay's view of a changing lower dir goes stale)
    case $b in /tmp/*) t=$r/t/${b#/tmp/} ;; /root/*) t=$r/h/${b#/root/} ;; *) t=$r/m$b ;; esac
    mkdir -p "$t"; mount --bind "$b" "$t"; mount -o remount,bind,ro "$t"
  done
  mount --rbind $r/t $r/m/tmp
  mount --rbind $r/h $r/m/root
  mkdir -p $r/m/shared                      # one directory that all hosts share, like NFS (RAM, gone at `down`)
  if [ "$1" = laptop ]; then mount -t tmpfs -o size=2g shared $r/m/shared; else mount --rbind /shared $r/m/shared; fi
  mount -t proc proc $r/m/proc
  mount -t sysfs sysfs $r/m/sys
  mkdir -p $r/m/sys/fs/cgroup; mount --rbind /sys/fs/cgroup $r/m/sys/fs/cgroup 2>/dev/null || true
  mount --rbind /dev $r/m/dev
  mount -t tmpfs -o size=100% shm $r/m/dev/shm
  mount -t tmpfs run $r/m/run; mkdir -p $r/m/run/sshd
  mkdir -p $r/m/mnt/.old; cd $r/m; pivot_root . mnt/.old; cd /
  hash -r
}

hosts_file() { local i; echo "127.0.0.1 localhost"; echo "$NC_NET.1 laptop"
  for i in $(seq 1 "$1"); do echo "$NC_NET.$((NC_FIRST-1+i)) n$i"; done; }

common_home() {  # files every host gets
  mkdir -p -m 700 /root/.ssh
  (umask 077; printf '%s\n' "$NC_KEY" > /root/.ssh/id_nc; printf '%s\n' "$NC_PUB" > /root/.ssh/authorized_keys)
  hosts_file "$NC_N" > /etc/hosts
  echo "export PATH=${NC_PATH:+$NC_PATH:}\$PATH RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0" > /root/.bashrc
  echo '. ~/.bashrc' > /root/.profile
}

host_init() {  # PID 1 of host $1, in new net/mount/pid/uts/ipc namespaces
  local n=$1
  hostname "$n"; fresh_root "$n"; umount -l /mnt/.old
  common_home
  ip link set lo up
  within 60 ip link show eth0
  ip addr add "$NC_NET.$((NC_FIRST-1+${n#n}))/24" dev eth0; ip link set eth0 up
  if [ "$NC_NICS" = 2 ]; then
    within 60 ip link show eth1
    ip addr add "$NC_NET2.$((NC_FIRST-1+${n#n}))/24" dev eth1; ip link set eth1 up
  fi
  if [ "$NC_DECOY" = 1 ]; then ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up; fi
  ip route add default via "$NC_NET.1" 2>/dev/null || true    # Ray finds its own IP by a UDP connect(); laptop forwards nothing
  rm -f /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
  cat > /etc/ssh/nc_sshd <<S
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
PrintMotd no
StrictModes no
MaxStartups 200
PidFile none
S
  exec /usr/sbin/sshd -D -e -f /etc/ssh/nc_sshd     # as PID 1 it also reaps orphans
}

lab_init() {  # PID 1 of the lab (the "laptop")
  local n=$1 i p nic
  mount --make-rprivate /; mount -t proc proc /proc; hostname laptop
  fresh_root laptop; umount -l /mnt/.old
  export NC_N=$n; common_home
  mkdir -p "$NC_STATE"      # copy-on-write view of the state directory
  ip link set lo up
  for nic in $(seq 0 $((NC_NICS-1))); do ip link add br$nic type bridge; ip link set br$nic up; done
  ip addr add "$NC_NET.1/24" dev br0
  [ "$NC_NICS" = 2 ] && ip addr add "$NC_NET2.1/24" dev br1
  mkdir -p /run/nc
  for i in $(seq 1 "$n"); do
    unshare -n -m -u -i -p -f --kill-child -- "$SELF" _host "n$i" >/run/nc/n$i.log 2>&1 </dev/null &
    within 60 pgrep -P $!; p=$(pgrep -P $!)
    echo "$p" > /run/nc/n$i.pid
    for nic in $(seq 0 $((NC_NICS-1))); do
      ip link add "v$i.$nic" type veth peer name eth$nic netns "$p"
      ip link set "v$i.$nic" master br$nic up
    done
  done
  for i in $(seq 1 "$n"); do
    within 60 bash -c "</dev/tcp/$NC_NET.$((NC_FIRST-1+i))/22"
  done
  touch /run/nc/ready
  while :; do sleep 3600 & wait $!; done          # bash as PID 1 reaps children
}

case "${1:-}" in
_host) host_init "$2" ;;
_lab) lab_init "$2" ;;
up)
  n=${2:?hosts}; [ "$(id -u)" = 0 ] || die "needs root"
  alive "$(lab_pid)" && die "already up ($NC_STATE)"
  mkdir -p "$NC_STATE"; [ -f "$NC_STATE/id" ] || ssh-keygen -q -t ed25519 -N '' -C nc -f "$NC_STATE/id"
  NC_KEY=$(cat "$NC_STATE/id") NC_PUB=$(cat "$NC_STATE/id.pub"); export NC_KEY NC_PUB   # the state directory is not visible in the hosts
  setsid unshare -n -m -u -i -p -f --kill-child -- "$SELF" _lab "$n" >"$NC_STATE/lab.log" 2>&1 </dev/null &
  o=$!; echo $o > "$NC_STATE/outer.pid"
  within 60 pgrep -P $o; p=$(pgrep -P $o)
  echo "$p" > "$NC_STATE/lab.pid"; echo "$n" > "$NC_STATE/n"
  ready() { ! alive "$p" || in_lab test -e /run/nc/ready; }      # or dead
  within 120 ready || { cat "$NC_STATE/lab.log" >&2; die "not ready"; }
  alive "$p" || { cat "$NC_STATE/lab.log" >&2; die "lab died"; }
  ;;
exec)
  h=$2; shift 2; alive "$(lab_pid)" || die "not up"
  if [ "$h" = laptop ]; then exec nsenter -t "$(lab_pid)" -n -m -u -i -p -- env HOME=/root "$@"; fi
  lp=$(in_lab cat "/run/nc/$h.pid")
  exec nsenter -t "$(lab_pid)" -n -m -p -- nsenter -t "$lp" -n -m -u -i -p -- env HOME=/root "$@"
  ;;
cut)
  h=$2; i=${h#n}
  case "${3:-down}" in
    down) for v in $(in_lab ls /sys/class/net | grep "^v$i\."); do in_lab ip link set "$v" down; done ;;
    drop) "$0" exec "$h" iptables -I INPUT ! -i lo -j DROP; "$0" exec "$h" iptables -I OUTPUT ! -o lo -j DROP ;;
    local) "$0" exec "$h" ip link set eth0 down ;;
  esac ;;
heal)
  h=$2; i=${h#n}
  for v in $(in_lab ls /sys/class/net | grep "^v$i\."); do in_lab ip link set "$v" up; done
  "$0" exec "$h" iptables -F; "$0" exec "$h" ip link set eth0 up ;;
off) in_lab sh -c "kill -9 \$(cat /run/nc/$2.pid)" ;;
down)
  p=$(lab_pid || true)
  if alive "$p"; then kill -9 "$p"; gone() { ! alive "$p"; }; within 60 gone; fi
  rm -rf "$NC_STATE" ;;
*) sed -n '2,26p' "$SELF"; exit 2 ;;
esac
