"""The mathematics of a2c_atari.py, on real games: against definitions, autograd and torch.optim, and a plain emulator.

A `Tape` is all that happened in a short real run: what the emulator was told and said, the arguments of the advantages,
the batch of each update and the parameters after it. What should have happened is worked out from the emulator alone.
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
    """Truncate episodes after so many frames."""
    make = a2c.AtariVectorEnv
    monkeypatch.setattr(a2c, "AtariVectorEnv", lambda **kw: make(**kw | {"max_num_frames_per_episode": frames}))


class Emulator(a2c.AtariVectorEnv):
    """The vectorised emulator, which writes down what it is told and says."""

    made = None  # a list in tests that read it
    frames = 108_000

    def __init__(self, **settings):
        super().__init__(**settings | {"max_num_frames_per_episode": self.frames})
        self.colour, self.resets, self.steps = not settings["grayscale"], [], []
        self.made.append(self)

    def reset(self, *, seed):
        obs, info = super().reset(seed=seed)
        self.resets.append((len(self.steps), seed.tolist(), obs.copy()))
        self.frame = info["episode_frame_number"].copy()
        return obs, info

    def step(self, actions):
        obs, rewards, terminations, truncations, info = super().step(actions)
        over, self.frame = info["episode_frame_number"] < self.frame, info["episode_frame_number"].copy()
        final = np.where(over[:, None, None, None], info["final_obs"], obs) if over.any() else obs
        said = obs, rewards, terminations, truncations, over, final, info["lives"]
        self.steps.append([np.copy(each) for each in (actions, *said)])
        return obs, rewards, terminations, truncations, info


@pytest.fixture
def emulators(monkeypatch):
    """All emulators that a test makes."""
    monkeypatch.setattr(Emulator, "made", [])
    monkeypatch.setattr(a2c, "AtariVectorEnv", Emulator)
    return Emulator.made


def log_into(patch, logged):
    def log(run, step, scalars):
        logged.append((step, {tag: torch.as_tensor(value).item() for tag, value in scalars.items()}))

    patch.setattr(a2c.Run, "log", log)


def points(logged, tag):
    return [(step, scalars[tag]) for step, scalars in logged if tag in scalars]


class Tape:
    """A run of a2c.train without its evaluation. What is (S, N) has a row for each of the run's steps in N games."""

    def __init__(self, folder, frames=108_000, **options):
        self.args, self.logged = make_args(**options), []
        self.sampled, self.chosen, self.steps = [], [], []
        self.gae, self.updates, self.batch, self.batches, self.values = [], [], [], [], [{}]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Emulator, "made", [])
            patch.setattr(Emulator, "frames", frames)
            log_into(patch, self.logged)
            self.record(patch)
            a2c.train(self.args, folder, None)
            (emulator,) = Emulator.made
        self.resets = emulator.resets
        self.sampled, self.chosen = np.array(self.sampled), np.array(self.chosen)
        said = map(np.array, zip(*emulator.steps))
        self.actions, self.after, self.rewards, self.terminations, self.truncations, self.over, self.final, _ = said
        self.before = np.roll(self.after, 1, axis=0)  # (S, N, 4, 84, 84): what a step led from
        for row, _, obs in self.resets:
            self.before[row] = obs

    def record(self, patch):
        tape = self

        class AtariEnvs(a2c.AtariEnvs):
            def step(self, actions):
                tape.sampled.append(actions.copy())
                tape.chosen.append(~self.fire)
                tape.steps.append((*map(np.copy, super().step(actions)), self.finished))
                return (*map(np.copy, tape.steps[-1][:5]),)

        class Agent(a2c.Agent):
            def features(self, obs):
                self.seen = obs.cpu().numpy()
                if torch.is_grad_enabled():  # what the update will be of
                    tape.batch.append(self.seen)
                return super().features(obs)

            def heads(self, features):
                logits, values = super().heads(features)
                if torch.is_grad_enabled():
                    tape.batches.append(np.concatenate(tape.batch))
                    tape.values.append({})
                    tape.batch.clear()
                else:  # with the parameters of an update: {observation: its value}
                    tape.values[-1] |= {row.tobytes(): v.item() for row, v in zip(self.seen, values)}
                return logits, values

        class RMSprop(a2c.RMSprop):
            def step(self):
                parameters = self.param_groups[0]["params"]
                grad = torch.cat([parameter.grad.flatten().cpu() for parameter in parameters])
                super().step()
                if len(tape.updates) < 9:  # they are large
                    tape.updates.append((grad, nn.utils.parameters_to_vector(parameters).detach().cpu()))

        def compute_gae(*inputs, compute_gae=a2c.compute_gae):
            advantages = compute_gae(*inputs)
            tape.gae.append((*(np.copy(x) for x in inputs), advantages))
            return advantages

        for name, value in locals().items():
            if hasattr(a2c, name):
                patch.setattr(a2c, name, value)
        patch.setattr(a2c, "AtariVectorEnv", Emulator)
        patch.setattr(a2c, "evaluate", lambda *_: {"episodic_return": [0.0]})

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
        expected = [[V[obs.tobytes()] for obs in row] for row in tape.before[rows]]
        np.testing.assert_allclose(values, expected, atol=1e-5)
        successors = tape.after[rows].copy()
        for t, n in np.argwhere(truncations):
            successors[t, n] = tape.final[rows][t, n]
            cut_off += abs(V[tape.after[rows][t, n].tobytes()] - V[successors[t, n].tobytes()]) > 1e-3
        expected = [[V[obs.tobytes()] for obs in row] for row in successors]
        np.testing.assert_allclose(next_values, expected, atol=1e-5)
        returns = lambda_returns(rewards, ends, truncations, np.array(expected), gamma, gae_lambda)
        np.testing.assert_allclose(advantages + values, returns, atol=1e-5)
    assert cut_off > 0 and tape.truncations.reshape(-1, args.num_steps, args.num_envs)[:, :-1].any()


