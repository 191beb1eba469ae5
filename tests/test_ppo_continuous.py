"""The mathematics of ppo_continuous.py: against definitions, autograd and torch.optim, and on tasks solved by hand.

Whole runs are calls of `ppo.train` on small environments defined here. `plain_ppo` is the same algorithm once more,
with loops, torch.distributions and torch.optim, and without a line of the script but the networks.
"""

import copy
import functools
import math
import os
import shutil
from types import SimpleNamespace
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch._inductor.config
import torch.nn as nn
from gymnasium.spaces import Box, Dict, Discrete
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


class Follow(Probe):
    def reward(self, action):
        return -float((action[0] - self.obs[0]) ** 2)


class Drift(gym.Env):
    """Two numbers that the actions push about; episodes of random length, cut at 6 steps, sometimes both at once."""

    observation_space = Box(-np.inf, np.inf, (2,))
    action_space = Box(np.array([-0.4, 0.1], np.float32), np.array([0.7, 0.3], np.float32))
    time_limit = None
    made: ClassVar = []

    def __init__(self, render_mode=None):
        self.seeds, self.ends, self.scores, self.seen = [], [], [], []
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.seeds.append(seed)
        self.x, self.t, self.last = 3 + self.rng.normal(size=2), 0, self.rng.integers(3, 9)
        self.scores.append(0.0)
        self.seen.append(self.x)
        return self.x, {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.x = 0.8 * self.x + action + 0.1 * self.rng.normal(size=2)
        self.t += 1
        reward, terminated, truncated = 20 - float(self.x @ self.x), self.t == self.last, self.t == 6
        self.ends.append((terminated, truncated))
        self.scores[-1] += reward
        self.seen.append(self.x)
        return self.x, reward, bool(terminated), truncated, {}


def make_args(env_class, **options):
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
    return ppo.Args(env_id=env_id, **defaults | options)


def train(env_class, folder, **options):
    """Train on an environment class; what is in the last checkpoint, and what it says about raw observations (B, D)."""
    args, logged = make_args(env_class, **options), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo.Run, "log", lambda run, step, scalars: logged.append((step, copy.deepcopy(scalars))))
        ppo.train(args, folder, None)
    checkpoint = ppo.load_checkpoint(folder)
    envs = ppo.Environments(args, 1, folder, frozen=True)
    agent = ppo.Agent(envs.obs_dim, envs.action_dim)
    ppo.restore({"agent": agent, "obs_stats": envs.obs_stats, "return_stats": envs.return_stats}, checkpoint)

    def value(obs):
        with torch.no_grad():
            scaled = agent.critic(torch.from_numpy(envs.normalise(np.array(obs)))).squeeze(-1).numpy()
        return scaled * envs.return_stats.std  # the critic counts in scaled rewards

    def action(obs):
        return ppo.numpy_actor(agent.actor)(envs.normalise(np.array(obs)))

    return SimpleNamespace(
        args=args, checkpoint=checkpoint, value=value, action=action, logged=logged, std=float(envs.return_stats.std)
    )


def assert_finite(checkpoint):
    for tensor in (*checkpoint["agent"].values(), *checkpoint["adam"].values()):
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


def test_mujoco_says_that_a_simulation_is_unstable_and_nothing_else(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    env = ppo.make_env("HalfCheetah-v4")
    env.reset(seed=1)
    env.step(np.zeros(6))
    assert capfd.readouterr() == ("", "")
    env.unwrapped.data.qvel[:] = 1e12
    env.step(np.zeros(6))
    said = capfd.readouterr().err
    assert said.startswith("note: ") and "The simulation is unstable" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())  # no MUJOCO_LOG.TXT


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


# Running statistics


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 1, 1, 20, 3), (1, 64), (64, 1), (1000,)])
@pytest.mark.parametrize("offset, scale", [(0.0, 1.0), (-5.0, 1e-3), (1e6, 1.0), (1e6, 0.0)])
def test_running_statistics_are_those_of_all_rows(shape, sizes, offset, scale):
    rows, seen = offset + scale * np.random.default_rng(len(sizes)).normal(size=(sum(sizes), *shape)), 0
    stats = ppo.RunningMeanStd(shape)
    for batch in np.split(rows, np.cumsum(sizes)[:-1]):
        stats.update(batch)
        seen += len(batch)
        np.testing.assert_allclose(stats.std, np.sqrt(rows[:seen].var(0) + 1e-8), rtol=1e-6)
    assert stats.count == len(rows) and np.shape(stats.mean) == np.shape(stats.m2) == shape
    np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(stats.m2 / stats.count, rows.var(0), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("num_envs", [1, 3, 10])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1e4, 1e5, 1e6, 1e8])
