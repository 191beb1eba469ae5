"""The mathematics of ppo_continuous.py: against definitions, autograd and torch.optim, and on tasks solved by hand.

Whole runs are calls of `ppo.train` on small environments defined here. A trained critic counts in scaled rewards, so
its values are compared after multiplication by the standard deviation that scaled them.
"""

import copy
import dataclasses
import functools
import math
import os
import shutil
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch._inductor.config
import torch.nn as nn
from conftest import scalars
from gymnasium.spaces import Box, Dict, Discrete
from test_resume import assert_same_run
from torch.distributions import Independent, Normal

import ppo_continuous as ppo

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NO_COMPILER = not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


# Environments, and short runs on them


class Probe(gym.Env):
    """Episodes of `length` steps, a random observation in [-1, 1], reward 1. Every action must lie inside the box."""

    observation_space = Box(-1, 1, (1,))
    action_space = Box(-2, 2, (1,))
    length = 1  # None: no termination
    time_limit = None  # None: no truncation

    def __init__(self, render_mode=None):
        pass

    def observe(self):
        return self.observation_space.sample()

    def reward(self, action):
        return 1.0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        self.obs = self.observe()
        return self.obs, {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        reward = self.reward(action)
        self.t += 1
        self.obs = self.observe()
        return self.obs, reward, self.t == self.length, False, {}


def train(env_class, folder, **options):
    """Train on an environment class; return the final checkpoint and what it says about raw observations (B, D)."""
    env_id = f"{env_class.__name__}-v0"
    gym.registry.pop(env_id, None)
    gym.register(env_id, entry_point=env_class, max_episode_steps=env_class.time_limit)
    defaults = dict(
        total_timesteps=3840,
        num_envs=4,
        num_steps=64,
        num_minibatches=4,
        learning_rate=5e-3,
        gamma=0.8,
        clip_vloss=False,  # it would hold a value to 0.2 per batch
        checkpoint_interval=10**9,
        eval_episodes=1,
        cuda=CUDA,
    )
    ppo.train(ppo.Args(env_id=env_id, **defaults | options), folder, None)
    checkpoint = ppo.load_checkpoint(str(folder))

    weights = checkpoint["agent"]
    agent = ppo.Agent(weights["actor.0.weight"].shape[1], len(weights["log_std"]))
    agent.load_state_dict(weights)
    obs_stats, return_stats = ppo.RunningMeanStd(()), ppo.RunningMeanStd(())
    obs_stats.load_state_dict(checkpoint["obs_stats"])
    return_stats.load_state_dict(checkpoint["return_stats"])

    def value(obs):
        with torch.no_grad():
            return agent.critic(torch.from_numpy(obs_stats.normalise(np.array(obs)))).squeeze(-1).numpy()

    def action(obs):
        return agent.numpy_actor()(obs_stats.normalise(np.array(obs)))

    return SimpleNamespace(checkpoint=checkpoint, value=value, action=action, reward_std=float(return_stats.std))


def assert_finite(checkpoint):
    for tensor in (*checkpoint["agent"].values(), checkpoint["exp_avg"], checkpoint["exp_avg_sq"]):
        assert tensor.isfinite().all()
    for stats in (checkpoint["obs_stats"], checkpoint["return_stats"]):
        assert stats["mean"].isfinite().all() and stats["m2"].isfinite().all()


# Generalised advantage estimation


def gae_by_definition(rewards, values, next_values, terminations, truncations, gamma, gae_lambda):
    """[GAE] Eq. (16) as it is printed: for each t a sum over l, up to the last step of t's episode."""
    T, N = rewards.shape
    advantages = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(T - t):
                successor_value = 0.0 if terminations[t + k, n] else next_values[t + k, n]
                delta = rewards[t + k, n] + gamma * successor_value - values[t + k, n]
                advantages[t, n] += (gamma * gae_lambda) ** k * delta
                if terminations[t + k, n] or truncations[t + k, n]:
                    break
    return advantages


@pytest.mark.parametrize("N", [1, 3, 8])
@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 0.95), (0.9, 1.0), (0.9, 0.0), (1.0, 1.0)])
def test_gae_is_the_double_sum(N, gamma, gae_lambda):
    rng = np.random.default_rng(N)
    rewards, values, next_values = rng.normal(size=(3, 40, N))
    terminations, truncations = rng.random((2, 40, N)) < 0.15
    both = rng.random((40, N)) < 0.05
    batch = rewards, values, next_values, terminations | both, truncations | both, gamma, gae_lambda
    assert (batch[3] & batch[4]).any() and (batch[3] & ~batch[4]).any() and (batch[4] & ~batch[3]).any()
    np.testing.assert_allclose(ppo.compute_gae(*batch), gae_by_definition(*batch), rtol=0, atol=1e-12)


def test_gae_without_values_is_the_reverse_cumsum_of_an_episode():
    rewards, no = np.random.default_rng(0).normal(size=(7, 2)), np.zeros((7, 2), bool)
    ends = no.copy()
    ends[3] = True
    episodes = [np.cumsum(rewards[rows][::-1], 0)[::-1] for rows in (slice(0, 4), slice(4, 7))]
    for terminations, truncations in ((ends, no), (no, ends)):
        advantages = ppo.compute_gae(rewards, 0 * rewards, 0 * rewards, terminations, truncations, 1.0, 1.0)
        np.testing.assert_allclose(advantages, np.concatenate(episodes), atol=1e-12)


