"""The benchmark on tiny runs: collecting, statistics, tables, figures."""

import json
import sys
from importlib import metadata

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, train
from torch.utils.tensorboard import SummaryWriter

import ppo_continuous as ppo

sys.path.insert(0, str(ROOT / "benchmark"))
import collect
import common
import plot
import provenance
import summary
import tables

SMALL = dict(env_id="Pendulum-v1", num_steps=64, num_minibatches=2, update_epochs=1)
SMALL |= dict(total_timesteps=832, eval_episodes=2)


def make_results(folder):
    """Results of five seeds as collect.py writes them: curves rise to 1000 times the seed."""
    rows = []
    for seed in range(1, 6):
        row = dict(script="ppo_continuous", env_id="HalfCheetah-v4", variant="", seed=seed)
        row |= dict(total_steps=100_000, training_return=1000 * seed, eval_return=1100 * seed)
        row |= dict(eval_battle_won_rate="", tests_battle_won_rate="", wall_seconds=1800)
        rows.append(row := row | dict(commit="c0ffee", ended=""))
        path = folder / common.curves_name(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        points = [f"charts/episodic_return,{1000 * i},{seed * 10 * i},1" for i in range(1, 101)]
        path.write_text("\n".join(["tag,step,value,count", *points]) + "\n")
    pd.DataFrame(rows).to_csv(folder / "runs.csv", index=False)
    return folder


@pytest.mark.quick
def test_iqm_is_the_mean_of_the_middle_half():
    values = np.random.default_rng(1).normal(size=(12, 3))
    for n in range(1, 13):
        expected = [np.mean(sorted(column)[n // 4 : n - n // 4]) for column in values[:n].T]
        np.testing.assert_allclose(plot.iqm(values[:n]), expected, err_msg=f"{n} values")
    assert [plot.center(np.array([0.0] * n + [100])) for n in (3, 4)] == [25, 0]  # mean, IQM
    clocks = [([0, 10], [0, 100]), ([0, 10], [0, 50]), None]  # of seeds, one without
    assert [summary.took(clocks, x) for x in ([10, 4, 1], [np.nan] * 3)] == [", 20 s", ""]


@pytest.mark.quick
def test_curves_and_thinning_average_over_bins_of_steps(tmp_path):
    points = [f"charts/episodic_return,{step},{step},1" for step in range(1, 801)]
    (tmp_path / "a.csv").write_text("\n".join(["tag,step,value,count", *points]))
    steps, values = plot.curves([tmp_path / "a.csv"] * 2, "charts/episodic_return")
    np.testing.assert_allclose(steps, np.arange(8, 801, 8))
    np.testing.assert_allclose(values, [steps - 3.5] * 2)  # of the steps 1 to 8, 9 to 16, ...
    points = pd.DataFrame({"step": range(1, 2501), "value": np.arange(2500.0) % 7})
    rows = collect.thin(points)
    assert len(rows) == 1000 and rows["count"].sum() == 2500 and rows.step.is_monotonic_increasing
    assert (rows.value * rows["count"]).sum() == pytest.approx(points.value.sum())
    assert collect.thin(points[:1000]).equals(points[:1000].assign(count=1))
    assert collect.held(points[::9], [9, 10, 19, 9999]).tolist() == [0, 2, 4, 2493 % 7]


@pytest.mark.quick
def test_events_of_a_resumed_run_are_read_once(tmp_path):
    for first, last, offset in ((0, 10, 0), (6, 15, 100)):  # killed at step 10, resumed at 6
        writer = SummaryWriter(str(tmp_path), purge_step=first + 1, filename_suffix=str(first))
        for step in range(first + 1, last + 1):
            writer.add_scalar("charts/episodic_return", step + offset, step)
        writer.close()
    events = common.read_events(tmp_path)
    assert sorted(zip(events.step, events.value)) == [(x, x + 100 * (x > 6)) for x in range(1, 16)]


def test_collected_runs_are_what_the_script_wrote(tmp_path, capsys):
    """Two runs, the second in a variant's folder, with another gamma, without provenance.json."""
    finished, tmp_path = tmp_path / "runs", tmp_path / "results"
    varied = finished / "ppo_continuous+rpo" / "2"
    train(ppo, finished / "1", **SMALL)
    provenance.write_provenance(finished / "1")
    train(ppo, varied, **SMALL, seed=2, gamma=0.9)
    flags = [str(finished), "--results", str(tmp_path)]
    assert collect.main(flags) == 1 and str(varied) in capsys.readouterr().err  # no commit
    assert collect.main([*flags, "--commit", "c0ffee"]) == 0
    first, second = common.read_table(tmp_path / "runs.csv").sort_values("seed").to_dict("records")
    variant = "--total-timesteps 832 --num-steps 64 --update-epochs 1 --num-minibatches 2"
    expected = set(common.FLAG.findall(f"{variant} --eval-episodes 2"))
    assert set(common.FLAG.findall(first["variant"])) == expected
    assert set(common.FLAG.findall(second["variant"])) == expected | {"--gamma 0.9"}
    assert first["commit"] == provenance.commit() and second["commit"] == "c0ffee"
    assert f"torch {metadata.version('torch')}" in first["versions"] == second["versions"]
    assert (second["script"], second["total_steps"]) == ("ppo_continuous+rpo", "832")
    returns = json.loads((varied / "result.json").read_text())["episodic_return"]
    assert float(second["eval_return"]) == pytest.approx(np.mean(returns), rel=1e-4)
    (path,) = (tmp_path / "ppo_continuous+rpo").glob("*gamma_0.9*__2__c0ffee.csv")
    curve = pd.read_csv(path, index_col="tag").value["charts/episodic_return"]
    logged = common.read_events(varied).set_index("tag").value["charts/episodic_return"]
    np.testing.assert_allclose(curve, logged, rtol=1e-5)
    assert float(second["training_return"]) == pytest.approx(logged.mean(), rel=1e-5)


def test_a_table_says_what_the_results_say_and_figures_are_drawn(tmp_path):
    runs = common.read_runs(make_results(tmp_path))
    references = common.read_table(common.RESULTS / "references.csv")
    (default,) = tables.score_table(runs, references).to_dict("records")
    assert (default["steps"], default["seeds"], default["hours"]) == ("100,000", "5", "0.50")
    assert default["training return"].startswith("3,000 [") and default["IQM"].startswith("3,000 [")
    assert default["evaluation"].startswith("3,300 [") and default["published"] == "1,443 ± 46"
    assert r"\pm" in tables.latex(pd.DataFrame([default]))
    flags = ["--scripts", "ppo_continuous", "overview", "--results", str(tmp_path)]
    plot.main([*flags, "--figures", str(tmp_path / "figures")])
    assert len(list((tmp_path / "figures").iterdir())) == 4