def test_rewards_are_clipped_for_learning_and_whole_scores_are_logged(tape):
    score, length = np.zeros(tape.args.num_envs), np.zeros(tape.args.num_envs, int)
    resets, episodes = [row for row, *_ in tape.resets], []
    for row, (rewards, over) in enumerate(zip(tape.rewards, tape.over)):
        if row in resets:
            score[:] = length[:] = 0
        score, length = score + rewards, length + 1
        _, _, clipped, _, _, finished = tape.steps[row]
        np.testing.assert_array_equal(clipped, np.sign(rewards))
        assert finished == [(n, score[n], length[n]) for n in np.flatnonzero(over)]
        episodes += [((row + 1) * tape.args.num_envs, score[n], length[n]) for n in np.flatnonzero(over)]
        score[over] = length[over] = 0
    assert len(episodes) >= 4
    for place, tag in enumerate(("charts/episodic_return", "charts/episodic_length"), start=1):
        assert points(tape.logged, tag) == [(episode[0], episode[place]) for episode in episodes]
    if "Breakout" not in tape.args.env_id:
        assert tape.rewards.max() > 1 and max(score for _, score, _ in episodes) > 1
    assert max(rewards.max() for rewards, *_ in tape.gae) == 1


def test_no_row_of_a_reset_enters_the_batch(tape):
    """Each row has three of its four frames in common with the row before it, unless an episode is over."""
    assert tape.over.any() and (tape.over <= tape.terminations | tape.truncations).all()
    for t, (next_obs, successors, _, terminations, truncations, _) in enumerate(tape.steps):
        over = tape.over[t]
        np.testing.assert_array_equal(next_obs, tape.after[t])
        np.testing.assert_array_equal(next_obs[~over, :3], tape.before[t][~over, 1:])
        assert (next_obs[over, :3] == 0).all() and next_obs[over, 3].any((1, 2)).all()
        np.testing.assert_array_equal(successors[:, :3], tape.before[t][:, 1:])
        np.testing.assert_array_equal((successors != next_obs).any((1, 2, 3)), over)
        np.testing.assert_array_equal(terminations, tape.terminations[t] & (over | tape.args.episodic_life))
        np.testing.assert_array_equal(truncations, tape.truncations[t])
    resets = [row for row, *_ in tape.resets]
    assert resets == list(range(0, len(tape.steps), tape.args.checkpoint_interval // tape.args.num_envs))
    for row, _, obs in tape.resets:
        assert (obs[:, :3] == 0).all() and np.array_equal(obs, tape.before[row])
    for k, batch in enumerate(tape.batches):
        np.testing.assert_array_equal(batch, tape.before[tape.rows(k)].reshape(batch.shape))


def test_fire_is_pressed_on_the_first_step_of_each_life_and_only_there(tape):
    """On that of a new episode too: of the emulator's own FIRE at a reset sticky actions swallow one in four."""
    buttons = list(a2c.make_atari(tape.args, 1).ale.get_action_set())
    if ale_py.Action.FIRE not in buttons:
        np.testing.assert_array_equal(tape.actions, tape.sampled)
        assert tape.chosen.all()
        return
    first = np.ones_like(tape.over)
    first[1:] = (tape.terminations | tape.truncations)[:-1]
    first[[row for row, *_ in tape.resets]] = True
    played = np.where(first, buttons.index(ale_py.Action.FIRE), tape.sampled)
    assert (tape.terminations & ~tape.over).any() and (played != tape.sampled).any()
    np.testing.assert_array_equal(tape.chosen, ~first)
    np.testing.assert_array_equal(tape.actions, played)


# One emulator, without vectors, wrappers or preprocessing


class Plain:
    """A game of the plain emulator: four frames per step, a life lost or the game's end found in its own counters."""

    def __init__(self, args, seed, first_frame, limit):
        settings = gym.spec(args.env_id.replace("Deterministic", "NoFrameskip")).kwargs
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
        ("ALE/Klax-v5", 2, 300, 10**6, False),
        ("ALE/Freeway-v5", 1, 200, 300, False),
    ],
)
def test_games_are_the_plain_emulators(tmp_path, monkeypatch, env_id, num_envs, steps, limit, lives):
    """The frame numbers at a reset say how many idle frames there were: that is up to the vector's chance."""
    limit_games(monkeypatch, limit)
    args, rng = make_args(env_id=env_id), np.random.default_rng(0)
    envs = a2c.AtariEnvs(args, num_envs, tmp_path)
    envs.reset(0)
    plain = [Plain(args, int(seed), frame, limit) for seed, frame in zip(envs.seeds, envs.frames)]
    ended = lost_lives = 0
    for t in range(steps):
        actions = rng.integers(envs.num_actions, size=num_envs)
        pressed = np.where(envs.fire, envs.fire_action, actions) if envs.fire.any() else actions
        next_obs, successors, rewards, terminations, truncations = envs.step(actions)
        finished = []
        for n, game in enumerate(plain):
            reward, lost_life, game_over, cut_off = game.step(pressed[n])
            over = game_over or cut_off
            assert (rewards[n], terminations[n], truncations[n]) == (np.sign(reward), game_over or lost_life, cut_off)
            assert np.array_equal(next_obs[n], successors[n]) == (not over)
            if t % 10 == n and not over:  # at an episode's end the vector's last screen is an older one
                np.testing.assert_allclose(next_obs[n, 3], game.pixels(), rtol=0, atol=1)
            lost_lives += lost_life and not game_over
            if over:
                finished.append((n, game.score, game.length))
                game.begin(envs.frames[n])
        assert envs.finished == finished
        ended += len(finished)
    assert ended >= num_envs and (lost_lives > 0) == lives


