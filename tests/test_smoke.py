"""Every script in a process of its own, as a user runs it: train, be killed, resume, evaluate.

On a machine with a GPU the scripts use it where they do by default.
"""

import json
import random
import signal
import subprocess
import time

import pytest
import torch
from conftest import SCRIPTS, assert_same, command, load, run

# A few seconds each. Checkpoint intervals are no multiples of the steps between updates
ATARI = "--env-id BreakoutNoFrameskip-v4 --eval-episodes 1 --log-interval 1 --seed 3"
SMALL = {
    "ppo_continuous": "--env-id Pendulum-v1 --num-envs 2 --num-steps 50 --num-minibatches 2 "
    "--update-epochs 2 --total-timesteps 1000 --checkpoint-interval 330 --eval-episodes 2",
    "a2c_atari": f"{ATARI} --num-envs 2 --num-steps 4 --total-timesteps 96 "
    "--checkpoint-interval 36",
    "a3c_atari": f"{ATARI} --num-workers 1 --num-steps 10 --total-timesteps 250 "
    "--checkpoint-interval 85 --max-episode-length 40",
    "dqn_per_atari": f"{ATARI} --num-envs 2 --num-steps 3 --batch-size 4 --buffer-size 400 "
    "--learning-starts 20 --total-timesteps 120 --checkpoint-interval 40 --eval-epsilon 0.9",
    "qmix_smac": "--env-id 3m --num-envs 2 --total-timesteps 300 --checkpoint-interval 110 "
    "--batch-size 4 --buffer-size 24 --test-interval 200 --test-nepisode 2 --eval-episodes 2",
}


@pytest.mark.quick
@pytest.mark.parametrize("script", SCRIPTS)
def test_train_resume_evaluate(script, tmp_path):
    run(script, *SMALL[script].split(), "--run-folder", "whole", cwd=tmp_path)
    whole = tmp_path / "whole"
    result = json.loads((whole / "result.json").read_text())
    assert result["script"] == script and result["global_step"] > 0
    checkpoints = sorted(whole.glob("checkpoint_*.pt"))
    assert len(checkpoints) == 2
    first = torch.load(checkpoints[0], weights_only=True)
    assert 0 < first["global_step"] < result["global_step"]  # one in the middle of the run

    # A run that was killed after the middle checkpoint: nothing but that file is left of it
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / checkpoints[0].name).write_bytes(checkpoints[0].read_bytes())
    run(script, "--run-folder", "killed", cwd=tmp_path)
    assert_same(load(whole / "model.pt"), load(killed / "model.pt"))
    again = json.loads((killed / "result.json").read_text())
    assert again["episodic_return"] == result["episodic_return"]
    assert again["seconds"] > first["seconds"]

    evaluation = run(script, "--evaluate", "whole/model.pt", cwd=tmp_path).stdout
    mean = sum(result["episodic_return"]) / len(result["episodic_return"])
    assert f"{mean:.2f}" in evaluation, (mean, evaluation)


@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_at_any_moment(script, tmp_path):
    """SIGKILL at random moments, then resumed: the model is the uninterrupted run's."""
    flags = SMALL[script].split()
    run(script, *flags, "--run-folder", "whole", cwd=tmp_path)
    seed = random.randrange(10**6)
    print("seed of the moments:", seed)
    moments = random.Random(seed)
    words = command(script, *flags, "--run-folder", "killed")
    for _ in range(3 if script == "ppo_continuous" else 1):
        process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(2, 9))
        process.send_signal(signal.SIGKILL)
        process.wait()
    run(script, *flags, "--run-folder", "killed", cwd=tmp_path)
    assert_same(load(tmp_path / "whole" / "model.pt"), load(tmp_path / "killed" / "model.pt"))
