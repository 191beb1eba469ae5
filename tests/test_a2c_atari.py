"""a2c_atari.py: its mathematics, its runs, and what users change in it."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, command, load, resume, train
from torch import nn
from torch.distributions import Categorical
from vectors_reader import cases, check

import a2c_atari as a2c

# Rollouts of 20 steps; the interval of the checkpoints is no multiple of it
SMALL = dict(num_envs=4, num_steps=5, total_timesteps=200, checkpoint_interval=70, conv3_filters=4)
SMALL |= dict(eval_episodes=2, env_threads=1, torch_threads=1, cuda=False, log_interval=1)


def make_args(**options):
    return a2c.Args(**SMALL | options)


@pytest.fixture
def no_evaluation(monkeypatch):
    monkeypatch.setattr(a2c, "evaluate", lambda *_: [0.0])


@pytest.fixture
def limit_games(monkeypatch):
    """A function that truncates episodes after so many frames."""

    def limit(frames):
        make = a2c.AtariVectorEnv
        settings = {"max_num_frames_per_episode": frames}
        monkeypatch.setattr(a2c, "AtariVectorEnv", lambda **kw: make(**kw | settings))

    return limit


@pytest.fixture
def logged(monkeypatch):
    """All that runs log: (step, tag, value)."""
    points = []

    def log(run, step, scalars):
        points.extend((step, tag, float(value)) for tag, value in scalars.items())

    monkeypatch.setattr(a2c.Run, "log", log)
    return points


# Mathematics


@pytest.mark.quick
@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 1.0), (0.9, 0.95), (0.9, 0.0)])
def test_returns_are_their_definition(gamma, gae_lambda):
    """For lambda = 1 the sum of [A3C] Alg. S3, for others [GAE] Eq. (16) plus V."""
    (T, N), rng = (30, 4), np.random.default_rng(0)
    rewards, values = rng.normal(size=(T, N)), rng.normal(size=(T + 1, N))
    dones = rng.random((T, N)) < 0.2
    expected = np.zeros((T, N))
    for t, n in np.ndindex(T, N):
        for k in range(t, T):
            V = 0.0 if dones[k, n] else values[k + 1, n]
            end = k == T - 1 or dones[k, n]
            if gae_lambda == 1:
                expected[t, n] += gamma ** (k - t) * (rewards[k, n] + gamma * V * end)
            else:
                delta = rewards[k, n] + gamma * V - values[k, n]
                expected[t, n] += (gamma * gae_lambda) ** (k - t) * delta + values[t, n] * (k == t)
            if end:
                break
    tensors = [torch.from_numpy(x) for x in (rewards, values[:-1], values[-1], dones)]
    returns = a2c.compute_returns(*tensors, gamma, gae_lambda).numpy()
    np.testing.assert_allclose(returns, expected, rtol=0, atol=1e-12)


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_returns_at_ends_and_edges(precision):
    """As in `train`: gamma V(final) is added to the last reward of a truncated episode."""
    for case in cases("gae", "n_step_return"):
        inputs = {name: torch.tensor(x) for name, x in case["inputs"].items()}
        gamma, dtype = inputs["gamma"].item(), getattr(torch, precision)
        rewards, values, next_values = (
            inputs[name].to(dtype) for name in ("rewards", "values", "next_values")
        )
        truncated = inputs["truncations"] & ~inputs["terminations"]
        dones = inputs["truncations"] | inputs["terminations"]
        rewards = rewards + gamma * next_values * truncated
        returns = a2c.compute_returns(rewards, values, next_values[-1], dones, gamma)
        check(case, "returns", returns, precision)


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_loss_and_gradient_are_the_papers(precision):
    case = list(cases("a2c_a3c", "a2c_loss"))[-1]  # its advantages are returns minus values
    names = ("logits", "values", "returns")
    inputs = [torch.tensor(case["inputs"][x]).to(getattr(torch, precision)) for x in names]
    logits, values = (x.requires_grad_() for x in inputs[:2])
    policy, mask = Categorical(logits=logits), torch.ones_like(values)
    logprobs = policy.log_prob(torch.tensor(case["inputs"]["actions"]))
    args = SimpleNamespace(**{x: case["inputs"][x].item() for x in ("ent_coef", "vf_coef")})
    loss, metrics = a2c.a2c_loss(logprobs, values, policy.entropy(), inputs[2], mask, args)
    loss.backward()
    check(case, "loss", loss.detach(), precision)
    for name, metric in metrics.items():
        check(case, name, metric, precision)
    check(case, "grad_logits", logits.grad, precision)
    check(case, "grad_values", values.grad, precision)
    masked, _ = a2c.a2c_loss(logprobs, values, policy.entropy(), inputs[2], 0 * mask, args)
    without = metrics["value_loss"] * args.vf_coef - args.ent_coef * metrics["entropy"]
    torch.testing.assert_close(masked.detach(), without)


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_rmsprop_is_tensorflows(precision):
    for case in cases("rmsprop"):
        inputs, dtype = case["inputs"], getattr(torch, precision)
        if not inputs["eps_inside_sqrt"] or inputs["initial_square_avg"] != 1:
            continue
        parameter = nn.Parameter(torch.tensor(inputs["theta"]).to(dtype))
        options = {name: inputs[name].item() for name in ("alpha", "eps")}
        optimizer = a2c.RMSprop([parameter], inputs["learning_rate"].item(), **options)
        thetas, averages = [], []
        for grad in torch.tensor(inputs["grads"]).to(dtype):
            parameter.grad = grad.clone()
            optimizer.step()
            thetas.append(parameter.detach().clone().numpy())
            averages.append(optimizer.state[parameter]["square_avg"].clone().numpy())
        check(case, "theta", np.array(thetas), precision)
        check(case, "square_avg", np.array(averages), precision)


@pytest.mark.quick
def test_network_is_initialized_orthogonally_and_takes_its_sizes_from_the_environment():
    agent = a2c.Agent((3, 84, 100), 6, 16)
    layers = [module for module in agent.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert [len(layer.weight) for layer in layers] == [32, 64, 16, 512, 6, 1]
    for layer, gain in zip(layers, [math.sqrt(2)] * 4 + [0.01, 1.0], strict=True):
        singular_values = torch.linalg.svdvals(layer.weight.flatten(1))
        expected = torch.full_like(singular_values, gain)
        torch.testing.assert_close(singular_values, expected, rtol=1e-4, atol=1e-6)
        assert (layer.bias == 0).all()
    policy, values = agent(torch.randint(256, (2, 3, 84, 100), dtype=torch.uint8))
    assert policy.sample().shape == values.shape == policy.entropy().shape == (2,)


# Whole updates, from the frames and rewards of a run


class Tape:
    """A run of a2c.train without its evaluation: (S, N, ...) for its S steps in N games."""

    def __init__(self, folder, **options):
        self.args, self.updates, self.resets = make_args(**options), [], []
        self.steps = []
        with pytest.MonkeyPatch.context() as patch:
            self.record(patch)
            a2c.train(self.args, folder, None)
        names = "obs given executed fire next_obs rewards terminations truncations over".split()
        for name, values in zip(names, zip(*self.steps)):
            setattr(self, name, np.array(values))

    def record(self, patch):
        tape = self

        class AtariEnvs(a2c.AtariEnvs):
            def reset(self, *arguments):
                self.obs = super().reset(*arguments)
                tape.resets.append(len(tape.steps))
                return self.obs

            def step(self, actions):
                before, fire, scores = self.obs.copy(), self.fire.copy(), self.returns.copy()
                self.obs, next_obs, *_ = step = super().step(actions)
                over = np.zeros(self.num_envs, bool)
                over[list(self.episodes)] = True
                scores = self.returns - scores  # raw rewards, but where an episode ended
                rewards = np.where(over, step[2], scores)
                executed = self.executed_actions
                record = (before, actions, executed, fire, next_obs, rewards, *step[3:5], over)
                tape.steps.append([np.copy(x) for x in record])
                return step

        def update(agent, optimizer, rollout, args, update=a2c.update):
            before = [p.detach().clone() for p in agent.parameters()]
            metrics = update(agent, optimizer, rollout, args)
            after = [p.detach().clone() for p in agent.parameters()]
            tape.updates.append((before, after, metrics, optimizer.param_groups[0]["lr"]))
            return metrics

        patch.setattr(a2c, "AtariEnvs", AtariEnvs)
        patch.setattr(a2c, "update", update)
        patch.setattr(a2c, "evaluate", lambda *_: [0.0])


def plain_network(parameters, obs):
    """Logits (..., A) and values (...): [DQN] Methods, with two heads."""
    weights, biases = parameters[::2], parameters[1::2]
    x = torch.from_numpy(obs).flatten(0, -4).double() / 255
    for k, stride in enumerate((4, 2, 1)):
        x = F.conv2d(x, weights[k], biases[k], stride).relu()
    x = F.linear(x.flatten(1), weights[3], biases[3]).relu()
    logits, values = F.linear(x, weights[4], biases[4]), F.linear(x, weights[5], biases[5])
    return logits.unflatten(0, obs.shape[:-3]), values[:, 0].unflatten(0, obs.shape[:-3])


OTHER = dict(learning_rate=1e-4, torch_rmsprop=True, rmsprop_alpha=0.9, rmsprop_eps=1e-3)
OTHER |= dict(anneal_lr=True, gae_lambda=0.95, bootstrap_truncation=False, ent_coef=0.1)
OTHER |= dict(vf_coef=0.25, max_grad_norm=0.2)
OPTIONS = {"default": dict(learning_rate=0.1, max_grad_norm=0.1), "other": OTHER}


@pytest.mark.parametrize("name", OPTIONS)
def test_updates_are_the_papers_in_float64(tmp_path, limit_games, logged, name):
    """Nine updates: returns, gradients, clipping, parameters and log."""
    limit_games(132)
    options = dict(num_envs=3, total_timesteps=135, checkpoint_interval=10**6, conv3_filters=32)
    tape = Tape(tmp_path, **options | OPTIONS[name])
    args, T = tape.args, 5
    assert (tape.terminations & ~tape.over).any() and tape.truncations.any() and tape.fire.any()
    parameters = [p.double().requires_grad_() for p in tape.updates[0][0]]
    squares = [torch.ones_like(p) for p in parameters]
    rmsprop = torch.optim.RMSprop(parameters, alpha=args.rmsprop_alpha, eps=args.rmsprop_eps)
    norms = []
    for k, (_, after, _, lr) in enumerate(tape.updates):
        rows = slice(k * T, k * T + T)
        rewards = torch.from_numpy(np.sign(tape.rewards[rows]))
        truncations = torch.from_numpy(tape.truncations[rows])
        ends = torch.from_numpy(tape.terminations[rows])
        if not args.bootstrap_truncation:
            ends = ends | truncations
        logits, values = plain_network(parameters, tape.obs[rows])
        with torch.no_grad():
            V = plain_network(parameters, tape.next_obs[rows])[1]
            R, returns = V[-1], []
            for t in reversed(range(T)):
                R = torch.where(truncations[t], V[t], R)
                R = args.gae_lambda * R + (1 - args.gae_lambda) * V[t]
                R = rewards[t] + args.gamma * torch.where(ends[t], 0.0, R)
                returns.insert(0, R)
            returns = torch.stack(returns)
        policy, error = Categorical(logits=logits), returns - values
        chosen = torch.from_numpy(~tape.fire[rows])
        logprobs = policy.log_prob(torch.from_numpy(tape.executed[rows]))
        gain = (error.detach() * logprobs)[chosen].sum() / chosen.numel()
        value_loss, entropy = error.square().mean(), policy.entropy().mean()
        rmsprop.zero_grad()
        (args.vf_coef * value_loss - gain - args.ent_coef * entropy).backward()
        norms.append(math.sqrt(sum(p.grad.square().sum().item() for p in parameters)))
        expected_lr = args.learning_rate * (1 - k / 9 if args.anneal_lr else 1)
        assert lr == pytest.approx(expected_lr)
        for p, g in zip(parameters, squares):
            p.grad *= min(1, args.max_grad_norm / norms[-1])
            if not args.torch_rmsprop:
                g.mul_(args.rmsprop_alpha).add_((1 - args.rmsprop_alpha) * p.grad**2)
                p.data -= lr * p.grad / (g + args.rmsprop_eps).sqrt()
        if args.torch_rmsprop:
            rmsprop.param_groups[0]["lr"] = lr
            rmsprop.step()
        before = tape.updates[0][0]
        for i, (p, q, start) in enumerate(zip(parameters, after, before)):
            moved, scale = p.detach() - start, (p.detach() - start).abs().max().item()
            message = f"parameter {i} after update {k}: {{}}".format
            torch.testing.assert_close(
                q - start, moved, rtol=1e-2, atol=1e-2 * scale, check_dtype=False, msg=message
            )
        logs = {"losses/policy_loss": -gain, "losses/value_loss": value_loss}
        logs |= {"losses/entropy": entropy, "losses/grad_norm": norms[-1]}
        logs["losses/explained_variance"] = 1 - error.var() / returns.var()
        logs["charts/learning_rate"] = expected_lr
        for tag, value in logs.items():
            points = [v for s, t, v in logged if (s, t) == (15 * k + 15, tag)]
            value = torch.as_tensor(value).item()
            assert points == pytest.approx([value], rel=1e-2, abs=1e-5), (tag, k)
    assert k == 8 and len(parameters[4]) == 32 and min(norms) < args.max_grad_norm < max(norms)


def test_actions_are_drawn_from_the_policy(tmp_path):
    """Chi square over a run, 0.999 quantile for 3 degrees of freedom; each action is explored."""
    options = dict(num_steps=100, total_timesteps=1600, checkpoint_interval=10**6)
    tape = Tape(tmp_path, **options, learning_rate=1e-6)
    with torch.no_grad():
        logits, _ = plain_network([p.double() for p in tape.updates[0][0]], tape.obs)
    counts = np.bincount(tape.given.flatten(), minlength=4)
    expected = logits.softmax(-1).sum((0, 1)).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3, (counts, expected)


def test_bf16_differs_from_float32_by_its_precision(tmp_path):
    runs = [Tape(tmp_path / str(bf16), bf16=bf16, total_timesteps=20) for bf16 in (False, True)]
    moves = [[q - p for p, q in zip(*run.updates[0][:2])] for run in runs]
    exact, short = (torch.cat([x.flatten() for x in move]) for move in moves)
    assert short.dtype == torch.float32 and not torch.equal(exact, short)
    assert torch.cosine_similarity(exact, short, dim=0) > 0.9


def test_averages_of_dead_units_are_flushed_to_zero(tmp_path, no_evaluation):
    flushes = torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)
    train(a2c, tmp_path, **SMALL | dict(total_timesteps=20))
    product = torch.full((8,), 1e-30) * 1e-9
    assert bool((product.view(torch.int32) != 0).any()) == (not flushes)


# Runs: checkpoints, resume, evaluation


def test_checkpoints_are_at_the_first_rollout_after_each_interval(tmp_path):
    tape = Tape(tmp_path)
    assert [row * 4 for row in tape.resets] == [0, 80, 140]
    kept = sorted(int(path.stem[-12:]) for path in tmp_path.glob("checkpoint_*"))
    assert kept == [140, 200]


def test_episodes_are_logged_unclipped_and_losses_by_interval(tmp_path, limit_games, logged):
    limit_games(400)
    flags = dict(env_id="ALE/SpaceInvaders-v5", total_timesteps=810, checkpoint_interval=10**6)
    train(a2c, tmp_path, **SMALL | flags | dict(log_interval=3))
    points = {tag: {s: v for s, t, v in logged if t == tag} for _, tag, _ in logged}
    assert points["charts/episodic_length"] == {400: 100, 800: 100}
    returns = points["charts/episodic_return"]
    assert list(returns) == [400, 800] and max(returns.values()) > 20
    assert list(points["eval/episodic_return"]) == [820]
    assert list(points["losses/entropy"]) == [*range(60, 820, 60), 820]


def test_seeds_differ_between_runs_checkpoints_and_evaluation(tmp_path, monkeypatch):
    seeds = []

    def reset(envs, seed, *arguments, reset=a2c.AtariEnvs.reset):
        seeds.append(seed)
        return reset(envs, seed, *arguments)

    monkeypatch.setattr(a2c.AtariEnvs, "reset", reset)
    monkeypatch.setattr(a2c, "EVAL_STEPS", 3)
    for seed in (1, 2):
        train(a2c, tmp_path / str(seed), **SMALL | dict(seed=seed))
    train(a2c, tmp_path / "again", **SMALL | dict(seed=2))
    a2c.evaluate(make_args(), load(tmp_path / "1" / "checkpoint_000000000140.pt"), tmp_path)
    assert len(set(seeds)) == 9 and seeds[4:8] == seeds[8:12], seeds
    assert_same(*(load(tmp_path / name / "model.pt") for name in ("2", "again")))


@pytest.mark.parametrize("greedy", [False, True])
def test_evaluation_counts_the_first_episode_of_each_environment(tmp_path, limit_games, greedy):
    limit_games(250)
    args = make_args(env_id="ALE/SpaceInvaders-v5", eval_episodes=3, greedy=greedy)
    envs = a2c.AtariEnvs(args, 1)
    agent = a2c.Agent(envs.obs_shape, envs.num_actions, 4)
    agent.policy_head.bias.data[2] = 0.5  # nearly uniform, but greedy always the same action
    model = {"agent": agent.state_dict(), "global_step": 0}
    episodes, actions = [], []

    def step(self, given, step=a2c.AtariEnvs.step):
        result = step(self, given)
        if len(actions) % 62 == 20:  # a second episode of environment 1
            self.episodes = self.episodes | {1: (7.0, 20)}
        actions.append(given)
        episodes.append(self.episodes)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a2c.AtariEnvs, "step", step)
        returns = a2c.evaluate(args, model, tmp_path)
    assert returns == [episodes[-1][0][0], 7.0, episodes[-1][2][0]] and len(actions) == 63
    assert (np.unique(actions).tolist() == [2]) == greedy
    assert max(returns) > 1  # unclipped
    again = a2c.evaluate(args, model, tmp_path)
    assert again[::2] == returns[::2]


def test_the_model_is_saved_before_a_failing_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(a2c, "evaluate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(a2c, tmp_path, **SMALL)
    assert load(tmp_path / "model.pt")["global_step"] == 200


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    """In the last of ten updates; the checkpoint before it stays the newest."""

    def a2c_loss(*rollout, a2c_loss=a2c.a2c_loss):
        loss, metrics = a2c_loss(*rollout)
        calls.append(loss)
        return loss * (math.nan if len(calls) == 10 else 1), metrics

    calls = []
    monkeypatch.setattr(a2c, "a2c_loss", a2c_loss)
    with pytest.raises(FloatingPointError, match="200"):
        train(a2c, tmp_path, **SMALL)
    checkpoint = a2c.load_checkpoint(tmp_path)
    assert checkpoint["global_step"] == 140 and not (tmp_path / "model.pt").exists()
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


def test_a_killed_run_resumes_exactly(tmp_path):
    flags = SMALL | dict(total_timesteps=600, checkpoint_interval=170)
    del flags["cuda"]
    flags = ["--no-cuda", *(f"--{name.replace('_', '-')}={x}" for name, x in flags.items())]
    subprocess.run(command("a2c_atari", *flags, "--run-folder", tmp_path / "whole"), check=True)
    seed, kills = int(time.time()), 0
    delays = np.random.default_rng(seed).uniform(0, 1, 2)
    folder = tmp_path / "killed"
    while not (folder / "result.json").exists():
        process = subprocess.Popen(command("a2c_atari", *flags, "--run-folder", folder))
        while process.poll() is None:
            time.sleep(0.02)
            if kills < 2 and len(list(folder.glob("checkpoint_*.pt"))) > kills:
                time.sleep(delays[kills])
                process.kill()
                kills += 1
        assert kills <= 2 and process.returncode in (0, -signal.SIGKILL), f"seed {seed}"
    for name in ("model.pt", "checkpoint_000000000600.pt"):
        assert_same(load(tmp_path / "whole" / name), load(folder / name), f"seed {seed}: {name}")


# What users change


@pytest.fixture
def use(monkeypatch, no_evaluation):
    def use(**parts):
        for name, value in parts.items():
            monkeypatch.setattr(a2c, name, value)

    return use


class DropoutAgent(a2c.Agent):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.linear.append(nn.Dropout(0.2))


class LSTMAgent(a2c.Agent):
    """An LSTM whose state begins at zero in new episodes; truncated backpropagation per rollout."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.lstm, self.state, self.steps = nn.LSTMCell(512, 512), None, 0

    def forward(self, obs):
        hidden = self.linear(self.convolutions(obs.float() / 255))
        if self.state is None:
            self.state = (torch.zeros(len(obs), 512),) * 2
        ongoing = obs[:, :-1].flatten(1).any(1)[:, None].float()
        state = [x * ongoing for x in self.state]
        if torch.is_grad_enabled() and self.steps % 5 == 0:
            state = [x.detach() for x in state]
        state = self.lstm(hidden, state)
        if torch.is_grad_enabled():
            self.state, self.steps = state, self.steps + 1
        policy = Categorical(logits=self.policy_head(state[0]))
        return policy, self.value_head(state[0]).squeeze(-1)


