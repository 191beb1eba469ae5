"""One process beside two ranks of torchrun, at the same number of environments, and environments alone: steps/s.

    python benchmark/experiments/ranks.py 3                 # three rounds by turns, about ten minutes on two cores

Writes results/ranks.csv.
"""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]
from common import RESULTS, commit, machine, read_events  # noqa: E402

A2C = "a2c_atari.py --no-cuda --total-timesteps 20000 --log-interval 10 --eval-episodes 1"
PPO = "ppo_continuous.py --num-envs 2 --total-timesteps 80000 --checkpoint-interval 1000000 --eval-episodes 1"
PROGRAMS = [  # name, ranks, command
    ("A2C, 16 environments, one process, two threads", 1, f"{A2C} --torch-threads 2 --env-threads 2"),
    ("A2C, 16 environments, two ranks, one thread each", 2, f"{A2C} --torch-threads 1 --env-threads 1"),
    ("PPO, 2 environments, one process, one thread", 1, PPO),
    ("PPO, 2 environments, one process, two threads", 1, f"{PPO} --torch-threads 2"),
    ("PPO, 2 environments, two ranks, one thread each", 2, PPO),
]


ALONE = [  # name, script, class, flags: random actions on one core, without a network
    ("A2C, 16 environments alone, one thread", "a2c_atari", "AtariEnvs", {"env_threads": 1}, 16),
    ("PPO, 1 environment alone", "ppo_continuous", "Environments", {}, 1),
]


def environments_alone(script: str, name: str, flags: dict, num_envs: int, steps: int = 3000) -> float:
    """Steps per second of all environments together."""
    module, rng = importlib.import_module(script), np.random.default_rng(1)
    envs = getattr(module, name)(module.Args(**flags), num_envs, Path())
    envs.reset(0)
    if script == "a2c_atari":
        actions = rng.integers(envs.num_actions, size=(steps, num_envs))
    else:
        actions = rng.standard_normal((steps, num_envs, envs.action_dim))
    started = time.time()
    for each in actions:
        envs.step(each)
    return num_envs * steps / (time.time() - started)


def steps_per_second(ranks: int, command: str) -> float:
    """Of the last three quarters of a run."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        script, *flags = command.split()
        program = [sys.executable, *torchrun, str(ROOT / script), *flags, "--run-folder", "run"]
        subprocess.run(program, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        points = read_events(Path(folder) / "run")
    points = points[points.tag == "charts/SPS"]
    points = points[points.step >= points.step.max() / 4]
    return (points.step.max() - points.step.min()) / (points.seconds.max() - points.seconds.min())


def main() -> None:
    rows = []
    for _ in range(int(sys.argv[1])):
        for name, *environments in ALONE:
            rows.append({"name": name, "steps_per_second": round(environments_alone(*environments))})
            print(rows[-1], flush=True)
        for name, ranks, command in PROGRAMS:
            rows.append({"name": name, "steps_per_second": round(steps_per_second(ranks, command))})
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows).assign(machine=machine(), commit=commit())
    table.to_csv(RESULTS / "ranks.csv", index=False)


if __name__ == "__main__":
    main()
