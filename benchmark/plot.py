"""Learning curves of the collected results: a figure per script with a panel per environment, as PDF, SVG and PNG.

    python benchmark/plot.py                                      # all scripts, two columns wide
    python benchmark/plot.py --scripts ppo_continuous --columns 1

A run is cut into 100 equal bins of steps, or fewer where it has fewer than 400 points (200 evaluations). A seed's value
in a bin is the mean of its episodes that ended there (a straight line across bins where none did), drawn at the bin's
end. A thin line is a seed; the thick one is the mean of the seeds, from five seeds on their interquartile mean (IQM);
the band is its 95 % bootstrap interval over seeds (of two or three seeds that is their range). Each variant has a
colour; runs that differ in their length only share one, and a dot is where each ends. Runs of more than three times
the length of an environment's shortest have a panel of their own. A dashed line is a published score, from
references.csv, or a number where the line would press the curves to the ground. The same results give the same files to
the byte.
"""

import argparse
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from run import ROOT, read_csv, run_name

TAGS = {"qmix_smac": "eval/battle_won_rate"}  # what is drawn, if not this:
TAG = "charts/episodic_return"
LABELS = {
    TAG: "training return",
    "eval/battle_won_rate": "battles won (fraction)",
    "eval/episodic_return": "evaluation return",
}
FLAG = re.compile(r"--\S+(?: (?!--)\S+)*")  # with its values
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")  # Okabe, Ito 2008
WIDTHS = {1: 3.25, 2: 6.75}  # inches of one and of two columns of a paper
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # fonts are embedded as TrueType, which journals ask for
    "svg.hashsalt": "benchmark",  # else the names in an SVG are random
}