# A policy that never presses FIRE


@pytest.mark.parametrize("env_id, episodic_life", [("BreakoutNoFrameskip-v4", False), ("ALE/Breakout-v5", True)])
def test_a_policy_that_never_fires_stalls_nothing(tmp_path, monkeypatch, emulators, env_id, episodic_life):
    """Idle, a life of Breakout takes 25 steps, and an episode 130."""

    class Idle(a2c.Agent):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.policy_head.bias.data[NOOP] = 100

    logged = []
    log_into(monkeypatch, logged)
    monkeypatch.setattr(a2c, "Agent", Idle)
    monkeypatch.setattr(Emulator, "frames", 4 * 1000)
    options = dict(total_timesteps=2 * 150, num_envs=2, num_steps=15, eval_episodes=6, greedy=True)
    a2c.train(make_args(env_id=env_id, episodic_life=episodic_life, **options), tmp_path, None)
    training, evaluation = emulators
    assert len(training.steps) == 150 and len(points(logged, "charts/episodic_return")) == 2
    assert len(evaluation.steps) < 150


# The update


def plain_network(parameters, obs):
    """Logits (B, A) and values (B,): [DQN] Methods, with two heads."""
    weights, biases = parameters[::2], parameters[1::2]
    x = obs.double() / 255
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
    """Nine updates in float64 from the frames and rewards of the run: actions, returns, gradients, parameters, log."""
    options = dict(num_envs=3, total_timesteps=135, conv3_filters=64, log_interval=1)
    tape = Tape(tmp_path, frames=132, **options | OPTIONS[name])
    args = tape.args
    assert (tape.terminations & ~tape.over).any() and tape.truncations.any() and not tape.chosen.all()
    torch.manual_seed(args.seed)
    rng = np.random.default_rng([args.seed, 0])
    parameters = [p.detach().double().requires_grad_() for p in a2c.Agent(4, args.conv3_filters).parameters()]
    initial = nn.utils.parameters_to_vector(parameters).detach()
    squares = [torch.ones_like(p) for p in parameters]
    rmsprop = torch.optim.RMSprop(parameters, alpha=args.rmsprop_alpha, eps=args.rmsprop_eps)

    def forward(obs):
        with torch.no_grad():
            logits, values = plain_network(parameters, torch.from_numpy(obs.reshape(-1, 4, 84, 84)))
        return logits.numpy().reshape(*obs.shape[:2], -1), values.numpy().reshape(obs.shape[:2])

    norms = []
    for k, (grad, theta) in enumerate(tape.updates):
        rows = tape.rows(k)
        obs, truncations = tape.before[rows], tape.truncations[rows]
        logits, old_values = forward(obs)
        drawn = [(row + rng.gumbel(size=row.shape)).argmax(1) for row in logits]
        np.testing.assert_array_equal(tape.sampled[rows], drawn)
        next_values = np.where(truncations, forward(tape.final[rows])[1], forward(tape.after[rows])[1])
        ends = tape.terminations[rows] | (truncations & (not args.bootstrap_truncation))
        rewards = np.sign(tape.rewards[rows])
        R = lambda_returns(rewards, ends, truncations, next_values, args.gamma, args.gae_lambda)
        advantages = torch.from_numpy(R - old_values).flatten()

        logits, values = plain_network(parameters, torch.from_numpy(obs).flatten(0, 1))
        policy = Categorical(logits=logits)
        log_probs = policy.log_prob(torch.from_numpy(tape.actions[rows]).flatten())
        chosen = torch.from_numpy(tape.chosen[rows]).flatten()
        gain, entropy = (advantages * log_probs)[chosen].sum() / chosen.numel(), policy.entropy().mean()
        value_loss = (torch.from_numpy(R).flatten() - values).square().mean()
        rmsprop.zero_grad()
        (args.vf_coef * value_loss - gain - args.ent_coef * entropy).backward()
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
        logs = {"losses/policy_loss": -gain, "losses/value_loss": value_loss, "losses/entropy": entropy}
        logs |= {"losses/grad_norm": norms[-1], "charts/learning_rate": learning_rate}
        logs["losses/explained_variance"] = 1 - advantages.numpy().var() / R.var()
        for tag, value in logs.items():
            assert points(tape.logged, tag)[k] == (
                15 * (k + 1),
                pytest.approx(torch.as_tensor(value).item(), rel=1e-3, abs=1e-5),
            ), tag
    assert k == 8 and scale > 1e-4 and min(norms) < args.max_grad_norm < max(norms)