def test_a_constant_normalises_to_something_finite(tmp_path, num_envs, scale):
    args = make_args(Probe)
    for constant in scale * np.random.default_rng(0).uniform(0.5, 1, 50):
        envs = ppo.Environments(args, num_envs, tmp_path)
        rows = [envs.normalise(np.full((num_envs, 1), constant)) for _ in range(3)]
        assert np.isfinite(rows).all() and np.abs(rows).max() < 0.01, f"{constant!r} becomes {rows}"


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
    assert saved["count"] == 9 and loaded.count == stats.count  # neither update wrote to the saved state
    np.testing.assert_array_equal(saved["mean"].numpy(), mean)
    np.testing.assert_array_equal(loaded.mean, stats.mean)
    np.testing.assert_array_equal(loaded.m2, stats.m2)


# The environments


@pytest.mark.parametrize("frozen", [False, True])
def test_environments_normalise_scale_and_count_whole_episodes(tmp_path, monkeypatch, frozen):
    """Against all raw rows up to the moment: a discounted return begins at zero after each end of an episode."""
    monkeypatch.setattr(Drift, "made", made := [])
    envs = ppo.Environments(make_args(Drift), 3, tmp_path, frozen)
    known = np.random.default_rng(0).normal(2, 3, (2, 50, 2)) if frozen else np.zeros((2, 0, 2))
    seen, discounted = list(known[0]), list(known[1, :, 0])
    if frozen:
        envs.obs_stats.update(known[0])
        envs.return_stats.update(known[1, :, 0])

    def normalised(rows):
        seen.extend(rows if not frozen else ())
        return ((rows - np.mean(seen, 0)) / np.sqrt(np.var(seen, 0) + 1e-8)).clip(-10, 10)

    next_obs, rng, R, kinds, lengths = envs.reset(5), np.random.default_rng(1), np.zeros(3), set(), np.zeros(3)
    plain = made[1:]  # the first one has only spaces
    assert len(plain) == 3
    np.testing.assert_allclose(next_obs, normalised(np.array([env.seen[0] for env in plain])), atol=1e-5)
    for _ in range(60):
        places, before = [len(env.seen) for env in plain], [env.scores[-1] for env in plain]
        actions = rng.normal(size=(3, 2)).astype(np.float32)
        next_obs, successors, rewards, terminations, truncations = envs.step(actions)
        assert next_obs.dtype == successors.dtype == np.float32
        expected = normalised(np.array([env.seen[place] for env, place in zip(plain, places)]))
        np.testing.assert_allclose(successors, expected, atol=1e-5)
        lengths += 1
        finished = []
        raw = [env.scores[-1 - any(env.ends[-1])] - score for env, score in zip(plain, before)]
        R = 0.8 * R + raw
        discounted.extend(R if not frozen else ())
        np.testing.assert_allclose(rewards, (raw / np.sqrt(np.var(discounted) + 1e-8)).clip(-10, 10), rtol=1e-6)
        for i, env in enumerate(plain):
            assert (terminations[i], truncations[i]) == env.ends[-1]
            kinds.add(env.ends[-1])
            if any(env.ends[-1]):
                finished.append((i, pytest.approx(env.scores[-2]), lengths[i]))
                expected[i] = normalised(env.seen[-1][None])[0]
                R[i] = lengths[i] = 0
        assert envs.finished == finished
        np.testing.assert_allclose(next_obs, expected, atol=1e-5)
    assert len(kinds) == 4 and envs.recent_scores[-1] in plain[0].scores + plain[1].scores + plain[2].scores
    assert envs.obs_stats.count == len(seen) and envs.return_stats.count == len(discounted)
    assert len(seen) == 50 if frozen else len(seen) > 200


