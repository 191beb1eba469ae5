#!/usr/bin/env bash
# Snakemake's SLURM executor for real: a controller and two nodes on this machine, four short runs, one node killed.
# As root, on Debian, after apt-get install slurm-wlm munge: SNAKEMAKE=~/snakemake/bin/snakemake benchmark/cluster/slurm_test.sh
# All that it writes is in a temporary folder but for /etc/slurm/slurm.conf, and gone at the end. Two or three minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
conf=/etc/slurm/slurm.conf # where Debian's programs look; jobs do not see SLURM_CONF
[ ! -e $conf ] || { echo "error: $conf exists; this would replace it" >&2; exit 1; }
work=$(mktemp -d)
chmod 755 "$work"
mkdir "$work/state" "$work/munge" "$work/node1" "$work/node2"
finish() {
    for file in "$work"/*.pid "$work"/munge/munged.pid; do [ -e "$file" ] && kill "$(cat "$file")" 2> /dev/null || true; done
    sleep 2
    rm -rf "$work" $conf
}
trap finish EXIT
dd if=/dev/urandom of="$work/munge/key" bs=1024 count=1 status=none
chmod 700 "$work/munge" "$work/munge/key"
munged --key-file "$work/munge/key" --socket "$work/munge.socket" --log-file "$work/munge/log" \
    --pid-file "$work/munge/munged.pid" --seed-file "$work/munge/seed" --force
cat > $conf << END
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
StateSaveLocation=$work/state
SlurmctldPidFile=$work/slurmctld.pid
SlurmctldPort=16817
SlurmdSpoolDir=$work/%n
SlurmdPidFile=$work/%n.pid
SlurmdLogFile=$work/%n.log
SlurmdTimeout=10
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MinJobAge=600
NodeName=node1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17001 CPUs=1 RealMemory=8000
NodeName=node2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17002 CPUs=1 RealMemory=8000
PartitionName=main Nodes=node1,node2 Default=YES State=UP
END
slurmctld
slurmd -N node1
slurmd -N node2
until [ "$(sinfo -h -o %T)" = idle ] && [ "$(sinfo -h -o %D)" = 2 ]; do sleep 1; done
sinfo

study() { # folder, further flags: run the study there
    "${SNAKEMAKE:-snakemake}" -s benchmark/Snakefile --configfile benchmark/studies/pendulum.yaml "${@:2}" \
        --config runs="$work/$1" results="$work/$1/results" > "$work/$1.log" 2>&1
}
# no accounting database here, so no sacct; the status is asked for at once
slurm=(--profile benchmark/cluster/slurm --slurm-status-command squeue --slurm-no-account
    --slurm-init-seconds-before-status-checks 5 --slurm-logdir "$work/logs" --latency-wait 5)

study undisturbed -c 2
study disturbed "${slurm[@]}" & engine=$!
until job=$(squeue -h -w node2 -t R -o %i 2> /dev/null | grep -m 1 .); do sleep 0.5; done
until checkpoint=$(find "$work/disturbed" -name 'checkpoint_*[1-9]*.pt' -newer "$work/node2.pid" 2> /dev/null |
    while read -r path; do if pgrep -f -- "^[^ ]*python[^ ]* .*--run-folder $(dirname "$path")( |\$)" > /dev/null; then echo "$path"; fi; done |
    tail -n 1 | grep .); do sleep 0.2; done
squeue -o "%.6i %.10T %.8N"
# a node dies at once: its daemon, and all that it started
descendants() { for child in $(pgrep -P "$1"); do descendants "$child"; done; echo "$1"; }
steps=$(pgrep -f "slurmstepd: \[$job" || true)
for pid in $(cat "$work/node2.pid") $steps; do descendants "$pid"; done | xargs kill -KILL 2> /dev/null || true
echo "killed: node2 with job $job"
until [ "$(sinfo -h -n node2 -o %T)" != "allocated" ]; do sleep 1; done
sinfo
wait $engine
python benchmark/compare.py "$work/undisturbed" "$work/disturbed"
study disturbed "${slurm[@]}"
grep -h "Nothing to be done" "$work/disturbed.log"
