"""Policies evaluated with the statistics they were trained with, frozen, and with fresh ones.

    python benchmark/experiments/frozen_or_fresh.py runs/ppo_continuous    # finished runs below it

An evaluation has fresh statistics if it loads the parameters alone and normalizes by what it sees.
Both play the policy's mode on the same episodes. Writes results/frozen_or_fresh.csv; rows of other
runs stay.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]
from common import RESULTS, read_table, variant  # noqa: E402

import ppo_continuous as ppo  # noqa: E402


def main(runs: Path) -> None:
    table, environments = RESULTS / "frozen_or_fresh.csv", ppo.Environments
    for path in sorted(runs.glob("**/model.pt")):
        model = ppo.load_checkpoint(path)
        args = dataclasses.replace(ppo.Args(**model["args"]), eval_episodes=10)
        row = {
            "env_id": args.env_id,
            "variant": variant("ppo_continuous", model["args"]),
            "seed": str(args.seed),
        }
        for name in ("frozen", "fresh"):
            ppo.Environments = environments
            if name == "fresh":
                shape = model["obs_stats"]["mean"].shape
                model["obs_stats"] = ppo.RunningMeanStd(shape).state_dict()
                ppo.Environments = lambda *inputs, training: environments(*inputs)
            returns = ppo.evaluate(args, model, path.parent)
            row |= {name: f"{np.mean(returns):.2f}", f"{name}_std": f"{np.std(returns):.2f}"}
        rows = pd.concat([read_table(table), pd.DataFrame([row | {"episodes": "10"}])])
        rows.drop_duplicates(["env_id", "variant", "seed"], keep="last").to_csv(table, index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