def test_episodes_depend_on_the_seed_the_step_and_on_who_plays(tmp_path, monkeypatch):
    def seeds_of(what):
        monkeypatch.setattr(Drift, "made", made := [])
        what()
        return [tuple(env.seeds[:1]) for env in made if env.seeds]

    def play(seed, step):
        envs = ppo.Environments(make_args(Drift, seed=seed), 4, tmp_path)
        return seeds_of(lambda: envs.reset(step))

    starts = play(1, 0), play(2, 0), play(1, 512), play(1, 1024)
    assert len({seed for start in starts for seed in start}) == 16 and play(1, 512) == starts[2]

    # A run of two checkpoints before its end, and evaluations of it
    options = dict(num_steps=8, total_timesteps=64, checkpoint_interval=32, eval_episodes=4, update_epochs=1)
    whole = seeds_of(lambda: train(Drift, tmp_path, **options))
    training, at_the_end = whole[:8], whole[8:]
    assert training == play(1, 0) + play(1, 32) and len(set(whole)) == 12
    model = ppo.load_checkpoint(tmp_path)

    def evaluation(seed=1, **changes):
        args = make_args(Drift, seed=seed, **options)
        return seeds_of(lambda: ppo.evaluate(args, model | changes, tmp_path))

    assert evaluation() == at_the_end
    others = whole, evaluation(seed=2), evaluation(global_step=32), play(2, 0), play(2, 64), play(1, 64)
    assert len({seed for other in others for seed in other}) == sum(map(len, others))


def test_evaluation_plays_the_mean_action_with_frozen_statistics(tmp_path, monkeypatch, capfd):
    """Whole episodes, and of each environment its first: not those that are soonest over."""
    run = train(Drift, tmp_path, num_steps=16, total_timesteps=128)
    monkeypatch.setattr(Drift, "made", made := [])
    args, model = make_args(Drift, eval_episodes=6), torch.load(tmp_path / "model.pt", weights_only=True)
    returns = ppo.evaluate(args, model, tmp_path)["episodic_return"]
    expected = []
    for env in made[1:]:
        plain = Drift()
        obs, over, score = plain.reset(seed=env.seeds[0])[0], False, 0.0
        while not over:
            action = run.action([obs])[0].clip(Drift.action_space.low, Drift.action_space.high)
            obs, reward, terminated, truncated, _ = plain.step(action)
            score, over = score + reward, terminated or truncated
        expected.append(score)
    assert returns == pytest.approx(expected) and len(set(np.round(expected, 6))) == 6
    assert f"{np.mean(expected):.2f} +- {np.std(expected):.2f}, 6 episodes" in capfd.readouterr().out


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


def papers_loss(agent, args, obs, actions, old_logprobs, old_values, advantages, returns):
    """Minus L^CLIP - c1 L^VF + c2 S, [PPO] Eq. (9); the half in L^VF is the baselines'. And what is logged of it."""
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.var().sqrt() + 1e-8)
    policy, epsilon = Normal(agent.actor(obs), agent.log_std.exp()), args.clip_coef
    r = torch.exp(policy.log_prob(actions).sum(1) - old_logprobs)
    clip = torch.where(r > 1 + epsilon, 1 + epsilon, torch.where(r < 1 - epsilon, 1 - epsilon, r))
    l_clip = torch.where(r * advantages < clip * advantages, r * advantages, clip * advantages).mean()
    v = agent.critic(obs)[:, 0]
    error = (v - returns) ** 2
    if args.clip_vloss:
        nearest = torch.min(torch.max(v, old_values - epsilon), old_values + epsilon)
        error = torch.max(error, (nearest - returns) ** 2)
    l_vf, s = error.mean() / 2, policy.entropy().sum(1).mean()
    metrics = {"policy_loss": -l_clip, "value_loss": l_vf, "entropy": s, "old_approx_kl": -r.log().mean()}
    metrics |= {"approx_kl": (r - 1).mean() - r.log().mean(), "clipfrac": ((r - 1).abs() > epsilon).double().mean()}
    return -(l_clip - args.vf_coef * l_vf + args.ent_coef * s), {k: v.item() for k, v in metrics.items()}


