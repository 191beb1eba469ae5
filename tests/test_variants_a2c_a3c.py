"""variants/a2c_atari and variants/a3c_atari: equations, short runs, exact resume, evaluation."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import assert_resumes, assert_same, cases, check, load, logged, run, train
from torch import nn

import a2c_atari

# Rollouts of 20 steps, with checkpoints at 0, 80 and 120
SMALL = dict(num_envs=4, num_steps=5, total_timesteps=120, checkpoint_interval=70, conv3_filters=4)
SMALL |= dict(eval_episodes=2, env_threads=1, torch_threads=1, cuda=False, log_interval=1)
MIDDLE = "checkpoint_000000000080.pt"
CLOSE = dict(rtol=1e-3, atol=1e-5)
# The first observation shows which action the third step rewards
RECALL = """
import gymnasium as gym
class Recall(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.t = int(self.np_random.integers(2)), 0
        return [2 * self.cue - 1, 0], {}
    def step(self, action):
        self.t += 1
        reward = (self.t == 3) * (0.1 + 1.9 * (action == self.cue))  # not to be clipped
        return [0, self.t == 2], reward, self.t == 3, False, {}
gym.register("Recall-v0", Recall)
"""
# Rank 1 begins with other parameters than rank 0. Each rank writes its last ones
RANKS = """
import os, torch, a2c_atari as a2c
rank, share, parts = int(os.environ["RANK"]), a2c.share, {}
def share_more(run_parts, global_step):
    parts.update(run_parts)
    parts["agent"].policy_head.weight.data += rank
    return share(parts, global_step)
a2c.share = share_more
a2c.main()
torch.save(parts["agent"].state_dict(), f"rank{rank}.pt")
"""


@pytest.fixture
def variant(patched, limit_games):
    """variant(name): the patched script as a module, whose games are cut off."""

    def make(name, frames=60):
        module = patched("a2c_atari", name)
        limit_games(module, frames)
        return module

    return make


@pytest.mark.parametrize("name", ["ppo", "lstm"])
def test_run_resume_evaluate(variant, tmp_path, name):
    assert_resumes(variant(name), tmp_path, **SMALL)


@pytest.mark.quick
def test_ppo_loss_and_gradient(variant):
    module = variant("ppo")
    for case in cases("ppo", "ppo_loss"):
        inputs = {name: torch.tensor(x) for name, x in case["inputs"].items()}
        flags = {name: x.item() for name, x in inputs.items() if x.dim() == 0}
        trained = [inputs[name].requires_grad_() for name in ("logprobs", "entropy", "values")]
        given, policy = [x for x in inputs.values() if x.dim()][3:], MagicMock()
        policy.log_prob.return_value, policy.entropy.return_value, values = trained
        minibatch = [torch.ones(1), None, torch.ones_like(values), *given]
        args = SimpleNamespace(bf16=False, **flags)
        loss, metrics = module.ppo_loss(lambda obs, x=(policy, values): x, minibatch, args)
        loss.backward()
        check(case, "loss", loss.detach())
        for name, x in zip(("logprobs", "entropy", "values"), trained):
            check(case, f"grad_{name}", x.grad)
        for name in ("policy_loss", "value_loss", "old_approx_kl", "approx_kl", "clipfrac"):
            check(case, name, metrics[name])


def test_ppo_takes_each_step_once_in_every_epoch_and_begins_as_a2c(variant, tmp_path):
    """At first the ratio is one, and the gradient of the unclipped loss that of A2C's."""
    module, minibatches, a2c_args = variant("ppo"), [], a2c_atari.Args(vf_coef=0.25)
    update, ppo_args = module.update, module.Args(clip_vloss=False, norm_adv=False)

    def record(agent, optimizer, minibatch, args):
        if len(minibatches) % 8 == 0:
            obs, actions, mask, _, old_values, advantages, returns = minibatch
            policy, values = agent(obs)
            rollout = (policy.log_prob(actions) * mask, values, policy.entropy(), returns)
            loss, metrics = module.ppo_loss(agent, minibatch, ppo_args)
            assert metrics["approx_kl"].abs() < 1e-6
            torch.testing.assert_close(advantages, returns - old_values)
            losses = (loss, a2c_atari.a2c_loss(*rollout, a2c_args)[0])
            gradients = [torch.autograd.grad(x, [*agent.parameters()]) for x in losses]
            torch.testing.assert_close(*gradients, **CLOSE)
        minibatches.append(minibatch)
        return update(agent, optimizer, minibatch, args)

    module.update = record
    train(module, tmp_path, **SMALL, update_epochs=2, num_minibatches=4)
    assert len(minibatches) == 120 // 20 * 2 * 4
    assert not all(minibatch[2].all() for minibatch in minibatches[::8])  # the mask is compared too
    for k in range(0, len(minibatches), 8):
        epochs = [[torch.cat(x) for x in zip(*minibatches[i : i + 4])] for i in (k, k + 4)]
        assert not epochs[0][0].equal(epochs[1][0])  # in another order
        rows = [[x[0].sum((1, 2, 3)), *x[1:]] for x in epochs]
        assert_same(*(sorted(torch.stack(x, 1).tolist()) for x in rows))
        assert len(rows[0][0]) == 20


def test_lstm_unrolls_each_episode(variant, tmp_path):
    """Values, bootstraps and gradients are those of nn.LSTM, unrolled from an episode's start."""
    module, lstm, steps, rollouts = variant("lstm", 100), nn.LSTM(512, 256), [], []
    envs, update, step = module.AtariEnvs, module.update, module.AtariEnvs.step
    first_obs = envs(module.Args(**SMALL), 4).reset(module.seed_everything(1, 0), None)

    def unroll(agent, frames):
        hidden = agent.linear(agent.convolutions(torch.tensor(np.stack(frames)).float() / 255))
        lstm._parameters = dict(zip(lstm._parameters, agent.lstm.parameters()))
        return agent.value_head(lstm(hidden)[0]).squeeze(-1)

    def record_step(envs, actions):
        steps.append((step(envs, actions), envs.episodes))
        return steps[-1][0]

    def record_update(agent, optimizer, rollout, args):
        if not rollouts:  # no episode has ended yet
            frames = [first_obs, *(x[0] for x, _ in steps[:4])]
            total = sum(unroll(agent, [x[n] for x in frames]).sum() for n in range(4))
            weights = [*agent.lstm.parameters()]
            actual = torch.autograd.grad(rollout[1].sum(), weights, retain_graph=True)
            torch.testing.assert_close(actual, torch.autograd.grad(total, weights), **CLOSE)
        rollouts.append((agent, rollout))
        return update(agent, optimizer, rollout, args)

    envs.step, module.update, module.evaluate = record_step, record_update, lambda *_: [0.0]
    train(module, tmp_path, **SMALL | dict(learning_rate=0.0, checkpoint_interval=200))
    values, returns = [torch.cat([x[i].detach() for _, x in rollouts]) for i in (1, 3)]
    for n in range(4):
        frames = [first_obs[n]]
        for t, ((obs, next_obs, rewards, terminations, *_), episodes) in enumerate(steps):
            V, bootstrap = unroll(rollouts[0][0], [*frames, next_obs[n]])[-2:]
            torch.testing.assert_close(values[t, n], V, **CLOSE)
            if not terminations[n] and (n in episodes or t % 5 == 4):
                expected = rewards[n] + 0.99 * bootstrap
                torch.testing.assert_close(returns[t, n], expected, **CLOSE)
            frames = [obs[n]] if n in episodes else [*frames, obs[n]]
    assert sum(len(episodes) for _, episodes in steps) >= 4 and values.std() > 1e-3
    assert any(x[3].any() for x, _ in steps)  # a life was lost, which resets nothing


def test_two_ranks_are_one_process(variant, tmp_path):
    """Up to rounding, and from the parameters of rank 0; resuming is exact."""
    module = variant("torchrun", frames=108_000)
    shutil.copy(module.__file__, tmp_path)
    (tmp_path / "ranks.py").write_text(RANKS)
    flags = SMALL | dict(max_grad_norm=0.01, learning_rate=0.1)
    words = "-m torch.distributed.run --standalone --nproc-per-node 2 ranks.py --no-cuda"
    words = [sys.executable, *words.split()]
    words += [f"--{k.replace('_', '-')}={x}" for k, x in flags.items() if k != "cuda"]
    options = dict(cwd=tmp_path, capture_output=True, text=True)
    process, two = subprocess.run([*words, "--run-folder=two"], **options), tmp_path / "two"
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("evaluation: ") == 1 and len(list(two.glob("*tfevents*"))) == 1
    ranks = [dict(torch.load(tmp_path / f"rank{rank}.pt")) for rank in (0, 1)]
    assert_same(ranks[1], ranks[0])

    folders = [train(x, tmp_path / x.__name__, **flags) for x in (module, a2c_atari)]
    one, plain = [load(folder / "model.pt")["agent"] for folder in folders]
    assert_same(one, plain)
    torch.testing.assert_close(ranks[0], dict(one), rtol=0, atol=1e-6)
    norms = [list(logged(x)["losses/grad_norm"].values()) for x in (two, folders[0])]
    np.testing.assert_allclose(*norms, rtol=1e-3)
    start = load(two / MIDDLE)["agent"]
    assert max((x - start[name]).abs().max() for name, x in one.items()) > 1e-5

    killed = tmp_path / "killed"
    killed.mkdir()
    shutil.copy(two / MIDDLE, killed)
    subprocess.run([*words, "--run-folder=killed"], **options)
    assert_same(load(killed / "model.pt"), load(two / "model.pt"))


def test_own_environment_is_learned(patched, tmp_path):
    """The optimum of a game that needs memory, and exact resume."""
    script = shutil.copy(patched("a3c_atari", "own_environment").__file__, tmp_path)
    (tmp_path / "recall.py").write_text(RECALL)
    flags = "--env-id recall:Recall-v0 --num-workers 1 --total-timesteps 1800 --run-folder run "
    flags += "--eval-episodes 20 --checkpoint-interval 1000 --learning-rate 3e-3"
    run(script, *flags.split(), cwd=tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["episodic_return"] == [2] * 20
    model, last = load(tmp_path / "run" / "model.pt"), max(tmp_path.glob("run/checkpoint_*.pt"))
    last.unlink()
    run(script, "--run-folder", "run", cwd=tmp_path)
    assert_same(load(last)["agent"], model["agent"])
