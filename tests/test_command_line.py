"""The command line: a wrong call is told so in one line and leaves no trace, a right one writes its run folder only."""

import dataclasses
import importlib
import json
import os
import pty
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from conftest import SCALE, SMALL, Run, checkpoints, execute, files_below, load, run_folder_in, scalars

WRONG = {  # in every script: {what is wrong: (flags, what the line has to say)}
    "unknown flag": ("--bogus 1", "--bogus"),
    "misspelt flag": ("--totaltimesteps 1", "--total-timesteps"),
    "value without a flag": ("Pendulum-v1", "Pendulum-v1"),
    "word for a number": ("--seed one", "--seed 'one'"),
    "fraction for a count": ("--total-timesteps 1e3", "--total-timesteps '1e3'"),
    "missing value": ("--seed", "--seed"),
    "value for a switch": ("--capture-video maybe", "maybe"),
    "seed of 33 bits": ("--seed 4294967296", "--seed"),
    "folder for a name": ("--exp-name a/b", "--exp-name"),
    "no name": ("--exp-name=", "--exp-name"),
    "malformed id": ("--env-id !!", "!!"),
    "resume and evaluate": ("--resume here --evaluate there", "--resume --evaluate"),
    "resume a missing run": ("--resume nowhere", "nowhere"),
    "evaluate a missing run": ("--evaluate nowhere", "nowhere"),
}
WRONG_OF = {
    "ppo_continuous": {
        "no id": ("--env-id=", "ID"),
        "misspelt environment": ("--env-id HalfCheeta-v4", "HalfCheeta-v4 HalfCheetah-v4"),
        "version to come": ("--env-id HalfCheetah-v9", "HalfCheetah-v9 HalfCheetah-v5"),
        "version gone": ("--env-id HalfCheetah-v3", "HalfCheetah-v3"),
        "version gone with MuJoCo 2": ("--env-id Pusher-v4", "Pusher-v4"),
        "discrete actions": ("--env-id CartPole-v1", "CartPole-v1 discrete a2c_atari.py dqn_per_atari.py"),
        "indivisible batch": ("--num-minibatches 7", "--num-minibatches 7 128"),
        "empty minibatches": ("--num-envs 1 --num-steps 16 --num-minibatches 32", "--num-minibatches 32 16"),
        "not one batch": ("--num-steps 4096", "--total-timesteps 4736 8192"),
        "gamma above 1": ("--gamma 1.001", "--gamma 1.001"),
        "lambda above 1": ("--gae-lambda 95", "--gae-lambda 95"),
        "clip of 1": ("--clip-coef 1", "--clip-coef 1"),
        "log-std of inf": ("--log-std-init inf", "--log-std-init inf"),
    },
    "a2c_atari": {
        "no id": ("--env-id=", "no Atari game"),
        "misspelt game": ("--env-id BraekoutNoFrameskip-v4", "BraekoutNoFrameskip-v4 BreakoutNoFrameskip-v4"),
        "misspelt new game": ("--env-id ALE/Braekout-v5", "ALE/Braekout-v5 Breakout"),
        "no game": ("--env-id CartPole-v1", "CartPole-v1"),
        "not one batch": ("--num-steps 500", "--total-timesteps 296 1000"),
        "gamma above 1": ("--gamma 1.001", "--gamma 1.001"),
        "lambda above 1": ("--gae-lambda 95", "--gae-lambda 95"),
        "alpha above 1": ("--rmsprop-alpha 1.5", "--rmsprop-alpha 1.5"),
        "less than no threads": ("--env-threads -1", "--env-threads -1"),
    },
    "dqn_per_atari": {
        "no id": ("--env-id=", "no Atari game"),
        "misspelt game": ("--env-id BraekoutNoFrameskip-v4", "BraekoutNoFrameskip-v4 BreakoutNoFrameskip-v4"),
        "no game": ("--env-id CartPole-v1", "CartPole-v1"),
        "not one iteration": ("--num-steps 500", "--total-timesteps 296 1000"),
        "a replay that is never warm": ("--learning-starts 67", "--learning-starts 67 --buffer-size 66"),
        "a run that ends before it learns": ("--learning-starts 295 --buffer-size 600", "--learning-starts 295 296"),
        "a replay of nothing": ("--buffer-size 19", "--buffer-size 19 20"),
        "fractions in disorder": ("--middle-fraction 0.6", "--middle-fraction 0.6 --end-fraction 0.5"),
        "no fraction": ("--end-fraction 0", "--end-fraction 0"),
        "epsilon above 1": ("--start-epsilon 1.5", "--start-epsilon 1.5"),
        "alpha above 1": ("--per-alpha 1.5", "--per-alpha 1.5"),
        "a replay on no GPU": ("--replay-on-gpu", "--replay-on-gpu CUDA"),
        "a replay larger than the machine": ("--buffer-size 1000000000000", "GB --buffer-size"),
    },
}
REFUSED = ("0", "-1", "nan", "inf", "-inf")  # by every flag that takes a number, but for:
ACCEPTED = {"inf": {"target_kl"}, "-1": {"log_std_init"}}
ACCEPTED["0"] = set(
    """seed gamma gae_lambda ent_coef vf_coef env_threads per_alpha per_beta eval_epsilon start_epsilon
    middle_epsilon end_epsilon rmsprop_alpha log_std_init""".split()
)
LIMITS = {
    "ppo_continuous": "--seed 0 --gamma 0 --gae-lambda 1 --ent-coef 0 --vf-coef 0 --target-kl inf",
    "a2c_atari": "--seed 0 --gamma 0 --gae-lambda 0 --ent-coef 0 --vf-coef 0 --rmsprop-alpha 0 --num-envs 1",
    "dqn_per_atari": "--seed 0 --gamma 0 --per-alpha 0 --per-beta 1 --start-epsilon 0 --middle-epsilon 1 "
    "--end-epsilon 0 --middle-fraction 1 --end-fraction 1 --num-envs 1 --buffer-size 10 --n-step 1",
}