@pytest.mark.parametrize("norm_adv", [False, True])
@pytest.mark.parametrize("clip_vloss", [False, True])
def test_loss_and_gradient_are_the_papers(clip_vloss, norm_adv):
    args = ppo.Args(clip_coef=0.2, ent_coef=0.01, vf_coef=0.7, clip_vloss=clip_vloss, norm_adv=norm_adv)
    agent = make_agent(dtype=torch.float64)
    minibatch = obs, actions, old_logprobs, old_values, *_ = make_minibatch(agent, 64)
    logprobs, entropy, values = agent(obs, actions)
    loss, metrics = ppo.ppo_loss(logprobs, entropy, values, *minibatch[2:], args)
    reference, expected = papers_loss(agent, args, *minibatch)

    ratios = (logprobs - old_logprobs).exp()
    assert (ratios < 0.8).any() and (ratios > 1.2).any() and ((ratios - 1).abs() < 0.2).any()
    assert ((values - old_values).abs() > 0.2).any() and ((values - old_values).abs() < 0.2).any()
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=1e-12)
    assert {name: metric.item() for name, metric in metrics.items()} == pytest.approx(expected, rel=1e-6)
    assert expected["approx_kl"] != pytest.approx(expected["old_approx_kl"], rel=0.1)
    parameters = tuple(agent.parameters())
    for ours, theirs in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(reference, parameters)):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_gradient_ends_at_the_clip_on_the_losing_side_only():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 1.1, 0.9, 0.9], dtype=torch.float64)
    advantages = torch.tensor([2.0, -2.0] * 4, dtype=torch.float64)
    logprobs = ratio.log().requires_grad_()
    zeros = torch.zeros(8, dtype=torch.float64)
    args = ppo.Args(clip_coef=0.2, norm_adv=False)
    loss, _ = ppo.ppo_loss(logprobs, zeros[0], zeros, zeros, zeros, advantages, zeros, args)
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
    loss, metrics = ppo.ppo_loss(zeros, zeros[0], values, zeros, zeros, zeros, returns, args)
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient.tolist() == pytest.approx([0.0 if clip_vloss else -0.25, 0.5])
    assert metrics["value_loss"].item() == pytest.approx(((1.8**2 if clip_vloss else 1) + 4) / 4)


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


ACTORS = {  # what a reader may put in the place of Agent.actor; all but the first two are asked through torch
    "as it is": lambda agent: agent.actor,
    "a layer more": lambda agent: nn.Sequential(*agent.actor[:4], nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 6)),
    "ReLU": lambda agent: nn.Sequential(agent.actor[0], nn.ReLU(), agent.actor[2], nn.ReLU(), agent.actor[4]),
    "a norm": lambda agent: nn.Sequential(agent.actor[0], nn.LayerNorm(64), *agent.actor[1:]),
    "squashed": lambda agent: nn.Sequential(agent.actor, nn.Tanh()),
}


@pytest.mark.parametrize("N", [1, 7])
@pytest.mark.parametrize("name", ACTORS)
def test_numpy_actor_is_the_actor(N, name):
    agent = make_agent(17, 6)
    agent.actor = ACTORS[name](agent).to(DEVICE)
    obs = np.random.default_rng(0).normal(size=(N, 17)).astype(np.float32)
    for _ in range(2):
        mean_action = ppo.numpy_actor(agent.actor)(obs)
        assert type(mean_action) is np.ndarray and mean_action.dtype == np.float32
        with torch.no_grad():
            expected = agent.actor(torch.from_numpy(obs).to(DEVICE)).cpu().numpy()
            for parameter in agent.parameters():
                parameter.mul_(1.1)
        np.testing.assert_allclose(mean_action, expected, atol=1e-5)


@pytest.mark.parametrize("obs_dim, action_dim", [(3, 1), (17, 6), (100, 2)])
def test_initialisation_is_orthogonal_with_zero_bias(obs_dim, action_dim):
    agent = ppo.Agent(obs_dim, action_dim, -0.5)
    gains = {"actor": (math.sqrt(2), math.sqrt(2), 0.01), "critic": (math.sqrt(2), math.sqrt(2), 1.0)}
    for name, network_gains in gains.items():
        layers = [layer for layer in getattr(agent, name) if isinstance(layer, nn.Linear)]
        assert [layer.out_features for layer in layers] == [64, 64, action_dim if name == "actor" else 1]
        for layer, gain in zip(layers, network_gains, strict=True):
            singular_values = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular_values, torch.full_like(singular_values, gain), rtol=1e-4, atol=1e-6)
            assert (layer.bias == 0).all()
    assert agent.log_std.tolist() == [-0.5] * action_dim and (ppo.Agent(3, 1).log_std == 0).all()


# The update


