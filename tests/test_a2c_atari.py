"""The mathematics of a2c_atari.py, on real games: against definitions, autograd and torch.optim, and a plain emulator.

A `Tape` is all that happened in a short real run: what the games were told and said, the arguments of the advantages,
the batch of each update and the parameters after it. What should have happened is worked out from the games alone.
"""

import functools
import math
import os
from itertools import pairwise
from types import SimpleNamespace

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from ale_py import ALEInterface, roms
from conftest import scalars
from torch.distributions import Categorical

import a2c_atari as a2c

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NOOP = 0


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


# Short runs, and what happened in them


def make_args(**options):
    defaults = dict(num_envs=4, total_timesteps=20, checkpoint_interval=10**9, conv3_filters=16)
    return a2c.Args(**defaults | dict(eval_episodes=1, env_threads=1, torch_threads=1, cuda=CUDA) | options)


def limit_games(monkeypatch, frames):
    """Truncate games after so many frames."""
    make = a2c.AtariVectorEnv
    monkeypatch.setattr(a2c, "AtariVectorEnv", lambda **kw: make(**kw | {"max_num_frames_per_episode": frames}))


class Tape:
    """A run of a2c.train without its evaluation. What is (S, N) has a row for each of the run's steps in N games."""

    def __init__(self, folder, frames=108_000, **options):
        self.args, self.folder = make_args(**options), folder
        self.resets, self.sampled, self.chosen, self.actions, self.steps = [], [], [], [], []
        self.gae, self.updates, self.batches, self.values = [], [], [], [{}]
        with pytest.MonkeyPatch.context() as patch:
            limit_games(patch, frames)
            self.record(patch)
            a2c.train(self.args, folder, None)
        self.sampled, self.chosen, self.actions = map(np.array, (self.sampled, self.chosen, self.actions))
        pixels, *rest, self.final_pixels, _ = zip(*self.steps)
        self.before, self.after = np.array(self.before), np.array(pixels)  # (S, N, 4, 84, 84): what a step led from, to
        self.rewards, self.terminations, self.truncations, self.over = map(np.array, rest)

    def record(self, patch):
        tape, self.before = self, []

        class Games(a2c.Games):
            def reset(self, seeds):
                tape.now = super().reset(seeds)
                tape.resets.append((len(tape.steps), seeds))
                return tape.now

            def press_fire(self, actions):
                tape.sampled.append(actions.copy())
                tape.chosen.append(super().press_fire(actions))
                return tape.chosen[-1].copy()

            def step(self, actions):
                tape.before.append(tape.now)
                tape.actions.append(actions.copy())
                tape.steps.append(super().step(actions))
                tape.now = tape.steps[-1][0]
                return tape.steps[-1]

        class Agent(a2c.Agent):
            def forward(self, pixels):
                logits, values = super().forward(pixels)
                if torch.is_grad_enabled():
                    tape.batches.append(pixels.cpu().numpy())
                    tape.values.append({})
                else:  # with the parameters of an update: {observation: its value}
                    tape.values[-1] |= {row.tobytes(): v.item() for row, v in zip(pixels.cpu().numpy(), values)}
                return logits, values

        def compute_gae(*inputs, compute_gae=a2c.compute_gae):
            advantages = compute_gae(*inputs)
            tape.gae.append((*(np.copy(x) for x in inputs), advantages))
            return advantages

        def rmsprop_step(theta, grad, square_avg, learning_rate, args, step=a2c.rmsprop_step):
            step(theta, grad, square_avg, learning_rate, args)
            if len(tape.updates) < 9:  # they are large
                tape.updates.append((grad.clone().cpu(), theta.clone().cpu()))

        for name, value in locals().items():
            if hasattr(a2c, name):
                patch.setattr(a2c, name, value)
        patch.setattr(a2c, "evaluate", lambda *_: [0.0])

    def rows(self, k):
        """The steps of update k."""
        return slice(k * self.args.num_steps, (k + 1) * self.args.num_steps)


GAMES = {  # some are lost and some cut off, within a rollout; one has no button FIRE; two have rewards above 1
    "BreakoutNoFrameskip-v4": dict(frames=488, total_timesteps=1120, checkpoint_interval=800),
    "SpaceInvadersNoFrameskip-v4": dict(frames=716, total_timesteps=740),
    "ALE/MsPacman-v5": dict(frames=492, num_steps=8, total_timesteps=640, gae_lambda=0.9, episodic_life=False),
}


@pytest.fixture(scope="module", params=GAMES)
def tape(request, tmp_path_factory):
    return Tape(tmp_path_factory.mktemp("tape"), env_id=request.param, **GAMES[request.param])


