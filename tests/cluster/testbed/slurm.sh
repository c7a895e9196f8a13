#!/usr/bin/env bash
# slurm.sh - a real multi-node Slurm (slurmctld + one slurmd per host) on hosts.sh hosts.
#   slurm.sh up N [CPUS]    n1 = controller + login node; n1..nN are compute nodes with CPUS (default 2) each
#   slurm.sh sh CMD…        run CMD on the login node (n1) in /shared
#   slurm.sh down
# Needs: apt-get install slurm-wlm munge openssh-server iproute2 iptables. No systemd, no cgroups.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")"); NC=$here/hosts.sh
case "${1:-}" in
up)
  n=${2:?nodes}; cpus=${3:-2}
  "$NC" up "$n"
  key=$(head -c 1024 /dev/urandom | base64 -w0)
  for i in $(seq 1 "$n"); do
    "$NC" exec "n$i" bash -c "
      set -e
      echo '$key' | base64 -d > /etc/munge/munge.key; chown munge: /etc/munge/munge.key; chmod 400 /etc/munge/munge.key
      mkdir -p -m 755 /run/munge; chown munge: /run/munge; mkdir -p /var/log/munge /var/lib/munge; chown munge: /var/log/munge /var/lib/munge
      # munged refuses group/world-writable parents of its directories
      su -s /bin/sh munge -c '/usr/sbin/munged --force' </dev/null >/dev/null 2>&1
      mkdir -p /etc/slurm /var/spool/slurmd /var/spool/slurmctld /var/log/slurm
      cat > /etc/slurm/slurm.conf <<S
ClusterName=nc
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SlurmctldTimeout=60
SlurmdTimeout=60
MessageTimeout=30
BatchStartTimeout=60
KillWait=5
InactiveLimit=0
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
NodeName=n[1-$n] CPUs=$cpus Boards=1 SocketsPerBoard=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP
S
      echo 'CgroupPlugin=cgroup/v1' > /etc/slurm/cgroup.conf"
  done
  "$NC" exec n1 bash -c '/usr/sbin/slurmctld </dev/null >/dev/null 2>&1'
  for i in $(seq 1 "$n"); do "$NC" exec "n$i" bash -c '/usr/sbin/slurmd </dev/null >/dev/null 2>&1'; done
  for _ in $(seq 300); do
    [ "$("$NC" exec n1 sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$n" ] && exit 0; sleep 0.2
  done
  "$NC" exec n1 bash -c 'sinfo -N -l; tail -n 20 /var/log/slurm/slurmctld.log /var/log/slurm/slurmd.log' >&2; exit 1 ;;
sh) shift; exec "$NC" exec n1 bash -lc "cd /shared; $*" ;;
down) exec "$NC" down ;;
*) sed -n '2,7p' "$0"; exit 2 ;;
esac