CHANGES = {
    "nothing": {},
    "dropout": {"Agent": DropoutAgent},
    "LSTM": {"Agent": LSTMAgent},
    "AdamW": {"RMSprop": lambda params, lr, **_: torch.optim.AdamW(params, lr)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_scripts_train_and_resume_exactly(tmp_path, use, change):
    use(**CHANGES[change])
    last = train(a2c, tmp_path / "run", **SMALL) / "checkpoint_000000000200.pt"
    whole = load(last)
    last.unlink()
    torch.rand(3)  # the generator's state must not matter
    assert_same(whole, load(resume(a2c, tmp_path / "run", tmp_path / "resumed") / last.name))
    names = {"exp_avg", "exp_avg_sq", "step"} if change == "AdamW" else {"square_avg"}
    assert all(state.keys() == names for state in whole["optimizer"]["state"].values())


def test_an_lstm_learns_through_the_steps_of_a_rollout(tmp_path, use):
    """The last step's value has a gradient with respect to the first step's state."""

    class Agent(LSTMAgent):
        def forward(self, obs):
            policy, value = super().forward(obs)
            if torch.is_grad_enabled():
                steps.append((self.state[0], value))
            return policy, value

    def update(*arguments, update=a2c.update):
        (grad,) = torch.autograd.grad(steps[-1][1].sum(), steps[-5][0], retain_graph=True)
        grads.append(grad.abs().sum().item())
        return update(*arguments)

    steps, grads = [], []
    use(Agent=Agent, update=update)
    train(a2c, tmp_path, **SMALL)
    assert len(grads) == 10 and min(grads) > 0


def test_frozen_layers_stay_and_a_changing_coefficient_is_seen(tmp_path, use):
    class Agent(a2c.Agent):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.convolutions.requires_grad_(False)

    def a2c_loss(*rollout, a2c_loss=a2c.a2c_loss):
        loss, metrics = a2c_loss(*rollout)
        losses.append(loss.item())  # a print or a breakpoint
        return loss * (len(losses) <= 2), metrics

    def update(agent, *arguments, update=a2c.update):
        states.append({name: x.clone() for name, x in agent.state_dict().items()})
        return update(agent, *arguments)

    losses, states = [], []
    use(Agent=Agent, a2c_loss=a2c_loss, update=update)
    train(a2c, tmp_path, **SMALL)
    assert len(losses) == len(states) == 10
    moved = {name for name in states[0] if not torch.equal(states[0][name], states[2][name])}
    assert moved == {name for name in states[0] if not name.startswith("convolutions")}
    assert_same(states[2], states[9])


def test_an_optimizer_of_unsaved_parameters_is_an_error(tmp_path, use):
    class Agent(a2c.Agent):
        def parameters(self, recurse=True):
            return [*super().parameters(), nn.Parameter(torch.ones(1))]

    use(Agent=Agent)
    with pytest.raises(SystemExit, match=r"error: .*optimizer"):
        train(a2c, tmp_path, **SMALL)


@pytest.mark.quick
@pytest.mark.parametrize("flags", [dict(checkpoint_interval=19), dict(num_envs=0), dict(seed=-1)])
def test_wrong_values_are_refused_before_a_folder_is_made(tmp_path, flags):
    with pytest.raises(SystemExit, match=r"^error: "):
        train(a2c, tmp_path / "run", **SMALL | dict(**flags))
    assert not (tmp_path / "run").exists()


def test_two_threads_do_not_spin_by_default():
    """OpenMP reads the variable as torch is imported."""
    code = "import a2c_atari, os; print(os.environ['OMP_WAIT_POLICY'])"
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    cwd = Path(a2c.__file__).parent
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True)
    assert result.stdout == b"PASSIVE\n", result.stderr
