"""Tables of scores, speed and hyperparameters as markdown and LaTeX (booktabs), and the results in README.

    python benchmark/tables.py                                    # benchmark/tables/*.md and *.tex, README.md
    python benchmark/tables.py --check                            # write nothing; status 1 if a file would change

Scores come from results/runs.csv and references.csv, speed from results/speed.csv, hyperparameters from the defaults of
each script's `Args`, further tables from the results of the other programs here. Of README.md only what stands between
`<!-- results -->` and `<!-- end of results -->` changes.
"""

import argparse
import ast
import re
import shlex
import statistics
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
from plot import FLAG, bootstrap, iqm, setting
from run import ROOT, read_csv
from speed import ROWS

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
NO_HYPERPARAMETERS = """exp_name seed torch_deterministic cuda strict_cuda torch_threads env_threads compile track
    wandb_project_name wandb_entity capture_video save_model upload_model hf_entity log_interval resume evaluate"""
SCORES = ["script", "environment", "variant", "steps", "seeds"]
SCORES += ["training return", "IQM", "evaluation", "published", "source", "wall time", "steps/s (times the peer)"]
SPEED = ["script", "program", "steps", "rounds", "steps/s", "ratio", "wall s", "peak MB", "machine"]
AVERAGES = """Training return: the mean of a seed's last 100 training episodes (whole games, unclipped), then the mean
over seeds, and from five seeds on also their interquartile mean (IQM). Evaluation: the mean over the episodes played
after training, then over seeds. In brackets: 95 % bootstrap intervals over seeds, which are too narrow where seeds are
few (of two or three it is their range). Published: as its source states it, with the deviation over seeds; to be
compared with the training return, but DQN's with the evaluation. It is blank where we found no table of scores for this
environment (A3C's are of other frames and networks, QMIX's of the real SMAC). Wall time: the mean of whole
runs, pauses excluded. Steps/s: in the tables of speed below, of the program with the row's flags, and how many times as
fast as the peer it is; blank where that was not measured."""
SPEEDS = """Speed: start and warm-up excluded, the programs by turns of four seconds, medians over the rounds. Ratio:
to the table's first program, of each round, the median (least to most). Wall seconds: of the whole process. Peak: of
its largest process. Tables that name no commit are of an earlier `speed.py`: one whole run after the other, which a
shared machine makes less exact, PPO's on one core while the other was busy, and of DQN 8,000 steps, in which few units
have been dead for long (see above). The "plain version" and "as in PyMARL" are no one's programs: they were written for
this comparison (`benchmark/peers.py`), A3C's with the script's own network, QMIX's with one environment.
Stable-Baselines3's DQN is neither double nor dueling nor prioritised."""
NO_COST = """--total-timesteps --checkpoint-interval --seed --no-cuda --log-std-init --no-bootstrap-truncation
    --bootstrap-timeouts --middle-fraction --end-fraction --target-interval"""  # flags with which a step takes as long


OTHERS = {  # further tables of README, of results/<name>.csv: by which program, and what they are
    "tricks": (
        "tricks.py",
        "What the tricks of the scripts gain (the last one nothing), in microseconds on one thread",
    ),
    "replay": ("replay.py", "Milliseconds that prioritised replay takes on one thread, beside cpprb (C++)"),
    "replay_share": ("replay.py", "Percent of the time of training that a full replay takes"),
    "replay_checkpoint": ("replay.py", "A full replay in a checkpoint"),
    "frozen_or_fresh": (
        "frozen_or_fresh.py RUNS_FOLDER",
        "What trained policies return with the statistics that were saved (frozen), and with new ones; made before "
        "Humanoid and the later runs on Hopper and Walker2d",
    ),
    "memory": (
        "memory.py --minutes 6 -- a3c_atari.py --num-workers 2 --checkpoint-interval 10000 --eval-interval 10000 "
        "--eval-episodes 4 --max-episode-length 500",
        "Memory of every process of a run over time, with an evaluation and a checkpoint every 10,000 steps",
    ),
}


WHAT = {  # rows of speed.py that are not the script of this name in agent steps: what they are, and the unit
    "qmix_smac_3m": ("`qmix_smac.py` on 3m", "environment steps"),
    "qmix_smac_2s3z": ("`qmix_smac.py` on 2s3z", "environment steps"),
    "qmix_updates_3m": ("Updates of `qmix_smac.py` at the sizes that 3m has in SMAC", "updates"),
    "qmix_updates_2s3z": ("Updates of `qmix_smac.py` at the sizes that 2s3z has in SMAC", "updates"),
}


