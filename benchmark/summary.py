"""The short tables of README.md and benchmark/README.md, which tables.py writes between markers.

One statistic throughout: the interquartile mean over seeds from five seeds on, the mean below
(`plot.center`), with a 95% bootstrap interval over seeds. One seed has no interval.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd
from common import FLAG, FRONT, arguments, curves_name, earlier_qmix, front, read_table, setting
from plot import center, in_words
from tables import interval, nearest, newest_rounds, number, spread

NAMES = {
    "ppo_continuous": (
        "PPO, Gaussian policy",
        "[Schulman et al. 2017](https://arxiv.org/abs/1707.06347)",
    ),
    "a2c_atari": ("A2C", "[Mnih et al. 2016](https://arxiv.org/abs/1602.01783)"),
    "a3c_atari": ("A3C with an LSTM", "[Mnih et al. 2016](https://arxiv.org/abs/1602.01783)"),
    "dqn_per_atari": (
        "double dueling DQN with prioritized replay",
        "[Schaul et al. 2016](https://arxiv.org/abs/1511.05952)",
    ),
    "qmix_smac": ("QMIX; also VDN, IQL", "[Rashid et al. 2018](https://arxiv.org/abs/1803.11485)"),
}
PEERS = {
    "ppo_continuous": ("sb3_ppo", "Stable-Baselines3"),
    "a2c_atari": ("sb3_a2c", "Stable-Baselines3"),
    "qmix_smac": ("jaxmarl_qmix", "JaxMARL QMIX"),
}
JAXMARL = {  # in words, how many steps for an update, and how many before the first one
    "jaxmarl_qmix": ("JaxMARL QMIX, 8 updates per 1,024 steps", 128, 31 * 1024),
    "jaxmarl_vdn": ("JaxMARL VDN, 8 updates per 1,024 steps", 128, 31 * 1024),
    "jaxmarl_pqn_vdn": ("JaxMARL PQN-VDN, 64 updates per 16,384 steps", 256, 0),
}
ENVIRONMENTS = FRONT | {"ppo_continuous": "HalfCheetah-v4 Hopper-v4 Walker2d-v4"}
REPLAY_MB = {"dqn_per_atari": 980_000 * 84 * 84 / 1e6}  # beyond speed.py's 20,000 transitions

QUESTIONS = {  # benchmark/README's tables: rows of script, environment, flags, and these in words
    "truncation": [
        ("ppo_continuous", "HalfCheetah-v4", "", "bootstrap at truncation, earlier version"),
        (
            "ppo_continuous",
            "HalfCheetah-v4",
            "--no-bootstrap-truncation",
            "do not bootstrap, earlier version",
        ),
    ],
    "log_std": [
        ("ppo_continuous", env_id, flags, words)
        for env_id in ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4")
        for flags, words in (("", "1 (default)"), ("--log-std-init -1.0", "0.37"))
    ],
    "vf_coef": [
        ("ppo_continuous", "Humanoid-v4", "", "weight 0.5, earlier version"),
        ("ppo_continuous", "Humanoid-v4", "--vf-coef 1.0", "weight 1, earlier version"),
        ("sb3_ppo", "Humanoid-v4", "--vf-coef 0.5", "Stable-Baselines3, weight 1"),
    ],
    "num_envs": [
        ("ppo_continuous", "HalfCheetah-v4", "", "1 environment, 2,048 steps (default)"),
        (
            "ppo_continuous",
            "HalfCheetah-v4",
            "--num-envs 8 --num-steps 256",
            "8 environments, 256 steps each",
        ),
    ],
    "priorities": [
        ("dqn_per_atari", f"{game}NoFrameskip-v4", f"--total-timesteps 600000 {flags}", words)
        for game in ("Breakout", "Pong")
        for flags, words in (
            ("--middle-fraction 0.1 --bf16 --checkpoint-interval 100000", "prioritized, `--bf16`"),
            (
                "--no-prioritized --middle-fraction 0.1 --bf16 --checkpoint-interval 100000",
                "uniform, `--bf16`",
            ),
        )
    ],
    "mixers": [
        ("qmix_smac", env_id, earlier_qmix(steps, flags), words)
        for env_id, steps in (
            ("3m", 200_000),
            ("8m", 200_000),
            ("2s3z", 500_000),
            ("2s3z", 2_000_000),
        )
        for flags, words in (
            ("", "QMIX"),
            (" --mixer vdn", "VDN"),
            (" --mixer none", "independent learners"),
        )
    ],
}


# Archived default runs of PPO, of about the version in which the other settings were run
EARLIER_VERSION = {"truncation": "6ff57fb201 85ddad7bd7", "vf_coef": "782d3f500c"}


def score(rows: pd.DataFrame, column: str) -> str:
    """The center with its interval, and how many seeds."""
    return f"{interval(rows[column], center)}, {len(rows)} seed{'s' * (len(rows) > 1)}"


def column_of(script: str) -> str:
    """What is compared: training returns, for QMIX battles won in the tests of the last fifth."""
    return "tests_battle_won_rate" if "qmix" in script else "training_return"


def steps_of(rows: pd.DataFrame) -> int:
    return int(rows.total_steps.astype(int).median())


def at_equal_steps(rows: pd.DataFrame, steps: int) -> pd.DataFrame:
    of = rows.total_steps if "total_steps" in rows else rows.steps
    return rows[(of.astype(int) / steps).between(0.95, 1.05)]


def algorithms(measured: pd.DataFrame) -> pd.DataFrame:
    """A row for each script: its paper, its page, and what a default run takes."""
    found, table = newest_rounds(measured), []
    for script, (algorithm, paper) in NAMES.items():
        rows = next(found[name] for name in found if name.startswith(script))
        name = next(name for name in rows.name if name.startswith(f"{script}.py"))
        rows, setting = rows[rows.name == name], name.partition(", ")[2]
        steps = int(arguments(script)["--total-timesteps"][0])
        seconds = steps / rows.steps_per_second.astype(float).median()
        took = f"{seconds / 3600:.1f} h" if seconds > 3600 else f"{seconds / 60:.0f} min"
        if setting:  # a number of workers
            took += f" ({setting}; default {arguments(script)['--num-workers'][0]})"
        peak = rows.peak_mb.astype(float).median() + REPLAY_MB.get(script, 0)
        memory = f"{peak / 1000:.1f} GB" + " per process" * ("worker" in setting)
        table.append(
            {
                "script": f"[`{script}.py`]({script}.py)",
                "algorithm": algorithm,
                "paper": paper,
                "page": f"[page](docs/{script}.md)",
                "default run on two cores": f"{steps / 1e6:g}M steps, {took}, {memory}",
            }
        )
    return pd.DataFrame(table)


def results(runs: pd.DataFrame, references: pd.DataFrame) -> pd.DataFrame:
    """README's scores: the longest runs, and those that a peer has made as long."""
    table, longest = [], front(runs)
    for script in FRONT:
        peer, peer_name = PEERS.get(script, ("", ""))
        for env_id in ENVIRONMENTS[script].split():
            flags = longest[script].variant.iloc[0] if script != "ppo_continuous" else ""
            mine = runs[(runs.script == script) & (runs.env_id == env_id)]
            theirs = runs[(runs.script == peer) & (runs.env_id == env_id)]
            shown = [mine[mine.variant == flags]]
            same = mine[[setting(script, x) == setting(script, flags) for x in mine.variant]]
            if len(theirs) and not len(at_equal_steps(theirs, steps_of(shown[0]))):
                shown.append(at_equal_steps(same, steps_of(theirs)))
            for rows in filter(len, shown):
                steps = steps_of(rows)
                other = at_equal_steps(theirs, steps)
                known = at_equal_steps(nearest(references, script, env_id, steps), steps)
                table.append(
                    {
                        "script": f"`{script}.py`",
                        "environment": env_id,
                        "steps": f"{steps / 1e6:.3g}M",
                        "ours": score(rows, column_of(script)),
                        "peer": f"{peer_name}: {score(other, column_of(script))}"
                        if len(other)
                        else "not measured",
                        "published": "; ".join(map(reference, known.to_dict("records"))),
                    }
                )
    return pd.DataFrame(table)