def test_termination_wins_over_truncation():
    one, yes = np.ones((1, 1)), np.ones((1, 1), bool)
    # The value of the last observation must not matter
    assert ppo.compute_gae(one, 3 * one, 1e9 * one, yes, yes, 0.9, 0.95) == 1 - 3
    assert ppo.compute_gae(one, 3 * one, 5 * one, ~yes, yes, 0.9, 0.95) == pytest.approx(1 + 0.9 * 5 - 3)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_gae_of_a_consistent_value_function_is_zero(gae_lambda):
    """Reward 1, cut by a time limit of 5: V is 1 / (1 - gamma) with the bootstrap, a finite sum without it."""
    gamma, limit = 0.9, 5
    position = np.arange(20)[:, None] % limit  # steps since the reset
    ends, no = position == limit - 1, np.zeros((20, 1), bool)
    rewards = np.ones((20, 1))
    infinite = rewards / (1 - gamma)
    finite = (1 - gamma ** (limit - position)) / (1 - gamma)
    next_finite = (1 - gamma ** (limit - 1 - position)) / (1 - gamma)
    next_finite[ends] = 7.0  # whatever the critic says there
    bootstrapped = ppo.compute_gae(rewards, infinite, infinite, no, ends, gamma, gae_lambda)
    terminated = ppo.compute_gae(rewards, finite, next_finite, ends, no, gamma, gae_lambda)
    np.testing.assert_allclose(bootstrapped, 0, atol=1e-12)
    np.testing.assert_allclose(terminated, 0, atol=1e-12)
    wrong = ppo.compute_gae(rewards, infinite, infinite, ends, no, gamma, gae_lambda)
    np.testing.assert_allclose(wrong[ends], -gamma / (1 - gamma))


class Endless(Probe):
    observation_space = Box(0, 1, (1,))
    length, time_limit = None, 5

    def observe(self):
        return np.ones(1, np.float32)


@pytest.mark.parametrize("bootstrap", [True, False])
def test_training_bootstraps_truncations(tmp_path, bootstrap):
    """The observation hides the time, so that without the bootstrap V is the mean over an episode of what is left."""
    # 65 steps are 13 whole episodes: with lambda 1 every target is an exact sum
    run = train(
        Endless, tmp_path, bootstrap_truncation=bootstrap, num_steps=65, total_timesteps=65 * 4 * 15, gae_lambda=1.0
    )
    left = np.arange(1, 6)
    expected = 1 / (1 - 0.8) if bootstrap else np.mean((1 - 0.8**left) / (1 - 0.8))
    assert run.value([[1.0]])[0] * run.reward_std == pytest.approx(expected, rel=0.02)


# Running statistics


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 1, 1, 20, 3), (1, 64), (64, 1), (1000,)])
@pytest.mark.parametrize("offset, scale", [(0.0, 1.0), (-5.0, 1e-3), (1e6, 1.0)])
def test_running_statistics_are_those_of_all_rows(shape, sizes, offset, scale):
    rows = offset + scale * np.random.default_rng(len(sizes)).normal(size=(sum(sizes), *shape))
    stats = ppo.RunningMeanStd(shape)
    for batch in np.split(rows, np.cumsum(sizes)[:-1]):
        stats.update(batch)
    assert stats.count == len(rows) and np.shape(stats.mean) == np.shape(stats.m2) == shape
    np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(stats.m2 / stats.count, rows.var(0), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(stats.std, np.sqrt(rows.var(0) + 1e-8), rtol=1e-6)
    z = stats.normalise(rows)
    assert z.dtype == np.float32 and np.abs(z).max() <= 10
    np.testing.assert_allclose(z, ((rows - rows.mean(0)) / stats.std).clip(-10, 10), atol=1e-5)


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("offset, scale", [(0.0, 1.0), (-5.0, 1e-3), (1e6, 1.0), (1e6, 0.0)])
def test_statistics_in_turn_are_those_after_each_row(N, offset, scale):
    rows = offset + scale * np.random.default_rng(N).normal(size=(40, N))
    stats, whole = ppo.RunningMeanStd(()), ppo.RunningMeanStd(())
    stds = np.concatenate([stats.update_in_turn(batch) for batch in np.split(rows, [1, 7])])
    expected = [np.sqrt(rows[: t + 1].var() + 1e-8) for t in range(40)]
    np.testing.assert_allclose(stds, expected, rtol=1e-6)
    whole.update(rows.ravel())
    np.testing.assert_allclose([stats.mean, stats.std, stds[-1]], [whole.mean, whole.std, whole.std], rtol=1e-9)


@pytest.mark.parametrize("num_envs", [1, 3, 10])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1e4, 1e5, 1e6, 1e8])
def test_a_constant_normalises_to_something_finite(num_envs, scale):
    for constant in scale * np.random.default_rng(0).uniform(0.5, 1, 50):
        stats = ppo.RunningMeanStd((1,))
        for _ in range(3):
            rows = np.full((num_envs, 1), constant)
            stats.update(rows)
            assert np.isfinite(stats.normalise(rows)).all(), f"{constant!r} becomes {stats.normalise(rows).ravel()}"
        assert np.abs(stats.normalise(rows)).max() < 0.01