def iqm(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Interquartile mean: the mean without the lowest and the highest quarter of the values, each rounded down."""
    n = values.shape[axis]
    return np.sort(values, axis).take(range(n // 4, n - n // 4), axis).mean(axis)


def centre(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """The IQM of five or more values, the mean of fewer."""
    return iqm(values, axis) if values.shape[axis] >= 5 else values.mean(axis)


def bootstrap(values: np.ndarray, statistic: Callable = centre, resamples: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % percentile bootstrap interval of a statistic over seeds; `values` (seeds, ...) give two arrays (...)."""
    rng = np.random.default_rng(0)
    rows = rng.integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(statistic(values[rows], axis=1), [2.5, 97.5], axis=0)
    return low, high


def curves(paths: list[Path], tag: str, most_bins: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The seeds of one variant on one grid: steps (B,) and values (seeds, B), or None where the tag is missing."""
    tables = []
    for path in paths:
        rows = [[row["step"], row["value"], row["count"]] for row in read_csv(path) if row["tag"] == tag]
        if not rows:
            return None
        tables.append(np.array(rows, float).T)
    points = 2 if tag.startswith("eval/") else 4  # at least so many a bin: an evaluation is of many episodes
    bins = max(1, min(most_bins, *(len(steps) // points for steps, _, _ in tables)))
    edges = np.linspace(0, max(steps[-1] for steps, _, _ in tables), bins + 1)
    ends, seeds = edges[1:], []
    for steps, values, counts in tables:
        which = np.searchsorted(edges[1:-1], steps)  # a bin holds its right edge
        weights = np.bincount(which, counts, bins)
        sums = np.bincount(which, counts * values, bins)
        seeds.append(np.interp(ends, ends[weights > 0], sums[weights > 0] / weights[weights > 0]))
    return ends, np.array(seeds)


def setting(script: str, variant: str) -> str:
    """The flags of a variant, sorted, but for the length of its runs and for what is the script's default."""
    path = ROOT / f"{script}.py"
    source = path.read_text() if path.exists() else ""
    kept = []
    for flag in FLAG.findall(variant):
        name, _, value = flag[2:].partition(" ")
        default = re.search(rf'^    {name.replace("-", "_")}: .* = "?{re.escape(value)}"?$', source, re.M)
        if name != "total-timesteps" and not (value and default):
            kept.append(flag)
    return " ".join(sorted(kept))


def draw(script: str, results_folder: Path, columns: int, tag: str, most_bins: int):
    """The figure of one script, or None where there are no results for it."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    runs = [row for row in read_csv(results_folder / "runs.csv") if row["script"] == script]
    shortest = {}
    for row in runs:
        shortest[row["env_id"]] = min(int(row["total_steps"]), shortest.get(row["env_id"], sys.maxsize))
    panels = defaultdict(lambda: defaultdict(list))  # {(env_id, whether these are much longer): {variant: paths}}
    for row in runs:
        path = results_folder / script / f"{run_name(row['env_id'], row['variant'], row['seed'])}.csv"
        if path.exists():
            longer = int(row["total_steps"]) > 3 * shortest[row["env_id"]]
            panels[row["env_id"], longer][row["variant"]].append(path)
    if not any(
        row["tag"] == tag for panel in panels.values() for paths in panel.values() for row in read_csv(paths[0])
    ):
        return None
    flags = {name: FLAG.findall(name) for panel in panels.values() for name in (setting(script, v) for v in panel)}
    common = set.intersection(*map(set, flags.values())) if len(flags) > 1 else set()
    own = {name: " ".join(flag for flag in flags[name] if flag not in common) for name in flags}
    settings = sorted(flags, key=own.get)  # the defaults, "", first
    looks = [{"color": colour, "linestyle": dashes} for dashes in ("-", "--", ":", "-.") for colour in COLOURS]
    looks = {name: looks[i % len(looks)] | {"linewidth": 1.4} for i, name in enumerate(settings)}
    references = defaultdict(list)
    for row in read_csv(ROOT / "benchmark" / "references.csv"):
        if row["script"] == script and tag.endswith("episodic_return"):
            references[row["env_id"]].append(row)

    columns = min(columns, len(panels))
    rows = -(-len(panels) // (2 * columns))
    across = -(-len(panels) // rows)
    figure = Figure(layout="constrained")
    seeds, sources = defaultdict(set), {}
    for i, (env_id, longer) in enumerate(sorted(panels)):
        axes = figure.add_subplot(rows, across, i + 1)
        for variant, paths in sorted(panels[env_id, longer].items()):
            drawn = curves(paths, tag, most_bins)
            if drawn is None:
                continue
            steps, values = drawn
            name = setting(script, variant)
            seeds[name].add(len(values))
            look = looks[name]
            colour = look["color"]
            axes.plot(steps, values.T, color=colour, linewidth=0.4, alpha=0.5)
            if len(values) > 1:
                axes.fill_between(steps, *bootstrap(values), color=colour, alpha=0.2, linewidth=0)
            axes.plot(steps, centre(values), **look, marker=".", markersize=4, markevery=[-1])
        highest = axes.dataLim.ymax  # of the curves
        for reference, dashes in zip(references[env_id], ("--", ":", "-.")):
            score = float(reference["score"])
            if score > 3 * highest > 0:
                axes.text(0.02, 0.98, f"published: {score:g}", transform=axes.transAxes, va="top", fontsize=7)
            else:
                axes.axhline(score, color="black", linewidth=0.8, linestyle=dashes)
            sources[f"published: {reference['source']}, {EngFormatter(sep='')(int(reference['steps']))} steps"] = dashes
        axes.set_title(f"{env_id}, longer runs" if longer else env_id)
        axes.set_xlim(left=0)
        if tag == "eval/battle_won_rate":
            axes.set_ylim(0, 1)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.locator_params("x", nbins=4, steps=[1, 2, 5, 10])
        if i + across >= len(panels):
            unit = "environment steps" if script == "qmix_smac" else "agent steps"
            frames = f"{unit}{' ' if columns > 1 else chr(10)}(4 frames each)"
            axes.set_xlabel(frames if script.endswith("atari") else unit)
        if i % across == 0:
            axes.set_ylabel(LABELS[tag])
    lines = [Line2D([], [], **looks[name]) for name in settings if seeds[name]]
    names = [f"{own[name] or 'defaults'}: {describe(seeds[name])}" for name in settings if seeds[name]]
    lines += [Line2D([], [], color="black", linewidth=0.8, linestyle=dashes) for dashes in sources.values()]
    labels = [*names, *sources]
    if common:
        labels.append("all runs with " + " ".join(flag for flag in flags[settings[0]] if flag in common))
        lines.append(Line2D([], [], linestyle="none"))
    labels = [textwrap.fill(label, 58 * columns, break_on_hyphens=False) for label in labels]
    figure.legend(lines, labels, loc="outside lower center")
    height = rows * min(0.85 * WIDTHS[columns] / across, 2) + 0.25 + 0.15 * "\n".join(labels).count("\n")
    figure.set_size_inches(WIDTHS[columns], height + 0.15)
    return figure


def describe(numbers: set[int]) -> str:
    """Which average over how many seeds the panels of a figure show."""
    low, high = min(numbers), max(numbers)
    average = "IQM" if low >= 5 else "mean" if high < 5 else "mean (IQM from 5 seeds on)"
    if high == 1:
        return "1 seed"
    return f"{average}, 95 % interval, {low if low == high else f'{low} to {high}'} seeds (thin)"


def save(figure, stem: Path) -> list[Path]:
    """Write a figure as PDF, SVG and PNG, without dates."""
    paths = [stem.with_suffix(suffix) for suffix in (".pdf", ".svg", ".png")]
    for path, metadata in zip(paths, ({"CreationDate": None}, {"Date": None}, {})):
        figure.savefig(path, metadata=metadata, dpi=200)
    return paths


def main(argv: list[str]) -> None:
    """Draw the figures, and name the files."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        sys.exit("error: figures need a package: pip install -r benchmark/requirements.txt")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", help="default: all that have any")
    parser.add_argument("--columns", type=int, choices=WIDTHS, default=2, help="of a paper: 3.25 or 6.75 inches wide")
    parser.add_argument("--tag", choices=LABELS, help=f"default: {TAG}, for qmix_smac {TAGS['qmix_smac']}")
    parser.add_argument("--bins", type=int, default=100, help="at most so many")
    parser.add_argument("--results-folder", type=Path, default=ROOT / "benchmark" / "results")
    parser.add_argument("--figures-folder", type=Path, default=ROOT / "benchmark" / "figures")
    args = parser.parse_args(argv)
    if args.bins < 1:
        parser.error("--bins must be at least 1")
    for folder in (args.results_folder, args.figures_folder):
        if folder.exists() and not folder.is_dir():
            parser.error(f"{folder} is no folder")
    found = sorted({row["script"] for row in read_csv(args.results_folder / "runs.csv")})
    if not found:
        parser.error(f"there are no results in {args.results_folder}")
    with matplotlib.rc_context(STYLE):
        for script in args.scripts or found:
            tag = args.tag or TAGS.get(script, TAG)
            if not (figure := draw(script, args.results_folder, args.columns, tag, args.bins)):
                sys.exit(f"error: there are no results of {script} in {args.results_folder}, or none with {tag}")
            args.figures_folder.mkdir(parents=True, exist_ok=True)
            name = "__".join([script, *([] if args.columns == 2 else ["narrow"]), *(args.tag or "").split("/")[1:]])
            print(*save(figure, args.figures_folder / name), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
