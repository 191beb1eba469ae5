"""The same trained policies evaluated with the statistics they were trained with, frozen, and with fresh, moving ones.

    python benchmark/frozen_or_fresh.py RUNS_FOLDER    # the folder that was given to run.py as --runs-folder

Fresh statistics are what an evaluation has that loads the parameters alone and normalises by what it sees. Both play
the mean action on the same episodes. Writes results/frozen_or_fresh.csv, a row for each finished run of ppo_continuous;
rows of other runs stay.
"""

import argparse
import csv
import json
import shlex
import sys
from pathlib import Path

import numpy as np
from run import ROOT, read_csv

sys.path.insert(0, str(ROOT))
import ppo_continuous as ppo

EPISODES = 10


def play(model: dict, fresh: bool) -> np.ndarray:
    """The returns of some episodes of the mean action."""
    env = ppo.make_env(model["args"]["env_id"])
    low, high = env.action_space.low, env.action_space.high
    agent, obs_stats = (
        ppo.Agent(len(env.observation_space.low), len(low)),
        ppo.RunningMeanStd(env.observation_space.shape),
    )
    agent.load_state_dict(model["agent"])
    if not fresh:
        obs_stats.load_state_dict(model["obs_stats"])
    mean_action, returns = agent.numpy_actor(), np.zeros(EPISODES)
    for i, seed in enumerate(ppo.reset_seeds(model["args"]["seed"], 0, 1, num=EPISODES)):
        obs, _ = env.reset(seed=seed)
        over = False
        while not over:
            if fresh:
                obs_stats.update(obs[None])
            obs, reward, terminated, truncated, _ = env.step(mean_action(obs_stats.normalise(obs)).clip(low, high))
            returns[i] += reward
            over = terminated or truncated
    env.close()
    return returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs_folder", type=Path)
    runs_folder = parser.parse_args().runs_folder
    table, found = ROOT / "benchmark" / "results" / "frozen_or_fresh.csv", False
    rows = {(row["env_id"], row["variant"], row["seed"]): list(row.values()) for row in read_csv(table)}
    for path in sorted(runs_folder.glob("ppo_continuous/*/runs/*/model.pt")):
        model = ppo.read_checkpoint(path)
        scores = [play(model, fresh) for fresh in (False, True)]
        numbers = [f"{number:.2f}" for score in scores for number in (score.mean(), score.std())]
        variant = shlex.join(json.loads((path.parents[2] / "run.json").read_text())["flags"])
        key = (model["args"]["env_id"], variant, str(model["args"]["seed"]))
        rows[key], found = [*key, *numbers, EPISODES], True
        print(path.parents[2].name, *numbers, flush=True)
    if not found:
        parser.error(f"there is no finished run of ppo_continuous in {runs_folder}")
    with open(table, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["env_id", "variant", "seed", "frozen", "frozen_std", "fresh", "fresh_std", "episodes"])
        writer.writerows(rows[key] for key in sorted(rows))


if __name__ == "__main__":
    main()