@pytest.mark.parametrize("shape", [(), (2,)])
def test_statistics_survive_a_checkpoint(tmp_path, shape):
    rows = np.random.default_rng(0).normal(size=(2, 9, *shape))
    stats, loaded = ppo.RunningMeanStd(shape), ppo.RunningMeanStd(shape)
    assert (stats.std > 0).all()  # no rows yet
    stats.update(rows[0])
    mean = stats.mean.copy()
    torch.save(stats.state_dict(), tmp_path / "stats.pt")
    saved = torch.load(tmp_path / "stats.pt", weights_only=True)
    loaded.load_state_dict(saved)
    for each in (stats, loaded):
        each.update(rows[1])
    assert saved["count"] == 9  # neither update wrote to the saved state
    np.testing.assert_array_equal(saved["mean"].numpy(), mean)
    assert loaded.count == stats.count
    np.testing.assert_array_equal(loaded.mean, stats.mean)
    np.testing.assert_array_equal(loaded.m2, stats.m2)


# The loss


def make_minibatch(agent, size=32, shift=0.3):
    """Random rows of the agent's dtype, whose old policy and values differ from the agent's by about `shift`."""
    obs_dim, action_dim = agent.actor[0].in_features, len(agent.log_std)
    like = dict(dtype=agent.log_std.dtype, device=agent.log_std.device)
    obs, noise = torch.randn(size, obs_dim, **like), torch.randn(size, action_dim, **like)
    with torch.no_grad():
        actions = agent.actor(obs) + noise * agent.log_std.exp()
        logprobs, _, values = agent(obs, actions)
    old_logprobs = logprobs + shift * torch.randn(size, **like)
    old_values = values + shift * torch.randn(size, **like)
    return obs, actions, old_logprobs, old_values, torch.randn(size, **like), torch.randn(size, **like)


def make_agent(obs_dim=5, action_dim=3, dtype=torch.float32):
    """An agent as after some training: parameters that are not at their special initial values."""
    agent = ppo.Agent(obs_dim, action_dim).to(DEVICE, dtype)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return agent


def test_log_std_init_is_the_deviation_of_the_first_actions(tmp_path):
    run = train(Follow, tmp_path, log_std_init=-1.5, learning_rate=1e-9, anneal_lr=False)
    assert run.checkpoint["agent"]["log_std"].tolist() == pytest.approx([-1.5])


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_loss_and_gradient_are_the_papers(clip_vloss):
    args = ppo.Args(clip_coef=0.2, ent_coef=0.01, vf_coef=0.7, clip_vloss=clip_vloss)
    agent = make_agent(dtype=torch.float64)
    minibatch = obs, actions, old_logprobs, old_values, advantages, returns = make_minibatch(agent, 64)
    loss, (policy_loss, value_loss, entropy, logratio) = ppo.ppo_loss(*agent(obs, actions), *minibatch[2:], args)

    # The paper maximises L^CLIP - c1 L^VF + c2 S, Eq. (9); the half in L^VF is the baselines'
    policy = Normal(agent.actor(obs), agent.log_std.exp())
    r = torch.exp(policy.log_prob(actions).sum(1) - old_logprobs)
    clip = torch.where(r > 1.2, 1.2, torch.where(r < 0.8, 0.8, r))
    l_clip = torch.where(r * advantages < clip * advantages, r * advantages, clip * advantages).mean()
    v = agent.critic(obs)[:, 0]
    error = (v - returns) ** 2
    if clip_vloss:
        nearest = torch.min(torch.max(v, old_values - 0.2), old_values + 0.2)
        error = torch.max(error, (nearest - returns) ** 2)
    l_vf = error.mean() / 2
    s = policy.entropy().sum(1).mean()
    reference = -(l_clip - 0.7 * l_vf + 0.01 * s)

    assert ((r < 0.8) | (r > 1.2)).any() and ((r > 0.8) & (r < 1.2)).any()
    assert ((v - old_values).abs() > 0.2).any() and ((v - old_values).abs() < 0.2).any()
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=1e-12)
    for part, expected in ((policy_loss, -l_clip), (value_loss, l_vf), (entropy, s), (logratio, r.log())):
        assert not part.requires_grad
        torch.testing.assert_close(part, expected.detach(), rtol=1e-10, atol=1e-10)
    parameters = tuple(agent.parameters())
    for ours, theirs in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(reference, parameters)):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_gradient_ends_at_the_clip_on_the_losing_side_only():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 1.1, 0.9, 0.9], dtype=torch.float64)
    advantages = torch.tensor([2.0, -2.0] * 4, dtype=torch.float64)
    logprobs = ratio.log().requires_grad_()
    zeros = torch.zeros(8, dtype=torch.float64)
    loss, _ = ppo.ppo_loss(logprobs, zeros[0], zeros, zeros, zeros, advantages, zeros, ppo.Args(clip_coef=0.2))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    beyond = torch.tensor([True, False, False, True, False, False, False, False])
    assert (gradient[beyond] == 0).all()
    torch.testing.assert_close(gradient[~beyond], (-ratio * advantages / 8)[~beyond])


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_value_clipping_stops_the_gradient_of_a_move_in_the_right_direction(clip_vloss):
    """Old value 0, new value 1, clip 0.2: towards the return 2 the move was too far, away from -1 it counts in full."""
    values = torch.ones(2, dtype=torch.float64, requires_grad=True)
    zeros, returns = torch.zeros(2, dtype=torch.float64), torch.tensor([2.0, -1.0], dtype=torch.float64)
    args = ppo.Args(clip_coef=0.2, clip_vloss=clip_vloss, vf_coef=0.5)
    loss, (_, value_loss, *_) = ppo.ppo_loss(zeros, zeros[0], values, zeros, zeros, zeros, returns, args)
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient.tolist() == pytest.approx([0.0 if clip_vloss else -0.25, 0.5])
    assert value_loss.item() == pytest.approx(((1.8**2 if clip_vloss else 1) + 4) / 4)