def reference(row: dict) -> str:
    """A published score with its spread and source."""
    value = float(row["score"])
    spread_of = f" ± {number(float(row['spread']), value)}" if row["spread"] else ""
    return f"{number(value)}{spread_of}, {row['source']}"


def defaults(runs: pd.DataFrame, references: pd.DataFrame) -> pd.DataFrame:
    """benchmark/README's scores: every environment, in each the plainest runs: the longest, and
    those of three seeds or more.
    """
    table = []
    for script in FRONT:
        for env_id, rows in runs[runs.script == script].groupby("env_id"):
            settings = [setting(script, variant) for variant in rows.variant]
            plainest = min(settings, key=lambda x: len(FLAG.findall(x)))
            rows = rows[[x == plainest for x in settings]]
            lengths = rows.total_steps.astype(int)
            groups, rest = [], rows
            for length in sorted(set(lengths), reverse=True):
                groups.insert(0, at_equal_steps(rest, length))
                rest = rest.drop(groups[0].index)
            groups = [x for x in groups if len(x) > 2 or lengths.max() in lengths[x.index].values]
            for rows in filter(len, groups):
                steps = steps_of(rows)
                known = at_equal_steps(nearest(references, script, env_id, steps), steps)
                table.append(
                    {
                        "script": f"`{script}.py`",
                        "environment": env_id,
                        "steps": f"{steps / 1e6:.3g}M",
                        "seeds": str(len(rows)),
                        "training": interval(rows[column_of(script)], center),
                        "evaluation": interval(
                            rows["eval_battle_won_rate" if "qmix" in script else "eval_return"],
                            center,
                        ),
                        "published": "; ".join(map(reference, known.to_dict("records"))),
                    }
                )
    return pd.DataFrame(table)