RUNS = {  # settings of runs as short as can be, an environment of its own kind each
    "ppo_continuous": {
        f"{env_id}, {num_envs}": f"--env-id {env_id} --num-envs {num_envs} --num-steps 64 --total-timesteps 512"
        for env_id in ("Pendulum-v1", "HalfCheetah-v4")
        for num_envs in (1, 4)
    },
    "a2c_atari": {
        name: f"--env-id {name}NoFrameskip-v4 --num-envs {num_envs} --num-steps 32 --total-timesteps 512"
        for name, num_envs in {"Breakout": 1, "Pong": 4}.items()
    },
    "dqn_per_atari": {
        name: f"--env-id {name}NoFrameskip-v4 --num-envs {num_envs} --num-steps 32 --total-timesteps 512"
        for name, num_envs in {"Breakout": 1, "SpaceInvaders": 4}.items()
    },
}
TAGS = """charts/learning_rate charts/SPS losses/value_loss losses/policy_loss losses/entropy losses/old_approx_kl
    losses/approx_kl losses/clipfrac losses/explained_variance"""
TAGS_OF = {  # once per batch
    "ppo_continuous": TAGS.split(),
    "a2c_atari": """charts/learning_rate charts/SPS losses/value_loss losses/policy_loss losses/entropy losses/grad_norm
        losses/explained_variance""".split(),
    "dqn_per_atari": """charts/learning_rate charts/epsilon charts/per_beta charts/SPS losses/td_loss losses/q_values
        losses/grad_norm""".split(),
}
PROGRESS = r"[\d,]+/[\d,]+ steps  [\d,]+ steps/s  return (-|-?[\d.,]+) \(last \d+\)  \d+:\d\d:\d\d left"
SCORE = r"evaluation: (-?[\d.]+) \+- ([\d.]+) over (\d+) (?:episodes|games).*\n(?:returns: (.+))\n"


def table(tables):
    return [
        pytest.param(script, *row, id=f"{script}, {name}") for script in SMALL for name, row in tables[script].items()
    ]