# The networks


@pytest.mark.parametrize("action_dim", [1, 3])
def test_log_probability_and_entropy_are_those_of_a_normal(action_dim):
    agent = make_agent(5, action_dim, torch.float64)
    obs, actions = make_minibatch(agent)[:2]
    logprobs, entropy, values = agent(obs, actions)
    policy = Independent(Normal(agent.actor(obs), agent.log_std.exp().expand(len(obs), -1)), 1)
    assert logprobs.shape == values.shape == (32,) and entropy.shape == ()
    torch.testing.assert_close(logprobs, policy.log_prob(actions), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy.expand(32), policy.entropy(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(values, agent.critic(obs)[:, 0])


@pytest.mark.parametrize("N", [1, 7])
def test_numpy_actor_is_the_actor(N):
    agent = make_agent(17, 6)
    obs = np.random.default_rng(0).normal(size=(N, 17)).astype(np.float32)
    mean_action = agent.numpy_actor()(obs)
    assert mean_action.dtype == np.float32
    with torch.no_grad():
        expected = agent.actor(torch.from_numpy(obs).to(DEVICE)).cpu().numpy()
    np.testing.assert_allclose(mean_action, expected, atol=1e-5)


@pytest.mark.parametrize("obs_dim, action_dim", [(3, 1), (17, 6), (100, 2)])
def test_initialisation_is_orthogonal_with_zero_bias(obs_dim, action_dim):
    agent = ppo.Agent(obs_dim, action_dim)
    gains = {"actor": (math.sqrt(2), math.sqrt(2), 0.01), "critic": (math.sqrt(2), math.sqrt(2), 1.0)}
    for name, network_gains in gains.items():
        layers = [layer for layer in getattr(agent, name) if isinstance(layer, nn.Linear)]
        assert [layer.out_features for layer in layers] == [64, 64, action_dim if name == "actor" else 1]
        for layer, gain in zip(layers, network_gains, strict=True):
            singular_values = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular_values, torch.full_like(singular_values, gain), rtol=1e-4, atol=1e-6)
            assert (layer.bias == 0).all()
    assert agent.log_std.shape == (action_dim,) and (agent.log_std == 0).all()


# The update


def vector(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def test_gradient_is_that_of_autograd_on_the_module():
    args = ppo.Args(ent_coef=0.01)
    agent = make_agent(dtype=torch.float64)
    minibatch = make_minibatch(agent)
    loss, parts = ppo.ppo_loss(*agent(*minibatch[:2]), *minibatch[2:], args)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, tuple(agent.parameters()))])
    grad, grad_parts = ppo.loss_gradient(ppo.Agent(5, 3).to("meta"), vector(agent), minibatch, args)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)
    for ours, theirs in zip(grad_parts, parts, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def adam_coefficients(t):
    learning_rate = 3e-3 * (1 - t / 60)
    return learning_rate, learning_rate / (1 - 0.9**t), math.sqrt(1 - 0.999**t)


def test_minibatch_step_is_adam_with_clipped_gradients():
    args = ppo.Args(ent_coef=0.01, max_grad_norm=0.5)
    structure, reference = ppo.Agent(5, 3).to("meta"), make_agent(dtype=torch.float64)
    adam = torch.optim.Adam(reference.parameters(), eps=1e-5)
    theta = vector(reference)
    exp_avg, exp_avg_sq = torch.zeros_like(theta), torch.zeros_like(theta)
    norms, start = [], theta.clone()
    for t in range(1, 51):
        *rest, advantages, returns = make_minibatch(reference)
        scale = 0.02 if t % 2 else 3.0  # gradients below and above max_grad_norm
        minibatch = (*rest, scale * advantages, rest[3] + scale * returns)
        adam.param_groups[0]["lr"], *coefficients = adam_coefficients(t)
        *_, norm = ppo.minibatch_step(structure, args, theta, exp_avg, exp_avg_sq, *coefficients, minibatch)
        adam.zero_grad()
        loss, _ = ppo.ppo_loss(*reference(*minibatch[:2]), *minibatch[2:], args)
        loss.backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
        adam.step()
        norms.append(norm.item())
    assert min(norms) < 0.5 < max(norms)
    assert (theta - start).abs().max() > 0.02
    torch.testing.assert_close(theta, vector(reference), rtol=0, atol=1e-9)


@pytest.mark.parametrize("norm_adv, clip_vloss", [(True, True), (False, False)])
def test_traced_step_is_the_step_to_the_bit(norm_adv, clip_vloss):
    """50 steps whose coefficients and minibatches change: same parameters, same losses; tracing itself changes none."""
    args = ppo.Args(ent_coef=0.01, norm_adv=norm_adv, clip_vloss=clip_vloss)
    agent, structure = make_agent().to(DEVICE), ppo.Agent(5, 3).to("meta")
    step = functools.partial(ppo.minibatch_step, structure, args)
    start = [vector(agent), torch.zeros_like(vector(agent)), torch.zeros_like(vector(agent))]
    example = copy.deepcopy(start)
    zeros = tuple(torch.zeros_like(x) for x in make_minibatch(agent))
    traced = ppo.straight_line(step, *example, *torch.ones(2, device=DEVICE), zeros)
    assert all(map(torch.equal, example, start))
    ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
    for t in range(1, 51):
        minibatch = make_minibatch(agent)
        coefficients = torch.tensor(adam_coefficients(t)[1:], device=DEVICE)
        parts, expected = traced(*ours, *coefficients, minibatch), step(*theirs, *coefficients, minibatch)
        assert all(map(torch.equal, [*ours, *parts], [*theirs, *expected]))
    assert (ours[0] - start[0]).abs().max() > 5e-3


@pytest.mark.skipif(NO_COMPILER, reason="torch.compile needs a C++ compiler")
def test_compiled_training_is_eager_training(tmp_path):
    """One batch, 50 minibatch steps, learning rate and bias correction changing: one compilation, the same result."""
    options = dict(total_timesteps=320, num_envs=1, num_steps=320, num_minibatches=10, update_epochs=5)
    options |= dict(learning_rate=3e-4, clip_vloss=True, ent_coef=0.01)
    # Without vec_isa_ok a cold compiler first tries each set of vector instructions, which takes seconds. Not by
    # monkeypatch: undoing it hides a setting from every later compilation
    inductor = torch._inductor.config.patch("cpp.vec_isa_ok", True)
    with torch._dynamo.config.patch(error_on_recompile=True), inductor:
        runs = (train(Follow, tmp_path / str(flag), compile=flag, **options) for flag in (False, True))
        eager, compiled = (nn.utils.parameters_to_vector(run.checkpoint["agent"].values()) for run in runs)
    torch.compiler.reset()
    torch.manual_seed(1)
    initial = nn.utils.parameters_to_vector(ppo.Agent(1, 1).state_dict().values())
    assert (eager - initial).abs().max() > 5e-3
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-5)