def gradients(steps=300, size=50):
    """Gradients of all sizes, some of them zero."""
    scale = 10.0 ** torch.linspace(-7, 1, size, dtype=torch.float64)
    for _ in range(steps):
        yield scale * torch.randn(size, dtype=torch.float64) * (torch.rand(size) < 0.9)


@pytest.mark.parametrize("torch_rmsprop", [False, True])
@pytest.mark.parametrize("alpha, eps", [(0.99, 1e-5), (0.9, 1e-2)])
def test_rmsprop_is_tensorflows_or_torchs(alpha, eps, torch_rmsprop):
    """TensorFlow's number by number: the average begins at one, epsilon stands inside the root."""
    theta = nn.Parameter(torch.randn(50, dtype=torch.float64))
    ours = a2c.RMSprop([theta], a2c.Args(rmsprop_alpha=alpha, rmsprop_eps=eps, torch_rmsprop=torch_rmsprop))
    parameter = nn.Parameter(theta.detach().clone())
    torchs = torch.optim.RMSprop([parameter], alpha=alpha, eps=eps)
    expected, g = theta.tolist(), [1.0] * 50
    for t, grad in enumerate(gradients()):
        theta.grad, parameter.grad = grad.clone(), grad.clone()
        ours.param_groups[0]["lr"] = torchs.param_groups[0]["lr"] = learning_rate = 1e-2 / (t + 1)
        ours.step()
        torchs.step()
        for i, d in enumerate(grad.tolist()):
            g[i] = alpha * g[i] + (1 - alpha) * d * d
            expected[i] -= learning_rate * d / math.sqrt(g[i] + eps)
    expected = parameter.detach() if torch_rmsprop else torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(theta.detach(), expected, rtol=1e-12, atol=1e-14)
    square_avg = torchs.state[parameter]["square_avg"] if torch_rmsprop else torch.tensor(g, dtype=torch.float64)
    torch.testing.assert_close(ours.state[theta]["square_avg"], square_avg, rtol=1e-10, atol=0)


