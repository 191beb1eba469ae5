"""Finished runs as CSV: each run's curves, and a row for it in runs.csv.

    python benchmark/collect.py runs/ppo_continuous            # all finished runs below a folder, whoever started them

A run becomes {results}/{script}/{env}__{variant}__{seed}__{commit}.csv with the columns tag, step, value, count, and a
row of {results}/runs.csv, which replaces the row that the run had. A tag with more than 1000 points is thinned: the run
is cut into 1000 bins of equal numbers of steps, and a row is the mean value and the mean step of the `count` points in
a bin. The variant is the hyperparameters that are not the script's defaults: no flags that change the speed only.
"""

import argparse
import fcntl
import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from common import RESULTS, ROOT, SPEED, curves_name, read_events, read_table, variant

TAGS = ("charts/episodic_return", "eval/episodic_return", "eval/battle_won_rate", "charts/SPS")
KEY = ["script", "env_id", "variant", "seed", "commit"]  # what makes a run, and a row of runs.csv


def thin(points: pd.DataFrame, bins: int = 1000) -> pd.DataFrame:
    """The points (step, value) of one tag, or means over bins of equal width, with the number of points in each."""
    points = points[["step", "value"]].assign(count=1)
    if len(points) <= bins:
        return points
    means = points.groupby(points.step * bins // (points.step.max() + 1))
    means = means.agg(step=("step", "mean"), value=("value", "mean"), count=("count", "sum"))
    return means.assign(step=means.step.round().astype(int))


def collect(folder: Path, results: Path) -> None:
    """Write a finished run's curves and its row. Raises ValueError where the log does not reach the end of the run."""
    result = json.loads((folder / "result.json").read_text())
    script, env_id, seed = result["script"], result["args"]["env_id"], result["args"]["seed"]
    points = read_events(folder)
    of = {tag: points[points.tag == tag] for tag in TAGS}
    if of["eval/episodic_return"].step.max() != result["global_step"]:
        raise ValueError("the evaluation at the end is not in the log")
    curves = pd.concat([thin(of[tag]).assign(tag=tag) for tag in TAGS if len(of[tag])])
    curves["value"] = curves.value.map("{:.6g}".format)

    won, returns = of["eval/battle_won_rate"], np.array(result["episodic_return"])
    tests = won[won.step > 0.8 * result["global_step"]].value[:-1]  # over the last fifth, without the evaluation
    program = [f"{script}.py"] if (ROOT / f"{script}.py").exists() else ["benchmark/peers.py", script]
    values = {
        "script": script,
        "env_id": env_id,
        "variant": variant(script, result["args"]),
        "seed": seed,
        "total_steps": result["global_step"],
        "training_return": of["charts/episodic_return"].value[-100:].mean(),
        "eval_return": returns.mean(),
        "eval_std": returns.std(),
        "eval_episodes": len(returns),
        "eval_battle_won_rate": won.value.iloc[-1] if len(won) else "",
        "tests_battle_won_rate": tests.mean(),
        "wall_seconds": round(result["seconds"]),
        "command": shlex.join(["python", *program, "--env-id", env_id, "--seed", str(seed)])
        + f" {variant(script, result['args'], SPEED)}",
        "commit": result.get("commit", "unknown")[:10] + "-changed" * result.get("commit", "").endswith("-dirty"),
        "versions": ", ".join(f"{package} {version}" for package, version in sorted(result["versions"].items())),
        "machine": result["machine"],
        "ended": pd.Timestamp(points.seconds.max(), unit="s").strftime("%Y-%m-%d %H:%M"),
    }
    row = {name: f"{value:.6g}" if isinstance(value, float) else str(value).strip() for name, value in values.items()}
    path = results / curves_name(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    curves.to_csv(path, columns=["tag", "step", "value", "count"], index=False)
    lock = os.open(results, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # other runs may end at this moment too
    rows = pd.concat([read_table(results / "runs.csv"), pd.DataFrame([row])]).fillna("").replace("nan", "")
    rows.drop_duplicates(KEY, keep="last").sort_values(KEY).to_csv(results / "runs.tmp", index=False)
    os.replace(results / "runs.tmp", results / "runs.csv")
    os.close(lock)


def main(argv: list[str]) -> int:
    """Collect every finished run below the folders. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    found = sorted(path.parent for folder in args.folders for path in folder.glob("**/result.json"))
    failed = 0
    for folder in found:
        try:
            collect(folder, args.results)
            print(f"{folder}: collected", flush=True)
        except Exception as error:  # damaged files of one run stop no other
            print(f"failed: {folder}: {type(error).__name__}: {error}", file=sys.stderr)
            failed = 1
    return failed or int(not found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
