"""The benchmark: statistics, collecting what scripts write, tables, figures, speed, and what the front page says."""

import dataclasses
import importlib
import json
import re
import sys
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import ROOT, Run
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(ROOT / "benchmark"))
import collect
import common
import compare
import plot
import speed
import tables

SMALL = "--env-id Pendulum-v1 --num-steps 64 --num-minibatches 2 --update-epochs 2 --total-timesteps 1984".split()


def make_results(folder, seeds=range(1, 6), script="ppo_continuous", env_id="HalfCheetah-v4", variants=("",)):
    """Results as collect.py writes them: for each seed a curve that rises to 1000 times the seed."""
    rows = []
    for variant in variants:
        for seed in seeds:
            row = {"script": script, "env_id": env_id, "variant": variant, "seed": seed, "total_steps": 100_000}
            path = folder / common.curves_name(row | {"commit": "c0ffee"})
            path.parent.mkdir(parents=True, exist_ok=True)
            points = "".join(f"charts/episodic_return,{1000 * i},{seed * 10 * i},1\n" for i in range(1, 101))
            path.write_text("tag,step,value,count\n" + points)
            row |= {"training_return": 1000 * seed, "eval_return": 1100 * seed, "eval_battle_won_rate": ""}
            rows.append(row | {"tests_battle_won_rate": "", "wall_seconds": 1800, "commit": "c0ffee", "ended": ""})
    pd.DataFrame(rows).to_csv(folder / "runs.csv", index=False)
    return folder


# Statistics


def test_iqm_is_the_mean_of_the_middle_half():
    values = np.random.default_rng(1).normal(size=(12, 3))
    for n in range(1, 13):
        expected = [np.mean(sorted(column)[int(0.25 * n) : n - int(0.25 * n)]) for column in values[:n].T]
        np.testing.assert_allclose(plot.iqm(values[:n]), expected)
        np.testing.assert_allclose(plot.iqm(values[:n].T, axis=1), expected)
    assert plot.iqm(np.array([1.0, 2, 3, 4, 1000])) == 3


def test_centre_is_the_mean_below_five_seeds():
    assert plot.centre(np.array([0.0, 0, 0, 100])) == 25
    assert plot.centre(np.array([0.0, 0, 0, 0, 100])) == 0


def test_bootstrap_interval_covers_and_is_deterministic():
    samples = np.random.default_rng(2).normal(size=(10, 200))  # 10 seeds each of 200 experiments whose mean is 0
    low, high = plot.bootstrap(samples, np.mean)
    assert low.shape == high.shape == (200,)
    assert 0.82 < np.mean((low < 0) & (high > 0)) < 0.97  # somewhat less than 95 %, as with all small samples
    assert np.all(low < samples.mean(0)) and np.all(samples.mean(0) < high)
    np.testing.assert_array_equal(plot.bootstrap(samples, np.mean), (low, high))
    assert tuple(plot.bootstrap(np.full(5, 3.0))) == (3, 3)


def test_curves_average_episodes_in_bins_of_steps(tmp_path):
    points = "".join(f"charts/episodic_return,{s},{s},1\n" for s in range(1, 801))
    (tmp_path / "a.csv").write_text("tag,step,value,count\n" + points)
    steps, values = plot.curves([tmp_path / "a.csv"] * 2, "charts/episodic_return")
    np.testing.assert_allclose(steps, np.arange(8, 801, 8))
    np.testing.assert_allclose(values, [steps - 3.5] * 2)  # of the steps 1 to 8, 9 to 16, ...


# Running and collecting


def test_thinning_keeps_episodes_and_means():
    points = pd.DataFrame({"step": range(1, 2501), "value": [float(step % 7) for step in range(1, 2501)]})
    rows = collect.thin(points)
    assert len(rows) == 1000 and rows["count"].sum() == 2500
    assert (rows.value * rows["count"]).sum() == pytest.approx(points.value.sum())
    assert all(a < b for a, b in pairwise(rows.step))
    assert collect.thin(points[:1000]).equals(points[:1000].assign(count=1))


