"""Tables of scores, speed and hyperparameters, and the check of all documents.

    python benchmark/tables.py            # after new results: write tables and numbers anew
    python benchmark/tables.py --check    # write nothing; print a line for each fault of documents

Tables come from the CSV files in results and from the defaults of each script's `Args`. They stand
in documents between the lines `<!-- name -->` and `<!-- end of name -->`, and as LaTeX in
benchmark/tables. README.md has the names scores and speed, other documents scores, provenance,
figures, speed, frozen, kill_test and slurm_test. documents.py says what else is checked.
"""

import argparse
import re
import sys
from pathlib import Path

import documents
import numpy as np
import pandas as pd
from common import (
    FRONT,
    NO_HYPERPARAMETERS,
    RESULTS,
    ROOT,
    STEPS,
    arguments,
    read_runs,
    read_table,
)
from plot import bootstrap, center, iqm


def number(value: float, scale: float | None = None) -> str:
    """A number with as many decimals as one of its size (or of the size of `scale`) deserves."""
    size = abs(value if scale is None else scale)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def interval(column: pd.Series, statistic=center) -> str:
    """The statistic over seeds, with its bootstrap interval if there are several, or nothing."""
    values = column[column != ""].astype(float).to_numpy()
    if not len(values):
        return ""
    middle = float(statistic(values, axis=0))
    if len(values) == 1:
        return number(middle)
    low, high = bootstrap(values, statistic)
    return f"{number(middle)} [{number(low, middle)}, {number(high, middle)}]"


def nearest(references: pd.DataFrame, script: str, env_id: str, steps: int) -> pd.DataFrame:
    """A row for each source: of a published curve the point nearest to `steps`."""
    rows = references[(references.script == script) & (references.env_id == env_id)]
    distance = (rows.steps.astype(int) - steps).abs()
    return rows.loc[distance.groupby(rows.source, sort=False).idxmin()]


def published(rows: pd.DataFrame) -> tuple[str, str]:
    """The scores of papers or well-known programs, and where they stand."""
    scores, sources = [], []
    for row in rows.to_dict("records"):
        score = float(row["score"])
        scores.append(number(score))
        if row["spread"]:
            scores[-1] += f" ± {number(float(row['spread']), score)}"
        sources.append(f"{row['source']}, {int(row['steps']) / 1e6:g}M steps")
    return "; ".join(scores), "; ".join(sources)


def score_table(runs: pd.DataFrame, references: pd.DataFrame) -> pd.DataFrame:
    """A row for each script, environment and variant."""
    table = []
    for (script, env_id, variant), rows in runs.groupby(["script", "env_id", "variant"]):
        steps = sorted(rows.total_steps.astype(int))
        score, source = published(nearest(references, script, env_id, steps[-1]))
        table.append(
            {
                "script": script,
                "environment": env_id,
                "flags": f"`{variant}`" if variant else "",
                "steps": " to ".join(dict.fromkeys([f"{steps[0]:,}", f"{steps[-1]:,}"])),
                "seeds": str(len(rows)),
                "training return": interval(rows.training_return, np.mean),
                "IQM": interval(rows.training_return, iqm) if len(rows) >= 5 else "",
                "evaluation": interval(rows.eval_return, np.mean),
                "battles won": interval(rows.eval_battle_won_rate, np.mean),
                "in the last fifth": interval(rows.tests_battle_won_rate, np.mean),
                "published": score,
                "source": source,
                "hours": f"{pd.to_numeric(rows.wall_seconds).mean() / 3600:.2f}".replace("nan", ""),
            }
        )
    return pd.DataFrame(table)