# Probe environments: each can be solved only if one more part of the algorithm works


def test_probe_value(tmp_path):
    """A constant observation and reward: V is that reward, as scaled (a constant has no spread: clipped to 10)."""

    class Certain(Probe):
        def observe(self):
            return np.ones(1, np.float32)

    run = train(Certain, tmp_path)
    assert run.value([[1.0]])[0] == pytest.approx(min(1 / run.reward_std, 10), rel=0.02)


def test_probe_credit_to_the_observation(tmp_path):
    class Seen(Probe):
        def observe(self):
            return np.sign(super().observe())

        def reward(self, action):
            return float(self.obs[0])

    run = train(Seen, tmp_path)
    assert run.value([[-1.0], [1.0]]) * run.reward_std == pytest.approx([-1, 1], abs=0.02)


def test_probe_discount_over_time(tmp_path):
    """Two steps, reward at the end: V(first) = gamma V(second) = gamma."""

    class Delayed(Probe):
        observation_space = Box(0, 2, (1,))
        length = 2

        def observe(self):
            return np.full(1, self.t, np.float32)

        def reward(self, action):
            return float(self.t == 1)

    run = train(Delayed, tmp_path, gamma=0.5)
    assert run.value([[0.0], [1.0]]) * run.reward_std == pytest.approx([0.5, 1], abs=0.02)


def test_probe_policy(tmp_path):
    class Target(Probe):
        def reward(self, action):
            return -float((action[0] - 0.5) ** 2)

    run = train(Target, tmp_path)
    assert run.action([[-0.7], [0.0], [0.7]]) == pytest.approx(0.5, abs=0.1)


class Follow(Probe):
    def reward(self, action):
        return -float((action[0] - self.obs[0]) ** 2)


OBS = np.linspace(-0.9, 0.9, 7)[:, None]


def test_probe_policy_that_depends_on_the_observation(tmp_path):
    run = train(Follow, tmp_path)
    assert run.action(OBS) == pytest.approx(OBS, abs=0.15)


@pytest.mark.parametrize("normalised", [True, False])
def test_probe_normalisation(tmp_path, monkeypatch, normalised):
    """Follow, with observations of scale 1e3 around 1e4 and rewards of 1e3: solved because it is normalised."""

    class Far(Follow):
        observation_space = Box(0, 2e4, (1,))

        def observe(self):
            self.x = self.np_random.uniform(-1, 1)
            return np.array([1e4 + 1e3 * self.x], np.float32)

        def reset(self, *, seed=None, options=None):
            gym.Env.reset(self, seed=seed)
            return super().reset()

        def reward(self, action):
            return -1000 * float((action[0] - self.x) ** 2)

    if not normalised:
        monkeypatch.setattr(ppo.RunningMeanStd, "normalise", lambda self, rows: rows.astype(np.float32))
    run = train(Far, tmp_path)
    error = np.abs(run.action(1e4 + 1e3 * OBS) - OBS).max()
    assert error < 0.15 if normalised else error > 0.5


# Spaces and degenerate data


def variant(**attributes):
    return type("Variant", (Probe,), attributes)