def lambda_returns(rewards, terminations, truncations, next_values, gamma, gae_lambda):
    """Backwards as in [A3C] Alg. S3: R = V(s) at the end, 0 after a terminal state, then R = r + gamma R.

    With lambda < 1, R is mixed with V at each step; lambda = 1 is the paper's. `next_values` are V of the observations
    that the actions led to.
    """
    R, returns = next_values[-1], []
    for r, terminal, truncated, v in zip(*(x[::-1] for x in (rewards, terminations, truncations, next_values))):
        R = np.where(truncated, v, gae_lambda * R + (1 - gae_lambda) * v)
        R = r + gamma * np.where(terminal, 0.0, R)
        returns.append(R)
    return np.array(returns[::-1])


def test_returns_are_the_papers(tape):
    args, cut_off = tape.args, 0
    assert len(tape.gae) == len(tape.batches) == len(tape.steps) / args.num_steps
    for k, (rewards, values, next_values, ends, truncations, gamma, gae_lambda, advantages) in enumerate(tape.gae):
        rows, V = tape.rows(k), tape.values[k]
        np.testing.assert_array_equal(rewards, np.sign(tape.rewards[rows]))
        np.testing.assert_array_equal(ends, tape.terminations[rows] & (tape.over[rows] | args.episodic_life))
        np.testing.assert_array_equal(truncations, tape.truncations[rows])
        assert (gamma, gae_lambda) == (args.gamma, args.gae_lambda)
        expected = [[V[pixels.tobytes()] for pixels in row] for row in tape.before[rows]]
        np.testing.assert_allclose(values, expected, atol=1e-5)
        next_pixels = tape.after[rows].copy()
        for t, n in np.argwhere(truncations):
            next_pixels[t, n] = tape.final_pixels[rows][t][n]
            cut_off += abs(V[tape.after[rows][t, n].tobytes()] - V[next_pixels[t, n].tobytes()]) > 1e-3
        expected = [[V[pixels.tobytes()] for pixels in row] for row in next_pixels]
        np.testing.assert_allclose(next_values, expected, atol=1e-5)
        returns = lambda_returns(rewards, ends, truncations, np.array(expected), gamma, gae_lambda)
        np.testing.assert_allclose(advantages + values, returns, atol=1e-5)
    assert cut_off > 0 and tape.truncations.reshape(-1, args.num_steps, args.num_envs)[:, :-1].any()


def test_rewards_are_clipped_for_learning_and_whole_scores_are_logged(tape):
    scores, lengths = [], []
    score, length = np.zeros(tape.args.num_envs), np.zeros(tape.args.num_envs)
    resets = [row for row, _ in tape.resets]
    for row, (rewards, over) in enumerate(zip(tape.rewards, tape.over)):
        if row in resets:
            score[:] = length[:] = 0
        score, length = score + rewards, length + 1
        steps = (row + 1) * tape.args.num_envs
        scores += [(steps, value) for value in score[over]]
        lengths += [(steps, value) for value in length[over]]
        score[over] = length[over] = 0
    logged = scalars(tape.folder)
    assert len(scores) >= 4
    assert logged["charts/episodic_return"] == scores and logged["charts/episodic_length"] == lengths
    if "Breakout" not in tape.args.env_id:
        assert tape.rewards.max() > 1 and max(scores)[1] > 1
    assert max(rewards.max() for rewards, *_ in tape.gae) == 1