def assert_refused(result, *words):
    assert (result.status, result.stdout) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
    for word in words:
        assert word in result.stderr


# Wrong calls


@pytest.mark.parametrize("script, flags, words", table({script: WRONG | WRONG_OF[script] for script in SMALL}))
def test_a_wrong_call_is_one_line_and_leaves_no_trace(call, tmp_path, script, flags, words):
    assert_refused(call(script, *SMALL[script], *flags.split()), *words.split())
    assert not list(tmp_path.iterdir())


def number_flags(script):
    fields = dataclasses.fields(importlib.import_module(script).Args)
    return [field.name for field in fields if field.type in (int, float, int | None, float | None)]


@pytest.mark.parametrize("script, name", [(script, name) for script in SMALL for name in number_flags(script)])
def test_a_number_that_makes_no_sense_is_refused(call, tmp_path, script, name):
    flag = "--" + name.replace("_", "-")
    for value in REFUSED:
        if name not in ACCEPTED.get(value, ()):
            assert_refused(call(script, *SMALL[script], flag, value), flag, value)
    assert not list(tmp_path.iterdir())


def test_the_limits_of_the_ranges_are_accepted(call, script):
    assert call(script, *SMALL[script], "--total-timesteps", "128", *LIMITS[script].split()).status == 0


def test_a_program_refuses_a_wrong_call_as_well(tmp_path, script):
    assert_refused(execute(script, "--env-id", "nosuch-v0", cwd=tmp_path), "nosuch-v0")
    assert not list(tmp_path.iterdir())


def test_help_names_every_flag(call, tmp_path, script):
    result = call(script, "--help")
    assert (result.status, result.stderr) == (0, "")
    for field in dataclasses.fields(importlib.import_module(script).Args):
        assert "--" + field.name.replace("_", "-") in result.stdout
    assert not list(tmp_path.iterdir())


def test_an_environment_whose_package_is_missing(call, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "shimmy" else found(name))
    result = call("ppo_continuous", *SMALL["ppo_continuous"], "--env-id", "dm_control/cheetah-run-v0")
    assert_refused(result, "dm_control/cheetah-run-v0", "pip install", "shimmy")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(call, tmp_path, script):
    (tmp_path / "runs").write_text("a file")
    result = call(script, *SMALL[script])
    assert (result.status, result.stdout) == (1, "")
    assert re.fullmatch(r"error: [^\n]*runs[^\n]*\n", result.stderr)
    assert files_below(tmp_path) == {Path("runs"): b"a file"}


# What a call may ask for and the machine does not have


def test_cuda_where_there_is_none(call, tmp_path, monkeypatch, script):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(call(script, *SMALL[script], "--cuda", "--strict-cuda"), "CUDA")
    assert not list(tmp_path.iterdir())
    result = call(script, *SMALL[script], "--total-timesteps", "512", "--cuda")
    assert result.status == 0
    assert re.fullmatch(r"note: [^\n]*CPU[^\n]*\n", result.stderr)


def test_tracking_without_a_login(tmp_path, script):
    (tmp_path / "home").mkdir()
    (tmp_path / "cwd").mkdir()
    env = {name: None for name in os.environ if name.startswith("WANDB_") or name == "NETRC"}
    env |= {"HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": None}
    assert_refused(Run(script, *SMALL[script], "--track", cwd=tmp_path / "cwd", env=env).wait(), "--track", "login")
    assert not list((tmp_path / "cwd").iterdir())


