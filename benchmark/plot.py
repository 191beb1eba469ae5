"""Learning curves: a figure per script with a panel per environment, one of all scripts, and one
over wall time.

    python benchmark/plot.py    # figures/{script}.pdf and .png, overview and wall_time as well

A run is cut into 100 equal bins of steps, or fewer if it has fewer than 400 points (200
evaluations). A seed's value in a bin is the mean of its episodes that ended there, drawn at the
bin's end. Fewer than three seeds are drawn each. From three on a thin line is a seed, the thick one
their mean, from five on their interquartile mean (IQM), the band its 95% bootstrap interval. Each
variant has a color; runs that differ only in their length share one, and a dot marks where each
ends. Runs of more than three times the length of an environment's shortest have a panel of their
own. Gray lines are peers' runs of as many steps as the longest. A dashed line is a published score
of about as many steps, dots are a published curve. Wall
time is steps over the steps per second of the newest speed table, where programs took turns on one
machine; where there is none, that of a run, the median of a program's runs. The same results give
the same files.
"""

import argparse
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import scipy.stats
from common import (
    EARLIER_QMIX,
    FLAG,
    FRONT,
    RESULTS,
    ROOT,
    curves_name,
    front,
    read_runs,
    read_table,
    setting,
)
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

LABELS = {
    "charts/episodic_return": "training return",
    "eval/battle_won_rate": "battles won (fraction)",
}
WORDS = {  # settings in a legend
    "--log-std-init -1.0": "initial standard deviation 0.37",
    "--num-envs 8 --num-steps 256": "8 environments, 256 steps each",
    "--vf-coef 1.0": "weight of the value loss 1",
    "--mixer vdn": "VDN",
    "--mixer none": "independent learners",
    "--bootstrap-timeouts": "bootstrap at truncation",
    "--no-prioritized": "uniform replay",
    "--bf16": "bfloat16",
    "--adam-eps 1.5e-4": "Adam's epsilon 1.5e-4",
    "--exploration-fraction 0.1": "epsilon 0.01 at 10% of the run",
    "--middle-fraction 0.1": "epsilon 0.1 at 10% of the run",
    "--middle-fraction 0.5": "epsilon 0.1 at 50%",
    "--end-fraction 0.8": "epsilon 0.01 at 80%",
    "--target-interval 32": "target copied every 32 iterations",
    "--buffer-size 1000": "replay of 1,000 episodes",
    "--batch-size 8": "minibatches of 8",
    "--batch-size 32": "minibatches of 32",
    "--updates-per-episode 0.25": "an update per 4 episodes",
    "--updates-per-episode 1.0": "an update per episode",
    "--optimizer rmsprop": "RMSprop",
    "--learning-rate 0.0005": "step size 5e-4",
    "--td-lambda 0.0": "one-step targets",
    "--td-lambda 0.8": "TD(0.8)",
}
TOGETHER = {  # settings of QMIX that were its defaults
    "earlier settings": FLAG.findall(f"--num-envs 8 {EARLIER_QMIX}"),
    "former default": FLAG.findall("--td-lambda 0.8 --batch-size 8 --updates-per-episode 1.0"),
}
PEERS = {  # of the overview: the peers' scripts, their names
    "ppo_continuous": {"sb3_ppo": "Stable-Baselines3"},
    "a2c_atari": {"sb3_a2c": "Stable-Baselines3"},
    "qmix_smac": {
        "jaxmarl_qmix": "JaxMARL QMIX",
        "jaxmarl_vdn": "JaxMARL VDN",
        "jaxmarl_pqn_vdn": "JaxMARL PQN-VDN",
    },
}
ON_THE_CLOCK = ("ppo_continuous", "qmix_smac")  # their runs and the peers' took one core each
PUBLISHED = {"color": "black", "linewidth": 0.8, "linestyle": "--"}
DOTS = [{"color": "#777777", "linestyle": "", "marker": x, "markersize": 3} for x in "osv^"]
PEER_LOOKS = [{"color": "#777777", "linestyle": dashes} for dashes in ("-", "-.", ":")]
TITLES = {
    "ppo_continuous": "PPO",
    "a2c_atari": "A2C",
    "a3c_atari": "A3C",
    "dqn_per_atari": "DQN",
    "qmix_smac": "QMIX",
}
# Okabe, Ito 2008
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #888833".split()
DASHES = ("-", "--", ":", "-.")
LOOKS = [{"color": color, "linestyle": dashes} for dashes in DASHES for color in COLORS[1:]]
LOOKS = [{"color": COLORS[0], "linestyle": "-"}, *LOOKS]  # blue: the default, or nearest to it
WIDTH = 6.75  # inches of two columns of a paper
STYLE = {
    "font.size": 7,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # fonts are embedded as TrueType, which journals ask for
}


