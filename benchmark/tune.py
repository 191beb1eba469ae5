"""Search hyperparameters with Optuna; processes on any machines that share a folder join a study.

    python benchmark/tune.py ppo_continuous --env-ids Hopper-v4 Walker2d-v4 \\
        --trials 20 --targets 3000 4000 \\
        --space learning_rate=1e-5..1e-3:log clip_coef=0.1,0.2,0.3 -- --total-timesteps 300000

A trial runs the script on each environment and seed; its value is the mean return of the final
evaluations, each divided by the size of its environment's target. The study is a journal,
{folder}/{script}.log: the same command elsewhere joins it, or resumes it, until it has that many
trials. A trial is stopped if its mean of the last 20 training episodes, looked at in each tenth of
a run, falls below the median of the others. Flags after `--` go to the script.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optuna
from common import ROOT, arguments, read_events
from optuna.storages.journal import JournalFileBackend, JournalStorage


def suggest(trial: optuna.Trial, spec: str) -> str:
    """A value for NAME=LOW..HIGH[:log] or NAME=A,B,C, as a flag of the script."""
    name, _, values = spec.partition("=")
    if ".." in values:
        bounds, _, log = values.partition(":")
        low, high = map(json.loads, bounds.split(".."))
        ask = trial.suggest_int if {type(low), type(high)} == {int} else trial.suggest_float
        value = ask(name, low, high, log=bool(log))
    else:
        value = trial.suggest_categorical(name, values.split(","))
    return f"--{name.replace('_', '-')}={value}"


def total_steps(command: list[str], script: str) -> int:
    """The steps that a run is asked for: its last --total-timesteps, or the script's default."""
    flag = "--total-timesteps"
    values = re.findall(rf"{flag}[= ](\d[\d_]*)", " ".join(command))
    return int(values[-1] if values else arguments(script)[flag][0])


def run(trial, command, folder: Path, first: int, total: int, target: float, poll: float) -> float:
    """Run the script for `total` steps, report its progress from `first` on, return its score.

    Raises TrialPruned.
    """
    folder.mkdir(parents=True)
    with open(folder / "console.txt", "w") as console:
        process = subprocess.Popen(command, stdout=console, stderr=console)
    try:
        while process.poll() is None:
            time.sleep(poll)
            events = read_events(folder)
            returns = events[events.tag == "charts/episodic_return"]
            if len(returns):
                tenth = first + min(9, 10 * returns.step.max() // total)
                last = trial.study.trials[trial.number].last_step
                if last is None or tenth > last:
                    trial.report(returns.value.tail(20).mean() / target, int(tenth))
                if trial.should_prune():
                    raise optuna.TrialPruned
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"status {process.returncode}, see {folder / 'console.txt'}")
    result = json.loads((folder / "result.json").read_text())
    return float(np.mean(result["episodic_return"])) / target


def main(argv: list[str]) -> None:
    end = argv.index("--") if "--" in argv else len(argv)
    own, flags = argv[:end], argv[end + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script")
    parser.add_argument("--env-ids", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument(
        "--targets", nargs="+", type=float, help="a return for each environment; default 1"
    )
    parser.add_argument(
        "--space", nargs="+", required=True, help="NAME=LOW..HIGH[:log] or NAME=A,B,C"
    )
    parser.add_argument("--trials", type=int, default=20, help="of all processes together")
    parser.add_argument("--folder", type=Path, default=Path("runs/tune"))
    parser.add_argument("--poll", type=float, default=10, help="seconds between looks at a run")
    args = parser.parse_args(own)
    if not (ROOT / f"{args.script}.py").exists():
        parser.error(f"there is no {args.script}.py")
    targets = dict(zip(args.env_ids, map(abs, args.targets or [1.0] * len(args.env_ids))))
    if len(targets) < len(args.env_ids) or not all(targets.values()):
        parser.error("--targets needs a number other than 0 for each of --env-ids")
    args.folder.mkdir(parents=True, exist_ok=True)

    def objective(trial: optuna.Trial) -> float:
        chosen, scores = [suggest(trial, spec) for spec in args.space], []
        for env_id in args.env_ids:
            for seed in args.seeds:
                name = f"{env_id.replace('/', '-')}__{seed}"
                mine = args.folder / args.script / str(trial.number) / name
                command = [sys.executable, str(ROOT / f"{args.script}.py"), *flags, *chosen]
                command += ["--env-id", env_id, "--seed", str(seed), "--run-folder", str(mine)]
                first, total = 10 * len(scores), total_steps(command, args.script)
                target = targets[env_id]
                scores.append(run(trial, command, mine, first, total, target, args.poll))
        return float(np.mean(scores))

    storage = JournalStorage(JournalFileBackend(str(args.folder / f"{args.script}.log")))
    sampler = optuna.samplers.TPESampler(constant_liar=True)  # for several processes
    how = {"sampler": sampler, "pruner": optuna.pruners.MedianPruner(), "direction": "maximize"}
    study = optuna.create_study(storage=storage, study_name=args.script, load_if_exists=True, **how)
    search = [args.env_ids, args.seeds, args.targets, args.space, flags]
    if study.user_attrs.get("search", search) != search:
        sys.exit(f"error: {args.folder} holds another search: choose another --folder")
    study.set_user_attr("search", search)
    done = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    enough = optuna.study.MaxTrialsCallback(args.trials, states=done)
    study.optimize(
        objective,
        callbacks=[enough],
        n_trials=args.trials - len(study.get_trials(states=done)),
        catch=(RuntimeError,),  # a run that failed, say diverged
    )
    if not study.get_trials(states=done[:1]):
        sys.exit(f"error: no trial was completed: see console.txt of its runs in {args.folder}")
    count = len(study.get_trials(states=done))
    print(f"best of {count} trials: {study.best_value:.4g} with {study.best_params}")


if __name__ == "__main__":
    main(sys.argv[1:])