def number(value: float, scale: float | None = None) -> str:
    """A number with as many decimals as one of its size (or of the size of `scale`) deserves."""
    size = abs(value if scale is None else scale)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def interval(values: list[float], statistic=np.mean) -> str:
    """The statistic over seeds, and its bootstrap interval if there are several."""
    values = np.array(values)
    middle = float(statistic(values, axis=0))
    if len(values) == 1:
        return number(middle)
    low, high = bootstrap(values, statistic)
    return f"{number(middle)} [{number(low, middle)}, {number(high, middle)}]"


def duration(seconds: float) -> str:
    """Minutes, or hours where it takes them."""
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def steps_text(steps: int) -> str:
    """1M, 1.5M, 300k."""
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps / 1e3:g}k"


def by(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """The rows grouped by the values of some columns, in order."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return dict(sorted(groups.items()))


def speed_of(script: str, env_id: str, variant: str, speed: list[list[list[str]]]) -> str:
    """What the tables of speed say of a row of scores: steps per second, and the ratio to the peer."""
    best, cell, path = 0, "", ROOT / f"{script}.py"
    default = re.search(r'^    env_id: str = "(.*)"', path.read_text() if path.exists() else "", re.M)
    elsewhere = default and default[1] != env_id and f", on {default[1]}"  # but for QMIX, whose maps have tables
    flags = {flag for flag in FLAG.findall(setting(script, variant)) if flag.split()[0] not in NO_COST.split()}
    threads = {flag for flag in flags if flag.split()[0] in ("--torch-threads", "--env-threads")}
    for peer, *programs in speed:
        for row in programs if peer[0] in (script, f"{script}_{env_id}") else ():
            name = re.sub(r", (\d+) workers", r" --num-workers \1", row[1])
            if name.startswith(f"{script}.py") and set(FLAG.findall(name)) == flags - threads:
                if int(row[3]) > best:  # of two tables the one with more rounds
                    best, cell = int(row[3]), f"{row[4]} ({row[5].split()[0]} times {peer[1]}"
                    cell += elsewhere if elsewhere and peer[0] == script else ""
    return cell and cell + (", with 2 torch threads)" if threads else ")")


def score_rows(runs: list[dict], references: list[dict], speed: list[list[list[str]]]) -> list[list[str]]:
    """The table of scores: a row for each script, environment and variant."""
    table = []
    for (script, env_id, variant), rows in by(runs, "script", "env_id", "variant").items():
        names = ("eval_return", "eval_battle_won_rate", "tests_battle_won_rate")
        column = {name: [float(row[name]) for row in rows if row.get(name)] for name in names}
        returns = [float(row["training_return"]) for row in rows if row["training_return"]]
        evaluation = interval(column["eval_return"]) if column["eval_return"] else ""
        if column["eval_battle_won_rate"]:
            evaluation += f"; battles won {interval(column['eval_battle_won_rate'])}"
        if column["tests_battle_won_rate"]:
            evaluation += f", and {interval(column['tests_battle_won_rate'])} in the tests of the last fifth of the run"
        published = [row for row in references if (row["script"], row["env_id"]) == (script, env_id)]
        scores = [
            number(float(row["score"]))
            + (f" ± {number(float(row['spread']), float(row['score']))}" if row["spread"] else "")
            for row in published
        ]
        steps = sorted({int(row["total_steps"]) for row in rows})
        table.append(
            [
                f"{script}.py",
                env_id,
                variant,
                " to ".join(f"{step:,}" for step in dict.fromkeys([steps[0], steps[-1]])),
                str(len(rows)),
                interval(returns) if returns else "",
                interval(returns, iqm) if len(returns) >= 5 else "",
                evaluation,
                "; ".join(scores),
                "; ".join(f"{row['source']}, {steps_text(int(row['steps']))} steps" for row in published),
                duration(statistics.mean(float(row["wall_seconds"]) for row in rows)),
                speed_of(script, env_id, variant, speed),
            ]
        )
    return table


def speed_tables(measured: list[dict]) -> list[list[list[str]]]:
    """Tables of speed: for each script, number of steps and processor the newest set of interleaved runs.

    A set are the rows of one call of speed.py. Its rounds begin with the peer; one that was broken off is left out.
    An older set is shown too where it has a program that no newer one has; of the earlier speed.py, which wrote no
    commit, only where no other set of any machine has that program.
    """
    by_turns = by([row for row in measured if row.get("commit")], "script", "steps")
    measured = [row | {"processor": row["machine"].split(", Python")[0]} for row in measured]
    sets = []
    for same in by(measured, "script", "steps", "processor").values():
        shown = set()
        replaced = {row["name"] for row in by_turns.get((same[0]["script"], same[0]["steps"]), [])}
        for rows in reversed(by(same, "date", "machine").values()):
            shown |= set() if rows[0].get("commit") else replaced
            names = list(dict.fromkeys(row["name"] for row in rows))
            rounds = [rows[i : i + len(names)] for i, row in enumerate(rows) if row["name"] == names[0]]
            rounds = [each for each in rounds if [row["name"] for row in each] == names]
            if rounds and not shown.issuperset(names):
                shown.update(names)
                sets.append((names, rounds))
    tables = []
    for names, rounds in sets:
        tables.append([])
        script, steps, machine = (rounds[0][0][key] for key in ("script", "steps", "machine"))
        if commit := rounds[0][0].get("commit"):
            machine += f", commit {commit}"
        for i, name in enumerate(names):
            column = {
                key: [float(each[i][key]) for each in rounds] for key in ("steps_per_second", "wall_seconds", "peak_mb")
            }
            ratios = [float(each[i]["steps_per_second"]) / float(each[0]["steps_per_second"]) for each in rounds]
            speed, wall, peak = (f"{statistics.median(values):,.0f}" for values in column.values())
            ratio = f"{statistics.median(ratios):.2f}"
            if i and len(rounds) > 1:
                ratio += f" ({min(ratios):.2f} to {max(ratios):.2f})"
            tables[-1].append([script, name, f"{int(steps):,}", str(len(rounds)), speed, ratio, wall, peak, machine])
    return tables


def speed_command(table: list[list[str]]) -> str:
    """The command that measured a table."""
    script, _, steps, rounds, *_ = table[0]
    command = f"python benchmark/speed.py --scripts {script} --repeats {rounds}"
    if script in ROWS:
        _, _, whole, commands = ROWS[script]
        command += " --full" if steps == f"{whole:,}" else ""
        names = [row[1] for row in table]
        command += "" if names == list(commands) else f" --programs {shlex.join(names)}"
    return command


def hyperparameter_rows(script: Path) -> list[list[str]]:
    """The flags of a script that belong to the experiment, their defaults as written, and their help."""
    text = script.read_text()
    lines = text.splitlines()
    body = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    table = []
    for assignment, meaning in pairwise(body):
        if isinstance(assignment, ast.AnnAssign) and assignment.target.id not in NO_HYPERPARAMETERS.split():
            value = assignment.value
            default = lines[value.lineno - 1][value.col_offset : value.end_col_offset]
            if re.fullmatch(r"\d[\d_]*", default):
                default = f"{int(default):,}"
            default = {"True": "yes", "False": "no", "None": "none"}.get(default, default.strip('"'))
            table.append(
                ["--" + assignment.target.id.replace("_", "-"), default, " ".join(meaning.value.value.split())]
            )
    return table


def markdown(header: list[str], table: list[list[str]]) -> str:
    """A table in markdown. Flags are set as code."""
    rows = [[f"`{cell}`" if re.match(r"--\w", cell) else cell.replace("|", r"\|") for cell in row] for row in table]
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(header: list[str], table: list[list[str]], columns: str) -> str:
    """A table in LaTeX: a tabular with booktabs' rules, to be put into a table environment of one's own."""

    def escape(cell: str) -> str:
        words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
        cell = re.sub(r"[\\&%$#_{}~^]", lambda match: words.get(match[0], f"\\{match[0]}"), cell)
        cell = re.sub(r"(?<![\w.-])(\d[\d.]*)e(-?\d+)\b", r"$\1 \\times 10^{\2}$", cell)
        cell = re.sub(r"(?<![\w$^{-])-(?=[\d.])", "$-$", cell)
        return cell.replace("±", r"$\pm$").replace("--", "-{}-").replace("`", "")

    first, *others = (" & ".join(map(escape, row)) + " \\\\" for row in [header, *table])
    begin = ["% needs \\usepackage{booktabs}", f"\\begin{{tabular}}{{{columns}}}", "\\toprule", first, "\\midrule"]
    return "\n".join([*begin, *others, "\\bottomrule", "\\end{tabular}", ""])


def provenance(runs: list[dict]) -> str:
    """For each script what it ran on, and the commands that repeat it."""
    text = ""
    for (script,), rows in by(runs, "script").items():
        places = []
        for (machine, versions, jobs), group in by(rows, "machine", "versions", "jobs").items():
            commits = sorted({commit for row in group for commit in row["commit"].split("; ")})
            places.append(f"{machine}, {versions}, {jobs} at once (commit {', '.join(commits)})")
        text += f"`{script}.py` ran on: {'; and '.join(places)}. Again:\n\n```bash\n"
        commands = defaultdict(list)  # environments of the same variant and seeds go into one command
        for (variant, env_id), group in by(rows, "variant", "env_id").items():
            seeds = " ".join(str(seed) for seed in sorted(int(row["seed"]) for row in group))
            commands[variant, seeds].append(env_id)
        for (variant, seeds), env_ids in commands.items():
            flags = f" -- {variant}" if variant else ""
            text += f"python benchmark/run.py --scripts {script} --env-ids {' '.join(env_ids)} --seeds {seeds}{flags}\n"
        text += "```\n\n"
    return text


def other_table(rows: list[dict]) -> str:
    """Measured rows as they are, without the columns that are everywhere the same, which are said below."""
    if len(rows) == 1:
        return markdown(list(rows[0]), [list(rows[0].values())])
    same = [name for name in rows[0] if len({row[name] for row in rows}) == 1]
    columns = [name for name in rows[0] if name not in same]
    table = markdown([name.replace("_", " ") for name in columns], [[row[name] for name in columns] for row in rows])
    notes = [f"{name.replace('_', ' ')}: {rows[0][name]}" for name in same if rows[0][name]]
    return table + ("\n" + "; ".join(notes) + ".\n" if notes else "")


def results_section(
    runs: list[dict],
    scores: list[list[str]],
    speed: list[list[list[str]]],
    figures: list[Path],
    others: dict[str, list[dict]],
) -> str:
    """What README says between its two markers."""
    text = "\n"
    if scores:
        text += f"{markdown(SCORES, scores)}\n{AVERAGES}\n"
        text += "Raw data: [benchmark/results](benchmark/results). In LaTeX, with all hyperparameters:\n"
        text += f"[benchmark/tables](benchmark/tables).\n\n{provenance(runs)}"
        if figures:
            text += (
                "In the figures runs that differ only in length, and so in schedules, have one colour; a dot is where\n"
            )
            text += "each ends.\n\n"
    for figure in figures:
        stem = f"benchmark/figures/{figure.stem}"
        text += f"![Learning curves of {figure.stem}.py]({stem}.png)\n\n"
        text += f"Learning curves of `{figure.stem}.py` ([PDF]({stem}.pdf), [SVG]({stem}.svg)), drawn by\n"
        text += f"`python benchmark/plot.py --scripts {figure.stem}`.\n\n"
    text += f"{SPEEDS}\n\n" if speed else ""
    for table in speed:
        title, unit = WHAT.get(table[0][0], (f"`{table[0][0]}.py`", "agent steps"))
        text += f"{title}, steps are {unit} ({table[0][-1]}):\n\n```bash\n{speed_command(table)}\n```\n\n"
        text += f"{markdown(SPEED[1:-1], [row[1:-1] for row in table])}\n"
    for name, rows in others.items():
        program, what = OTHERS[name]
        text += f"{what} (`python benchmark/{program}`):\n\n{other_table(rows)}\n"
    return text


def replace_section(readme: str, section: str) -> str:
    """README with another results section; the second marker is added where it is missing."""
    if readme.count(BEGIN) != 1:
        sys.exit(f"error: the line {BEGIN} must be in README once")
    before, after = readme.split(BEGIN)
    after = after.split(END, 1)[1] if END in after else after
    return f"{before}{BEGIN}\n{section.rstrip()}{chr(10) * 2 if section.strip() else ''}{END}{after}"


def main(argv: list[str]) -> int:
    """Write what has changed. Returns the exit status."""
    benchmark = ROOT / "benchmark"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file would change")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results-folder", type=Path, default=benchmark / "results")
    parser.add_argument("--figures-folder", type=Path, default=benchmark / "figures")
    parser.add_argument("--tables-folder", type=Path, default=benchmark / "tables")
    args = parser.parse_args(argv)
    if not args.readme.is_file() or not args.results_folder.is_dir():
        parser.error(f"{args.readme} must be a file and {args.results_folder} a folder")
    if args.tables_folder.exists() and not args.tables_folder.is_dir():
        parser.error(f"{args.tables_folder} is no folder")

    runs = read_csv(args.results_folder / "runs.csv")
    speed = speed_tables(read_csv(args.results_folder / "speed.csv"))
    scores = score_rows(runs, read_csv(benchmark / "references.csv"), speed)
    tables = {
        "scores": (SCORES, scores, "lllrrrrrrlrl"),
        "speed": (SPEED, [row for table in speed for row in table], "llrrrrrrl"),
    }
    for script in sorted(ROOT.glob("*.py")):
        header = ["argument", "default", "meaning"]
        tables[f"hyperparameters_{script.stem}"] = (header, hyperparameter_rows(script), r"llp{0.6\linewidth}")
    files = {}
    for name, (header, table, columns) in tables.items():
        files[args.tables_folder / f"{name}.md"] = markdown(header, table)
        files[args.tables_folder / f"{name}.tex"] = latex(header, table, columns)
    others = {name: read_csv(args.results_folder / f"{name}.csv") for name in OTHERS}
    others = {name: rows for name, rows in others.items() if rows}
    section = results_section(runs, scores, speed, sorted(args.figures_folder.glob("*.png")), others)
    files[args.readme] = replace_section(args.readme.read_text(), section)

    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{'would change' if args.check else 'written'}: {path}")
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path])
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