def newest_rounds(measured: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The newest call of speed.py for each of its tables: {name: rows}."""
    found = {}
    for name, rows in measured[measured.script.isin(STEPS)].groupby("script", sort=False):
        last = rows[rows.date == rows.date.iloc[-1]]
        found[name] = last.assign(round=last.groupby("name").cumcount())
    return found


def spread(ratios: pd.Series) -> str:
    """The median, and the least and the most of several."""
    text = f"{ratios.median():.2f}"
    return text if len(ratios) == 1 else f"{text} ({ratios.min():.2f} to {ratios.max():.2f})"


def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each program of one call: medians over rounds, ratios to the first program."""
    speeds = rows.pivot(index="round", columns="name", values="steps_per_second").astype(float)
    table = []
    for name in dict.fromkeys(rows.name):
        mine = rows[rows.name == name]
        table.append(
            {
                "program": name,
                "steps": f"{int(mine.steps.iloc[0]):,}",
                "rounds": str(len(mine)),
                "steps/s": f"{speeds[name].median():,.0f}",
                "ratio": spread(speeds[name] / speeds[rows.name.iloc[0]]),
                "wall s": f"{mine.wall_seconds.astype(float).median():,.0f}",
                "peak MB": f"{mine.peak_mb.astype(float).median():,.0f}",
            }
        )
    return pd.DataFrame(table)


def hyperparameter_table(script: str) -> pd.DataFrame:
    """The flags of a script that belong to the experiment, with their defaults and help."""
    rows = []
    for flag, (default, meaning) in arguments(script).items():
        if flag[2:].replace("-", "_") not in NO_HYPERPARAMETERS:
            number = re.fullmatch(r"\d[\d_]*", default)
            default = f"{int(default):,}" if number else default.strip('"')
            default = {"True": "yes", "False": "no", "None": "none"}.get(default, default)
            rows.append({"argument": flag, "default": default, "meaning": meaning})
    return pd.DataFrame(rows)


def markdown(table: pd.DataFrame) -> str:
    """A table in markdown."""
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    cells = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def latex(table: pd.DataFrame) -> str:
    """A table in LaTeX: a tabular with booktabs' rules, without a table environment."""
    columns = "".join(r"p{0.6\linewidth}" if name == "meaning" else "l" for name in table)
    table = table.map(lambda cell: cell.replace("`", ""))
    text = table.to_latex(index=False, escape=True, column_format=columns)
    text = re.sub(r"(?<![\w.-])(\d[\d.]*)e(-?\d+)\b", r"$\1 \\times 10^{\2}$", text)
    text = re.sub(r"(?<![\w${-])-(?=[\d.])", "$-$", text)
    text = text.replace("±", r"$\pm$").replace("--", "-{}-")
    return "% needs \\usepackage{booktabs}\n" + text


def provenance_list(runs: pd.DataFrame) -> str:
    """What the runs of each script were made on."""
    text = ""
    for (script, machine, versions), rows in runs.groupby(["script", "machine", "versions"]):
        commits = sorted({commit for commits in rows.commit for commit in commits.split("; ")})
        text += f"* `{script}`: {machine}, {versions} (commit {', '.join(commits)})\n"
    return text


def speed_section(measured: pd.DataFrame) -> str:
    """The newest table of each call of speed.py, with its command."""
    text = ""
    for name, rows in newest_rounds(measured).items():
        table = speed_table(rows)
        commit = rows.commit.iloc[0] or "not noted"
        text += f"`{name}` ({rows.machine.iloc[0]}, commit {commit}):\n\n"
        command = f"python benchmark/speed.py --scripts {name} --repeats {table.rounds[0]}"
        command = f"JAXMARL=~/JaxMARL {command}" if name.startswith("qmix") else command
        text += f"```bash\n{command}\n```\n\n{markdown(table)}\n"
    return text


def frozen_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The default runs: what their policies return with either kind of statistics."""
    table = []
    for env_id, group in rows[rows.variant == ""].groupby("env_id"):
        row = {"environment": env_id, "seeds": str(len(group))}
        table.append(row | {name: interval(group[name]) for name in ("frozen", "fresh")})
    return pd.DataFrame(table)


def replace_sections(text: str, sections: dict[str, str]) -> tuple[str, list[str]]:
    """The text with its sections between markers replaced, and faults of the markers."""
    faults = []
    for name in re.findall(r"^<!-- (?:end of )?(\w+) -->$", text, re.M):
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        if name not in sections or text.count(begin) != 1 or text.count(end) != 1:
            faults.append(f"the marker {name} is unknown, or not there once with its end")
            continue
        before, _, after = text.partition(begin)
        _, _, after = after.partition(end)
        text = f"{before}{begin}\n{sections[name].strip()}\n{end}{after}"
    return text, list(dict.fromkeys(faults))


def generate(results: Path) -> tuple[dict[Path, str], list[str]]:
    """All generated files as they should be, {path: text}, and faults of the markers."""
    import summary  # which imports this module

    runs, measured = read_runs(results), read_table(results / "speed.csv")
    references = read_table(results / "references.csv")
    scores = score_table(runs, references)
    drawn = sorted(FRONT.keys() & set(runs.script))
    figures = [f"![Learning curves of {name}](figures/{name}.png)" for name in drawn]
    front_page = {
        "algorithms": markdown(summary.algorithms(measured)),
        "scores": markdown(summary.results(runs, references)),
        "speed": markdown(summary.speed(measured, every=False)),
    }
    sections = {
        "scores": markdown(scores),
        "provenance": provenance_list(runs),
        "figures": "\n\n".join(figures),
        "speed": speed_section(measured),
        "frozen": markdown(frozen_table(read_table(results / "frozen_or_fresh.csv"))),
        "kill_test": f"```\n{(results / 'kill_test.txt').read_text()}```",
        "slurm_test": f"```\n{(results / 'slurm_test.txt').read_text()}```",
        "defaults": markdown(summary.defaults(runs, references)),
        "speeds": markdown(summary.speed(measured)),
        "speeds_gpu": markdown(summary.speed(measured, gpu=True)),
        "win_rates": markdown(summary.win_rates(runs, results)),
    }
    archived = read_table(results / "archive" / "runs.csv")
    for name in summary.QUESTIONS:
        sections[name] = markdown(summary.question(name, runs, archived))
    files, faults = {}, []
    for path in documents.documents():
        files[path], found = replace_sections(
            path.read_text(), front_page if path == ROOT / "README.md" else sections
        )
        faults += [f"{path.relative_to(ROOT)}: {fault}" for fault in found]
    tables = {f"hyperparameters_{script}": hyperparameter_table(script) for script in FRONT}
    for name, table in (tables | {"scores": scores}).items():
        files[ROOT / "benchmark" / "tables" / f"{name}.tex"] = latex(table)
    return files, faults


def main(argv: list[str]) -> int:
    """Write what has changed, or check it. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, print faults")
    args = parser.parse_args(argv)
    files, faults = generate(RESULTS)
    for path, text in files.items():
        name = path.relative_to(ROOT)
        if not args.check and path.suffix == ".md":
            try:
                text = documents.with_lines(documents.with_numbers(path, text))
            except (ValueError, KeyError, OSError) as error:
                faults.append(f"{name}: a number has no source: {error}")
        if path.exists() and path.read_text() == text:
            continue
        if args.check:
            faults.append(f"{name}: not what the results give (python benchmark/tables.py)")
        else:
            path.write_text(text)
            print(f"written: {name}")
    if args.check:
        faults += documents.faults()
    print(*faults, sep="\n", end="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