@pytest.mark.parametrize("token, flags", [(None, []), ("a token", ["--no-save-model"])], ids=["no login", "no model"])
def test_uploading_what_cannot_be_uploaded(call, tmp_path, monkeypatch, script, token, flags):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    assert_refused(call(script, *SMALL[script], "--upload-model", *flags), "--upload-model", "--save-model", "login")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flag, package", [("track", "wandb"), ("upload-model", "huggingface_hub"), ("capture-video", "moviepy")]
)
def test_a_package_that_is_not_there(call, tmp_path, monkeypatch, script, flag, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert_refused(call(script, *SMALL[script], f"--{flag}"), f"--{flag}", f"pip install {package}")
    assert not list(tmp_path.iterdir())


def test_tracking_with_a_wrong_key(tmp_path, script):
    (tmp_path / "cwd").mkdir()
    env = {name: None for name in os.environ if name.startswith("WANDB_")} | {"WANDB_API_KEY": "abc"}
    assert_refused(Run(script, *SMALL[script], "--track", cwd=tmp_path / "cwd", env=env).wait(), "--track", "key")
    assert not list((tmp_path / "cwd").iterdir())


@pytest.mark.parametrize("flags", ["--exp-name w2#lr", "--wandb-project-name a/b"])
def test_tracking_under_a_name_that_cannot_be(call, tmp_path, monkeypatch, script, flags):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert_refused(call(script, *SMALL[script], "--track", *flags.split()), "--track", "characters")
    assert not list(tmp_path.iterdir())


def test_the_command_on_a_model_card_makes_the_run_anew(script):
    """Also where the run was resumed: its command was --resume."""
    module = importlib.import_module(script)
    args = module.Args(seed=3, exp_name="two words", gamma=0.5, save_model=False, torch_deterministic=False)
    program, name, *flags = shlex.split(module.command_line(dataclasses.replace(args, resume="runs/a run")))
    assert (program, name, tyro.cli(module.Args, args=flags)) == ("python", f"{script}.py", args)
    assert module.command_line(module.Args()) == f"python {script}.py"


def test_an_upload_that_fails(call, tmp_path, monkeypatch, script):
    """The run is whole all the same, and the line says where its model is."""

    def create_repo(*arguments, **options):
        raise ConnectionRefusedError("nobody\nanswers")

    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create_repo)
    result = call(script, *SMALL[script], "--total-timesteps", "512", "--upload-model")
    run_folder = run_folder_in(tmp_path)
    assert result.status == 1 and (run_folder / "model.pt").exists()
    assert result.stderr == f"error: the model is in runs/{run_folder.name}, but was not uploaded: nobody answers\n"
    assert "eval/episodic_return" in scalars(run_folder)


@pytest.mark.parametrize(
    "script, flags",
    [
        ("a2c_atari", f"--num-steps {10**15} --total-timesteps {10**17} --checkpoint-interval {10**17}"),
        ("dqn_per_atari", f"--batch-size {10**15}"),
    ],
)
def test_too_little_memory(call, script, flags):
    """As many rows as no machine can hold."""
    result = call(script, *SMALL[script], *flags.split())
    assert result.status == 1
    assert re.fullmatch(r"(note: [^\n]*\n)?error: Unable to allocate [^\n]*\n", result.stderr)


def test_too_little_memory_for_a_tensor(call, script, monkeypatch):
    """PyTorch has a class of errors of its own for a full GPU only."""
    monkeypatch.setattr(f"{script}.train", lambda *_: torch.empty(10**16, dtype=torch.uint8))
    result = call(script, *SMALL[script])
    assert result.status == 1
    assert re.fullmatch(r"(note: [^\n]*\n)?error: [^\n]*allocate[^\n]*\n", result.stderr)


