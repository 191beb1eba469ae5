"""Speed of each script beside its peers at the same hyperparameters, on one machine.

    python benchmark/speed.py --scripts ppo_continuous --repeats 3    # about ten minutes
    JAXMARL=~/JaxMARL python benchmark/speed.py --scripts qmix_smac_3m

The last one needs a clone of github.com/FLAIROx/JaxMARL. A shared machine is fast now and slow
then, so the programs of a round take turns: one runs for four seconds while the others are stopped,
and only the time of its own turns counts. Steady speed is measured from the end of the warm-up to
the end of training, over the same part of the round for all if that is long enough. Wall time is
that of the whole process. Appends to benchmark/results/speed.csv, which tables.py shows.
"""

import argparse
import contextlib
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import psutil
import torch
from common import RESULTS, ROOT, STEPS, read_events, read_table
from provenance import PACKAGES, PEERS, commit, machine, versions

A2C = "a2c_atari.py --no-cuda --eval-episodes 1 --log-interval 10"
A3C = (
    "a3c_atari.py --checkpoint-interval 100000000 --eval-episodes 1 --log-interval 10 --num-workers"
)
DQN = (
    "dqn_per_atari.py --no-cuda --eval-episodes 1 --log-interval 20 --learning-starts 2000 "
    "--buffer-size 20000"
)
PLAIN_DQN = "--no-double --no-dueling --no-prioritized"  # as Stable-Baselines3's
QMIX = "qmix_smac.py --log-interval 1000 --test-interval 10000000 --env-id 3m"
ATARI_PEER = "--env-id BreakoutNoFrameskip-v4 --threads 2"
MINIBATCHES = "--batch-size 32 --updates-per-episode 0.25"
JAXMARL = "benchmark/peers.py jaxmarl_qmix --env-id 3m --updates"


def on_gpu(command: str) -> str:
    """The command without the flag that keeps a script off the GPU."""
    return command.replace("--no-cuda ", "")


PROGRAMS = [  # what is compared, name, command; the ratios of a table are to its first program
    ("ppo_continuous", "Stable-Baselines3 PPO", "benchmark/peers.py sb3_ppo"),
    ("ppo_continuous", "SBX PPO", "benchmark/peers.py sbx_ppo"),
    ("ppo_continuous", "ppo_continuous.py", "ppo_continuous.py"),
    ("ppo_continuous", "ppo_continuous.py --compile", "ppo_continuous.py --compile"),
    ("a2c_atari", "Stable-Baselines3 A2C", f"benchmark/peers.py sb3_a2c {ATARI_PEER}"),
    ("a2c_atari", "a2c_atari.py", A2C),
    ("a2c_atari", "a2c_atari.py --bf16", f"{A2C} --bf16"),
    ("a3c_atari", "PFRL A3C, 2 workers", "benchmark/peers.py pfrl_a3c --workers 2"),
    ("a3c_atari", "a3c_atari.py, 2 workers", f"{A3C} 2"),
    ("a3c_atari", "a3c_atari.py, 8 workers", f"{A3C} 8"),
    ("dqn_per_atari", "Stable-Baselines3 DQN", f"benchmark/peers.py sb3_dqn {ATARI_PEER}"),
    ("dqn_per_atari", "dqn_per_atari.py", DQN),
    ("dqn_per_atari", "dqn_per_atari.py --bf16", f"{DQN} --bf16"),
    ("dqn_per_atari", f"dqn_per_atari.py {PLAIN_DQN}", f"{DQN} {PLAIN_DQN}"),
    ("ppo_continuous_cuda", "Stable-Baselines3 PPO", "benchmark/peers.py sb3_ppo --device cuda"),
    ("ppo_continuous_cuda", "ppo_continuous.py --cuda", "ppo_continuous.py --cuda"),
    (
        "ppo_continuous_cuda",
        "ppo_continuous.py --cuda --compile",
        "ppo_continuous.py --cuda --compile",
    ),
    (
        "a2c_atari_cuda",
        "Stable-Baselines3 A2C",
        f"benchmark/peers.py sb3_a2c --device cuda {ATARI_PEER}",
    ),
    ("a2c_atari_cuda", "a2c_atari.py", on_gpu(A2C)),
    ("a2c_atari_cuda", "a2c_atari.py --bf16", f"{on_gpu(A2C)} --bf16"),
    (
        "dqn_per_atari_cuda",
        "Stable-Baselines3 DQN",
        f"benchmark/peers.py sb3_dqn --device cuda {ATARI_PEER}",
    ),
    ("dqn_per_atari_cuda", "dqn_per_atari.py", on_gpu(DQN)),
    ("dqn_per_atari_cuda", "dqn_per_atari.py --bf16", f"{on_gpu(DQN)} --bf16"),
    # 17 updates: for 68 episodes, as many as 1,024 steps of qmix_smac.py have, with MINIBATCHES
    ("qmix_smac_3m", "JaxMARL QMIX, as many updates", f"{JAXMARL} 17"),
    ("qmix_smac_3m", "JaxMARL QMIX, 8 updates per 1,024 steps", f"{JAXMARL} 8"),
    ("qmix_smac_3m", "qmix_smac.py", QMIX),
    ("qmix_smac_3m", f"qmix_smac.py {MINIBATCHES}", f"{QMIX} {MINIBATCHES}"),
]


NEEDS = {"sb3_": "stable_baselines3", "sbx_": "sbx", "pfrl_": "pfrl"}  # of the peers


