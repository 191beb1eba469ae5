"""a2c_atari.py: its mathematics, its runs, and what users change in it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, cases, check, load, logged, resume, train
from torch import nn
from torch.distributions import Categorical

import a2c_atari as a2c

# Rollouts of 10 steps; the interval of the checkpoints is no multiple of it
SMALL = dict(num_envs=2, num_steps=5, total_timesteps=100, checkpoint_interval=35, conv3_filters=4)
SMALL |= dict(eval_episodes=2, env_threads=1, torch_threads=1, cuda=False, log_interval=1)


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_returns(precision):
    """As in `train`: gamma V(final) is added to the last reward of a truncated episode."""
    for case in cases("gae"):
        inputs = {name: torch.tensor(x) for name, x in case["inputs"].items()}
        discounts = inputs["gamma"].item(), float(inputs.get("gae_lambda", 1))
        names = ("rewards", "values", "next_values")
        rewards, values, next_values = (inputs[x].to(getattr(torch, precision)) for x in names)
        values.requires_grad_()  # the returns are constants
        truncated = inputs["truncations"] & ~inputs["terminations"]
        dones = inputs["truncations"] | inputs["terminations"]
        rewards = rewards + discounts[0] * next_values * truncated
        returns = a2c.compute_returns(rewards, values, next_values[-1], dones, *discounts)
        check(case, "returns", returns, precision)


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_loss_and_gradient(precision):
    case = list(cases("a2c_a3c", "a2c_loss"))[-1]  # its advantages are returns minus values
    names = ("logits", "values", "returns")
    inputs = [torch.tensor(case["inputs"][x]).to(getattr(torch, precision)) for x in names]
    logits, values = (x.requires_grad_() for x in inputs[:2])
    policy = Categorical(logits=logits)
    logprobs = policy.log_prob(torch.tensor(case["inputs"]["actions"]))
    args = SimpleNamespace(**{x: case["inputs"][x].item() for x in ("ent_coef", "vf_coef")})
    loss, metrics = a2c.a2c_loss(logprobs, values, policy.entropy(), inputs[2], args)
    loss.backward()
    for name, x in (metrics | dict(loss=loss.detach())).items():
        check(case, name, x, precision)
    check(case, "grad_logits", logits.grad, precision)
    check(case, "grad_values", values.grad, precision)


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_rmsprop_is_tensorflows(precision):
    for case in cases("rmsprop"):
        inputs, dtype = case["inputs"], getattr(torch, precision)
        if inputs["initial_square_avg"] == 0:
            continue
        parameter = nn.Parameter(torch.tensor(inputs["theta"]).to(dtype))
        settings = [inputs[name].item() for name in ("learning_rate", "alpha", "eps")]
        optimizer = a2c.RMSprop([parameter], *settings)
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
        torch.testing.assert_close(singular_values - gain, 0 * singular_values, rtol=0, atol=1e-4)
        assert (layer.bias == 0).all()
    policy, values = agent(torch.randint(256, (2, 3, 84, 100), dtype=torch.uint8))
    assert policy.sample().shape == values.shape == policy.entropy().shape == (2,)


class Tape:
    """A run without its evaluation: of its steps arrays (S, N, ...), of its updates the results."""

    def __init__(self, folder, **options):
        self.args, self.parameters, self.rates, steps = a2c.Args(**SMALL | options), [], [], []

        class AtariEnvs(a2c.AtariEnvs):
            def reset(self, *arguments):
                self.obs = super().reset(*arguments)
                return self.obs

            def step(self, actions):
                before = (self.obs, self.fire)
                self.obs, *step = super().step(actions)
                step[2][0] |= step[3][0]  # a lost life in a step that is truncated
                steps.append([*before, self.executed_actions, *step[:4]])
                return self.obs, *step

        def update(agent, optimizer, *arguments, update=a2c.update):
            self.parameters = self.parameters or [copy_of(agent)]
            metrics = update(agent, optimizer, *arguments)
            self.parameters.append(copy_of(agent))
            self.rates.append(optimizer.param_groups[0]["lr"])
            return metrics

        def copy_of(agent):
            return [p.detach().clone() for p in agent.parameters()]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(a2c, "AtariEnvs", AtariEnvs)
            patch.setattr(a2c, "update", update)
            patch.setattr(a2c, "evaluate", lambda *_: [0.0])
            a2c.train(self.args, folder, None)
        names = ("obs", "fire", "actions", "next_obs", "rewards", "terminations", "truncations")
        for i, name in enumerate(names):
            setattr(self, name, np.array([step[i] for step in steps]))


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
OTHER |= dict(vf_coef=0.25, max_grad_norm=0.2, gamma=0.9)
OPTIONS = {"RMSprop": dict(learning_rate=0.1, max_grad_norm=0.1, gamma=0.9), "other": OTHER}


@pytest.mark.parametrize("name", OPTIONS)
def test_updates_are_the_papers_in_float64(tmp_path, limit_games, name):
    """Nine updates: returns, gradients, clipping, parameters and log."""
    limit_games(a2c, 132)
    options = dict(num_envs=3, total_timesteps=121, checkpoint_interval=10**6, conv3_filters=32)
    tape = Tape(tmp_path, **options | OPTIONS[name])
    args, T, points = tape.args, 5, logged(tmp_path)
    assert tape.terminations.any() and tape.truncations.any() and tape.fire.any()
    start = tape.parameters[0]
    parameters = [p.double().requires_grad_() for p in start]
    squares = [torch.ones_like(p) for p in parameters]
    rmsprop = torch.optim.RMSprop(parameters, alpha=args.rmsprop_alpha, eps=args.rmsprop_eps)
    norms = []
    names = ("rewards", "truncations", "terminations", "fire", "actions")
    for k, (after, lr) in enumerate(zip(tape.parameters[1:], tape.rates)):
        rows = slice(k * T, k * T + T)
        columns = [torch.from_numpy(getattr(tape, x)[rows]) for x in names]
        rewards, truncations, ends, fire, actions = columns
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
        gain = (error.detach() * policy.log_prob(actions))[~fire].sum() / fire.numel()
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
        for i, (p, q, first) in enumerate(zip(parameters, after, start)):
            moved, scale = p.detach() - first, (p.detach() - first).abs().max().item()
            message = f"parameter {i} after update {k}: {{}}".format
            close = dict(rtol=1e-2, atol=1e-2 * scale, check_dtype=False, msg=message)
            torch.testing.assert_close(q - first, moved, **close)
        logs = {"losses/policy_loss": -gain, "losses/value_loss": value_loss}
        logs |= {"losses/entropy": entropy, "losses/grad_norm": norms[-1]}
        explained = 1 - error.var() / returns.var()
        logs |= {"losses/explained_variance": explained, "charts/learning_rate": expected_lr}
        for tag, value in logs.items():
            value = torch.as_tensor(value).item()
            assert points[tag][15 * k + 15] == pytest.approx(value, rel=1e-2, abs=1e-5), (tag, k)
    assert k == 8 and len(parameters[4]) == 32 and min(norms) < args.max_grad_norm < max(norms)


def test_actions_are_drawn_from_the_policy(tmp_path):
    """Chi square over a run, 0.999 quantile for 3 degrees of freedom; each action is explored."""
    options = dict(num_envs=4, num_steps=40, total_timesteps=640, checkpoint_interval=10**6)
    tape = Tape(tmp_path, **options, learning_rate=1e-6)
    with torch.no_grad():
        logits, _ = plain_network([p.double() for p in tape.parameters[0]], tape.obs)
    counts = np.bincount(tape.actions[~tape.fire], minlength=4)
    expected = logits.softmax(-1)[~tape.fire].sum(0).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3, (counts, expected)


def test_bf16_differs_from_float32_by_its_precision(tmp_path):
    runs = [Tape(tmp_path / str(bf16), bf16=bf16, total_timesteps=10) for bf16 in (False, True)]
    moves = [[q - p for p, q in zip(*run.parameters)] for run in runs]
    exact, short = (torch.cat([x.flatten() for x in move]) for move in moves)
    assert short.dtype == torch.float32 and not torch.equal(exact, short)
    assert torch.cosine_similarity(exact, short, dim=0) > 0.9
    other = Tape(tmp_path / "other", seed=2, total_timesteps=10)
    assert not other.parameters[0][0].equal(runs[0].parameters[0][0])
    with torch.autocast("cpu", torch.bfloat16):
        policy, values = a2c.Agent((4, 84, 84), 4)(torch.zeros(2, 4, 84, 84, dtype=torch.uint8))
    assert policy.logits.dtype == values.dtype == torch.float32


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run, and the seeds of its resets and of its evaluation's."""
    seeds, folder = [], tmp_path_factory.mktemp("a2c") / "run"

    def reset(envs, seed, *arguments, reset=a2c.AtariEnvs.reset):
        seeds.append(seed)
        return reset(envs, seed, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a2c.AtariEnvs, "reset", reset)
        patch.setattr(a2c, "EVAL_STEPS", 3)
        for path, seed in ((folder, 1), (folder.parent / "other", 2)):
            train(a2c, path, **SMALL, seed=seed)
        # At the step of a reset in training
        a2c.evaluate(a2c.Args(**SMALL), load(folder / "checkpoint_000000000070.pt"), folder)
    return folder, seeds