def test_averages_of_dead_units_are_flushed_to_zero_which_changes_no_parameter(tmp_path):
    """Without a gradient the average fades to a denormal number, at which rounding holds it for ever."""

    def small(tensor):  # compared as integers: a flushing processor takes denormal numbers for zero here too
        return bool(((tensor.view(torch.int32) != 0) & (tensor.view(torch.int32) & 0x7F800000 == 0)).any())

    found = {}
    try:
        for flush in (False, True):
            flushes = torch.set_flush_denormal(flush) and flush
            theta = nn.Parameter(torch.linspace(-1, 1, 64))
            rmsprop = a2c.RMSprop([theta], a2c.Args(rmsprop_alpha=0.8))
            for k in range(1000):
                theta.grad = torch.linspace(-3, 2, 64) if k < 5 else torch.zeros(64)
                rmsprop.step()
            found[flush] = theta.tolist(), rmsprop.state[theta]["square_avg"]
        torch.set_flush_denormal(False)
        a2c.train(make_args(), tmp_path, None)
        product = torch.full((8,), 1e-30) * 1e-9
    finally:
        torch.set_flush_denormal(False)
    assert found[False][0] == found[True][0]
    assert small(found[False][1]) and small(found[True][1]) == small(product) == (not flushes)


def make_batch(size=64):
    logits, values = torch.randn(size, 5, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    advantages, returns = torch.randn(2, size, dtype=torch.float64)
    chosen = (torch.rand(size) < 0.8).double()
    return logits.requires_grad_(), values.requires_grad_(), torch.randint(5, (size,)), chosen, advantages, returns


def test_loss_is_the_papers():
    logits, values, actions, chosen, advantages, returns = batch = make_batch()
    loss, metrics = a2c.a2c_loss(*batch, a2c.Args(ent_coef=0.02, vf_coef=0.7))
    policy = Categorical(logits=logits)
    policy_loss = -sum(policy.log_prob(actions)[i] * advantages[i] for i in range(64) if chosen[i]) / 64
    value_loss, entropy = F.mse_loss(values, returns), policy.entropy().mean()
    torch.testing.assert_close(loss, policy_loss + 0.7 * value_loss - 0.02 * entropy)
    expected = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    assert metrics.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(metrics[name], expected[name])


def test_the_policy_learns_nothing_from_a_fire_that_it_did_not_choose():
    logits, values, _, chosen, *_ = batch = make_batch()
    loss, _ = a2c.a2c_loss(*batch, a2c.Args(ent_coef=0.0))
    policy_grad, value_grad = torch.autograd.grad(loss, (logits, values))
    assert (policy_grad[chosen == 0] == 0).all() and (policy_grad[chosen == 1] != 0).any(1).all()
    assert (value_grad != 0).all()


def test_gae_is_the_double_sum():
    """[GAE] Eq. (16) as it is printed: for each t a sum over l, up to the last step of t's episode."""
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 30, 4))
    terminations, truncations = rng.random((2, 30, 4)) < 0.2
    assert (terminations & truncations).any()
    for gamma, gae_lambda in (0.99, 0.95), (0.9, 1.0), (0.9, 0.0):
        delta = rewards + gamma * np.where(terminations, 0.0, next_values) - values
        expected = np.zeros((30, 4))
        for t, n in np.ndindex(30, 4):
            end = next((k for k in range(t, 30) if terminations[k, n] or truncations[k, n]), 29)
            expected[t, n] = sum((gamma * gae_lambda) ** (k - t) * delta[k, n] for k in range(t, end + 1))
        advantages = a2c.compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda)
        np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-12)


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
        actions = a2c.sample(row.expand(20_000, 5), rng.gumbel(size=(20_000, 5)))
        expected = 20_000 * row.softmax(0).cpu().numpy()
        assert ((np.bincount(actions, minlength=5) - expected) ** 2 / expected).sum() < 18.5
    certain = torch.tensor([[0.0, 100.0], [100.0, 0.0]], device=DEVICE)
    np.testing.assert_array_equal(a2c.sample(certain, rng.gumbel(size=(2, 2))), [1, 0])