def test_events_of_a_resumed_run_are_read_once(tmp_path):
    for first, last, offset in ((0, 10, 0), (6, 15, 100)):  # killed at 10, resumed from the checkpoint at 6
        writer = SummaryWriter(str(tmp_path), purge_step=first + 1, filename_suffix=str(first))
        for step in range(first + 1, last + 1):
            writer.add_scalar("charts/episodic_return", step + offset, step)
        writer.close()
    events = common.read_events(tmp_path)
    assert events.step.tolist() == list(range(1, 16))
    assert events.value.tolist() == [*range(1, 7), *range(107, 116)]
    (tmp_path / "empty").mkdir()
    assert common.read_events(tmp_path / "empty").empty


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder of two finished runs of PPO, one of them of another variant."""
    runs = tmp_path_factory.mktemp("runs")
    for seed, flags in ((1, []), (2, ["--gamma", "0.9"])):
        argv = [*SMALL, "--seed", str(seed), *flags, "--run-folder", str(seed)]
        assert Run("ppo_continuous", *argv, cwd=runs).wait().status == 0
    return runs


def test_collected_runs_are_what_the_script_wrote(finished, tmp_path):
    assert collect.main([str(finished), "--results", str(tmp_path)]) == 0
    flags = "--total-timesteps 1984 --num-steps 64 --update-epochs 2 --num-minibatches 2"
    first, second = common.read_table(tmp_path / "runs.csv").sort_values("seed").to_dict("records")
    result = json.loads((finished / "2" / "result.json").read_text())
    assert first["variant"] == flags
    assert set(common.FLAG.findall(second["variant"])) == {*common.FLAG.findall(flags), "--gamma 0.9"}
    assert (second["script"], second["env_id"], second["total_steps"]) == ("ppo_continuous", "Pendulum-v1", "1984")
    assert float(second["eval_return"]) == pytest.approx(np.mean(result["episodic_return"]), rel=1e-4)
    assert second["command"].startswith("python ppo_continuous.py --env-id Pendulum-v1 --seed 2 --")
    assert f"torch {result['versions']['torch']}" in second["versions"] and second["machine"] == result["machine"]
    (path,) = (tmp_path / "ppo_continuous").glob("*gamma_0.9*__2__*.csv")
    curves, events = pd.read_csv(path), common.read_events(finished / "2")
    episodes = events[events.tag == "charts/episodic_return"]
    np.testing.assert_allclose(curves[curves.tag == "charts/episodic_return"].value, episodes.value, rtol=1e-5)
    assert float(second["training_return"]) == pytest.approx(episodes.value.mean(), rel=1e-5)

    before = {path: path.read_bytes() for path in tmp_path.rglob("*.csv")}
    assert collect.main([str(finished), "--results", str(tmp_path)]) == 0
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.csv")}


@pytest.mark.parametrize("damaged", ["result.json", "events"])
def test_damaged_files_of_one_run_replace_no_result_and_stop_no_other(damaged, finished, tmp_path, capsys):
    assert collect.main([str(finished), "--results", str(tmp_path)]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.csv")}
    (path,) = (finished / "1").glob(f"{damaged}*")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    try:
        capsys.readouterr()
        assert collect.main([str(finished), "--results", str(tmp_path)]) == 1
    finally:
        path.write_bytes(content)
    out, err = capsys.readouterr()
    assert out == f"{finished / '2'}: collected\n" and err.startswith(f"failed: {finished / '1'}: ")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.csv")}


def test_names_of_runs_differ_where_runs_do():
    variants = ["", "--x 1", "--x -1", "--x 11", "--no-x", "--x 1 --y"]
    assert len({tuple(common.run_name("E-v1", variant)) for variant in variants}) == 6
    assert common.run_name("ALE/Pong-v5", "--no-x --y 3") == ["ALE-Pong-v5", "no-x_y_3"]


@pytest.mark.parametrize("study", sorted((ROOT / "benchmark" / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_studies_name_scripts_and_flags_that_are_there(study):
    peers = re.findall(r'^    "(\w+)": ', (ROOT / "benchmark" / "peers.py").read_text(), re.M)
    for part in yaml.safe_load(study.read_text())["study"]:
        assert part["seeds"] and part["env_ids"]
        flags = {flag.split()[0] for flag in common.FLAG.findall(part.get("flags", ""))}
        if part["script"] not in peers:
            assert flags <= set(yes_and_no(common.arguments(part["script"])))


def test_speed_compares_programs_with_flags_that_are_there():
    assert {table for table, _, _ in speed.PROGRAMS} == set(speed.STEPS)
    for _, name, command in speed.PROGRAMS:
        if not command.startswith("benchmark/peers.py"):
            script = command.removeprefix(f"{speed.TORCHRUN} ").split(".py")[0]
            assert name.startswith(f"{script}.py")
            assert {*re.findall(r"--[\w-]+", command)} <= {"--nproc-per-node", *yes_and_no(common.arguments(script))}


def yes_and_no(flags):
    return [*flags, *(f"--no-{flag[2:]}" for flag in flags)]


def test_equal_models_are_told_from_different_ones(tmp_path, capsys):
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0 + 1e-7)):
        (tmp_path / name / "run").mkdir(parents=True)
        model = {"args": name, "seconds": value, "agent": {"weight": torch.tensor([value])}}
        torch.save(model, tmp_path / name / "run" / "model.pt")
        (tmp_path / name / "run" / "result.json").write_text('{"episodic_return": [1.0]}')
        (tmp_path / name / "run" / "starts").write_text("now \nlater checkpoint_9.pt\n")
    folders = [str(tmp_path / name) for name in "abcd"]
    assert compare.main(folders[:2]) == 0
    assert capsys.readouterr().out == "run: the same to the bit; started from nothing, then from checkpoint_9.pt\n"
    assert compare.main([folders[0], folders[2]]) == compare.main([folders[0], folders[3]]) == 1
    assert compare.main([folders[3], folders[0]]) == 1  # nothing finished


def test_a_search_space_is_read_as_written():
    optuna = pytest.importorskip("optuna", reason="the search needs pip install -r benchmark/requirements.txt")
    import tune

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trial = optuna.create_study().ask()
    specs = ["learning_rate=1e-5..1e-3:log", "num_envs=2..4", "clip_coef=0.1,0.2"]
    names, values = zip(*(tune.suggest(trial, spec).split("=") for spec in specs))
    assert names == ("--learning-rate", "--num-envs", "--clip-coef")
    assert 1e-5 <= float(values[0]) <= 1e-3 and values[1] in "234" and values[2] in ("0.1", "0.2")
    kinds = {name: type(distribution).__name__ for name, distribution in trial.distributions.items()}
    assert list(kinds.values()) == ["FloatDistribution", "IntDistribution", "CategoricalDistribution"]
    assert trial.distributions["learning_rate"].log


# Tables


def test_committed_tables_are_what_the_results_give():
    files = tables.generate(common.RESULTS)
    assert {"README.md", "benchmark/README.md", "benchmark/tables/scores.tex"} <= {
        str(path.relative_to(ROOT)) for path in files
    }
    for path, text in files.items():
        assert path.read_text() == text, "run python benchmark/tables.py"


def test_scores_say_what_the_results_say(tmp_path):
    results = make_results(tmp_path, variants=("", "--no-bootstrap-truncation"))
    references = common.read_table(common.RESULTS / "references.csv")
    runs = common.read_runs(results)
    default, variant = tables.score_table(runs, references).to_dict("records")
    assert (default["steps"], default["seeds"], default["hours"]) == ("100,000", "5", "0.50")
    assert default["training return"].startswith("3,000 [") and default["IQM"].startswith("3,000 [")
    assert default["evaluation"].startswith("3,300 [") and default["published"] == "1,443 ± 46"
    assert default["source"] == "CleanRL docs (PPO; 3 seeds), 1M steps"
    assert variant["flags"] == "`--no-bootstrap-truncation`"
    (front,) = tables.front_scores(runs, references).to_dict("records")
    assert front["score"] == default["training return"] and front["steps"] == "100,000"


def test_the_front_page_shows_the_longest_runs_and_of_these_the_plainest():
    def row(variant, steps):
        return {"script": "a2c_atari", "env_id": common.FRONT["a2c_atari"], "variant": variant, "total_steps": steps}

    rows = [row("--total-timesteps 9", "9"), row("--gamma 0.9 --total-timesteps 20", "20")]
    rows += [row("--total-timesteps 20", "20"), row("", "10")]
    assert common.front(pd.DataFrame(rows))["a2c_atari"].variant.tolist() == ["--total-timesteps 20"]


def test_speed_table_takes_the_newest_rounds():
    def row(date, name, steps_per_second):
        fixed = {
            "script": "ppo_continuous",
            "steps": "1000",
            "wall_seconds": "10",
            "peak_mb": "500",
            "machine": "M, 3",
            "commit": "",
        }
        return {"date": date, "name": name, "steps_per_second": str(steps_per_second), **fixed}

    names = ["Peer", "ppo_continuous.py", "Slow peer", "its own Peer"]
    today = [row("2", n, v) for n, v in zip(names * 3, [100, 300, 50, 600, 200, 400, 50, 800, 100, 500, 50, 1000])]
    measured = pd.DataFrame([row("1", names[0], 1), row("1", names[1], 9), *today])
    (rows,) = tables.newest_rounds(measured).values()
    table = tables.speed_table(rows)
    assert table.program.tolist() == names and table.rounds.tolist() == ["3"] * 4
    assert table["steps/s"].tolist() == ["100", "400", "50", "800"]
    assert table.ratio.tolist()[1] == "3.00 (2.00 to 5.00)"
    front = tables.front_speed(measured)
    assert front["fastest peer"].tolist() == ["Peer: 100", "its own Peer: 800"]
    assert front["times as fast"].tolist() == ["3.00 (2.00 to 5.00)", "0.50 (0.50 to 0.50)"]


def test_a_setting_has_no_lengths_and_no_defaults():
    assert common.setting("qmix_smac", "--total-timesteps 500 --mixer qmix") == ""
    assert common.setting("qmix_smac", "--mixer vdn --total-timesteps 500 --gamma 0.98") == "--gamma 0.98 --mixer vdn"
    assert common.setting("ppo_continuous", "--log-std-init -1 --num-envs 1") == "--log-std-init -1"


def test_a_variant_is_what_differs_from_the_defaults():
    values = dataclasses.asdict(importlib.import_module("ppo_continuous").Args())
    assert common.variant("ppo_continuous", values) == ""
    values |= {"seed": 7, "run_folder": "x", "norm_adv": False, "compile": True, "gamma": 0.9, "target_kl": 0.02}
    assert common.variant("ppo_continuous", values) == "--gamma 0.9 --no-norm-adv --target-kl 0.02"
    assert common.variant("ppo_continuous", values, common.SPEED).split()[-1] == "--compile"
    peer = {"env_id": "3m", "seed": 1, "total_timesteps": 9, "threads": 1}
    assert common.variant("jaxmarl_qmix", peer) == "--total-timesteps 9"
    assert common.variant("jaxmarl_qmix", peer, common.SPEED) == "--total-timesteps 9 --threads 1"


def test_of_a_seed_the_run_that_ended_last_counts(tmp_path):
    runs = [("1", "a", ""), ("1", "b", "11-23"), ("1", "c", "11-22"), ("2", "a", ""), ("2", "d", "11-23")]
    rows = [{"script": "s", "env_id": "e", "variant": "", "seed": s, "commit": c, "ended": day} for s, c, day in runs]
    rows.append(rows[0] | {"variant": "--gamma 0.9"})
    pd.DataFrame(rows).to_csv(tmp_path / "runs.csv", index=False)
    assert common.read_runs(tmp_path).commit.tolist() == ["b", "d", "a"]


def test_runs_of_one_seed_at_two_commits_have_curves_of_their_own():
    row = {"script": "ppo_continuous", "env_id": "Ant-v4", "variant": "--gamma 0.9", "seed": 1}
    names = {common.curves_name(row | {"commit": commit}) for commit in ("c0ffee", "c0ffee-changed", "beef; c0ffee")}
    assert len(names) == 3 and "ppo_continuous/Ant-v4__gamma_0.9__1__c0ffee.csv" in names


@pytest.mark.parametrize("script", ["ppo_continuous", "a2c_atari"])
def test_hyperparameters_are_the_defaults(script):
    rows = tables.hyperparameter_table(script).set_index("argument").to_dict("index")
    words = {True: "yes", False: "no", None: "none"}
    for argument in dataclasses.fields(importlib.import_module(script).Args):
        if argument.name not in common.NO_HYPERPARAMETERS:
            row = rows.pop("--" + argument.name.replace("_", "-"))
            assert row["meaning"]
            if type(argument.default) in (int, float):
                assert float(row["default"].replace(",", "")) == argument.default
            else:
                assert row["default"] == words.get(argument.default, argument.default)
    assert not rows


def test_latex_is_well_formed():
    cells = ["x_y 50% #1 {^~}", "1,443 ± 46", "-4.5 and 1e-5", "`--flag -1`"]
    text = tables.latex(pd.DataFrame([cells], columns=["a", "b", "meaning", "d"]))
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    (row,) = [line for line in text.splitlines() if "1,443" in line]
    assert len(re.findall(r"(?<!\\)&", row)) == 3 and row.endswith(r"\\")
    assert r"1,443 $\pm$ 46" in row and r"$-$4.5 and $1 \times 10^{-5}$" in row and r"-{}-flag $-$1" in row
    assert r"\_" in row and r"\%" in row and r"\#" in row and r"\{" in row


def test_references_name_their_sources():
    for row in common.read_table(common.RESULTS / "references.csv").to_dict("records"):
        assert (ROOT / f"{row['script']}.py").exists()
        assert row["env_id"] and float(row["score"]) and int(row["steps"]) and row["source"]
        assert not row["spread"] or float(row["spread"]) > 0


def test_numbers_in_the_text_are_in_the_tables():
    text = (ROOT / "benchmark" / "README.md").read_text()
    said = text.split("What they show:")[1].split("## ")[0]
    said = re.sub(r"\[[^]]*\]\([^)]*\)|`[^`]*`|\d+M\b", "", said)
    numbers = r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)"
    assert len(found := re.findall(numbers, said)) > 15
    cells = "".join(re.findall(r"^\|.*\|$", text, re.M))
    assert not set(found) - set(re.findall(numbers, cells)) - {"1", "3"}  # the deviation, the map 3m


@pytest.mark.parametrize("page", ["README.md", "benchmark/README.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert len(links) > 5
    for link in links:
        assert link.startswith("https://") or (ROOT / page).parent.joinpath(link).exists(), f"{page} names {link}"


# Figures


def test_figures_are_the_same_each_time_and_fit_for_a_paper(tmp_path):
    results = make_results(tmp_path, seeds=range(1, 4), variants=("", "--no-bootstrap-truncation"))
    contents = []
    for name in ("first", "second"):
        plot.main(["--results", str(results), "--figures", str(tmp_path / name)])
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {f"{name}.{kind}" for name in ("ppo_continuous", "overview") for kind in ("pdf", "png")}
    pdf = contents[0]["ppo_continuous.pdf"]
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf, "fonts are embedded as TrueType"
    assert b"CreationDate" not in pdf


def test_a_figure_shows_the_seeds_their_centre_and_the_published_score(tmp_path):
    figure = plot.draw("ppo_continuous", make_results(tmp_path, seeds=[1, 2, 3]))
    (axes,) = figure.axes
    ends = sorted(line.get_ydata()[-1] for line in axes.lines if len(line.get_ydata()) > 2)
    assert ends == pytest.approx([985, 1970, 1970, 2955])  # bins of four points; the mean lies on the second seed
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [1442.64]
    assert axes.get_title() == "HalfCheetah-v4" and axes.get_xlabel() == "agent steps"


def legend_of(tmp_path, variants):
    (legend,) = plot.draw("ppo_continuous", make_results(tmp_path, seeds=[1], variants=variants)).legends
    return [text.get_text().split(":")[0] for text in legend.get_texts()], legend.get_lines()


def test_runs_of_another_length_share_the_colour_and_no_two_variants_look_alike(tmp_path):
    lengths = ("--total-timesteps 100 --x 1", "--x 1 --total-timesteps 200", "--total-timesteps 300")
    others = tuple(f"--gamma 0.{i}" for i in range(1, 9))  # with the two settings above more than there are colours
    names, lines = legend_of(tmp_path, ("", *lengths, *others))
    assert names == ["defaults", *others, "--x 1", "published"]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines)


def test_flags_that_all_runs_of_a_figure_have_are_named_once(tmp_path):
    names, _ = legend_of(tmp_path, ("--gamma 0.9 --num-envs 8", "--num-envs 8", "--num-envs 8 --gamma 0.9 --compile"))
    assert names == ["defaults", "--compile --gamma 0.9", "--gamma 0.9", "published", "all runs with --num-envs 8"]


# Speed


def test_programs_that_run_by_turns_are_measured_by_their_own_time(monkeypatch, tmp_path):
    """One does two steps in the time in which the other does one; each has half of the processor."""
    (tmp_path / "busy.py").write_text("""
import sys, time
for step in range(int(sys.argv[1])):
    for _ in range(int(sys.argv[2])):
        sum(range(20_000))
    print("point", step, time.time(), flush=True)
""")
    monkeypatch.setattr(speed, "ROOT", tmp_path)
    one, two = speed.measure(["busy.py 250 20", "busy.py 500 10"], warmup=25, turn=0.1)
    assert two["steps_per_second"] / one["steps_per_second"] == pytest.approx(2, rel=0.25)
    assert two["wall_seconds"] / one["wall_seconds"] == pytest.approx(1, rel=0.25)
    assert speed.active([(10, 11), (13, 14.5)], 14) == speed.active([(10, 11), (13, 14)], 99) == 2
    with pytest.raises(SystemExit, match="invalid literal"):
        speed.measure(["busy.py 100000 20", "busy.py x"], warmup=25, turn=0.1)


def test_steps_and_clock_of_our_scripts_are_read_from_their_log(finished, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "one").symlink_to(finished / "1")
    points = speed.read_points(tmp_path)
    assert points[-1][0] == 1984 and all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))
