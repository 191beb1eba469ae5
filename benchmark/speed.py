"""Speed of each script beside a peer at the same hyperparameters, as whole processes, in turn on one machine.

    python benchmark/speed.py --scripts ppo_continuous            # the table of README, about 15 minutes
    python benchmark/speed.py --scripts ppo_continuous --full     # whole runs of 1M steps: about half an hour

Steady speed is measured from the end of the warm-up to the end of training, by the time stamps of the TensorBoard
points (ours) or by what peers.py prints; wall time is the whole process's. A machine that others use too is fast now
and slow then: so the programs of a round run by turns, one for four seconds while the others are stopped, and only the
time of one's own turns counts. Where that is long enough, speed is measured over the same part of the round for all:
past every warm-up and before the first program ends. Prints a table and appends to benchmark/results/speed.csv.
"""

import argparse
import csv
import datetime
import importlib.metadata
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import git
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmark" / "results" / "speed.csv"

A3C = "a3c_atari.py --num-workers {workers} --eval-interval 100000000 --eval-episodes 1 --log-interval 10 "
A3C += "--total-timesteps {{steps}}"
DQN = (  # from 2,000 transitions on, as the peers do; a small replay, since only speed counts
    "dqn_per_atari.py --no-cuda --eval-episodes 1 --log-interval 5 "
    "--learning-starts 2000 --buffer-size 20000 --total-timesteps {steps}"
)

# script: (agent steps of a run, of its warm-up, of a whole run, {name: command; the first is the peer of the ratios})
ROWS = {
    "ppo_continuous": (
        102_400,
        20_480,
        1_000_000,
        {
            "Stable-Baselines3 PPO": "benchmark/peers.py sb3_ppo --steps {steps}",
            "ppo_continuous.py": "ppo_continuous.py --total-timesteps {steps}",
            "ppo_continuous.py --compile": "ppo_continuous.py --total-timesteps {steps} --compile",
        },
    ),
    "a2c_atari": (
        40_000,
        8_000,
        1_000_000,
        {
            "Stable-Baselines3 A2C": "benchmark/peers.py sb3_a2c --threads 2 --steps {steps}",
            "a2c_atari.py": "a2c_atari.py --no-cuda --eval-episodes 1 --log-interval 10 --total-timesteps {steps}",
            "a2c_atari.py --bf16 --compile": "a2c_atari.py --no-cuda --eval-episodes 1 --log-interval 10 "
            "--bf16 --compile --total-timesteps {steps}",
        },
    ),
    "a3c_atari": (
        40_000,
        8_000,
        1_000_000,
        {
            "plain version, 2 workers": "benchmark/peers.py plain_a3c --workers 2 --steps {steps}",
            "PFRL A3C, 2 workers": "benchmark/peers.py pfrl_a3c --workers 2 --steps {steps}",
            "a3c_atari.py, 2 workers": A3C.format(workers=2),
            "a3c_atari.py, 8 workers": A3C.format(workers=8),
        },
    ),
    "dqn_per_atari": (  # the warm-up goes on until Adam's averages of dead units fade below 1e-38, which slows a CPU
        24_000,
        6_000,
        100_000,
        {
            "Stable-Baselines3 DQN": "benchmark/peers.py sb3_dqn --threads 2 --steps {steps}",
            "Tianshou DQN with PER": "benchmark/peers.py tianshou_dqn --threads 2 --steps {steps}",
            "PFRL DQN with PER": "benchmark/peers.py pfrl_dqn --threads 2 --steps {steps}",
            "dqn_per_atari.py": DQN,
            "dqn_per_atari.py --compile": DQN + " --compile",
            "dqn_per_atari.py --bf16": DQN + " --bf16",
            "dqn_per_atari.py --bf16 --compile": DQN + " --bf16 --compile",
        },
    ),
}
for _map in ("3m", "2s3z"):
    ROWS[f"qmix_smac_{_map}"] = (
        30_000,
        6_000,
        1_000_000,
        {
            "QMIX as in PyMARL": f"benchmark/peers.py plain_qmix_{_map} --steps {{steps}}",
            "qmix_smac.py": f"qmix_smac.py --env-id {_map} --log-interval 1000 --test-interval 10000000 "
            "--total-timesteps {steps}",
        },
    )
    ROWS[f"qmix_updates_{_map}"] = (  # steps are updates, at the sizes of the real SMAC
        200,
        20,
        2_000,
        {
            "update as in PyMARL": f"benchmark/peers.py plain_qmix_updates_{_map} --steps {{steps}}",
            "update of qmix_smac.py": f"benchmark/peers.py qmix_updates_{_map} --steps {{steps}}",
        },
    )