def question(name: str, runs: pd.DataFrame, archived: pd.DataFrame) -> pd.DataFrame:
    """The table of one question: a row for each setting."""
    table = []
    for script, env_id, flags, words in QUESTIONS[name]:
        rows = runs
        if name in EARLIER_VERSION and script == "ppo_continuous":
            commits = EARLIER_VERSION[name].split()
            rows = archived if flags else archived[archived.commit.isin(commits)]
        rows = rows[(rows.script == script) & (rows.env_id == env_id) & (rows.variant == flags)]
        if len(rows):
            evaluated = "eval_battle_won_rate" if "qmix" in script else "eval_return"
            table.append(
                {
                    "environment": env_id,
                    "setting": words,
                    "steps": f"{steps_of(rows) / 1e6:.3g}M",
                    "seeds": str(len(rows)),
                    "training": interval(rows[column_of(script)], center),
                    "evaluation": interval(rows[evaluated], center),
                }
            )
    return pd.DataFrame(table)


def win_rates(runs: pd.DataFrame, results: Path) -> pd.DataFrame:
    """When runs of at least 480,000 steps first win which fraction of their battles, no variants'.

    A rate is the mean of three tests in a row, for a peer, whose tests are rare, one test. Its
    seconds are by the log's steps per second since the start; a peer has none, and its seconds are
    that part of the run's wall time which its steps are of all steps. Medians over seeds; those
    that other programs ran beside go by the other seeds' clocks. `-` where most never do.
    """
    table, rates = [], (0.5, 0.8, 0.9)
    runs = runs[(runs.tests_battle_won_rate != "") & (runs.total_steps.astype(int) >= 480_000)]
    runs = runs[~runs.script.str.contains("+", regex=False)]
    for (env_id, script, variant), rows in runs.groupby(["env_id", "script", "variant"]):
        reached, ends, updates, clocks = {rate: [] for rate in rates}, [], [], []
        for row in rows.to_dict("records"):
            curves = read_table(results / curves_name(row)).astype({"step": int, "value": float})
            won = curves[curves.tag == "eval/battle_won_rate"].groupby("step").value.mean()
            smooth = won.rolling(3).mean() if script == "qmix_smac" else won
            for rate in rates:
                reached[rate].append(smooth.index[smooth >= rate - 1e-9].min())
            ends.append(int(row["total_steps"]))
            made = curves[curves.tag == "charts/updates"].value
            updates.append(made.iloc[-1] if len(made) else float("nan"))
            if script in JAXMARL:
                _, per_update, start = JAXMARL[script]
                updates[-1] = (int(row["total_steps"]) - start) / per_update
            speeds = curves[curves.tag == "charts/SPS"]
            clocks.append((speeds.step, speeds.step / speeds.value))
            if speeds.empty and row["wall_seconds"]:
                clocks[-1] = (0, ends[-1]), (0, int(row["wall_seconds"]))
            if not row["wall_seconds"] or "earlier" in words_of(script, variant):
                clocks[-1] = None  # other programs ran beside it, or its machine is not known
        entry = {"map": env_id, "program": words_of(script, variant), "seeds": str(len(rows))}
        for rate in rates:
            steps = pd.Series(reached[rate]).fillna(float("inf")).median()
            reads = f"{steps / 1e3:,.0f}k{took(clocks, reached[rate])}"
            entry[f"{rate:g}"] = reads if steps < 1e12 else "-"
        entry["last fifth"] = interval(rows.tests_battle_won_rate, center)
        entry["whole run"] = f"{steps_of(rows) / 1e6:.3g}M{took(clocks, ends)}"
        made = pd.Series(updates).median()
        entry["updates"] = "" if pd.isna(made) else f"{made:,.0f}"
        table.append(entry)
    return pd.DataFrame(table)