def vector(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def adam_state(agent):
    """theta, exp_avg, exp_avg_sq, adam_steps at the beginning."""
    theta = vector(agent)
    return [theta, torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros((), dtype=torch.int64, device=DEVICE)]


def learning_rate(t):
    return torch.tensor(3e-3 * (1 - t / 60), dtype=torch.float64, device=DEVICE)


def test_minibatch_step_is_adam_with_the_clipped_gradient_of_autograd():
    args = ppo.Args(ent_coef=0.01, max_grad_norm=0.5, norm_adv=False)
    structure, reference = ppo.Agent(5, 3).to("meta"), make_agent(dtype=torch.float64)
    adam = torch.optim.Adam(reference.parameters(), eps=1e-5)
    theta, exp_avg, _, adam_steps = state = adam_state(reference)
    norms, start = [], theta.clone()
    for t in range(1, 51):
        *rest, advantages, returns = make_minibatch(reference)
        scale = 0.02 if t % 2 else 3.0  # gradients below and above max_grad_norm
        minibatch = (*rest, scale * advantages, rest[3] + scale * returns)
        before = exp_avg.clone()
        metrics = ppo.minibatch_step(structure, args, *state, learning_rate(t), minibatch)
        adam.param_groups[0]["lr"] = learning_rate(t).item()
        adam.zero_grad()
        papers_loss(reference, args, *minibatch)[0].backward()
        norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 0.5).item())
        assert metrics["grad_norm"].item() == pytest.approx(norms[-1])
        expected = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
        torch.testing.assert_close((exp_avg - 0.9 * before) / 0.1, expected, rtol=1e-6, atol=1e-9)
        adam.step()
    assert min(norms) < 0.5 < max(norms) and adam_steps == 50
    assert (theta - start).abs().max() > 0.02
    torch.testing.assert_close(theta, vector(reference), rtol=0, atol=1e-9)


@pytest.mark.parametrize("norm_adv, clip_vloss", [(True, True), (False, False)])
def test_traced_step_is_the_step_to_the_bit(norm_adv, clip_vloss):
    """50 steps whose coefficients and minibatches change: same parameters and metrics; tracing itself changes none."""
    args = ppo.Args(ent_coef=0.01, norm_adv=norm_adv, clip_vloss=clip_vloss, cuda=CUDA)
    agent, calls = make_agent(), []

    def step(*inputs):
        calls.append(inputs)
        return ppo.minibatch_step(*inputs)

    traced, plain = ppo.accelerate(step, agent, args), functools.partial(ppo.minibatch_step, agent, args)
    ours, theirs = adam_state(agent), adam_state(agent)
    for t in range(1, 51):
        minibatch = make_minibatch(agent)
        metrics, expected = traced(*ours, learning_rate(t), minibatch), plain(*theirs, learning_rate(t), minibatch)
        assert list(metrics) == list(expected) and all(map(torch.equal, metrics.values(), expected.values()))
        assert all(map(torch.equal, ours, theirs))
    assert len(calls) == 1 and (ours[0] - vector(agent)).abs().max() > 5e-3


@pytest.mark.skipif(NO_COMPILER, reason="torch.compile needs a C++ compiler")
def test_compiled_training_is_eager_training(tmp_path):
    """One batch, 50 minibatch steps, learning rate and bias correction changing: one compilation, the same result."""
    options = dict(total_timesteps=320, num_envs=1, num_steps=320, num_minibatches=10, update_epochs=5)
    options |= dict(learning_rate=3e-4, clip_vloss=True, ent_coef=0.01)
    # Without vec_isa_ok a cold compiler first tries each set of vector instructions, which takes seconds. Not by
    # monkeypatch: undoing it hides a setting from every later compilation
    inductor = torch._inductor.config.patch("cpp.vec_isa_ok", True)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True), inductor:
        runs = [train(Follow, tmp_path / str(flag), compile=flag, **options) for flag in (False, True)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    eager, compiled = (nn.utils.parameters_to_vector(run.checkpoint["agent"].values()) for run in runs)
    torch.compiler.reset()
    torch.manual_seed(1)
    initial = nn.utils.parameters_to_vector(ppo.Agent(1, 1).state_dict().values())
    assert (eager - initial).abs().max() > 5e-3
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-5)


# The whole loop