def test_what_is_wrong_with_the_code_keeps_its_traceback(call, script, monkeypatch):
    monkeypatch.setattr(f"{script}.train", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        call(script, *SMALL[script])


def test_a_film_without_a_renderer(call, tmp_path, monkeypatch):
    def render(env):
        raise RuntimeError("no\nscreen")

    monkeypatch.setattr("gymnasium.envs.classic_control.pendulum.PendulumEnv.render", render)
    result = call("ppo_continuous", *SMALL["ppo_continuous"], "--capture-video")
    assert_refused(result, "--capture-video", "Pendulum-v1", "no screen")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("renderer, word", [("nonsense", "MUJOCO_GL"), ("glfw", "--capture-video")])
def test_a_film_where_mujoco_cannot_render(tmp_path, renderer, word):
    env = {"MUJOCO_GL": renderer, "DISPLAY": None, "WAYLAND_DISPLAY": None}
    flags = "--env-id HalfCheetah-v4 --capture-video".split()
    assert_refused(Run("ppo_continuous", *SMALL["ppo_continuous"], *flags, cwd=tmp_path, env=env).wait(), word)
    assert not list(tmp_path.iterdir())


# Paths for --resume and --evaluate


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
@pytest.mark.parametrize(
    "content", ["nothing", "words", "no archive", "another script's", "no state", "no arguments", "other flags"]
)
def test_what_is_not_a_run_of_this_script(call, tmp_path, script, flag, content):
    folder = tmp_path / "runs" / "a run"
    folder.mkdir(parents=True)
    path = folder / "checkpoint_512.pt"
    if content == "words":
        (folder / "README.md").write_text("nothing else")
    if content == "no archive":
        path.write_text("not a checkpoint")
    if content == "another script's":
        torch.save({"script": "another", "args": {"env_id": "Pendulum-v1"}}, path)
    if content == "no state":
        torch.save([script], path)
    if content == "no arguments":
        torch.save({"script": script}, path)
    if content == "other flags":  # of another version
        args = dataclasses.asdict(importlib.import_module(script).Args())
        torch.save({"script": script, "args": args | {"number_of_environments": 2}}, path)
    before = files_below(tmp_path)
    named = [path, path.relative_to(tmp_path)] if path.exists() and flag == "--evaluate" else []
    for name in ("runs/a run", *named):
        assert_refused(call(script, flag, str(name)), "a run")
    assert files_below(tmp_path) == before


def test_a_file_cannot_be_resumed(call, finished, tmp_path, script):
    _, run_folder = finished
    for path in (run_folder / "model.pt", checkpoints(run_folder)[-1]):
        (tmp_path / path.name).write_bytes(path.read_bytes())
        assert_refused(call(script, "--resume", path.name), "--resume", "folder")
    assert len(list(tmp_path.iterdir())) == 2


def test_another_environment_cannot_be_evaluated_or_resumed(call, finished, tmp_path, script):
    _, run_folder = finished
    before = files_below(run_folder)
    for flag in ("--resume", "--evaluate"):
        result = call(script, flag, str(run_folder), "--env-id", "Another-v1")
        assert_refused(result, load(run_folder / "model.pt")["args"]["env_id"], "Another-v1")
    assert not list(tmp_path.iterdir()) and files_below(run_folder) == before


def test_another_network_is_refused(call, finished, tmp_path, script):
    """And a deviation that the run did not begin with, which an evaluation does not ask for."""
    flags = {"a2c_atari": "--conv3-filters 5", "dqn_per_atari": "--no-dueling"}.get(script, "--log-std-init -1")
    _, run_folder = finished
    before = files_below(run_folder)
    for flag in ("--resume", "--evaluate"):
        if (script, flag) == ("ppo_continuous", "--evaluate"):
            continue
        result = call(script, flag, str(run_folder), *flags.split())
        assert result.status == 2 and re.search(r"^error: [^\n]*\n\Z", result.stderr, re.M)
    assert not list(tmp_path.iterdir()) and files_below(run_folder) == before


# Right calls


@pytest.mark.parametrize("script, flags", [(s, flags) for s in SMALL for flags in RUNS[s].values()])
def test_a_run_says_and_writes_what_it_should_and_no_more(tmp_path, script, flags):
    argv = [*SMALL[script], *flags.split(), "--seed", "3"]
    result = Run(script, *argv, cwd=tmp_path).wait()
    assert (result.status, result.stderr) == (0, "")
    name, *progress, score, returns = result.stdout.splitlines()
    env_id = flags.split()[1]
    assert re.fullmatch(rf"run folder: runs/{env_id}__{script}__3__\d+", name)
    assert progress and all(re.fullmatch(PROGRESS, line) for line in progress)
    mean, std, count, values = re.fullmatch(SCORE, f"{score}\n{returns}\n").groups()
    values = [float(value) for value in values.split()]
    assert len(values) == int(count) == 2
    assert np.allclose([np.mean(values), np.std(values)], [float(mean), float(std)], atol=0.01)

    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    run_folder = run_folder_in(tmp_path)
    assert name == f"run folder: runs/{run_folder.name}"
    kinds = sorted(re.sub(r"\d.*", "", path.name) for path in run_folder.iterdir())
    assert kinds == ["args.json", "checkpoint_", "checkpoint_", "events.out.tfevents.", "model.pt"]


def test_a_program_on_its_own_says_no_more_either(finished):
    result, run_folder = finished
    name, *progress = re.sub(SCORE, "", result.stdout).splitlines()
    assert name == f"run folder: runs/{run_folder.name}"
    assert progress and all(re.fullmatch(PROGRESS, line) for line in progress)
    assert [path.name for path in run_folder.parent.parent.iterdir()] == ["runs"]


def test_rounded_steps_are_said(call, script):
    flags = [*RUNS[script].values()][-1].split()
    result = call(script, *SMALL[script], *flags, "--total-timesteps", "500")
    assert result.status == 0
    assert re.fullmatch(r"note: 500 steps [^\n]*512[^\n]*\n", result.stderr)


def test_the_files_of_a_run(finished, script):
    result, run_folder = finished
    args = json.loads((run_folder / "args.json").read_text())
    assert list(args) == [field.name for field in dataclasses.fields(importlib.import_module(script).Args)]
    flags = dict(zip(SMALL[script][::2], SMALL[script][1::2]))
    assert {name: str(args[name[2:].replace("-", "_")]) for name in flags} == flags
    model, checkpoint = load(run_folder / "model.pt"), load(checkpoints(run_folder)[-1])
    assert set(model) < set(checkpoint)
    assert model["args"] == checkpoint["args"] == args
    assert model["global_step"] == checkpoint["global_step"] == args["total_timesteps"]

    points = scalars(run_folder)
    batch = args["num_envs"] * args["num_steps"]
    for tag in TAGS_OF[script]:
        assert [step for step, _ in points[tag]] == list(range(batch, args["total_timesteps"] + 1, batch)), tag
        assert np.isfinite([value for _, value in points[tag]]).all(), tag
    assert min(value for _, value in points["charts/SPS"]) > 0
    rates = [value for _, value in points["charts/learning_rate"]]
    assert rates[0] == pytest.approx(args["learning_rate"])
    assert np.all(np.diff(rates) < 0) if args.get("anneal_lr") else len(set(rates)) == 1
    returns = points.get("charts/episodic_return", [])
    assert [step for step, _ in returns] == [step for step, _ in points.get("charts/episodic_length", [])]
    assert len(returns) == len(checkpoint["recent_returns"]) >= (18 if SCALE[script] == 1 else 0)
    ((step, value),) = points["eval/episodic_return"]
    assert step == args["total_timesteps"]
    assert value == pytest.approx(float(re.search(SCORE, result.stdout)[1]), abs=0.01)


def test_no_model_is_saved_where_none_is_wanted(call, tmp_path, script):
    assert call(script, *SMALL[script], "--total-timesteps", "512", "--no-save-model").status == 0
    assert not (run_folder_in(tmp_path) / "model.pt").exists()
    assert len(checkpoints(run_folder_in(tmp_path))) == 2


# Evaluation


def test_evaluation_repeats_the_end_of_training(call, finished, tmp_path, script):
    result, run_folder = finished
    before = files_below(run_folder)
    for path in (run_folder, run_folder / "model.pt", checkpoints(run_folder)[-1]):
        evaluation = call(script, "--evaluate", str(path))
        assert (evaluation.status, evaluation.stderr) == (0, "")
        assert evaluation.stdout == re.search(SCORE, result.stdout)[0]
    assert files_below(run_folder) == before and not list(tmp_path.iterdir())


def test_evaluation_with_other_episodes(call, finished, script):
    result, run_folder = finished
    model = str(run_folder / "model.pt")
    scores = [re.search(SCORE, result.stdout)]
    for flags in ("--eval-episodes 3", "--seed 7", "--seed 7"):
        scores.append(re.fullmatch(SCORE, call(script, "--evaluate", model, *flags.split()).stdout))
    two, three, other, same = (score[4].split() for score in scores)
    assert len(three) == 3
    assert three[:2] == two or script == "a2c_atari"  # its games draw their actions from one generator
    assert other == same and len(other) == 2
    assert "atari" in script or not set(other) & set(two)  # a game's scores are a few whole numbers


def test_evaluation_leaves_the_model_and_its_statistics_as_they_are(finished, monkeypatch, script):
    _, run_folder = finished
    module, model = importlib.import_module(script), load(run_folder / "model.pt")
    if hasattr(module, "RunningMeanStd"):
        monkeypatch.setattr(module.RunningMeanStd, "update", lambda *_: pytest.fail("the statistics are not frozen"))
    module.evaluate(module.Args(**model["args"]), model, run_folder)
    assert str(model) == str(load(run_folder / "model.pt"))


def test_evaluation_asks_for_no_login_and_no_device(call, finished, tmp_path, monkeypatch, script):
    """A model that was trained with all services is evaluated by someone who has none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setattr("wandb.login", lambda **_: False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    result, run_folder = finished
    model = load(run_folder / "model.pt")
    model["args"] |= dict.fromkeys(["track", "upload_model", "capture_video", "cuda", "strict_cuda"], True)
    torch.save(model, tmp_path / "model.pt")
    for package in ("wandb", "huggingface_hub", "moviepy"):
        monkeypatch.setitem(sys.modules, package, None)
    evaluation = call(script, "--evaluate", "model.pt")
    assert (evaluation.status, evaluation.stdout) == (0, re.search(SCORE, result.stdout)[0])
    assert re.fullmatch(r"note: [^\n]*CPU[^\n]*\n", evaluation.stderr)
    assert_refused(call(script, "--evaluate", "model.pt", "--strict-cuda"), "--strict-cuda")


# Films, the terminal


def test_films_move(tmp_path, script):
    moviepy = pytest.importorskip("moviepy")
    steps = 256 if SCALE[script] == 1 else 1024  # to the end of the first game
    flags = f"--total-timesteps {steps} --checkpoint-interval 1024 --eval-episodes 1 --capture-video".split()
    result = Run(script, *SMALL[script], *flags, cwd=tmp_path).wait()
    assert (result.status, result.stderr) == (0, "")
    assert re.sub(SCORE, "", result.stdout).count("\n") == len(re.findall(PROGRESS, result.stdout)) + 1
    videos = sorted((run_folder_in(tmp_path) / "videos").iterdir())
    assert {video.suffix for video in videos} == {".mp4"}
    for kind in ("evaluation", "train"):
        with moviepy.VideoFileClip(next(str(video) for video in videos if video.name.startswith(kind))) as film:
            frames = np.stack([frame for frame in film.iter_frames()][::20])
        assert len(frames) >= 5
        assert frames.max() > 200 and frames.min() < 50
        assert all((before != after).any() for before, after in pairwise(frames))


def test_a_terminal_shows_one_line_rewritten_in_place(tmp_path, script):
    terminal, other_end = pty.openpty()
    try:
        result = Run(script, *SMALL[script], cwd=tmp_path, stdout=os.ttyname(other_end)).wait()
        os.set_blocking(terminal, False)
        shown = os.read(terminal, 1_000_000).decode().replace("\r\n", "\n")
    finally:
        os.close(terminal)
        os.close(other_end)
    assert (result.status, result.stderr) == (0, "")
    name, progress, score = shown.split("\n", 2)
    assert name.startswith("run folder: ")
    assert re.fullmatch(SCORE, score)
    first, *states = progress.removesuffix("\x1b[K").split("\x1b[K\r")
    assert first.startswith("\r") and len(states) >= 2
    assert all(re.fullmatch(PROGRESS, state) for state in (first[1:], *states))
    last = f"{4736 // SCALE[script]:,}"
    assert states[-1].startswith(f"{last}/{last} steps")