def available(command: str) -> bool:
    """Whether what a program needs is there."""
    if JAXMARL in command:
        return "JAXMARL" in os.environ
    return all(find_spec(NEEDS[peer]) is not None for peer in NEEDS if peer in command)


def signal_all(process: subprocess.Popen, signum: int) -> None:
    """Send a signal to a process and to all that it started, and that these started."""
    family = psutil.Process(process.pid)
    family.suspend()  # so that it starts no more of them meanwhile
    for member in [*family.children(recursive=True), family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signum)


def measure(commands: list[str], warmup: int, turn: float = 4.0) -> list[dict]:
    """Run commands by turns of so many seconds, each to its end in an empty folder.

    Returns for each its steady steps per second, wall seconds, and the peak memory in MB of its
    largest process.
    """
    processes, turns, peaks = [], [[] for _ in commands], [0] * len(commands)
    running = list(range(len(commands)))
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root, str(i)) for i in running]
        try:
            for folder, command in zip(folders, commands):
                folder.mkdir()
                path, *flags = command.split()
                program = [sys.executable, str(ROOT / path), *flags]
                with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
                    process = subprocess.Popen(program, cwd=folder, stdout=stdout, stderr=stderr)
                processes.append(process)
                signal_all(processes[-1], signal.SIGSTOP)
            while running:
                for i in list(running):
                    begin, ended = time.time(), 0
                    signal_all(processes[i], signal.SIGCONT)
                    while not ended and time.time() < begin + turn:
                        time.sleep(0.02)
                        ended, status, usage = os.wait4(processes[i].pid, os.WNOHANG)
                    turns[i].append((begin, time.time()))
                    if not ended:
                        signal_all(processes[i], signal.SIGSTOP)
                        continue
                    running.remove(i)
                    peaks[i] = usage.ru_maxrss // 1024
                    processes[i].returncode = os.waitstatus_to_exitcode(status)
                    if processes[i].returncode:
                        errors = (folders[i] / "stderr").read_text()
                        sys.exit(f"error: {commands[i]} failed: {errors}")
        finally:
            for process in processes:
                if process.returncode is None:
                    signal_all(process, signal.SIGKILL)
                    process.wait()
        points = [read_points(folder) for folder in folders]
    begins = [next(clock for step, clock in run if step >= warmup) for run in points]
    ends = [run[-1][1] for run in points]
    if min(ends) - max(begins) >= 5 * turn * len(commands):  # at least five turns of each
        begins, ends = [max(begins)] * len(commands), [min(ends)] * len(commands)
    measured = []
    for run, mine, begin, end, peak in zip(points, turns, begins, ends, peaks):
        steady = [(step, active(mine, clock)) for step, clock in run if begin <= clock <= end]
        (first_step, first), (last_step, last) = steady[0], steady[-1]
        speed, wall = (last_step - first_step) / (last - first), active(mine, mine[-1][1])
        row = {"steps_per_second": round(speed, 1), "wall_seconds": round(wall, 1)}
        measured.append(row | {"peak_mb": peak})
    return measured


def read_points(folder: Path) -> list[tuple[int, float]]:
    """How many steps a program had done, and when, in seconds since the epoch."""
    if runs := list((folder / "runs").glob("*")):
        events = read_events(runs[0])
        return events[events.tag == "charts/SPS"][["step", "seconds"]].values.tolist()
    points = []
    for line in (folder / "stdout").read_text().splitlines():
        if line.startswith("point"):
            _, step, seconds = line.split()
            points.append((int(step), float(seconds)))
    return points


def active(turns: list[tuple[float, float]], clock: float) -> float:
    """Seconds of a program's turns before `clock`."""
    return sum(min(clock, end) - begin for begin, end in turns if begin < clock)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scripts", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument(
        "--steps", type=int, help="of a run, for a trial; nothing is written to results"
    )
    args = parser.parse_args()
    date = datetime.datetime.now().isoformat(
        sep=" ", timespec="minutes"
    )  # marks the rows of one call
    for script in args.scripts:
        if script.endswith("_cuda") and not torch.cuda.is_available():
            print(f"{script} needs a GPU: left out", flush=True)
            continue
        steps = args.steps or STEPS[script]
        programs = {name: command for table, name, command in PROGRAMS if table == script}
        for name in [name for name, command in programs.items() if not available(command)]:
            print(f"{name} is not installed: left out", flush=True)
            del programs[name]
        instructions = torch.backends.cpu.get_cpu_capability()
        if instructions == "AVX2" and not script.endswith(
            "_cuda"
        ):  # bfloat16 is far slower than float32 there
            programs = {
                name: command for name, command in programs.items() if "--bf16" not in command
            }
        commands = [f"{command} --total-timesteps {steps}" for command in programs.values()]
        found = ", ".join(map(" ".join, versions(f"{PACKAGES} {PEERS}").items()))
        where = {"machine": f"{machine()} ({instructions}), {found}", "commit": commit()}
        for repeat in range(args.repeats):
            rows = []
            for name, run in zip(programs, measure(commands, steps // 4)):
                print(f"{repeat + 1}/{args.repeats} {name}: {run}", flush=True)
                rows.append(
                    {"date": date, "script": script, "name": name, "steps": steps} | run | where
                )
            if not args.steps:
                path = RESULTS / "speed.csv"
                pd.concat([read_table(path), pd.DataFrame(rows)]).to_csv(path, index=False)


if __name__ == "__main__":
    main()
