"""Every script as a user runs it, on a GPU if it uses one: train, be killed, resume, evaluate."""

import importlib
import json
import random
import signal
import subprocess
import time

import pytest
import torch
from conftest import ROOT, SCRIPTS, assert_same, call, command, load, logged, run

# A few seconds each. Checkpoint intervals are no multiples of the steps between updates
ATARI = "--env-id BreakoutNoFrameskip-v4 --eval-episodes 1 --log-interval 1 --torch-threads 1"
SMALL = {
    "ppo_continuous": "--env-id Pendulum-v1 --num-envs 2 --num-steps 50 --num-minibatches 2 "
    "--update-epochs 2 --total-timesteps 1000 --checkpoint-interval 330 --eval-episodes 2",
    "a2c_atari": f"{ATARI} --num-envs 2 --num-steps 4 --total-timesteps 96 "
    "--checkpoint-interval 36",
    "a3c_atari": f"{ATARI} --num-workers 1 --num-steps 10 --total-timesteps 150 "
    "--checkpoint-interval 55 --max-episode-length 40",
    "dqn_per_atari": f"{ATARI} --num-envs 2 --batch-size 4 --buffer-size 400 "
    "--learning-starts 20 --total-timesteps 120 --checkpoint-interval 41 --eval-epsilon 0.9",
    "qmix_smac": "--env-id 3m --num-envs 2 --total-timesteps 200 --checkpoint-interval 70 "
    "--batch-size 4 --buffer-size 24 --test-interval 150 --test-nepisode 2 --eval-episodes 2",
}
TRAINED = [("HalfCheetah-v4", 500), ("PongDeterministic-v4", 10), ("3m", 10)]  # and a least return


@pytest.fixture(scope="module", params=SCRIPTS)
def whole(request, tmp_path_factory):
    """A script, the flags of a short run, and its folder when it has finished."""
    script, folder = request.param, tmp_path_factory.mktemp(request.param) / "whole"
    flags = SMALL[script].split()
    call(script, *flags, "--run-folder", folder)
    return script, flags, folder


@pytest.mark.quick
def test_train_resume_evaluate(whole, tmp_path, capsys):
    script, _, folder = whole
    result = json.loads((folder / "result.json").read_text())
    assert result["script"] == script and result["global_step"] > 0
    middle, _ = sorted(folder.glob("checkpoint_*.pt"))
    first = torch.load(middle, weights_only=True)
    assert 0 < first["global_step"] < result["global_step"]  # one in the middle of the run
    assert not {"optimizer", "return_stats", "replay"} & load(folder / "model.pt").keys()

    (killed := tmp_path / "killed").mkdir()  # a killed run: only the middle checkpoint is left
    (killed / middle.name).write_bytes(middle.read_bytes())
    run(script, "--run-folder", "killed", cwd=tmp_path)
    assert_same(load(folder / "model.pt"), load(killed / "model.pt"))
    again = json.loads((killed / "result.json").read_text())
    assert again["episodic_return"] == result["episodic_return"]
    assert again["seconds"] > first["seconds"]

    call(script, "--evaluate", killed)
    mean = sum(result["episodic_return"]) / len(result["episodic_return"])
    assert f"evaluation: {mean:.2f}" in capsys.readouterr().out
    assert logged(folder)["eval/episodic_return"][result["global_step"]] == pytest.approx(mean)

    if script in ("ppo_continuous", "a2c_atari", "qmix_smac"):  # annealed, then no longer
        first["args"]["anneal_lr"], first["optimizer"]["param_groups"][0]["lr"] = True, 1e-9
        torch.save(first, max(killed.glob("checkpoint_*")))
        call(script, "--resume", killed, "--no-anneal-lr")
        (group,) = load(max(killed.glob("checkpoint_*")))["optimizer"]["param_groups"]
        assert group["lr"] == first["args"]["learning_rate"]


def test_killed_at_any_moment(whole, tmp_path):
    """SIGKILL at a random moment, then resumed, and again: what is saved is the same."""
    script, flags, folder = whole
    seed = random.randrange(10**6)
    print("seed of the moments:", seed)
    moments, killed = random.Random(seed), tmp_path / "killed"
    for _ in range(3 if script == "ppo_continuous" else 1):
        words = command(script, *flags, "--run-folder", killed)
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        process.stdout.readline()  # the run folder
        time.sleep(moments.uniform(0, json.loads((folder / "result.json").read_text())["seconds"]))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    run(script, *flags, "--run-folder", killed, cwd=tmp_path)
    call(script, *flags, "--run-folder", killed)  # it has finished
    assert_same(*(load(max(x.glob("checkpoint_*"))) for x in (folder, killed)))


@pytest.mark.parametrize("name, least", TRAINED)
def test_trained_models_are_better_than_random(name, least, tmp_path):
    path = ROOT / "models" / f"{name}.pt"
    module = importlib.import_module(torch.load(path, weights_only=True)["script"])
    model = module.load_checkpoint(path)
    assert not {"optimizer", "return_stats", "replay"} & model.keys()
    vars(args := module.Args(**model["args"])).update(eval_episodes=2, num_envs=2)
    assert sum(module.evaluate(args, model, tmp_path)) > 2 * least