def took(clocks: list, steps: list) -> str:
    """The median seconds that the seeds' `steps` (NaN: never) took by their clocks, if any.

    A clock is steps and seconds, or None: such a seed goes by the others' clocks (their median).
    """
    timed, seconds = [clock for clock in clocks if clock], []
    for x, clock in zip(steps, clocks) if timed else ():
        times = [np.interp(x, *other) for other in ([clock] if clock else timed)]
        seconds.append(np.inf if pd.isna(x) else np.median(times))
    return f", {np.median(seconds):,.0f} s" if timed and np.median(seconds) < np.inf else ""


def words_of(script: str, variant: str) -> str:
    """A program of the table of win rates in words."""
    if script in JAXMARL:
        return JAXMARL[script][0]
    return f"`{script}.py`, {in_words(setting(script, variant))}"


def speed(measured: pd.DataFrame, gpu: bool = False, every: bool = True) -> pd.DataFrame:
    """A row for each program and peer: the script, its faster or all settings, the fastest peer.

    A peer whose name says how many updates it makes has a row of its own, beside the script's
    defaults.
    """
    table, found = [], newest_rounds(measured)
    for script in FRONT:
        names = [name for name in found if name.startswith(script)]
        names = [name for name in names if name.endswith("_cuda") == gpu]
        if not names:
            continue
        rows = found[names[0]]
        speeds = rows.pivot(index="round", columns="name", values="steps_per_second").astype(float)
        ordered = list(speeds.median().sort_values().index)  # the fastest last
        ours = [name for name in ordered if name.startswith(f"{script}.py")]
        own = [name for name in ordered if " 8 updates" in name]
        default = next(name for name in rows.name if name in ours)
        rounds = f"{len(speeds)} round{'s' * (len(speeds) > 1)}"
        machine = rows.machine.iloc[0].replace("(R)", "").replace(" Processor", "")
        kind = (
            r"NVIDIA [^(,]+(?= \()" if gpu else r"AMD EPYC|Intel Xeon|(?<=cores of )[^(,]+(?= \()"
        )
        processor = re.search(kind, machine)[0]
        for peer in [name for name in ordered if name not in ours + own][-1:] + own:
            like = [name for name in ours if "--batch-size" in name]  # minibatches as JaxMARL's
            shown = [default, *(name for name in ours if name != default)]
            if not every:
                shown = [name for name in shown if ours.index(name) >= ours.index(default)]
            for mine in [default] if peer in own else like or shown:
                table.append(
                    {
                        "program": f"`{mine}`",
                        "steps/s": f"{speeds[mine].median():,.0f}",
                        "peer": peer,
                        "its steps/s": f"{speeds[peer].median():,.0f}",
                        "ratio": spread(speeds[mine] / speeds[peer]),
                        "measured on": f"{processor}, {rounds}",
                    }
                )
    return pd.DataFrame(table)