def test_bf16_is_float32_but_for_its_precision(tmp_path):
    exact, short = a2c.Agent(4).to(DEVICE), a2c.Agent(4, bf16=True).to(DEVICE)
    with torch.no_grad():
        for parameter in exact.policy_head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        short.load_state_dict(exact.state_dict())
        obs = torch.randint(256, (32, 4, 84, 84), dtype=torch.uint8, device=DEVICE)
        for ours, theirs in zip(short(obs), exact(obs), strict=True):
            assert ours.dtype == torch.float32 and not torch.equal(ours, theirs)
            assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()
    updates = [Tape(tmp_path / str(flag), bf16=flag).updates for flag in (False, True)]
    (exact_grad, _), (short_grad, _) = (run[0] for run in updates)
    assert short_grad.dtype == torch.float32 and not torch.equal(short_grad, exact_grad)
    assert torch.cosine_similarity(short_grad, exact_grad, dim=0) > 0.99


@pytest.mark.parametrize("compile", [False, True])
def test_compiling_is_asked_for(tmp_path, monkeypatch, compile):
    """It takes too long here to be done: each forward pass of training goes through what the compiler returns."""
    calls = []

    def compiler(method, **options):
        return lambda batch: calls.append((method.__name__, len(batch))) or method(batch)

    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(a2c, "evaluate", lambda *_: {"episodic_return": [0.0]})
    a2c.train(make_args(compile=compile), tmp_path, None)
    acting = [("features", 4), ("heads", 4)]
    assert calls == (acting * 5 + acting + [("heads", 20)] if compile else [])


# A run that cannot go on


def test_a_gradient_that_is_not_finite_stops_training(tmp_path, monkeypatch):
    """In the third of five updates; the checkpoint before it is the last."""
    calls = []

    def a2c_loss(*inputs, a2c_loss=a2c.a2c_loss):
        calls.append(inputs)
        loss, metrics = a2c_loss(*inputs)
        return loss * (math.nan if len(calls) == 3 else 1), metrics

    monkeypatch.setattr(a2c, "a2c_loss", a2c_loss)
    with pytest.raises(FloatingPointError, match=r"step 60\b"):
        a2c.train(make_args(total_timesteps=100, checkpoint_interval=20), tmp_path, None)
    checkpoint = a2c.load_checkpoint(tmp_path)
    assert checkpoint["global_step"] == 40 and not (tmp_path / "model.pt").exists()
    squares = [state["square_avg"] for state in checkpoint["optimizer"]["state"].values()]
    assert len(squares) == 12 and all(tensor.isfinite().all() for tensor in (*checkpoint["agent"].values(), *squares))


# Evaluation and videos


def test_evaluation_is_reproduced_and_counts_whole_episodes(tmp_path, monkeypatch, emulators):
    args = make_args(env_id="BerzerkNoFrameskip-v4", eval_episodes=3)  # short episodes, points all the time
    logged = []
    log_into(monkeypatch, logged)
    a2c.train(args, tmp_path, None)
    checkpoint = a2c.load_checkpoint(tmp_path)

    def play(**options):
        emulators.clear()
        returns = a2c.evaluate(make_args(**vars(args) | options), checkpoint, tmp_path)["episodic_return"]
        (emulator,) = emulators
        actions, obs, rewards, *ends, over, _, _ = map(np.array, zip(*emulator.steps))
        obs = np.concatenate([emulator.resets[0][2][None], obs[:-1]])
        first = np.concatenate([np.ones((1, 3), bool), np.logical_or(*ends)[:-1]])  # of a life: FIRE is pressed
        return returns, obs, actions, rewards, over, first

    returns, _, actions, rewards, over, _ = play()
    assert points(logged, "eval/episodic_return") == [(20, pytest.approx(np.mean(returns)))]
    lengths = over.argmax(0) + 1
    assert over.any(0).all() and len(set(lengths)) > 1 and max(lengths) == len(rewards)
    scores = [rewards[:length, n].sum() for n, length in enumerate(lengths)]
    assert returns == scores != rewards.sum(0).tolist()
    monkeypatch.setattr(Emulator, "frames", 4 * 50)
    assert not np.array_equal(play(seed=2)[2], actions[:50])
    _, obs, greedy, *_, first = play(greedy=True)
    agent = a2c.Agent(len(checkpoint["agent"]["policy_head.bias"]), 16).to(DEVICE)
    agent.load_state_dict(checkpoint["agent"])
    logits, _ = agent(torch.from_numpy(obs).flatten(0, 1).to(DEVICE))
    expected = logits.argmax(1).cpu().numpy().reshape(greedy.shape)
    np.testing.assert_array_equal(greedy[~first], expected[~first])
    assert (greedy[first] == 1).all() and len(np.unique(expected)) > 1