VARIANTS = {
    "constant observation and reward": variant(observe=lambda self: np.ones(1, np.float32)),
    "large constant observation": variant(
        observation_space=Box(0, 1e7, (1,), np.float64), observe=lambda self: np.array([971324.3])
    ),
    "zero reward": variant(reward=lambda self, action: 0.0),
    "float64 observations": variant(observation_space=Box(-1, 1, (2,), np.float64)),
    "int64 observations": variant(observation_space=Box(-3, 3, (2,), np.int64)),
    "uint8 image": variant(observation_space=Box(0, 255, (2, 3), np.uint8)),
    "dictionary": variant(observation_space=Dict({"a": Box(-1, 1, (2,)), "b": Discrete(3)})),
    "matrix of actions": variant(action_space=Box(-1, 1, (2, 3))),
    "float64 actions": variant(action_space=Box(-0.1, 0.7, (2,), np.float64)),
    "unbounded actions": variant(action_space=Box(-np.inf, np.inf, (2,))),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_training_stays_finite(tmp_path, name):
    env_class = VARIANTS[name]
    run = train(env_class, tmp_path, num_envs=3, num_steps=16, total_timesteps=96)
    assert_finite(run.checkpoint)
    weights = run.checkpoint["agent"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert weights["actor.0.weight"].shape == (64, gym.spaces.flatdim(env_class.observation_space))
    assert weights["log_std"].shape == (math.prod(env_class.action_space.shape),)


def test_minibatches_of_one_sample_stay_finite(tmp_path):
    run = train(Follow, tmp_path, num_envs=1, num_steps=16, num_minibatches=16, total_timesteps=32)
    assert_finite(run.checkpoint)


def test_the_policy_is_sampled_and_the_environment_gets_it_clipped(tmp_path, monkeypatch):
    """Bounds narrower than the noise and not symmetric: both are reached, neither is exceeded (Probe asserts that)."""
    sent, stored, noise = [], [], []

    class Narrow(Probe):
        action_space = Box(np.array([-0.1, 0.2], np.float32), np.array([0.5, 0.3], np.float32))

        def reward(self, action):
            sent.append(action)
            return 1.0

    class Recorded(ppo.Agent):
        def __init__(self, *dims):
            super().__init__(*dims)
            self.log_std.data.copy_(torch.tensor([-0.5, -3.0]))

        def forward(self, obs, actions):
            if not torch.is_grad_enabled():  # once per batch
                stored.append(actions.cpu().numpy().copy())
                noise.append(((actions - self.actor(obs)) / self.log_std.exp()).cpu().numpy())
            return super().forward(obs, actions)

    monkeypatch.setattr(ppo, "Agent", Recorded)
    train(Narrow, tmp_path, total_timesteps=1024)
    sent, stored, noise = np.array(sent)[:1024], np.concatenate(stored), np.concatenate(noise)
    np.testing.assert_array_equal(sent, stored.clip(Narrow.action_space.low, Narrow.action_space.high))
    np.testing.assert_array_equal(sent[:, 0].min(), Narrow.action_space.low[0])
    np.testing.assert_array_equal(sent[:, 0].max(), Narrow.action_space.high[0])
    assert noise.mean(0) == pytest.approx(0, abs=4 / math.sqrt(1024))
    assert noise.std(0) == pytest.approx(1, abs=4 / math.sqrt(2 * 1024))


# What is in a batch


@pytest.mark.parametrize("checkpoint_interval", [10**9, 21])
def test_no_row_of_a_reset_enters_the_batch(tmp_path, monkeypatch, checkpoint_interval):
    """Observations (environment, episode, step) make each row say where it comes from. 4 batches of 7 steps."""
    made, batches, critic_inputs = [], [], []

    class Counter(gym.Env):
        observation_space = Box(0, np.inf, (3,))
        action_space = Box(-1, 1, (1,))

        def __init__(self, render_mode=None):
            self.number, self.episode, self.steps = (len(made) - 1) % 3, -1, 0  # the first one has only spaces
            made.append(self)

        def observation(self):
            return np.array([self.number, self.episode, self.t], np.float32)

        def reset(self, *, seed=None, options=None):
            self.episode, self.t = self.episode + 1, 0
            return self.observation(), {}

        def step(self, action):
            self.t += 1
            self.steps += 1
            terminated, truncated = ends(self.number, self.t)
            return self.observation(), self.t / 10, terminated, truncated, {}

        time_limit = None

    def ends(number, t):
        """Environment 0 (and evaluation's) terminates at 3, environment 1 is truncated at 5, 2 both at once at 4."""
        return (number == 0) & (t == 3) | (number == 2) & (t == 4), (number == 1) & (t == 5) | (number == 2) & (t == 4)

    class Recorded(ppo.Agent):
        def __init__(self, *dims):
            super().__init__(*dims)
            self.critic.register_forward_hook(record)

    def record(critic, inputs, output):
        if not torch.is_grad_enabled():  # the observations of a batch, then their successors
            critic_inputs.append(inputs[0].clone().cpu().numpy().reshape(7, 3, 3))

    def compute_gae(*batch, gae=ppo.compute_gae):
        batches.append(copy.deepcopy(batch))
        return gae(*batch)

    monkeypatch.setattr(ppo, "Agent", Recorded)
    monkeypatch.setattr(ppo, "compute_gae", compute_gae)
    monkeypatch.setattr(ppo.RunningMeanStd, "normalise", lambda self, rows: rows.astype(np.float32))
    monkeypatch.setattr(ppo.RunningMeanStd, "update_in_turn", lambda self, rows: np.ones(len(rows)))
    train(
        Counter,
        tmp_path,
        num_envs=3,
        num_steps=7,
        num_minibatches=1,
        total_timesteps=84,
        checkpoint_interval=checkpoint_interval,
    )

    assert [env.steps for env in made] == [0, *([28] * 3 if checkpoint_interval > 21 else [7] * 12), 3]
    assert len(batches) == 4 and len(critic_inputs) == 8
    last = None
    for (rewards, values, next_values, terminations, truncations, *_), obs, successors in zip(
        batches, critic_inputs[::2], critic_inputs[1::2], strict=True
    ):
        for array in (rewards, values, next_values, terminations, truncations):
            assert array.shape == (7, 3)
        number, episode, step = np.moveaxis(obs, -1, 0)
        np.testing.assert_array_equal(number, np.tile(np.arange(3), (7, 1)))
        np.testing.assert_array_equal(successors, np.stack([number, episode, step + 1], -1))
        np.testing.assert_allclose(rewards, (step + 1) / 10, rtol=1e-6)
        np.testing.assert_array_equal((terminations, truncations), ends(number, step + 1))
        ended = terminations | truncations
        following = np.where(ended[..., None], np.stack([number, episode + 1, 0 * step], -1), successors)
        np.testing.assert_array_equal(obs[1:], following[:-1])
        if last is None:
            assert (obs[0, :, 1:] == 0).all()
        elif checkpoint_interval == 21:  # new environments after each batch, also where the episode had just ended
            np.testing.assert_array_equal(obs[0], np.stack([number[0], 0 * step[0], 0 * step[0]], -1))
        else:
            np.testing.assert_array_equal(obs[0], last)
        last = following[-1]


def test_statistics_are_those_of_every_observation_and_discounted_return(tmp_path, monkeypatch):
    """And each reward is divided by the deviation of the discounted returns that were known at its step."""
    envs, scaled = [], []

    class Recorded(Follow):
        length = 3

        def __init__(self, render_mode=None):
            self.seen, self.rewards, self.returns = [], [], []
            envs.append(self)

        def observe(self):
            self.seen.append(super().observe())
            return self.seen[-1]

        def reward(self, action):
            self.rewards.append(super().reward(action))
            self.returns.append(self.rewards[-1] + (0.8 * self.returns[-1] if self.t else 0.0))
            return self.rewards[-1]

    def compute_gae(rewards, *rest, gae=ppo.compute_gae):
        scaled.append(rewards.copy())
        return gae(rewards, *rest)

    monkeypatch.setattr(ppo, "compute_gae", compute_gae)
    checkpoint = train(Recorded, tmp_path, num_steps=16, total_timesteps=192).checkpoint
    # The first environment has only spaces, the last one is evaluation's
    rewards, returns = (np.transpose([getattr(env, name) for env in envs[1:5]]) for name in ("rewards", "returns"))
    stds = np.sqrt([returns[: t + 1].var() + 1e-8 for t in range(len(returns))])
    np.testing.assert_allclose(np.concatenate(scaled), (rewards / stds[:, None]).clip(-10, 10), rtol=1e-5)
    for name, rows in (
        ("obs_stats", [env.seen for env in envs[1:5]]),
        ("return_stats", [env.returns for env in envs[1:5]]),
    ):
        stats, rows = checkpoint[name], np.concatenate(rows).astype(np.float64)
        assert stats["count"] == len(rows)
        np.testing.assert_allclose(stats["mean"], rows.mean(0), rtol=1e-9)
        np.testing.assert_allclose(stats["m2"] / stats["count"], rows.var(0), rtol=1e-9)


def test_training_is_annealed_adam_over_permutations_of_the_batch(tmp_path, monkeypatch):
    """The minibatches of a run, replayed with torch.optim on an ordinary agent, give the run's parameters."""
    minibatches, gaes = [], []

    def straight_line(step, *example):
        def recorded(*inputs):
            minibatches.append(copy.deepcopy(inputs[-1]))
            return step(*inputs)

        return recorded

    def compute_gae(*batch, gae=ppo.compute_gae):
        gaes.append(gae(*batch).copy())
        return gaes[-1]

    monkeypatch.setattr(ppo, "straight_line", straight_line)
    monkeypatch.setattr(ppo, "compute_gae", compute_gae)
    options = dict(num_minibatches=4, update_epochs=2, learning_rate=1e-3, clip_vloss=True)
    run = train(Follow, tmp_path, num_steps=16, total_timesteps=192, **options)
    args = ppo.Args(**run.checkpoint["args"])
    assert len(gaes) == 3 and len(minibatches) == 3 * 2 * 4

    torch.manual_seed(args.seed)
    agent = ppo.Agent(1, 1).to(DEVICE)
    adam = torch.optim.Adam(agent.parameters(), eps=1e-5)
    for k, (obs, actions, old_logprobs, old_values, advantages, returns) in enumerate(minibatches):
        iteration, place = divmod(k, 8)
        logprobs, entropy, values = agent(obs, actions)
        if place == 0:  # the policy that acted is the one that starts to learn
            torch.testing.assert_close(logprobs, old_logprobs, rtol=0, atol=1e-4)
            torch.testing.assert_close(values, old_values, rtol=0, atol=1e-4)
        if place % 4 == 0:  # an epoch takes each sample once
            gae, rows = torch.from_numpy(gaes[iteration]), minibatches[k : k + 4]
            seen = torch.cat([row[5] - row[3] for row in rows]).cpu()
            torch.testing.assert_close(seen.sort().values, gae.flatten().sort().values, rtol=0, atol=1e-5)
        raw = returns - old_values
        torch.testing.assert_close(advantages, (raw - raw.mean()) / (raw.std() + 1e-8), rtol=0, atol=1e-4)
        adam.param_groups[0]["lr"] = 1e-3 * (1 - iteration / 3)
        adam.zero_grad()
        loss, _ = ppo.ppo_loss(logprobs, entropy, values, old_logprobs, old_values, advantages, returns, args)
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        adam.step()
    for name, parameter in agent.state_dict().items():
        torch.testing.assert_close(run.checkpoint["agent"][name], parameter.cpu(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("target_kl, epochs", [(None, 3), (1e-9, 1), (1e9, 3)])
def test_what_is_logged_of_a_batch_and_where_it_ends_early(tmp_path, monkeypatch, target_kl, epochs):
    steps, gaes = [], []

    def straight_line(step, *example):
        def recorded(theta, *rest):
            steps.append((theta.clone(), copy.deepcopy(rest[-1])))
            return step(theta, *rest)

        return recorded

    def compute_gae(rewards, values, *rest, gae=ppo.compute_gae):
        gaes.append((values.copy(), gae(rewards, values, *rest).copy()))
        return gaes[-1][1]

    monkeypatch.setattr(ppo, "straight_line", straight_line)
    monkeypatch.setattr(ppo, "compute_gae", compute_gae)
    options = dict(target_kl=target_kl, update_epochs=3, num_minibatches=4, learning_rate=1e-2, anneal_lr=False)
    run = train(Follow, tmp_path, num_steps=16, total_timesteps=128, **options)
    assert len(steps) == run.checkpoint["adam_steps"] == 2 * epochs * 4
    points, agent, logratios = scalars(tmp_path), ppo.Agent(1, 1).to(DEVICE), []
    for theta, (obs, actions, old_logprobs, *_) in steps[epochs * 4 :]:
        nn.utils.vector_to_parameters(theta, agent.parameters())
        with torch.no_grad():
            logratios.append((agent(obs, actions)[0] - old_logprobs).double().cpu().numpy())
    ratios = np.exp(logratios)
    (values, advantages), last = gaes[1], np.array(logratios[-4:])
    returns = values + advantages
    for tag, expected in {
        "old_approx_kl": -last.mean(),
        "approx_kl": (np.exp(last) - 1 - last).mean(),
        "clipfrac": np.mean((ratios < 0.8) | (ratios > 1.2)),
        "explained_variance": 1 - np.var(returns - values) / np.var(returns),
    }.items():
        step, value = points[f"losses/{tag}"][-1]
        assert step == 128 and value == pytest.approx(expected, rel=1e-3, abs=1e-6), tag
    assert epochs == 1 or (ratios > 1.2).any()


# Resuming where a reset leaves traces


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # of Box2D
def test_resuming_is_exact_where_a_used_environment_is_not_a_new_one(tmp_path):
    """Box2D's walker keeps its world when it is reset, and the world what happened in it."""
    args = ppo.Args(env_id="BipedalWalker-v3", num_envs=2, num_steps=128, num_minibatches=4, update_epochs=2, cuda=CUDA)
    args = dataclasses.replace(args, total_timesteps=768, checkpoint_interval=256, eval_episodes=1)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    ppo.train(args, whole, None)
    shutil.copytree(whole, killed)
    (killed / "checkpoint_768.pt").unlink()
    ppo.train(args, killed, ppo.load_checkpoint(str(killed)))
    assert_same_run(killed, whole)


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # of Box2D
def test_an_environment_that_can_be_filmed_plays_the_same_episodes():
    """To find out whether it renders, one is reset, and Box2D's walker remembers in the episode after the next."""
    rows = {False: [], True: []}
    for render in rows:
        env = ppo.make_env("BipedalWalker-v3", render=render)
        for seed in range(1, 4):
            rng = np.random.default_rng(0)
            rows[render].append(env.reset(seed=seed)[0])
            over = False
            while not over:
                obs, _, over, _, _ = env.step(rng.uniform(-0.3, 0.3, 4).astype(np.float32))
                rows[render].append(obs)
        env.close()
    assert np.array_equal(rows[False], rows[True])


# A run that cannot go on


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "what, value, step", [("reward", v, 70) for v in (np.nan, np.inf, -np.inf)] + [("obs", np.nan, 96)]
)
def test_what_is_not_finite_stops_training(tmp_path, what, value, step):
    """The fault is in the third of four batches of 32 steps; the checkpoint before it is the last."""

    class Faulty(Probe):
        steps = 0

        def reward(self, action):
            Faulty.steps += 1  # of all environments: at each checkpoint there is a new one
            return float(value) if what == "reward" and self.steps == step else 1.0

        def observe(self):
            obs = super().observe()
            return obs * np.float32(value) if what == "obs" and self.steps == step else obs

    options = dict(num_envs=1, num_steps=32, total_timesteps=128, checkpoint_interval=32)
    with pytest.raises(FloatingPointError, match=r"step 96\b"):
        train(Faulty, tmp_path, **options)
    checkpoint = ppo.load_checkpoint(str(tmp_path))
    assert checkpoint["global_step"] == 64 and not (tmp_path / "model.pt").exists()
    assert_finite(checkpoint)
