"""The benchmark's tools: statistics, running and collecting, tables, figures, and what README says of results."""

import csv
import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, wait_for
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(ROOT / "benchmark"))
import plot
import replay
import run
import speed
import tables

# A script that takes the same flags and leaves the same files as a real one, in milliseconds. It copies the events
# that lie beside it. Seed 2 fails unless there is a file `luck`; with --slow it waits to be interrupted, once.
STUB = """
import json, shutil, signal, sys, time
from pathlib import Path
here, argv = Path(__file__).parent, sys.argv[1:]
def interrupt(*_):
    print("interrupted", file=sys.stderr)
    sys.exit(130)
signal.signal(signal.SIGINT, interrupt)
resume = "--resume" in argv
if resume:
    folder = Path(argv[1])
else:
    seed = argv[argv.index("--seed") + 1]
    if seed == "2" and not (here / "luck").exists():
        sys.exit("error: no luck")
    folder = Path(f"runs/Env-v0__stub__{seed}__1")
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"total_timesteps": 3000}))
    (folder / "checkpoint_0.pt").touch()
print("1,500/3,000 steps  100 steps/s", flush=True)
if "--slow" in argv:
    time.sleep(60)
shutil.copy(here / "events", folder / "events.out.tfevents.1")
print("evaluation: 7.00 +- 0.50 over 10 episodes of the mean action")
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A repository of the script `stub` alone. Returns a function that runs run.main on it."""
    (tmp_path / "stub.py").write_text(STUB)
    write_events(tmp_path / "log", episodes=2500)
    (events,) = (tmp_path / "log").iterdir()
    events.rename(tmp_path / "events")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    return lambda *flags: run.main([*BASE, *FOLDERS(tmp_path), *flags])


BASE = "--scripts stub --env-ids Env-v0 --jobs 2".split()


def FOLDERS(folder):
    return ["--runs-folder", str(folder / "runs"), "--results-folder", str(folder / "results")]


def write_events(folder, episodes):
    """A TensorBoard log: an episode of return i at each step i, one speed, and the evaluation at step 3000."""
    writer = SummaryWriter(str(folder))
    for i in range(1, episodes + 1):
        writer.add_scalar("charts/episodic_return", i, i)
    writer.add_scalar("charts/SPS", 100, 3000)
    writer.add_scalar("losses/value_loss", 1, 3000)
    writer.add_scalar("eval/episodic_return", 7, 3000)
    writer.close()