def test_evaluation_takes_the_first_episode_of_each_environment(tmp_path, monkeypatch):
    """Those that are soonest over are no fair sample: environment 0 ends twice before environment 2 does once."""
    finished = iter([[(0, 1.0, 1)], [], [(0, 2.0, 2), (1, 5.0, 3)], [(2, 7.0, 4), (0, 3.0, 1)]])

    class Scripted(a2c.AtariEnvs):
        def step(self, actions):
            self.finished = next(finished)
            return np.zeros((3, 4, 84, 84), np.uint8), None, None, None, None

    monkeypatch.setattr(a2c, "AtariEnvs", Scripted)
    model = {"agent": a2c.Agent(4, 16).state_dict(), "global_step": 0}
    returns = a2c.evaluate(make_args(eval_episodes=3), model, tmp_path)
    assert returns == {"episodic_return": [1.0, 5.0, 7.0]} and not list(finished)


def test_videos_are_of_the_episodes_that_were_played(tmp_path, monkeypatch, emulators):
    from imageio_ffmpeg import read_frames

    monkeypatch.setattr(Emulator, "frames", 320)
    options = dict(env_id="ALE/SpaceInvaders-v5", total_timesteps=400, checkpoint_interval=200, num_envs=2, seed=2)
    a2c.train(make_args(**options, capture_video=True), tmp_path, None)

    def episodes(emulator):
        """For each reset the first seed, and for each step what happened in the first environment."""
        rows = [row for row, *_ in emulator.resets] + [None]
        happened = [tuple(int(step[k][0]) for k in (0, 2, 3, 7)) for step in emulator.steps]
        return [(seeds[0], happened[row:end]) for (row, seeds, _), end in zip(emulator.resets, rows[1:])]

    played = dict(episode for emulator in emulators if not emulator.colour for episode in episodes(emulator))
    videos = [episode for emulator in emulators if emulator.colour for episode in episodes(emulator)]
    names = ["training-0", "training-200", "evaluation-400"]
    assert {path.stem for path in (tmp_path / "videos").iterdir()} == set(names)
    for name, (seed, steps) in zip(names, videos, strict=True):
        assert len(steps) == 80 and steps[:79] == played[seed][:79]  # the last step shows the next episode already
        properties, *frames = read_frames(str(tmp_path / "videos" / f"{name}.mp4"))
        assert len(frames) in (79, 80) and properties["size"] == (320, 420)  # moviepy may round one away
        frames = [np.frombuffer(frame, np.uint8).astype(int) for frame in frames]
        assert np.mean([np.abs(a - b).max() > 50 for a, b in pairwise(frames)]) > 0.5
    assert any(reward for _, steps in videos for _, reward, *_ in steps)


# Names of environments


def registered():
    gym.register_envs(ale_py)
    return {spec.id: spec.kwargs for spec in gym.registry.values() if str(spec.entry_point).startswith("ale_py")}


def test_ids_mean_what_they_mean_in_gymnasium(monkeypatch):
    monkeypatch.setattr(a2c, "AtariVectorEnv", lambda **settings: settings)
    known = {name: kwargs for name, kwargs in registered().items() if name.startswith("ALE/") or "NoFrame" in name}
    assert len(known) > 200
    for env_id, kwargs in known.items():
        for same in (env_id, env_id.replace("NoFrameskip", "Deterministic")):  # no longer registered
            settings = a2c.make_atari(make_args(env_id=same), 1)
            for name in ("game", "repeat_action_probability", "max_num_frames_per_episode"):
                assert settings[name] == kwargs[name]
            assert settings["frameskip"] == 4 and not kwargs["full_action_space"]


@pytest.mark.parametrize("env_id", ["Breakout-v4", "Breakout-v0", "CartPole-v1"])
def test_other_environments_are_refused(env_id):
    with pytest.raises(SystemExit, match=f"error: {env_id} is not an Atari environment of this kind"):
        a2c.make_atari(make_args(env_id=env_id), 1)


@pytest.mark.parametrize("env_id", ["BreakoutNoFrameSkip-v4", "ALE/SpaceInvader-v5", "ALE/Breakout-v4", ""])
def test_an_unknown_id_is_gymnasiums_error(env_id):
    with pytest.raises(gym.error.Error):
        a2c.make_atari(make_args(env_id=env_id), 1)