def plain_ppo(args):
    """The algorithm with loops over all there is. Returns the agent, all raw observations and discounted returns, the
    rewards as scaled, (step, return, length) of each episode, and (step, learning rate, metrics) of each update."""
    T, N, gamma = args.num_steps, args.num_envs, args.gamma
    low, high = Drift.action_space.low, Drift.action_space.high
    torch.manual_seed(args.seed)
    agent = ppo.Agent(2, 2, args.log_std_init)
    adam = torch.optim.Adam(agent.parameters(), eps=1e-5)
    seen, discounted, scaled, episodes, updates = [], [], [], [], []

    def normalise(rows):
        seen.extend(rows)
        z = (np.array(rows) - np.mean(seen, 0)) / np.sqrt(np.var(seen, 0) + 1e-8)
        return torch.tensor(np.minimum(np.maximum(z, -10), 10), dtype=torch.float32)

    for first in range(0, args.total_timesteps, T * N):
        if first % args.checkpoint_interval == 0:
            envs, R, rng = [Drift() for _ in range(N)], [0.0] * N, np.random.default_rng([args.seed, first])
            seeds = np.random.SeedSequence([args.seed, first]).generate_state(N)
            obs = normalise([env.reset(seed=int(seed))[0] for env, seed in zip(envs, seeds)])
        noise = torch.from_numpy(rng.standard_normal((T, N, 2), np.float32))
        rows = []
        for t in range(T):
            with torch.no_grad():
                policy, values = Normal(agent.actor(obs), agent.log_std.exp()), agent.critic(obs)[:, 0]
                actions = policy.mean + policy.stddev * noise[t]
                logprobs = policy.log_prob(actions).sum(1)
            steps = [env.step(action.clip(low, high)) for env, action in zip(envs, actions.numpy())]
            raw_obs, rewards, terminated, truncated, _ = zip(*steps)
            R = [gamma * before + reward for before, reward in zip(R, rewards)]
            discounted.extend(R)
            scaled.append(np.clip(rewards / np.sqrt(np.var(discounted) + 1e-8), -10, 10))
            successors = normalise(raw_obs)
            with torch.no_grad():
                next_values = agent.critic(successors)[:, 0]
            rows.append((obs, actions, logprobs, values, scaled[-1], next_values, terminated, truncated))
            obs = successors.clone()
            for n, env in enumerate(envs):
                if terminated[n] or truncated[n]:
                    episodes.append((first + (t + 1) * N, env.scores[-1], env.t))
                    obs[n] = normalise([env.reset()[0]])[0]
                    R[n] = 0.0

        obs_rows, actions, logprobs, values, rewards, next_values, terminated, truncated = map(np.stack, zip(*rows))
        ends = terminated if args.bootstrap_truncation else terminated | truncated
        advantages = gae_by_definition(rewards, values, next_values, ends, truncated, gamma, args.gae_lambda)
        batch = (obs_rows, actions, logprobs, values, advantages, advantages + values)
        batch = [torch.tensor(x, dtype=torch.float32).flatten(0, 1) for x in batch]
        alpha = args.learning_rate * (1 - first / args.total_timesteps if args.anneal_lr else 1)
        adam.param_groups[0]["lr"] = alpha
        for _ in range(args.update_epochs):
            metrics = []
            for rows in np.array_split(rng.permutation(T * N), args.num_minibatches):
                adam.zero_grad()
                loss, parts = papers_loss(agent, args, *(x[rows] for x in batch))
                loss.backward()
                parts["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm).item()
                adam.step()
                metrics.append(parts)
            metrics = {name: np.mean([each[name] for each in metrics]) for name in metrics[0]}
            if args.target_kl is not None and metrics["approx_kl"] > args.target_kl:
                break
        metrics["explained_variance"] = 1 - np.var(advantages) / np.var(advantages + values)
        updates.append((first + T * N, alpha, metrics))
    return agent, seen, discounted, scaled, episodes, updates


LOOPS = {
    "default": dict(clip_vloss=True, vf_coef=0.7, ent_coef=0.02, max_grad_norm=0.3, log_std_init=-0.3),
    "otherwise": dict(
        norm_adv=False,
        bootstrap_truncation=False,
        anneal_lr=False,
        gae_lambda=0.7,
        gamma=0.95,
        clip_coef=0.05,
        target_kl=0.001,
        seed=3,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_training_is_the_plain_loop(tmp_path, name):
    """Six updates, new episodes after three of them: parameters, statistics, episodes and all that is logged."""
    options = dict(num_envs=3, num_steps=20, total_timesteps=360, checkpoint_interval=180, update_epochs=4)
    run = train(Drift, tmp_path, **options | dict(learning_rate=1e-3) | LOOPS[name])
    agent, seen, discounted, _, episodes, updates = plain_ppo(run.args)
    torch.manual_seed(run.args.seed)
    initial = ppo.Agent(2, 2, run.args.log_std_init).state_dict()
    for key, parameter in agent.state_dict().items():
        torch.testing.assert_close(run.checkpoint["agent"][key].cpu(), parameter, rtol=0, atol=3e-5)
        assert (parameter - initial[key]).abs().max() > 1e-3
    for key, rows in ("obs_stats", np.array(seen)), ("return_stats", np.array(discounted)):
        stats = run.checkpoint[key]
        assert stats["count"] == len(rows)
        np.testing.assert_allclose(stats["mean"], rows.mean(0), rtol=1e-5)
        np.testing.assert_allclose(stats["m2"] / stats["count"], rows.var(0), rtol=1e-5)

    def logged(tag):
        return [(step, float(scalars[tag])) for step, scalars in run.logged if tag in scalars]

    close = functools.partial(pytest.approx, rel=2e-3, abs=2e-5)
    for place, tag in enumerate(("charts/episodic_return", "charts/episodic_length"), start=1):
        assert logged(tag) == [(episode[0], close(episode[place])) for episode in episodes]
    assert logged("charts/learning_rate") == [(step, pytest.approx(alpha)) for step, alpha, _ in updates]
    for metric in updates[0][2]:
        assert logged(f"losses/{metric}") == [(step, close(metrics[metric])) for step, _, metrics in updates], metric


@pytest.mark.parametrize("target_kl, epochs", [(None, 4), (0.2, 2), (0.1, 1), (1.0, 4)])
def test_an_update_ends_after_the_epoch_whose_mean_kl_is_too_large(tmp_path, monkeypatch, target_kl, epochs):
    """The estimate (r - 1) - log r decides, not the one with more variance, nor that of the last minibatch."""
    series, calls = [0.0, 0.3, 0.5, 0.1, 0.0, 0.0, 0.0, 0.0], []

    def accelerate(*_):
        def step(*inputs):
            calls.append(inputs)
            kl = torch.tensor(series[(len(calls) - 1) % (2 * epochs)])
            return {"approx_kl": kl, "old_approx_kl": 0.3 - 10 * kl, "grad_norm": torch.ones(())}

        return step

    monkeypatch.setattr(ppo, "accelerate", accelerate)
    options = dict(num_steps=8, total_timesteps=64, num_minibatches=2, update_epochs=4)
    train(Follow, tmp_path, target_kl=target_kl, **options)
    assert len(calls) == 2 * 2 * epochs


# Probe environments: each can be solved only if one more part of the algorithm works


def test_probe_value(tmp_path):
    """A constant observation and reward: V is that reward, as scaled (a constant has no spread: clipped to 10)."""

    class Certain(Probe):
        def observe(self):
            return np.ones(1, np.float32)

    run = train(Certain, tmp_path)
    assert run.value([[1.0]])[0] / run.std == pytest.approx(min(1 / run.std, 10), rel=0.02)


def test_probe_credit_to_the_observation(tmp_path):
    class Seen(Probe):
        def observe(self):
            return np.sign(super().observe())

        def reward(self, action):
            return float(self.obs[0])

    assert train(Seen, tmp_path).value([[-1.0], [1.0]]) == pytest.approx([-1, 1], abs=0.02)


def test_probe_discount_over_time(tmp_path):
    """Two steps, reward at the end: V(first) = gamma V(second) = gamma."""

    class Delayed(Probe):
        observation_space = Box(0, 2, (1,))
        length = 2

        def observe(self):
            return np.full(1, self.t, np.float32)

        def reward(self, action):
            return float(self.t == 1)

    assert train(Delayed, tmp_path, gamma=0.5).value([[0.0], [1.0]]) == pytest.approx([0.5, 1], abs=0.02)


class Endless(Probe):
    observation_space = Box(0, 1, (1,))
    length, time_limit = None, 5

    def observe(self):
        return np.ones(1, np.float32)


@pytest.mark.parametrize("bootstrap", [True, False])
def test_probe_time_limit(tmp_path, bootstrap):
    """The observation hides the time, so that without the bootstrap V is the mean over an episode of what is left."""
    # 65 steps are 13 whole episodes: with lambda 1 every target is an exact sum
    options = dict(bootstrap_truncation=bootstrap, num_steps=65, total_timesteps=65 * 4 * 15, gae_lambda=1.0)
    expected = 1 / (1 - 0.8) if bootstrap else np.mean((1 - 0.8 ** np.arange(1, 6)) / (1 - 0.8))
    assert train(Endless, tmp_path, **options).value([[1.0]])[0] == pytest.approx(expected, rel=0.02)


def test_probe_policy(tmp_path):
    class Target(Probe):
        def reward(self, action):
            return -float((action[0] - 0.5) ** 2)

    assert train(Target, tmp_path).action([[-0.7], [0.0], [0.7]]) == pytest.approx(0.5, abs=0.1)


OBS = np.linspace(-0.9, 0.9, 7)[:, None]


def test_probe_policy_that_depends_on_the_observation(tmp_path):
    assert train(Follow, tmp_path).action(OBS) == pytest.approx(OBS, abs=0.15)


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
        monkeypatch.setattr(ppo.Environments, "normalise", lambda self, rows: rows.astype(np.float32))
    error = np.abs(train(Far, tmp_path).action(1e4 + 1e3 * OBS) - OBS).max()
    assert error < 0.15 if normalised else error > 0.5


# Spaces, degenerate data, and a run that cannot go on


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
    "float64 actions": variant(action_space=Box(-0.1, 0.7, (2,), np.float64)),
    "unbounded actions": variant(action_space=Box(-np.inf, np.inf, (2,))),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_training_stays_finite(tmp_path, name):
    env_class = VARIANTS[name]
    run = train(env_class, tmp_path, num_envs=3, num_steps=16, total_timesteps=96, update_epochs=2)
    assert_finite(run.checkpoint)
    weights = run.checkpoint["agent"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert weights["actor.0.weight"].shape == (64, gym.spaces.flatdim(env_class.observation_space))
    assert weights["log_std"].shape == env_class.action_space.shape


@pytest.mark.parametrize("action_space", [Discrete(3), Box(-1, 1, (2, 3)), Dict({"a": Box(-1, 1, (2,))})])
def test_other_actions_are_refused(tmp_path, action_space):
    with pytest.raises(SystemExit, match="needs a Box of one dimension"):
        train(variant(action_space=action_space), tmp_path)


def test_minibatches_of_one_sample_stay_finite(tmp_path):
    options = dict(num_envs=1, num_steps=16, num_minibatches=16, total_timesteps=32)
    assert_finite(train(Follow, tmp_path, norm_adv=False, **options).checkpoint)
    with pytest.raises(SystemExit, match="2 or more"):  # one number has no standard deviation
        train(Follow, tmp_path, norm_adv=True, **options)


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
    checkpoint = ppo.load_checkpoint(tmp_path)
    assert checkpoint["global_step"] == 64 and not (tmp_path / "model.pt").exists()
    assert_finite(checkpoint)


# Where a reset leaves traces: Box2D's walker keeps its world, and the world what happened in it


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # of Box2D
def test_resuming_is_exact_where_a_used_environment_is_not_a_new_one(tmp_path):
    args = ppo.Args(env_id="BipedalWalker-v3", num_envs=2, num_steps=128, num_minibatches=4, update_epochs=2, cuda=CUDA)
    args.total_timesteps, args.checkpoint_interval, args.eval_episodes = 768, 256, 1
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ppo.train(args, whole, None)
    shutil.copytree(whole, killed)
    (killed / "checkpoint_000000000768.pt").unlink()
    ppo.train(args, killed, checkpoint := ppo.load_checkpoint(killed))
    assert checkpoint["global_step"] == 512
    ours, theirs = (ppo.load_checkpoint(folder / "model.pt") for folder in (killed, whole))
    assert all(map(torch.equal, ours["agent"].values(), theirs["agent"].values()))
    assert torch.equal(ours["obs_stats"]["m2"], theirs["obs_stats"]["m2"])


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # of Box2D
def test_an_environment_that_is_recorded_plays_the_same_episodes(tmp_path):
    played = []
    for capture_video in (False, True):
        args = ppo.Args(env_id="BipedalWalker-v3", capture_video=capture_video)
        envs, rng = ppo.Environments(args, 1, tmp_path), np.random.default_rng(0)
        played.append([envs.reset(0)])
        while len(played[-1]) < 150 or not envs.finished:
            played[-1].append(envs.step(rng.uniform(-0.3, 0.3, (1, 4)).astype(np.float32))[0])
        envs.close()
    assert np.array_equal(*played)
    assert [path.name for path in (tmp_path / "videos").glob("*.mp4")] == ["training-0-episode-0.mp4"]