def make_results(folder, seeds=range(1, 6), script="ppo_continuous", env_id="HalfCheetah-v4", variants=("",)):
    """Results as run.py collects them: for each seed a curve that rises to 1000 times the seed."""
    rows = []
    for variant in variants:
        for seed in seeds:
            path = folder / script / f"{run.run_name(env_id, variant, seed)}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            points = "".join(f"charts/episodic_return,{1000 * i},{seed * 10 * i},1\n" for i in range(1, 101))
            path.write_text("tag,step,value,count\n" + points)
            row = {"script": script, "env_id": env_id, "variant": variant, "seed": seed, "total_steps": 100_000}
            row |= {"training_return": 1000 * seed, "eval_return": 1100 * seed, "eval_std": 5, "eval_episodes": 10}
            row |= {"eval_battle_won_rate": "", "wall_seconds": 120, "command": "", "commit": "c0ffee"}
            rows.append(row | {"versions": "Python 3", "machine": "2 cores of X", "jobs": 1})
    with open(folder / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
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
    assert plot.bootstrap(np.full(5, 3.0)) == (3, 3)


def test_curves_average_episodes_in_bins_of_steps(tmp_path):
    (tmp_path / "a.csv").write_text(
        "tag,step,value,count\n" + "".join(f"charts/episodic_return,{s},{s},1\n" for s in range(1, 801))
    )
    steps, values = plot.curves([tmp_path / "a.csv"] * 2, "charts/episodic_return", 100)
    np.testing.assert_allclose(steps, np.arange(8, 801, 8))
    np.testing.assert_allclose(values, [steps - 3.5] * 2)  # of the steps 1 to 8, 9 to 16, ...
    assert plot.curves([tmp_path / "a.csv"], "eval/episodic_return", 100) is None


# Running and collecting


def test_thinning_keeps_episodes_and_means():
    points = [(step, float(step % 7)) for step in range(1, 2501)]
    rows = run.thin(points)
    assert len(rows) == 1000
    assert sum(count for *_, count in rows) == 2500
    assert sum(value * count for _, value, count in rows) == pytest.approx(sum(value for _, value in points))
    assert all(a[0] < b[0] for a, b in pairwise(rows))
    assert run.thin(points[:1000]) == [(step, value, 1) for step, value in points[:1000]]


def test_print_gives_the_plain_commands(capsys, tmp_path):
    flags = "--env-ids Hopper-v4 dm_control/x --seeds 1 2 --print".split()
    assert run.main(["--scripts", "ppo_continuous", *flags, *FOLDERS(tmp_path), "--", "--no-anneal-lr"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"python ppo_continuous.py --env-id {env_id} --seed {seed} --no-anneal-lr"
        for env_id in ("Hopper-v4", "dm_control/x")
        for seed in (1, 2)
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", ["", "--jobs 0", "-- --seed 3", "-- --resume=x", "-- --env_id=x"])
def test_wrong_calls_are_refused(flags, tmp_path, capsys):
    selection = ["--scripts", "ppo_continuous"] + (["--env-ids", "Hopper-v4"] if flags else [])
    with pytest.raises(SystemExit, match="2"):
        run.main([*selection, *FOLDERS(tmp_path), *flags.split()])
    assert "error: " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_names_of_runs_differ_where_runs_do():
    variants = ["", "--x 1", "--x -1", "--x 11", "--no-x", "--x 1 --y"]
    assert len({run.run_name("E-v1", variant, seed) for variant in variants for seed in (1, 2)}) == 12
    assert run.run_name("ALE/Pong-v5", "--no-x --y 3", 1) == "ALE-Pong-v5__no-x_y_3__1"


def test_a_failed_run_is_named_and_the_others_go_on_and_a_second_start_makes_the_rest(stub, tmp_path, capsys):
    assert stub("--seeds", "1", "2", "3") == 1
    captured = capsys.readouterr()
    assert captured.err == "failed: stub/Env-v0__default__2: status 1: error: no luck\n"
    assert len(re.findall(r"Env-v0__default__[13]: finished", captured.out)) == 2
    assert [row["seed"] for row in run.read_csv(tmp_path / "results" / "runs.csv")] == ["1", "3"]

    (tmp_path / "luck").touch()
    assert stub("--seeds", "1", "2", "3") == 0
    assert re.findall(r"(\d) of 3|__(\d): finished", capsys.readouterr().out) == [("2", ""), ("", "2")]
    assert [row["seed"] for row in run.read_csv(tmp_path / "results" / "runs.csv")] == ["1", "2", "3"]


def test_collected_tables(stub, tmp_path):
    assert stub("--seeds", "1", "--", "--wide") == 0
    (row,) = run.read_csv(tmp_path / "results" / "runs.csv")
    assert row["command"] == "python stub.py --env-id Env-v0 --seed 1 --wide"
    assert (row["variant"], row["total_steps"], row["eval_return"]) == ("--wide", "3000", "7")
    assert (row["eval_std"], row["eval_episodes"], row["eval_battle_won_rate"]) == ("0.50", "10", "")
    assert float(row["training_return"]) == np.mean(range(2401, 2501))
    assert row["jobs"] == "2" and row["commit"] and "torch" in row["versions"] and "cores" in row["machine"]
    points = run.read_csv(tmp_path / "results" / "stub" / "Env-v0__wide__1.csv")
    assert {point["tag"] for point in points} == {"charts/episodic_return", "charts/SPS", "eval/episodic_return"}
    episodes = [point for point in points if point["tag"] == "charts/episodic_return"]
    assert len(episodes) <= 1000 and sum(int(point["count"]) for point in episodes) == 2500

    before = {path: path.read_bytes() for path in (tmp_path / "results").rglob("*.csv")}
    for path in before:
        path.unlink()
    assert run.main(["--collect", *FOLDERS(tmp_path)]) == 0
    assert before == {path: path.read_bytes() for path in (tmp_path / "results").rglob("*.csv")}


@pytest.mark.parametrize(
    "damaged, content", [("events", b""), ("events", None), ("run.json", b"{"), ("args.json", b"{"), ("model.pt", b"")]
)
def test_damaged_files_of_one_run_replace_no_result_and_stop_no_other(stub, tmp_path, capsys, damaged, content):
    assert stub("--seeds", "1", "3") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "results").rglob("*.csv")}
    folder = tmp_path / "runs" / "stub" / "Env-v0__default__1"
    (run_folder,) = (folder / "runs").iterdir()
    torch.save({"global_step": 3000}, run_folder / "model.pt")
    names = {"events": run_folder / "events.out.tfevents.1", "run.json": folder / "run.json"}
    path = names.get(damaged, run_folder / damaged)
    path.write_bytes(path.read_bytes()[:5000] if content is None else content)
    capsys.readouterr()
    assert run.main(["--collect", *FOLDERS(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "stub/Env-v0__default__3: collected\n"
    assert captured.err.startswith("failed: stub/Env-v0__default__1: ")
    assert before == {path: path.read_bytes() for path in (tmp_path / "results").rglob("*.csv")}


def test_a_second_start_repairs_what_was_not_collected_whole(stub, tmp_path, capsys):
    assert stub("--seeds", "1", "1", "--env-ids", "Env-v0", "Env-v0") == 0
    curve, row = tmp_path / "results" / "stub" / "Env-v0__default__1.csv", tmp_path / "results" / "runs.csv"
    before = curve.read_bytes(), row.read_bytes()
    curve.write_bytes(before[0][:60])
    row.write_bytes(before[1].splitlines(keepends=True)[0])
    assert stub("--seeds", "1") == 0
    assert (curve.read_bytes(), row.read_bytes()) == before


def test_a_process_whose_end_nobody_saw_lasted_until_it_printed_its_last(tmp_path):
    mine = run.Run("stub", "Env-v0", 1, [], tmp_path)
    mine.folder.mkdir(parents=True)
    process = {"started": "2026-01-01T00:00:00+00:00", "seconds": 10.0, "status": None}
    (mine.folder / "run.json").write_text(json.dumps({"processes": [process]}))
    (mine.folder / "console.txt").touch()
    os.utime(mine.folder / "console.txt", (0, 1767225600 + 90))  # a minute and a half after 2026 began
    assert [process["seconds"] for process in mine.processes()] == [90]


def test_the_evaluation_is_no_test(stub, tmp_path):
    (tmp_path / "events").unlink()
    writer = SummaryWriter(str(tmp_path / "log2"))
    for step, won in ((1000, 0.1), (2500, 0.2), (3000, 0.4), (3000, 1.0)):  # the last is the evaluation
        writer.add_scalar("eval/battle_won_rate", won, step)
        writer.add_scalar("eval/episodic_return", won, step)
    writer.close()
    (events,) = (tmp_path / "log2").iterdir()
    events.rename(tmp_path / "events")
    assert stub("--seeds", "1") == 0
    (row,) = run.read_csv(tmp_path / "results" / "runs.csv")
    assert (float(row["tests_battle_won_rate"]), float(row["eval_battle_won_rate"])) == (pytest.approx(0.3), 1)


@pytest.mark.parametrize("step, finished", [(3000, True), (2999, False)])
def test_a_model_of_the_last_step_is_a_finished_run(step, finished, tmp_path):
    mine = run.Run("stub", "Env-v0", 1, [], tmp_path)
    assert not mine.finished()
    folder = mine.folder / "runs" / "Env-v0__stub__1__1"
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"total_timesteps": 3000}))
    torch.save({"global_step": step}, folder / "model.pt")
    assert mine.finished() is finished


def test_ctrl_c_reaches_the_runs_and_a_second_start_resumes_them(stub, tmp_path):
    program = (
        f"import run, pathlib; run.ROOT = pathlib.Path({str(tmp_path)!r}); raise SystemExit(run.main(run.sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *BASE, *FOLDERS(tmp_path), "--seeds", "1", "3", "4", "--", "--slow"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmark")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    consoles = [tmp_path / "runs" / "stub" / f"Env-v0__slow__{seed}" / "console.txt" for seed in (1, 3)]
    wait_for(lambda: all(path.exists() and "steps" in path.read_text() for path in consoles))
    assert stub("--seeds", "1", "--", "--slow") == 1, "a run that another process is at is left alone"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "goes on" in err and out.count(": interrupted") == 2
    assert all("interrupted" in path.read_text() for path in consoles)
    assert not (tmp_path / "runs" / "stub" / "Env-v0__slow__4").exists()

    assert stub("--seeds", "1", "3", "--", "--slow") == 0
    for path in consoles:
        assert len(list(path.parent.glob("runs/*"))) == 1
        processes = json.loads((path.parent / "run.json").read_text())["processes"]
        assert [each["status"] for each in processes] == [130, 0]


# Tables


def make_tables(folder, results, *flags, figures=None):
    """Run tables.py on a copy of README in `folder`; returns the status."""
    if not (folder / "README.md").exists():
        (folder / "README.md").write_text((ROOT / "README.md").read_text())
    folders = ["--results-folder", str(results), "--figures-folder", str(figures or folder / "figures")]
    return tables.main(
        [*folders, "--tables-folder", str(folder / "tables"), "--readme", str(folder / "README.md"), *flags]
    )


def test_committed_tables_and_readme_are_what_the_results_give(tmp_path):
    benchmark = ROOT / "benchmark"
    make_tables(tmp_path, benchmark / "results", figures=benchmark / "figures")
    for committed in (benchmark / "tables").glob("*"):
        assert (tmp_path / "tables" / committed.name).read_text() == committed.read_text(), "run benchmark/tables.py"
    if tables.END in (ROOT / "README.md").read_text():
        assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text(), "run benchmark/tables.py"
    assert (benchmark / "tables").exists() or not (benchmark / "results" / "runs.csv").exists()


def test_a_misspelt_results_folder_changes_nothing(tmp_path):
    with pytest.raises(SystemExit):
        make_tables(tmp_path, tmp_path / "nothing")
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_tables_without_results_are_empty_and_stable(tmp_path):
    (tmp_path / "nothing").mkdir()
    assert make_tables(tmp_path, tmp_path / "nothing") == 0
    assert make_tables(tmp_path, tmp_path / "nothing", "--check") == 0
    assert len((tmp_path / "tables" / "scores.md").read_text().splitlines()) == 2
    before, after = (tmp_path / "README.md").read_text().split(tables.BEGIN)
    assert after.startswith(f"\n{tables.END}\n") and before in (ROOT / "README.md").read_text()


def test_tables_say_what_the_results_say(tmp_path):
    results = make_results(tmp_path, variants=("", "--no-bootstrap-truncation"))
    assert make_tables(tmp_path, results, "--check") == 1 and not (tmp_path / "tables").exists()
    assert make_tables(tmp_path, results) == 0
    assert make_tables(tmp_path, results, "--check") == 0
    readme, scores = (tmp_path / "README.md").read_text(), (tmp_path / "tables" / "scores.md").read_text()
    assert scores in readme and readme.count(tables.BEGIN) == readme.count(tables.END) == 1
    default, variant = scores.splitlines()[2:]
    cells = [cell.strip() for cell in default.split("|")]
    assert cells[1:6] == ["ppo_continuous.py", "HalfCheetah-v4", "", "100,000", "5"]
    assert cells[6].startswith("3,000 [") and cells[7].startswith("3,000 [") and cells[8].startswith("3,300 [")
    assert cells[9:12] == ["1,443 ± 46", "CleanRL docs (PPO; 3 seeds), 1M steps", "2.0 min"]
    assert "`--no-bootstrap-truncation`" in variant
    command = "python benchmark/run.py --scripts ppo_continuous --env-ids HalfCheetah-v4 --seeds 1 2 3 4 5"
    assert f"{command}\n{command} -- --no-bootstrap-truncation\n" in readme

    (tmp_path / "tables" / "scores.tex").write_text("edited by hand")
    assert make_tables(tmp_path, results, "--check") == 1


def test_the_share_of_the_replay_is_what_its_calls_take(monkeypatch):
    """Priorities that take 150 ms, beside gradient steps of some 20, or 80 where another test runs."""
    plain = replay.dqn.Replay

    def update(self, *inputs):
        time.sleep(0.15)
        plain.update(self, *inputs)

    monkeypatch.setattr(replay.FullReplay, "update", update)
    row = replay.share_of_a_run(2048, steps=192, warmup=96)
    parts = [row[f"{name}_percent"] for name in ("add", "sample", "update")]
    assert 40 < parts[2] < 100 and 0 < max(parts[:2]) < 20
    assert row["sum_percent"] == pytest.approx(sum(parts), abs=0.02)
    assert replay.dqn.Replay is plain


def test_speed_table_takes_the_newest_whole_rounds():
    def row(date, name, speed):
        fixed = {"script": "stub", "steps": "1000", "wall_seconds": "10", "peak_mb": "500", "machine": "M, Python 3"}
        return {"date": date, "name": name, "steps_per_second": str(speed), **fixed}

    today = [row("2", name, speed) for name, speed in zip(["peer", "ours"] * 3, [100, 300, 200, 400, 100, 500])]
    measured = [row("1", "peer", 1), row("1", "ours", 9), *today, row("2", "peer", 7)]
    (newest,) = tables.speed_tables(measured)
    assert [line[1:6] for line in newest] == [
        ["peer", "1,000", "3", "100", "1.00"],
        ["ours", "1,000", "3", "400", "3.00 (2.00 to 5.00)"],
    ]
    older = [row("0", "peer", 50), row("0", "other", 25)]  # the only one with this program
    assert tables.speed_tables(older + measured)[0] == newest
    assert [line[1:6] for line in tables.speed_tables(older + measured)[1]] == [
        ["peer", "1,000", "1", "50", "1.00"],
        ["other", "1,000", "1", "25", "0.50"],
    ]
    # Of another machine: it replaces what a speed.py that wrote no commit measured of the same programs anywhere
    by_turns = [line | {"machine": "N, Python 3", "commit": "c0ffee"} for line in today]
    shown = tables.speed_tables(older + measured + by_turns)
    assert [[line[1] for line in table] for table in shown] == [["peer", "other"], ["peer", "ours"]]
    assert shown[1][0][8] == "N, Python 3, commit c0ffee"
    with_commits = [line | {"commit": "decaf"} for line in measured]
    assert len(tables.speed_tables(with_commits + by_turns)) == 2  # one of each machine


def test_scores_name_the_speed_of_the_program_with_the_same_flags():
    def table(script, rounds, **speeds):
        names = {"peer": "Peer"} | {"ours": "s.py", "compiled": "s.py --compile", "both": "s.py --bf16 --compile"}
        return [
            [script, names[name], "9", str(rounds), str(v), f"{v / 100:.2f} (1 to 9)"] for name, v in speeds.items()
        ]

    measured = [table("s", 1, peer=100, ours=111), table("s", 3, peer=100, ours=200, compiled=300, both=400)]
    measured += [
        table("s_map", 1, peer=50, ours=500),
        table("t", 9, peer=1, ours=999),
        table("s", 2, peer=100, ours=222),
    ]
    for env_id, variant, expected in (
        ("env", "", "200 (2.00 times Peer)"),
        ("env", "--seed 3 --compile", "300 (3.00 times Peer)"),
        ("env", "--compile --checkpoint-interval 1 --bf16", "400 (4.00 times Peer)"),
        ("env", "--compile --torch-threads 1", "300 (3.00 times Peer, with 2 torch threads)"),
        ("env", "--bf16", ""),  # not measured
        ("env", "--compile --x 1", ""),
    ):
        assert tables.speed_of("s", env_id, variant, measured) == expected
    assert tables.speed_of("s", "map", "", measured[2:4]) == "500 (5.00 times Peer)"
    assert tables.speed_of("s", "other", "", measured[2:4]) == ""


def test_speed_of_another_number_of_workers_is_not_taken_and_another_game_is_named():
    rows = (("P", "1"), ("a3c_atari.py, 2 workers", "2"))
    measured = [[["a3c_atari", name, "9", "1", each, "1"] for name, each in rows]]
    for env_id, where in (("PongDeterministic-v4", ""), ("PongNoFrameskip-v4", ", on PongDeterministic-v4")):
        flags = "--num-workers 2 --total-timesteps 9"
        assert tables.speed_of("a3c_atari", env_id, flags, measured) == f"2 (1 times P{where})"
    assert tables.speed_of("a3c_atari", "PongDeterministic-v4", "--num-workers 4", measured) == ""


def test_a_setting_has_no_lengths_and_no_defaults():
    assert plot.setting("qmix_smac", "--total-timesteps 500 --mixer qmix") == ""
    assert plot.setting("qmix_smac", "--mixer vdn --total-timesteps 500 --gamma 0.98") == "--gamma 0.98 --mixer vdn"
    assert plot.setting("ppo_continuous", "--log-std-init -1 --num-envs 1") == "--log-std-init -1"
    assert plot.setting("ppo_continuous", "--num-envs 8 --compile") == "--compile --num-envs 8"


@pytest.mark.parametrize("word, chosen", [("s.py", ["s.py"]), ("bf16", ["s.py --bf16", "s.py --bf16 --compile"])])
def test_a_whole_name_of_a_program_is_that_program_only(word, chosen, monkeypatch, tmp_path):
    names, run_ = ["Peer", "s.py", "s.py --bf16", "s.py --bf16 --compile"], []
    monkeypatch.setitem(speed.ROWS, "s", (10, 1, 100, {name: name for name in names}))
    monkeypatch.setattr(speed, "RESULTS", tmp_path / "speed.csv")
    measured = {"steps_per_second": 1.0, "wall_seconds": 1.0, "peak_mb": 1}
    monkeypatch.setattr(speed, "measure", lambda commands, warmup: run_.extend(commands) or [measured] * len(commands))
    monkeypatch.setattr(sys, "argv", ["speed.py", "--scripts", "s", "--repeats", "1", "--programs", "Peer", word])
    speed.main()
    assert run_ == ["Peer", *chosen]


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


@pytest.mark.parametrize("script", SMALL)
def test_hyperparameters_are_the_defaults(script):
    rows = {row[0]: row[1] for row in tables.hyperparameter_rows(ROOT / f"{script}.py")}
    words = {True: "yes", False: "no", None: "none"}
    for argument in dataclasses.fields(importlib.import_module(script).Args):
        if argument.name not in tables.NO_HYPERPARAMETERS.split():
            text = rows.pop("--" + argument.name.replace("_", "-"))
            if type(argument.default) in (int, float):
                assert float(text.replace(",", "")) == argument.default
            else:
                assert text == words.get(argument.default, argument.default)
    assert not rows


def test_latex_is_well_formed(tmp_path):
    make_tables(tmp_path, make_results(tmp_path, variants=("", "--x_y 50% #1 {^~}")))
    files = list((tmp_path / "tables").glob("*.tex"))
    assert {"scores.tex", "speed.tex", "hyperparameters_ppo_continuous.tex"} <= {path.name for path in files}
    for path in files:
        text = path.read_text()
        plain = re.sub(r"\\.", "", text)
        depths = np.cumsum([{"{": 1, "}": -1}.get(character, 0) for character in plain])
        assert depths[-1] == 0 and depths.min() >= 0 and plain.count("$") % 2 == 0
        (columns,) = re.findall(r"\\begin{tabular}{(.*)}", text)
        columns = len(re.sub(r"p{.*?}", "p", columns.replace(r"{0.6\linewidth}", "{}")))
        rows = [line for line in text.splitlines() if line.endswith(r"\\")]
        assert rows and all(len(re.findall(r"(?<!\\)&", row)) == columns - 1 for row in rows)
        assert [text.count(rf"\{rule}rule") for rule in ("top", "mid", "bottom")] == [1, 1, 1]
        assert not re.search(r"[#_^~]|%(?! needs)", re.sub(r"\$.*?\$", "", plain))


def test_references_name_their_sources():
    for row in run.read_csv(ROOT / "benchmark" / "references.csv"):
        assert (ROOT / f"{row['script']}.py").exists() or row["script"] in ("a3c_atari", "dqn_per_atari", "qmix_smac")
        assert row["env_id"] and float(row["score"]) and int(row["steps"]) and row["source"]
        assert not row["spread"] or float(row["spread"]) > 0


def test_numbers_in_the_text_of_readme_are_in_the_results():
    """What README says beside its tables: of HalfCheetah's defaults, and in the list of what the runs show."""
    text = (ROOT / "README.md").read_text().split(tables.BEGIN)[0]
    parts = re.search(r"The defaults of `ppo_continuous.py`.*?\n\n", text, re.S)[0], text.split("What they show")[1]
    said = re.sub(r"near [\d,]+|1e-38|\[[^]]*\]\([^)]*\)", "", "".join(parts))  # a plateau has no one number; nor links
    known = "".join((ROOT / "benchmark/tables" / name).read_text() for name in ("scores.md", "speed.md"))
    with open(ROOT / "benchmark/results/tricks.csv") as file:
        known += "".join(f" {float(row['median_us']) / 1000:.1f}" for row in csv.DictReader(file))  # in ms
    with open(ROOT / "benchmark/results/frozen_or_fresh.csv") as file:
        rows = [row for row in csv.DictReader(file) if not row["variant"]]
    for env_id in {row["env_id"] for row in rows}:
        for key in ("frozen", "fresh"):
            mean = np.mean([float(row[key]) for row in rows if row["env_id"] == env_id])
            known += f" {mean:,.0f}"
    numbers = r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?"
    assert len(found := re.findall(numbers, said)) > 15
    assert not set(found) - set(re.findall(numbers, known))


# Figures


def test_figures_that_readme_names_exist():
    for link in re.findall(r"\]\((benchmark/[^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / link).exists(), f"README names {link}"


def test_figures_are_the_same_each_time_and_fit_for_a_paper(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install -r benchmark/requirements.txt")
    results = make_results(tmp_path, seeds=range(1, 4), variants=("", "--no-bootstrap-truncation"))
    contents = []
    for name in ("first", "second"):
        plot.main(["--results-folder", str(results), "--figures-folder", str(tmp_path / name)])
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {f"ppo_continuous.{suffix}" for suffix in ("pdf", "svg", "png")}
    pdf, svg = contents[0]["ppo_continuous.pdf"], contents[0]["ppo_continuous.svg"].decode()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf, "fonts are embedded as TrueType"
    assert b"CreationDate" not in pdf and "<dc:date>" not in svg
    for text in ("HalfCheetah-v4", "agent steps", "defaults: mean, 95 % interval, 3 seeds", "published: CleanRL docs"):
        assert f"<!-- {text}" in svg
    for colour in plot.COLOURS[:2]:
        assert colour.lower() in svg


def test_runs_of_another_length_share_the_colour_and_no_two_variants_look_alike(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install -r benchmark/requirements.txt")
    lengths = (
        "--total-timesteps 100 --seed-offset 1",
        "--seed-offset 1 --total-timesteps 200",
        "--total-timesteps 300",
    )
    others = tuple(f"--gamma 0.{i}" for i in range(1, 9))  # with the two settings above more than there are colours
    results = make_results(tmp_path, seeds=[1], variants=("", *lengths, *others))
    (legend,) = plot.draw("ppo_continuous", results, 2, plot.TAG, 100).legends
    names = [text.get_text().split(":")[0] for text in legend.get_texts()]
    looks = [(line.get_color(), line.get_linestyle()) for line in legend.get_lines()]
    assert names == ["defaults", *others, "--seed-offset 1", "published"]
    assert len(set(looks)) == len(looks)


def test_flags_that_all_runs_of_a_figure_have_are_named_once(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install -r benchmark/requirements.txt")
    variants = ("--gamma 0.9 --num-envs 8", "--num-envs 8", "--num-envs 8 --gamma 0.9 --compile")
    (legend,) = plot.draw(
        "ppo_continuous", make_results(tmp_path, seeds=[1], variants=variants), 2, plot.TAG, 100
    ).legends
    names = [text.get_text().split(":")[0] for text in legend.get_texts()]
    assert names == ["defaults", "--compile --gamma 0.9", "--gamma 0.9", "published", "all runs with --num-envs 8"]
    (tmp_path / "alone").mkdir()
    results = make_results(tmp_path / "alone", seeds=[1], variants=("--num-envs 8",))
    (legend,) = plot.draw("ppo_continuous", results, 2, plot.TAG, 100).legends
    assert [text.get_text().split(":")[0] for text in legend.get_texts()] == ["--num-envs 8", "published"]
