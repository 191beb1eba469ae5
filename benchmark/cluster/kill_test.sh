#!/usr/bin/env bash
# Four short runs by Snakemake, twice, the second time with a run and then the engine killed: the same to the bit?
# Needs snakemake (or SNAKEMAKE=/path/to/it), and a minute or two.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

study() { # folder: run the study there
    exec "${SNAKEMAKE:-snakemake}" -s benchmark/Snakefile --configfile benchmark/studies/pendulum.yaml -c 2 \
        --config runs="$work/$1" results="$work/$1/results" > "$work/$1.log" 2>&1
}
kill_a_run() { # folder: kill the first run that has a checkpoint
    until checkpoint=$(find "$work/$1" -name 'checkpoint_*[1-9]*.pt' 2> /dev/null | grep -m 1 .); do sleep 0.1; done
    run=$(dirname "$checkpoint")
    echo "killed: $(basename "$(dirname "$run")")/$(basename "$run") after $(basename "$checkpoint")"
    pkill -KILL -f "^[^ ]*python[^ ]* .*--run-folder $run( |\$)"
}
(study undisturbed)
(study disturbed) & engine=$!
kill_a_run disturbed
sleep 3
kill -KILL $engine && wait $engine 2> /dev/null || true
echo "killed: the engine; of the runs that it started $(pgrep -cf "^[^ ]*python.* --run-folder $work" || true) go on"
(study disturbed)
python benchmark/compare.py "$work/undisturbed" "$work/disturbed"
(study disturbed)
grep -h "Nothing to be done" "$work/disturbed.log"