def measure(commands: list[str], warmup: int, turn: float = 4.0) -> list[dict]:
    """Run commands by turns of so many seconds, each to its end in an empty folder.

    Returns for each its steady steps per second, its wall seconds and the peak memory in MB of its largest process.
    """
    processes, turns, peaks = [], [[] for _ in commands], [0] * len(commands)
    running = list(range(len(commands)))
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root, str(i)) for i in running]
        try:
            for folder, command in zip(folders, commands):
                folder.mkdir()
                script, *arguments = command.split()
                with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
                    program = [sys.executable, str(ROOT / script), *arguments]
                    options = {"cwd": folder, "stdout": stdout, "stderr": stderr, "start_new_session": True}
                    processes.append(subprocess.Popen(program, **options))
                os.killpg(processes[-1].pid, signal.SIGSTOP)  # and its workers, here and below
            while running:
                for i in list(running):
                    begin, ended = time.time(), 0
                    os.killpg(processes[i].pid, signal.SIGCONT)
                    while not ended and time.time() < begin + turn:
                        time.sleep(0.02)
                        ended, status, usage = os.wait4(processes[i].pid, os.WNOHANG)
                    turns[i].append((begin, time.time()))
                    if not ended:
                        os.killpg(processes[i].pid, signal.SIGSTOP)
                        continue
                    running.remove(i)
                    peaks[i], processes[i].returncode = usage.ru_maxrss // 1024, os.waitstatus_to_exitcode(status)
                    if processes[i].returncode:
                        sys.exit(f"error: {commands[i]} failed: {(folders[i] / 'stderr').read_text()}")
        finally:
            for process in processes:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        points = [read_points(folder) for folder in folders]
    begins = [next(clock for step, clock in each if step >= warmup) for each in points]
    ends = [each[-1][1] for each in points]
    if min(ends) - max(begins) >= 5 * turn * len(commands):  # at least five turns of each
        begins, ends = [max(begins)] * len(commands), [min(ends)] * len(commands)
    measured = []
    for each, mine, begin, end, peak in zip(points, turns, begins, ends, peaks):
        (first_step, first), *_, (last_step, last) = [(s, active(mine, t)) for s, t in each if begin <= t <= end]
        speed, wall = (last_step - first_step) / (last - first), active(mine, mine[-1][1])
        measured.append({"steps_per_second": round(speed, 1), "wall_seconds": round(wall, 1), "peak_mb": peak})
    return measured


def read_points(folder: Path) -> list[tuple[int, float]]:
    """How many steps a program had done, and when, in seconds since the epoch."""
    if runs := list((folder / "runs").glob("*")):
        events = EventAccumulator(str(runs[0]), size_guidance={"scalars": 0}).Reload().Scalars("charts/SPS")
        return [(event.step, event.wall_time) for event in events]
    lines = [line.split() for line in (folder / "stdout").read_text().splitlines() if line.startswith("point")]
    return [(int(step), float(seconds)) for _, step, seconds in lines]


def active(turns: list[tuple[float, float]], clock: float) -> float:
    """Seconds of a program's turns before `clock`."""
    return sum(min(clock, end) - begin for begin, end in turns if begin < clock)


def machine() -> str:
    """Processor, cores and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    packages = ("torch", "gymnasium", "mujoco", "ale-py", "jaxmarl", "stable-baselines3", "tianshou", "pfrl")
    installed = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in packages if name in installed)
    return f"{os.cpu_count()} cores of {cpu}, Python {platform.python_version()}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int, help="rounds, 5 unless told")
    parser.add_argument(
        "--programs", nargs="+", help="names, or words of names: only these programs (the first is the peer)"
    )
    parser.add_argument("--full", action="store_true", help="whole runs, once each unless --repeats is given")
    args = parser.parse_args()
    repeats = (1 if args.full else 5) if args.repeats is None else args.repeats
    words = args.programs or [""]

    def wanted(name: str) -> bool:
        return any(name == word if any(word in row[3] for row in ROWS.values()) else word in name for word in words)

    if repeats < 1:
        parser.error("--repeats must be at least 1")
    for script in args.scripts:
        if not any(map(wanted, ROWS[script][3])):
            parser.error(
                f"no program of {script} has one of these words in its name; there are {list(ROWS[script][3])}"
            )
    date = datetime.datetime.now().isoformat(sep=" ", timespec="minutes")  # marks the runs of one table
    commit = git("rev-parse", "--short=10", "HEAD") + ("-changed" if git("status", "--porcelain", "*.py") else "")
    print(machine(), commit)
    for script in args.scripts:
        steps, warmup, whole, commands = ROWS[script]
        commands = {name: command for name, command in commands.items() if wanted(name)}
        steps = whole if args.full else steps
        runs = {name: [] for name in commands}
        for repeat in range(repeats):
            measured = measure([command.format(steps=steps) for command in commands.values()], warmup)
            for name, run in zip(commands, measured):
                runs[name].append(run)
                print(f"  {repeat + 1}/{repeats} {name}: {run}", file=sys.stderr, flush=True)
                row = {"date": date, "script": script, "name": name, "steps": steps, **run}
                write_header = not RESULTS.exists()
                RESULTS.parent.mkdir(exist_ok=True)
                with open(RESULTS, "a", newline="") as file:
                    writer = csv.DictWriter(file, [*row, "machine", "commit"])
                    if write_header:
                        writer.writeheader()
                    writer.writerow(row | {"machine": machine(), "commit": commit})
        peer = next(iter(runs.values()))
        print(f"\n{script}: medians of {repeats} rounds of {steps:,} agent steps, by turns\n")
        print("| program | steps/s | ratio (min to max) | wall s | wall ratio | peak MB |\n|---|---|---|---|---|---|")
        for name, mine in runs.items():
            median = {key: statistics.median(run[key] for run in mine) for key in mine[0]}
            ratios = [m["steps_per_second"] / p["steps_per_second"] for m, p in zip(mine, peer)]
            walls = [m["wall_seconds"] / p["wall_seconds"] for m, p in zip(mine, peer)]
            print(
                f"| {name} | {median['steps_per_second']:,.0f} | {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}) | {median['wall_seconds']:.0f} | "
                f"{statistics.median(walls):.2f} | {median['peak_mb']:,.0f} |"
            )


if __name__ == "__main__":
    main()