def test_no_row_of_a_reset_enters_the_batch(tape):
    """Each row has three of its four frames in common with the row before it, unless a game is over."""
    assert tape.over.any() and (tape.over <= tape.terminations | tape.truncations).all()
    for t in range(len(tape.steps)):
        over = tape.over[t]
        np.testing.assert_array_equal(tape.after[t][~over, :3], tape.before[t][~over, 1:])
        assert (tape.after[t][over, :3] == 0).all() and tape.after[t][over, 3].any((1, 2)).all()
        if over.any():
            np.testing.assert_array_equal(tape.final_pixels[t][over, :3], tape.before[t][over, 1:])
    resets = [row for row, _ in tape.resets]
    assert resets == list(range(0, len(tape.steps), tape.args.checkpoint_interval // tape.args.num_envs))
    for row, seeds in tape.resets:
        assert seeds == a2c.reset_seeds(1, row * 4, num=4) and len(set(seeds)) == 4
        assert (tape.before[row][:, :3] == 0).all()
    assert len({str(seeds) for _, seeds in tape.resets}) == len(resets)
    for k, batch in enumerate(tape.batches):
        np.testing.assert_array_equal(batch, tape.before[tape.rows(k)].reshape(batch.shape))


def test_fire_is_pressed_on_the_first_step_of_each_life_and_only_there(tape):
    """On that of a new game too: of the emulator's own FIRE at a reset sticky actions swallow one in four."""
    buttons = list(a2c.make_envs(tape.args, 1).ale.get_action_set())
    if ale_py.Action.FIRE not in buttons:
        np.testing.assert_array_equal(tape.actions, tape.sampled)
        assert tape.chosen.all()
        return
    first = np.ones_like(tape.over)
    first[1:] = (tape.terminations | tape.truncations)[:-1]
    first[[row for row, _ in tape.resets]] = True
    played = np.where(first, buttons.index(ale_py.Action.FIRE), tape.sampled)
    assert (tape.terminations & ~tape.over).any() and (played != tape.sampled).any()
    np.testing.assert_array_equal(tape.chosen, ~first)
    np.testing.assert_array_equal(tape.actions, played)


# One emulator, without vectors, wrappers or preprocessing


class Plain:
    """A game of the plain emulator: four frames per step, a life lost or the game's end found in its own counters."""

    def __init__(self, args, seed, first_frame, limit):
        settings = a2c.atari_settings(args.env_id)
        self.ale, self.limit = ALEInterface(), limit
        self.ale.setInt("random_seed", seed)
        self.ale.setFloat("repeat_action_probability", settings["repeat_action_probability"])
        self.ale.loadROM(roms.get_rom_path(settings["game"]))
        self.buttons = self.ale.getMinimalActionSet()
        self.begin(first_frame)

    def begin(self, first_frame):
        """FIRE for one frame where there is such a button, then idle for a number of frames that is up to chance."""
        self.ale.reset_game()
        if ale_py.Action.FIRE in self.buttons:
            self.ale.act(ale_py.Action.FIRE)
        for _ in range(first_frame - self.ale.getEpisodeFrameNumber()):
            self.ale.act(ale_py.Action.NOOP)
        self.score = self.length = 0

    def step(self, action):
        """Returns the reward, whether a life was lost, and whether the game is over or cut off."""
        lives, reward, self.screens = self.ale.lives(), 0, []
        for frame in range(4):
            reward += self.ale.act(self.buttons[action])
            if self.ale.game_over():
                break
            if frame >= 2:
                self.screens.append(torch.from_numpy(self.ale.getScreenGrayscale()))
        self.score, self.length = self.score + reward, self.length + 1
        cut_off = 4 * self.length >= self.limit
        return reward, self.ale.lives() < lives, self.ale.game_over(with_truncation=False), cut_off

    def pixels(self):
        """The brighter of the last two screens at each place, each of 84 x 84 pixels the mean of its area."""
        height, width = self.screens[0].shape
        return shrink(height) @ torch.maximum(*self.screens).double() @ shrink(width).T


@functools.cache
def shrink(size):
    """(84, size): the share of each of `size` pixels in each of 84 that lie over them."""
    edges, pixel = torch.linspace(0, size, 85, dtype=torch.float64)[:, None], torch.arange(size)
    return (edges[1:].minimum(pixel + 1) - edges[:-1].maximum(pixel)).clamp(min=0) * 84 / size


@pytest.mark.parametrize(
    "env_id, num_envs, steps, limit, lives",
    [
        ("BreakoutNoFrameskip-v4", 3, 400, 500, True),
        ("ALE/Breakout-v5", 2, 400, 10**6, True),
        ("SpaceInvadersNoFrameskip-v4", 2, 600, 10**6, True),
        ("PongDeterministic-v4", 1, 1000, 10**6, False),
        ("KlaxNoFrameskip-v0", 2, 300, 10**6, False),
        ("ALE/Freeway-v5", 1, 200, 300, False),
    ],
)
def test_games_are_the_plain_emulators(monkeypatch, env_id, num_envs, steps, limit, lives):
    limit_games(monkeypatch, limit)
    args, rng = make_args(env_id=env_id), np.random.default_rng(0)
    games = a2c.Games(a2c.make_envs(args, num_envs))
    seeds = a2c.reset_seeds(1, 0, num=num_envs)
    games.reset(seeds)
    plain = [Plain(args, seed, frame, limit) for seed, frame in zip(seeds, games.frames)]
    ended = lost_lives = 0
    for t in range(steps):
        actions = rng.integers(games.envs.single_action_space.n, size=num_envs)
        games.press_fire(actions)
        pixels, rewards, terminations, truncations, over, _, finished = games.step(actions)
        ours = list(zip(rewards, terminations, truncations, over))
        scores = []
        for n, game in enumerate(plain):
            reward, lost_life, game_over, cut_off = game.step(actions[n])
            assert ours[n] == (reward, game_over or lost_life, cut_off, game_over or cut_off)
            if t % 10 == n and not over[n]:  # at a game's end the vector's last screen is an older one
                np.testing.assert_allclose(pixels[n, 3], game.pixels(), rtol=0, atol=1)
            lost_lives += lost_life and not game_over
            if game_over or cut_off:
                scores.append((game.score, game.length))
                game.begin(games.frames[n])
        assert finished == scores
        ended += len(scores)
    assert ended >= num_envs and (lost_lives > 0) == lives


# A policy that never presses FIRE


@pytest.mark.parametrize("env_id, episodic_life", [("BreakoutNoFrameskip-v4", False), ("ALE/Breakout-v5", True)])
def test_a_policy_that_never_fires_stalls_nothing(tmp_path, monkeypatch, env_id, episodic_life):
    """Idle, a life of Breakout takes 25 steps, and a game 130."""

    class Idle(a2c.Agent):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.policy_head.bias.data[NOOP] = 100

    class Games(a2c.Games):
        def step(self, actions):
            played.append(len(actions))
            return super().step(actions)

    played = []
    monkeypatch.setattr(a2c, "Agent", Idle)
    monkeypatch.setattr(a2c, "Games", Games)
    limit_games(monkeypatch, 4 * 1000)
    options = dict(total_timesteps=2 * 150, num_envs=2, num_steps=15, eval_episodes=6, greedy=True)
    a2c.train(make_args(env_id=env_id, episodic_life=episodic_life, **options), tmp_path, None)
    assert played.count(2) == 150 and len(scalars(tmp_path).get("charts/episodic_return", ())) == 2
    assert played.count(6) < 150


# The update


def plain_network(parameters, pixels):
    """Logits (B, A) and values (B,): [DQN] Methods, with two heads."""
    weights, biases = parameters[::2], parameters[1::2]
    x = pixels.double() / 255
    for k, stride in enumerate((4, 2, 1)):
        x = F.conv2d(x, weights[k], biases[k], stride).relu()
    x = F.linear(x.flatten(1), weights[3], biases[3]).relu()
    return F.linear(x, weights[4], biases[4]), F.linear(x, weights[5], biases[5])[:, 0]


OPTIONS = {
    "default": dict(learning_rate=0.1, max_grad_norm=0.1),
    "otherwise": dict(
        learning_rate=1e-4,
        torch_rmsprop=True,
        rmsprop_alpha=0.9,
        rmsprop_eps=1e-3,
        anneal_lr=True,
        gae_lambda=0.95,
        conv3_filters=32,
        bootstrap_truncation=False,
        ent_coef=0.1,
        vf_coef=0.25,
        max_grad_norm=0.2,
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_training_is_the_papers_gradient_and_rmsprop(tmp_path, name):
    """Nine updates worked out in float64 from the frames and rewards of the run, with no help from the script."""
    options = dict(num_envs=3, total_timesteps=135, conv3_filters=64)
    tape = Tape(tmp_path, frames=132, **options | OPTIONS[name])
    args = tape.args
    assert (tape.terminations & ~tape.over).any() and tape.truncations.any() and not tape.chosen.all()
    torch.manual_seed(args.seed)
    parameters = [p.detach().double().requires_grad_() for p in a2c.Agent(4, args.conv3_filters).parameters()]
    initial = nn.utils.parameters_to_vector(parameters).detach()
    squares = [torch.ones_like(p) for p in parameters]
    rmsprop = torch.optim.RMSprop(parameters, alpha=args.rmsprop_alpha, eps=args.rmsprop_eps)

    def value(pixels):
        with torch.no_grad():
            values = plain_network(parameters, torch.from_numpy(pixels.reshape(-1, 4, 84, 84)))[1]
        return values.numpy().reshape(pixels.shape[:2])

    norms = []
    for k, (grad, theta) in enumerate(tape.updates):
        rows = tape.rows(k)
        pixels, truncations = tape.before[rows], tape.truncations[rows]
        next_values = np.where(truncations, 0, value(tape.after[rows]))
        if truncations.any():
            final = np.stack([p if p is not None else pixels[0] for p in tape.final_pixels[rows]])
            next_values = np.where(truncations, value(final), next_values)
        ends = tape.terminations[rows] | (truncations & (not args.bootstrap_truncation))
        rewards = np.sign(tape.rewards[rows])
        R = lambda_returns(rewards, ends, truncations, next_values, args.gamma, args.gae_lambda)
        advantages = torch.from_numpy(R - value(pixels)).flatten()

        logits, values = plain_network(parameters, torch.from_numpy(tape.batches[k]))
        policy = Categorical(logits=logits)
        log_probs = policy.log_prob(torch.from_numpy(tape.actions[rows]).flatten())
        chosen = torch.from_numpy(tape.chosen[rows]).flatten()
        gain = (advantages * log_probs)[chosen].sum() / chosen.numel() + args.ent_coef * policy.entropy().mean()
        loss = args.vf_coef * (torch.from_numpy(R).flatten() - values).square().mean() - gain
        rmsprop.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, args.max_grad_norm).item())
        expected = torch.cat([p.grad.flatten() for p in parameters])
        torch.testing.assert_close(grad.double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())

        learning_rate = args.learning_rate * (1 - k / 9 if args.anneal_lr else 1)
        rmsprop.param_groups[0]["lr"] = learning_rate
        if args.torch_rmsprop:
            rmsprop.step()
        for p, g in zip(parameters, squares if not args.torch_rmsprop else ()):
            g.mul_(args.rmsprop_alpha).add_((1 - args.rmsprop_alpha) * p.grad**2)
            p.data -= learning_rate * p.grad / (g + args.rmsprop_eps).sqrt()
        moved = nn.utils.parameters_to_vector(parameters).detach() - initial
        scale = moved.abs().max().item()
        torch.testing.assert_close(theta.double() - initial, moved, rtol=1e-3, atol=1e-3 * scale)
    assert k == 8 and scale > 1e-4 and min(norms) < args.max_grad_norm < max(norms)


def gradients(steps=300, size=50):
    """Gradients of all sizes, some of them zero."""
    scale = 10.0 ** torch.linspace(-7, 1, size, dtype=torch.float64)
    for _ in range(steps):
        yield scale * torch.randn(size, dtype=torch.float64) * (torch.rand(size) < 0.9)


@pytest.mark.parametrize("alpha, eps", [(0.99, 1e-5), (0.9, 1e-2)])
def test_rmsprop_is_tensorflows(alpha, eps):
    args = a2c.Args(rmsprop_alpha=alpha, rmsprop_eps=eps)
    theta = torch.randn(50, dtype=torch.float64)
    expected, g = theta.numpy().copy(), np.ones(50)
    square_avg = torch.ones_like(theta)
    for t, grad in enumerate(gradients()):
        learning_rate = 1e-2 / (t + 1)
        a2c.rmsprop_step(theta, grad.clone(), square_avg, learning_rate, args)
        for i, d in enumerate(grad.tolist()):
            g[i] = alpha * g[i] + (1 - alpha) * d * d
            expected[i] -= learning_rate * d / math.sqrt(g[i] + eps)
    np.testing.assert_allclose(theta.numpy(), expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(square_avg.numpy(), g, rtol=1e-10)


@pytest.mark.parametrize("alpha, eps", [(0.99, 1e-5), (0.9, 1e-2)])
def test_torch_rmsprop_is_torchs(alpha, eps):
    args = a2c.Args(rmsprop_alpha=alpha, rmsprop_eps=eps, torch_rmsprop=True)
    theta = torch.randn(50, dtype=torch.float64)
    parameter, square_avg = nn.Parameter(theta.clone()), torch.zeros_like(theta)
    rmsprop = torch.optim.RMSprop([parameter], alpha=alpha, eps=eps)
    for t, grad in enumerate(gradients()):
        rmsprop.param_groups[0]["lr"] = 1e-2 / (t + 1)
        a2c.rmsprop_step(theta, grad.clone(), square_avg, 1e-2 / (t + 1), args)
        parameter.grad = grad
        rmsprop.step()
    torch.testing.assert_close(theta, parameter.data, rtol=1e-12, atol=1e-14)


def make_batch(size=64):
    logits, values = torch.randn(size, 5, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    advantages, returns = torch.randn(2, size, dtype=torch.float64)
    chosen = (torch.rand(size) < 0.8).double()
    return logits.requires_grad_(), values.requires_grad_(), torch.randint(5, (size,)), chosen, advantages, returns


def test_loss_is_the_papers():
    logits, values, actions, chosen, advantages, returns = batch = make_batch()
    loss, parts = a2c.a2c_loss(*batch, a2c.Args(ent_coef=0.02, vf_coef=0.7))
    policy = Categorical(logits=logits)
    policy_loss = -sum(policy.log_prob(actions)[i] * advantages[i] for i in range(64) if chosen[i]) / 64
    value_loss, entropy = F.mse_loss(values, returns), policy.entropy().mean()
    torch.testing.assert_close(loss, policy_loss + 0.7 * value_loss - 0.02 * entropy)
    for part, expected in zip(parts, (policy_loss, value_loss, entropy), strict=True):
        assert not part.requires_grad
        torch.testing.assert_close(part, expected.detach())


def test_the_policy_learns_nothing_from_a_fire_that_it_did_not_choose():
    logits, values, _, chosen, *_ = batch = make_batch()
    loss, _ = a2c.a2c_loss(*batch, a2c.Args(ent_coef=0.0))
    policy_grad, value_grad = torch.autograd.grad(loss, (logits, values))
    assert (policy_grad[chosen == 0] == 0).all() and (policy_grad[chosen == 1] != 0).any(1).all()
    assert (value_grad != 0).all()


# The network and its actions


@pytest.mark.parametrize("conv3_filters", [64, 32])
def test_initialisation_is_orthogonal_with_zero_bias(conv3_filters):
    agent = a2c.Agent(6, conv3_filters)
    layers = [module for module in agent.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert [len(layer.weight) for layer in layers] == [32, 64, conv3_filters, 512, 6, 1]
    for layer, gain in zip(layers, [math.sqrt(2)] * 4 + [0.01, 1.0], strict=True):
        singular_values = torch.linalg.svdvals(layer.weight.flatten(1))
        torch.testing.assert_close(singular_values, torch.full_like(singular_values, gain), rtol=1e-4, atol=1e-6)
        assert (layer.bias == 0).all()


def test_actions_are_drawn_from_the_softmax():
    """Chi square, 0.999 quantile: 18.5 for 4 degrees of freedom."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0, -3.0], [100.0, 101.0, 100.0, 99.5, 98.0]], device=DEVICE)
    rng = np.random.default_rng(0)
    for row in logits:
        actions = a2c.sample(row.expand(20_000, 5), rng)
        expected = 20_000 * row.softmax(0).cpu().numpy()
        assert ((np.bincount(actions, minlength=5) - expected) ** 2 / expected).sum() < 18.5
    certain = torch.tensor([[0.0, 100.0], [100.0, 0.0]], device=DEVICE)
    np.testing.assert_array_equal(a2c.sample(certain, rng), [1, 0])


def test_bf16_is_float32_but_for_its_precision(tmp_path):
    exact, short = a2c.Agent(4).to(DEVICE), a2c.Agent(4, bf16=True).to(DEVICE)
    with torch.no_grad():
        for parameter in exact.policy_head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        short.load_state_dict(exact.state_dict())
        pixels = torch.randint(256, (32, 4, 84, 84), dtype=torch.uint8, device=DEVICE)
        for ours, theirs in zip(short(pixels), exact(pixels), strict=True):
            assert ours.dtype == torch.float32 and not torch.equal(ours, theirs)
            assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()
    updates = [Tape(tmp_path / str(flag), bf16=flag).updates for flag in (False, True)]
    (exact_grad, _), (short_grad, _) = (run[0] for run in updates)
    assert short_grad.dtype == torch.float32 and not torch.equal(short_grad, exact_grad)
    assert torch.cosine_similarity(short_grad, exact_grad, dim=0) > 0.99


# A run that cannot go on


def test_a_gradient_that_is_not_finite_stops_training(tmp_path, monkeypatch):
    """In the third of five updates; the checkpoint before it is the last."""
    calls = []

    def a2c_loss(*inputs, a2c_loss=a2c.a2c_loss):
        calls.append(inputs)
        loss, parts = a2c_loss(*inputs)
        return loss * (math.nan if len(calls) == 3 else 1), parts

    monkeypatch.setattr(a2c, "a2c_loss", a2c_loss)
    with pytest.raises(FloatingPointError, match=r"step 60\b"):
        a2c.train(make_args(total_timesteps=100, checkpoint_interval=20), tmp_path, None)
    checkpoint = a2c.load_checkpoint(str(tmp_path))
    assert checkpoint["global_step"] == 40 and not (tmp_path / "model.pt").exists()
    assert all(tensor.isfinite().all() for tensor in (*checkpoint["agent"].values(), checkpoint["square_avg"]))


# Evaluation and films


def test_evaluation_is_reproduced_and_counts_whole_games(tmp_path, monkeypatch):
    berzerk = dict(env_id="BerzerkNoFrameskip-v4", eval_episodes=3)  # short games, points all the time
    played = []

    class Games(a2c.Games):
        def reset(self, seeds):
            self.pixels = super().reset(seeds)
            return self.pixels

        def press_fire(self, actions):
            played.append((self.pixels, actions.copy()))
            return super().press_fire(actions)

        def step(self, actions):
            self.pixels, rewards, _, _, over, *_ = outcome = super().step(actions)
            played[-1] += rewards, over
            return outcome

    def play(**options):
        played.clear()
        returns = a2c.evaluate(make_args(**berzerk, **options), checkpoint, tmp_path)
        return returns, *map(np.array, zip(*played))

    a2c.train(make_args(**berzerk), tmp_path, None)
    (_, at_the_end), *_ = scalars(tmp_path)["eval/episodic_return"]
    checkpoint = a2c.load_checkpoint(str(tmp_path))
    monkeypatch.setattr(a2c, "Games", Games)
    returns, _, actions, rewards, over = play()
    assert np.mean(returns) == pytest.approx(at_the_end, rel=1e-6)
    lengths = over.argmax(0) + 1
    assert over.any(0).all() and len(set(lengths)) > 1 and max(lengths) == len(rewards)
    assert returns == [rewards[:length, n].sum() for n, length in enumerate(lengths)] != rewards.sum(0).tolist()
    limit_games(monkeypatch, 4 * 50)
    assert not np.array_equal(play(seed=2)[2], actions[:50])
    _, pixels, greedy, *_ = play(greedy=True)
    agent = a2c.Agent(len(checkpoint["agent"]["policy_head.bias"]), 16).to(DEVICE)
    agent.load_state_dict(checkpoint["agent"])
    logits, _ = agent(torch.from_numpy(pixels).flatten(0, 1).to(DEVICE))
    np.testing.assert_array_equal(greedy.ravel(), logits.argmax(1).cpu().numpy())


def test_films_are_of_the_games_that_were_played(tmp_path, monkeypatch):
    from imageio_ffmpeg import read_frames

    made = []

    class Recorded(a2c.AtariVectorEnv):
        def __init__(self, **settings):
            super().__init__(**settings | {"max_num_frames_per_episode": 320})
            self.games = []  # for each reset its first seed and, at each step, what happened in the first game
            made.append(self)

        def reset(self, *, seed):
            self.games.append((seed[0], []))
            return super().reset(seed=seed)

        def step(self, actions):
            outcome = _, rewards, terminations, _, info = super().step(actions)
            happened = actions, rewards, terminations, info["lives"], info["episode_frame_number"]
            self.games[-1][1].append(tuple(int(what[0]) for what in happened))
            return outcome

    monkeypatch.setattr(a2c, "AtariVectorEnv", Recorded)
    options = dict(env_id="ALE/SpaceInvaders-v5", total_timesteps=400, checkpoint_interval=200, num_envs=2)
    a2c.train(make_args(**options, capture_video=True), tmp_path, None)
    played = {seed: steps for envs in made if envs.grayscale for seed, steps in envs.games}
    films = [game for envs in made if not envs.grayscale for game in envs.games]
    names = ["train-step-0", "train-step-200", "evaluation-step-400"]
    assert {path.stem for path in (tmp_path / "videos").iterdir()} == set(names)
    for name, (seed, steps) in zip(names, films, strict=True):
        assert len(steps) == 79 and steps == played[seed][:79]
        properties, *frames = read_frames(str(tmp_path / "videos" / f"{name}.mp4"))
        assert len(frames) in (79, 80) and properties["size"] == (320, 420)  # moviepy may round one away
        frames = [np.frombuffer(frame, np.uint8).astype(int) for frame in frames]
        assert np.mean([np.abs(a - b).max() > 50 for a, b in pairwise(frames)]) > 0.5
    assert any(reward for _, steps in films for _, reward, *_ in steps)


# Names of games


def registered():
    gym.register_envs(ale_py)
    return {spec.id: spec.kwargs for spec in gym.registry.values() if str(spec.entry_point).startswith("ale_py")}


def test_ids_mean_what_they_mean_in_gymnasium():
    known = {name: kwargs for name, kwargs in registered().items() if name.startswith("ALE/") or "NoFrame" in name}
    assert len(known) > 200
    for env_id, kwargs in known.items():
        expected = {name: kwargs[name] for name in ("game", "repeat_action_probability")}
        assert a2c.atari_settings(env_id) == expected
        deterministic = env_id.replace("NoFrameskip", "Deterministic")  # no longer registered; the same game
        assert a2c.atari_settings(deterministic) == expected


@pytest.mark.parametrize(
    "env_id, words",
    [
        ("BreakoutNoFrameSkip-v4", "BreakoutNoFrameskip-v4"),
        ("breakoutNoFrameskip-v4", "BreakoutNoFrameskip-v4"),
        ("BreakuotNoFrameskip-v4", "BreakoutNoFrameskip-v4"),
        ("ALE/SpaceInvader-v5", "SpaceInvadersNoFrameskip-v4"),
        ("MontezumasRevengeDeterministic-v4", "MontezumaRevengeNoFrameskip-v4"),
        ("CartPole-v1", "no Atari game"),
        ("", "no Atari game"),
        ("Breakout-v4", "BreakoutNoFrameskip-v4 ALE/Breakout-v5"),
        ("Breakout-v0", "BreakoutNoFrameskip-v4 ALE/Breakout-v5"),
        ("Breakout", "BreakoutNoFrameskip-v4 ALE/Breakout-v5"),
        ("Breakout-ram-v4", "BreakoutNoFrameskip-v4 ALE/Breakout-v5"),
        ("Breakout-ramNoFrameskip-v4", "BreakoutNoFrameskip-v4 ALE/Breakout-v5"),
        ("ALE/Breakout-ram-v5", "BreakoutNoFrameskip-v4 ALE/Breakout-v5"),
        ("ALE/Breakout-v4", "BreakoutNoFrameskip-v4 ALE/Breakout-v5"),
        ("BreakoutNoFrameskip-v5", "BreakoutNoFrameskip-v4 ALE/Breakout-v5"),
    ],
)
def test_an_id_that_cannot_be_had_is_told_so_in_one_line(capsys, env_id, words):
    with pytest.raises(SystemExit) as exit_:
        a2c.make_envs(make_args(env_id=env_id), 1)
    out, error = capsys.readouterr()
    assert exit_.value.code == 2 and out == ""
    assert error.startswith("error: ") and error.count("\n") == 1 and env_id in error
    for word in words.split():
        assert word in error


def games_to_start():
    """All games of the emulator, or a sample of them: each takes a fifth of a second. ALL_GAMES=1 starts them all."""
    ids = sorted(name for name in registered() if name.startswith("ALE/"))
    return ids if os.environ.get("ALL_GAMES") else ids[::9]


def test_every_game_of_the_emulator_has_an_id():
    games = {a2c.atari_settings(name)["game"] for name in registered() if name.startswith("ALE/")}
    assert games == {game for game in roms.get_all_rom_ids() if ALEInterface.isSupportedROM(roms.get_rom_path(game))}


@pytest.mark.parametrize("env_id", games_to_start())
def test_a_game_starts_and_goes_on(env_id):
    games = a2c.Games(a2c.make_envs(make_args(env_id=env_id), 1))
    pixels = games.reset([0])
    assert pixels.shape == (1, 4, 84, 84) and pixels.dtype == np.uint8
    frames = games.frames
    actions = np.array([games.envs.single_action_space.n - 1])
    games.press_fire(actions)
    next_pixels, *_, over, _, finished = games.step(actions)
    assert games.frames == frames + 4 and not over and not finished
    np.testing.assert_array_equal(next_pixels[:, :3], pixels[:, 1:])


# A game of pixels that can be learned in seconds


class Catch:
    """A ball falls from the top; the paddle on the ground, which moves by one of four places, should be under it."""

    single_action_space = gym.spaces.Discrete(3)
    ale = SimpleNamespace(get_action_set=lambda: [ale_py.Action.NOOP, ale_py.Action.RIGHT, ale_py.Action.LEFT])

    def __init__(self, num_envs):
        self.num_envs = num_envs

    def reset(self, *, seed):
        self.rng = np.random.default_rng(seed)
        self.ball, self.paddle, self.time = np.zeros((3, self.num_envs), int)
        self.pixels = np.zeros((self.num_envs, 4, 84, 84), np.uint8)
        self.begin(np.arange(self.num_envs))
        return self.pixels.copy(), {"episode_frame_number": 4 * self.time}

    def begin(self, games):
        self.ball[games], self.paddle[games] = self.rng.integers(4, size=(2, len(games)))
        self.time[games] = self.pixels[games] = 0
        self.draw(games)

    def draw(self, games):
        grid = np.zeros((len(games), 4, 4), np.uint8)
        rows = np.arange(len(games))
        grid[rows, 3, self.paddle[games]] = 128
        grid[rows, self.time[games], self.ball[games]] = 255
        self.pixels[games, :3] = self.pixels[games, 1:]
        self.pixels[games, 3] = grid.repeat(21, 1).repeat(21, 2)

    def step(self, actions):
        self.paddle = (self.paddle + np.array([0, 1, -1])[actions]).clip(0, 3)
        self.time = self.time + 1
        self.draw(np.arange(self.num_envs))
        end, final = self.time == 3, self.pixels.copy()
        rewards = np.where(end, np.where(self.ball == self.paddle, 1, -1), 0)
        self.begin(np.flatnonzero(end))
        info = {"episode_frame_number": 4 * self.time, "final_obs": final}
        return self.pixels.copy(), rewards, end, np.zeros_like(end), info

    def close(self):
        pass


def test_catch_is_learned(tmp_path, monkeypatch):
    """A random player scores -0.5, a perfect one 1. (With alpha at 0.99, the average would begin at one too long.)"""
    monkeypatch.setattr(a2c, "make_envs", lambda args, num_envs: Catch(num_envs))
    options = dict(num_envs=8, total_timesteps=6000, gamma=0.9, rmsprop_alpha=0.5, learning_rate=5e-3)
    a2c.train(make_args(**options, conv3_filters=32, eval_episodes=50, greedy=True), tmp_path, None)
    points = scalars(tmp_path)
    scores = [score for _, score in points["charts/episodic_return"]]
    assert len(scores) == 2000
    assert np.mean(scores[:200]) < -0.3
    assert np.mean(scores[-200:]) > 0.7
    assert points["eval/episodic_return"][0][1] > 0.8