def test_seeds_checkpoints_and_flags_given_at_a_resume(finished, tmp_path, monkeypatch):
    """And denormals are flushed in training."""
    flushes = torch.set_flush_denormal(True)  # whether this processor can
    torch.set_flush_denormal(False)
    monkeypatch.setattr(a2c, "evaluate", lambda *_: [0.0])
    folder, seeds = finished
    assert len(seeds) == len(set(seeds)) == 9, seeds
    names = sorted(path.name for path in folder.glob("checkpoint_*"))
    assert names == ["checkpoint_000000000070.pt", "checkpoint_000000000100.pt"]
    with pytest.raises(SystemExit, match="--torch-rmsprop"):
        resume(a2c, folder, tmp_path / "other", torch_rmsprop=True)
    folder = resume(a2c, folder, tmp_path / "run", learning_rate=1e-5, total_timesteps=110)
    (group,) = load(folder / "checkpoint_000000000110.pt")["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(1e-5, rel=1e-12)
    assert (torch.full((8,), 1e-30) * 1e-9).view(torch.int32).any() == (not flushes)


def test_episodes_are_logged_unclipped_and_losses_by_interval(tmp_path, limit_games):
    limit_games(a2c, 400)
    flags = dict(env_id="ALE/SpaceInvaders-v5", total_timesteps=405, checkpoint_interval=10**6)
    train(a2c, tmp_path, **SMALL | flags | dict(log_interval=4))
    points = logged(tmp_path)
    assert points["charts/episodic_length"] == {200: 100, 400: 100}
    returns = points["charts/episodic_return"]
    assert list(returns) == [200, 400] and max(returns.values()) > 5
    assert list(points["eval/episodic_return"]) == [410]
    assert [*range(40, 410, 40), 410] == [*points["losses/entropy"]] == [*points["charts/SPS"]]


@pytest.mark.parametrize("greedy", [False, True])
def test_evaluation_counts_first_episodes(tmp_path, monkeypatch, limit_games, capsys, greedy):
    limit_games(a2c, 250)
    args = a2c.Args(**SMALL | dict(env_id="ALE/SpaceInvaders-v5", eval_episodes=3, greedy=greedy))
    agent = a2c.Agent((4, 84, 84), 6, 4)
    agent.policy_head.bias.data[2] = 0.5  # nearly uniform, but greedy always the same action
    model = {"agent": agent.state_dict(), "global_step": 0}
    episodes, actions, modes = [], [], []

    def forward(self, obs, forward=a2c.Agent.forward):
        modes.append(self.training)
        return forward(self, obs)

    def step(self, given, step=a2c.AtariEnvs.step):
        result = step(self, given)
        if len(actions) == 20:  # the rest is a second episode of environment 1
            self.episodes = self.episodes | {1: (7.0, 20)}
        actions.append(given)
        self.lengths[1] = 0  # as if its episodes were short
        self.returns += len(actions) > 63  # in the last evaluation, whose episodes do not end
        episodes.append(self.episodes)
        return result

    monkeypatch.setattr(a2c.Agent, "forward", forward)
    monkeypatch.setattr(a2c.AtariEnvs, "step", step)
    returns = a2c.evaluate(args, model, tmp_path)
    assert returns == [episodes[-1][0][0], 7.0, episodes[-1][2][0]] and len(actions) == 63
    assert (np.unique(actions).tolist() == [2]) == greedy
    assert max(returns) > 1 and not any(modes)  # unclipped, in evaluation mode
    monkeypatch.setattr(a2c, "EVAL_STEPS", 5)
    assert a2c.evaluate(args, model, tmp_path) == [5.0] * 3 and len(actions) == 63 + 5
    output = capsys.readouterr().out
    assert f" +- {np.std(returns):.2f}, 3 episodes" in output
    assert "cut off after 5 " in output and "5.00 +- 0.00, 0 episodes" in output


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    calls = []

    def a2c_loss(*rollout, a2c_loss=a2c.a2c_loss):
        loss, metrics = a2c_loss(*rollout)
        calls.append(loss)
        return loss * (math.nan if len(calls) == 5 else 1), metrics

    monkeypatch.setattr(a2c, "a2c_loss", a2c_loss)
    with pytest.raises(FloatingPointError, match="50"):
        train(a2c, tmp_path, **SMALL | dict(total_timesteps=60))
    checkpoint = a2c.load_checkpoint(tmp_path)
    assert checkpoint["global_step"] == 40 and not (tmp_path / "model.pt").exists()
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


class Changed(a2c.Agent):
    """Dropout, which draws random numbers, layers that are not trained, values (B, 1)."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.linear.append(nn.Dropout(0.2))
        self.convolutions.requires_grad_(False)

    def forward(self, obs):
        policy, value = super().forward(obs)
        return policy, value[:, None]


@pytest.mark.parametrize("anneal_lr", [False, True])
def test_a_changed_script_resumes_exactly(tmp_path, monkeypatch, limit_games, anneal_lr):
    limit_games(a2c, 60)
    optimizer = a2c.RMSprop if anneal_lr else lambda p, lr, **_: torch.optim.AdamW(p, lr)
    monkeypatch.setattr(a2c, "Agent", Changed)
    monkeypatch.setattr(a2c, "evaluate", lambda *_: [0.0])
    monkeypatch.setattr(a2c, "RMSprop", lambda p, lr, **x: optimizer(p, 2 * lr, **x))
    folder = train(a2c, tmp_path / "run", **SMALL, anneal_lr=anneal_lr)
    middle, last = sorted(folder.glob("checkpoint_*.pt"))
    before, whole = load(middle), load(last)
    rate = whole["optimizer"]["param_groups"][0]["lr"]
    assert rate == pytest.approx(2 * 7e-4 * (0.1 if anneal_lr else 1))
    for name, x in whole["agent"].items():
        assert x.equal(before["agent"][name]) == name.startswith("convolutions"), name
    last.unlink()
    torch.rand(3)  # the generator's state must not matter
    assert_same(whole, load(resume(a2c, tmp_path / "run", tmp_path / "resumed") / last.name))


@pytest.mark.quick
@pytest.mark.parametrize("flag, value", [("checkpoint_interval", 9), ("num_envs", 0)])
def test_sizes_that_do_not_fit_are_refused_before_a_folder_is_made(tmp_path, flag, value):
    with pytest.raises(SystemExit, match=r"^error: "):
        train(a2c, tmp_path / "run", **SMALL | {flag: value})
    assert not (tmp_path / "run").exists()