def iqm(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Interquartile mean: without the lowest and the highest quarter, each rounded down."""
    return scipy.stats.trim_mean(values, 0.25, axis=axis)


def center(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """The IQM of five or more values, the mean of fewer."""
    return iqm(values, axis) if values.shape[axis] >= 5 else values.mean(axis)


def bootstrap(values: np.ndarray, statistic=center) -> tuple[np.ndarray, np.ndarray]:
    """The 95% percentile bootstrap interval of a statistic over seeds.

    From values (seeds, ...) to two arrays (...).
    """
    options = {"n_resamples": 20_000, "method": "percentile", "vectorized": True}
    options["rng"] = np.random.default_rng(0)
    return scipy.stats.bootstrap((values,), statistic, axis=0, **options).confidence_interval


def tag_of(script: str) -> str:
    """What is drawn of a script."""
    if script.startswith(("qmix", "jaxmarl")):
        return "eval/battle_won_rate"
    return "charts/episodic_return"


def curves(paths: list[Path], tag: str, most_bins: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """The seeds of one variant on one grid: steps (B,) and values (seeds, B)."""
    tables = [table[table.tag == tag] for table in map(pd.read_csv, paths)]
    # At least so many in a bin: an evaluation is of many episodes
    points = 2 if tag.startswith("eval/") else 4
    bins = max(1, min(most_bins, *(len(table) // points for table in tables)))
    edges = np.linspace(0, max(table.step.max() for table in tables), bins + 1)
    ends, seeds = edges[1:], []
    for table in tables:
        which = np.searchsorted(edges[1:-1], table.step)  # a bin holds its right edge
        weights = np.bincount(which, table["count"], bins)
        sums = np.bincount(which, table["count"] * table.value, bins)
        seeds.append(np.interp(ends, ends[weights > 0], sums[weights > 0] / weights[weights > 0]))
    return ends, np.array(seeds)


def draw_runs(axes, tag: str, runs: pd.DataFrame, results: Path, look: dict, unit=1.0) -> None:
    """Draw the runs of one variant: below three seeds each, from three on their center and band.

    The horizontal axis is steps times `unit`.
    """
    steps, values = curves([results / curves_name(row) for row in runs.to_dict("records")], tag)
    steps = steps * unit
    dot = {"marker": ".", "markersize": 4, "markevery": [-1]}
    if len(values) < 3:
        axes.plot(steps, values.T, **look, **dot, linewidth=1)
        return
    axes.plot(steps, values.T, color=look["color"], linewidth=0.4, alpha=0.5)
    axes.fill_between(steps, *bootstrap(values), color=look["color"], alpha=0.2, linewidth=0)
    axes.plot(steps, center(values), **look, **dot, linewidth=1.4)


def draw_panel(
    axes, script: str, env_id: str, runs: pd.DataFrame, results: Path, looks: dict
) -> dict[str, dict]:
    """Draw an environment's runs, each variant in the look of its setting, and published scores.

    A score is shown where the panel's longest runs have about as many steps, a published curve as
    dots. Returns the look of each source.
    """
    tag, dots = tag_of(script), iter(DOTS)
    for variant, rows in runs.groupby("variant"):
        draw_runs(axes, tag, rows, results, looks[setting(script, variant)])
    longest = runs.total_steps.astype(int).max()
    references = read_table(RESULTS / "references.csv").astype({"steps": int, "score": float})
    references, sources = references.query("script == @script and env_id == @env_id"), {}
    for source, rows in references.groupby("source", sort=False):
        source, steps = source.split(" (")[0], rows.steps.iloc[-1]
        if len(rows) > 1:  # a published curve
            rows, look = rows[rows.steps < 1.05 * longest], next(dots)
            axes.plot(rows.steps, rows.score, **look)
            sources[source] = look
        elif 0.9 < steps / longest < 1.1 and tag.endswith("episodic_return"):
            axes.axhline(rows.score.item(), **PUBLISHED)
            sources[f"{source}, {steps / 1e6:g}M steps"] = PUBLISHED
    axes.set_xlim(left=0)
    axes.set_xlabel("environment steps" if "qmix" in script else "agent steps")
    axes.set_ylabel(LABELS[tag])
    if tag == "eval/battle_won_rate":
        axes.set_ylim(0, 1)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params("x", nbins=4, steps=[1, 2, 5, 10])
    return sources


def in_words(flags: str) -> str:
    """A setting for a legend."""
    if flags in WORDS:
        return WORDS[flags]
    found = FLAG.findall(re.sub("--checkpoint-interval \\d+", "", flags))
    for name, flags in TOGETHER.items():
        if set(flags) <= set(found):
            found = [flag for flag in found if flag not in flags] + [name]
    return ", ".join(WORDS.get(flag, flag) for flag in found) or "default"


def seeds(sizes) -> str:
    """How many seeds: the fewest to the most."""
    counts = " to ".join(dict.fromkeys(map(str, (min(sizes), max(sizes)))))
    return f"{counts} seed{'s' * (counts != '1')}"


def draw(script: str, results: Path) -> Figure:
    """The figure of one script."""
    everything = read_runs(results)
    runs = everything.query("script == @script")
    if runs.empty:
        sys.exit(f"error: no runs of {script} in {results}")
    steps = runs.total_steps.astype(int)
    runs = runs.assign(longer=steps > 3 * steps.groupby(runs.env_id).transform("min"))
    settings = {setting(script, variant) for variant in runs.variant}
    flags = {name: FLAG.findall(name) for name in settings}
    common = set.intersection(*map(set, flags.values())) if len(flags) > 1 else set()
    own = {name: " ".join(flag for flag in flags[name] if flag not in common) for name in flags}
    default = "--exploration-fraction"  # today's epsilon: other runs of DQN have an earlier one
    plainest_first = sorted(
        flags, key=lambda name: (default not in name, own[name].count("--"), own[name])
    )
    looks = dict(zip(plainest_first, LOOKS * len(flags)))

    panels = sorted(runs.groupby(["env_id", "longer"]), key=lambda x: (x[0][0], not x[0][1]))
    rows = -(-len(panels) // 4)
    across = -(-len(panels) // rows)
    figure, published, peers = Figure(layout="constrained"), {}, {}
    for i, ((env_id, longer), group) in enumerate(panels):
        axes = figure.add_subplot(rows, across, i + 1)
        longest = group.total_steps.astype(int).max()
        for (peer, name), look in zip(PEERS.get(script, {}).items(), PEER_LOOKS):
            theirs = everything[(everything.script == peer) & (everything.env_id == env_id)]
            theirs = theirs[(theirs.total_steps.astype(int) / longest).between(0.95, 1.05)]
            if len(theirs):
                draw_runs(axes, tag_of(script), theirs, results, look)
                peers.setdefault(name, (look, []))[1].append(len(theirs))
        for source, look in draw_panel(axes, script, env_id, group, results, looks).items():
            published[f"published: {source}"] = Line2D([], [], **look)
        axes.set_title(f"{env_id}, longer runs" if longer else env_id)
        axes.set_xlabel("" if i + across < len(panels) else axes.get_xlabel())
        axes.set_ylabel("" if i % across else axes.get_ylabel())
    runs["setting"] = runs.variant.map(lambda variant: setting(script, variant))
    legend = {}
    for name, look in looks.items():
        sizes = runs[runs.setting == name].groupby(["variant", "env_id"]).size()
        legend[f"{in_words(own[name])}: {seeds(sizes)}"] = Line2D([], [], **look)
    for name, (look, sizes) in peers.items():
        legend[f"{name}: {seeds(sizes)}"] = Line2D([], [], **look)
    legend |= published
    common = {flag for flag in common if "--checkpoint-interval" not in flag}
    if common:
        words = ", ".join(in_words(flag) for flag in sorted(common))
        legend[f"all runs: {words}"] = Line2D([], [], linestyle="none")
    figure.legend(list(legend.values()), list(legend), loc="outside lower center")
    figure.set_size_inches(WIDTH, rows * min(0.85 * WIDTH / across, 2) + 0.25 + 0.15 * len(legend))
    return figure


def draw_overview(results: Path) -> Figure:
    """A panel per script: the runs that README's table names, a peer's, the published score."""
    runs = read_runs(results)
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    for i, (script, ours) in enumerate(front(runs).items()):
        axes = figure.add_subplot(2, 3, i + 1)
        env_id, variant = ours.iloc[0][["env_id", "variant"]]
        legend = {f"here ({len(ours)})": LOOKS[0]}
        for (peer, name), look in zip(PEERS.get(script, {}).items(), PEER_LOOKS):
            theirs = runs[(runs.script == peer) & (runs.env_id == env_id)]
            if len(theirs):
                draw_runs(axes, tag_of(script), theirs, results, look)
                legend[f"{name} ({len(theirs)})"] = look
        looks = {setting(script, variant): LOOKS[0]}
        legend |= draw_panel(axes, script, env_id, ours, results, looks)
        handles = [Line2D([], [], **look) for look in legend.values()]
        if script == "qmix_smac":  # its legend in the empty panel
            place = dict(loc="upper left", bbox_to_anchor=(1.2, 1))
            axes.legend(handles, list(legend), **place, fontsize=6).set_in_layout(False)
        else:
            axes.legend(handles, list(legend), loc="best", fontsize=6)
        if script in ("a2c_atari", "dqn_per_atari"):  # elsewhere there is room
            low, high = axes.get_ylim()
            axes.set_ylim(top=high + 0.4 * (high - low))
            axes.legend(handles, list(legend), loc="upper left", fontsize=6)
        axes.set_title(f"{TITLES[script]}, {env_id}")
    words = (
        "In parentheses: seeds.\nFewer than three: each seed.\nElse: the mean, from five on the\n"
        "interquartile mean, with a\n95% bootstrap interval.\nDashed lines, markers: published."
    )
    figure.text(0.72, 0.25, words, fontsize=7, va="center")
    return figure


def draw_wall_time(results: Path) -> Figure:
    """Returns over minutes, ours and a peer's: the runs of `draw_overview`."""
    runs, measured = read_runs(results), read_table(results / "speed.csv")
    figure = Figure(figsize=(WIDTH, 2.3), layout="constrained")
    shown = {script: ours for script, ours in front(runs).items() if script in ON_THE_CLOCK}
    for i, (script, ours) in enumerate(shown.items()):
        axes, env_id = figure.add_subplot(1, len(ON_THE_CLOCK), i + 1), ours.iloc[0].env_id
        if measured.empty:
            continue
        newest = measured[measured.script == script].astype({"steps_per_second": float})
        newest = newest[newest.date == newest.date.max()]
        speeds = newest.groupby("name").steps_per_second.median()
        legend = {f"here ({len(ours)})": (ours, LOOKS[0], f"{script}.py")}
        if f"{script}.py --compile" in speeds:
            legend[f"here, compiled ({len(ours)})"] = (ours, LOOKS[1], f"{script}.py --compile")
        for (peer, name), look in zip(PEERS[script].items(), PEER_LOOKS):
            theirs = runs[(runs.script == peer) & (runs.env_id == env_id)]
            programs = [program for program in speeds.index if program.startswith(name)]
            if len(theirs):
                program = programs[0] if programs else ""
                legend[f"{name} ({len(theirs)})"] = (theirs, look, program)
        drawn = {}
        for words, (rows, look, program) in legend.items():
            seconds = pd.to_numeric(rows.wall_seconds) / rows.total_steps.astype(int)
            per_step = 1 / speeds[program] if program in speeds else seconds.median()
            if np.isfinite(per_step):  # else nothing says how long a step takes
                draw_runs(axes, tag_of(script), rows, results, look, per_step / 60)
                drawn[words] = Line2D([], [], **look)
        axes.legend(drawn.values(), drawn, loc="best", fontsize=6)
        axes.set_title(f"{TITLES[script]}, {env_id}")
        axes.set_xlim(left=0)
        axes.set_xlabel("minutes")
        axes.set_ylabel(LABELS[tag_of(script)])
    return figure


def main(argv: list[str]) -> None:
    """Draw the figures, and name the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scripts", nargs="+", help="default: ours that have results, and overview"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figures", type=Path, default=ROOT / "benchmark" / "figures")
    args = parser.parse_args(argv)
    if not (args.results / "runs.csv").exists():
        sys.exit(f"error: no runs in {args.results}")
    found = sorted({*read_runs(args.results).script})
    if args.results.resolve() == RESULTS or FRONT.keys() & {*found}:
        found = sorted(FRONT.keys() & {*found})
    args.figures.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        whole = {"overview": draw_overview, "wall_time": draw_wall_time}
        for name in args.scripts or [*found, *(whole if FRONT.keys() & {*found} else ())]:
            figure = whole[name](args.results) if name in whole else draw(name, args.results)
            for suffix, metadata in ((".pdf", {"CreationDate": None}), (".png", {})):
                path = (args.figures / name).with_suffix(suffix)
                figure.savefig(path, metadata=metadata, dpi=200)
                print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