def games_to_start():
    """All games of the emulator, or a sample of them: each takes a fifth of a second. ALL_GAMES=1 starts them all."""
    ids = sorted(name for name in registered() if name.startswith("ALE/"))
    return ids if os.environ.get("ALL_GAMES") else ids[::9]


def test_every_game_of_the_emulator_has_an_id():
    games = {kwargs["game"] for name, kwargs in registered().items() if name.startswith("ALE/")}
    assert games == {game for game in roms.get_all_rom_ids() if ALEInterface.isSupportedROM(roms.get_rom_path(game))}


@pytest.mark.parametrize("env_id", games_to_start())
def test_a_game_starts_and_goes_on(tmp_path, env_id):
    envs = a2c.AtariEnvs(make_args(env_id=env_id), 1, tmp_path)
    obs = envs.reset(0)
    assert obs.shape == (1, 4, 84, 84) and obs.dtype == np.uint8
    obs, frames = obs.copy(), envs.frames
    next_obs, *_ = envs.step(np.array([envs.num_actions - 1]))
    assert envs.frames == frames + 4 and not envs.finished
    np.testing.assert_array_equal(next_obs[:, :3], obs[:, 1:])


# A game of pixels that can be learned in seconds


class Catch:
    """A ball falls from the top; the paddle on the ground, which moves by one of four places, should be under it."""

    single_action_space = gym.spaces.Discrete(3)
    ale = SimpleNamespace(get_action_set=lambda: [ale_py.Action.NOOP, ale_py.Action.RIGHT, ale_py.Action.LEFT])

    def __init__(self, num_envs):
        self.num_envs, self.seeds = num_envs, []

    def reset(self, *, seed):
        self.seeds.append(seed.tolist())
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


def test_episodes_depend_on_the_seed_the_step_and_on_who_plays(tmp_path, monkeypatch):
    def make_atari(args, num_envs):
        made.append(Catch(num_envs))
        return made[-1]

    def seeds_of(what):
        made.clear()
        drawn.clear()
        what()
        return [seed for envs in made for seeds in envs.seeds for seed in seeds]

    def sample(logits, gumbel_noise, sample=a2c.sample):
        drawn.append(gumbel_noise.tobytes())
        return sample(logits, gumbel_noise)

    def play(seed, step):
        return seeds_of(lambda: a2c.AtariEnvs(make_args(seed=seed), 4, tmp_path).reset(step))

    made, drawn, noises = [], [], []  # the noise of the actions, at each step and at first
    monkeypatch.setattr(a2c, "make_atari", make_atari)
    monkeypatch.setattr(a2c, "sample", sample)
    starts = play(1, 0), play(2, 0), play(1, 512), play(1, 1024)
    assert len({seed for start in starts for seed in start}) == 16 and play(1, 512) == starts[2]

    # A run of two checkpoints before its end, and evaluations of it
    options = dict(total_timesteps=40, checkpoint_interval=20, eval_episodes=4)
    whole = seeds_of(lambda: a2c.train(make_args(**options), tmp_path, None))
    noises.append(drawn[0])
    training, at_the_end = whole[:8], whole[8:]
    assert training == play(1, 0) + play(1, 20) and len(set(whole)) == 12
    model = a2c.load_checkpoint(tmp_path)

    def evaluation(seed=1, **changes):
        seeds = seeds_of(lambda: a2c.evaluate(make_args(**options, seed=seed), model | changes, tmp_path))
        noises.append(drawn[0])
        return seeds

    assert evaluation() == at_the_end
    others = whole, evaluation(seed=2), evaluation(global_step=20), play(2, 0), play(2, 40), play(1, 40)
    assert len({seed for other in others for seed in other}) == sum(map(len, others))
    assert len(set(noises)) == 4


def test_catch_is_learned(tmp_path, monkeypatch):
    """A random player scores -0.5, a perfect one 1. (With alpha at 0.99, the average would begin at one too long.)"""
    logged = []
    log_into(monkeypatch, logged)
    monkeypatch.setattr(a2c, "make_atari", lambda args, num_envs: Catch(num_envs))
    options = dict(num_envs=8, total_timesteps=6000, gamma=0.9, rmsprop_alpha=0.5, learning_rate=5e-3)
    a2c.train(make_args(**options, conv3_filters=32, eval_episodes=50, greedy=True), tmp_path, None)
    scores = [score for _, score in points(logged, "charts/episodic_return")]
    assert len(scores) == 2000
    assert np.mean(scores[:200]) < -0.3
    assert np.mean(scores[-200:]) > 0.7
    assert points(logged, "eval/episodic_return")[0][1] > 0.8
