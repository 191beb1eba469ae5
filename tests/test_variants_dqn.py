"""variants/dqn_per_atari: the equations of each patch, learning, exact resume, evaluation."""

import json

import numpy as np
import pytest
import torch
from conftest import assert_resumes, assert_same, cases, check, load, resume, train
from test_dqn_per_atari import SMALL, Tiny, make_batch
from torch import nn

quick, ROWS = pytest.mark.quick, np.arange(8)
LEARNS = SMALL | dict(total_timesteps=960, train_frequency=2, eval_epsilon=0.0, learning_rate=1e-3)
LEARNS |= dict(buffer_size=900, target_network_frequency=80, exploration_fraction=0.8, gamma=0.5)
LEARNS |= dict(checkpoint_interval=330, num_minibatches=2, update_epochs=4, dueling=True)


@pytest.fixture
def variant(patched):
    return lambda name: patched("dqn_per_atari", name)


def score(folder):
    return np.mean(json.loads((folder / "result.json").read_text())["episodic_return"])


@pytest.mark.parametrize("name", ["c51", "qr", "munchausen", "noisy", "pqn"])
def test_learns_and_resumes(variant, monkeypatch, tmp_path, name):
    module = variant(name)

    class Small(module.QNetwork):  # takes less time
        def __init__(self, *args):
            super().__init__(*args)
            layers = nn.AvgPool2d(42), nn.Flatten(), nn.Linear(16, 512), nn.ReLU()
            self.trunk = nn.Sequential(*layers)

        def forward(self, obs):
            assert self.training == (len(obs) != 2)  # of the evaluation
            return super().forward(obs)

    monkeypatch.setattr(module, "AtariVectorEnv", Tiny)
    monkeypatch.setattr(module, "QNetwork", Small)
    flags = {flag: value for flag, value in LEARNS.items() if hasattr(module.Args, flag)}
    assert score(assert_resumes(module, tmp_path, **flags)) > 0.9 * Tiny.best  # half by chance


def test_vectors_learns_cartpole_and_resumes(variant, tmp_path):
    """A random policy's return is 20."""
    flags = dict(checkpoint_interval=36_000, cuda=False)
    assert score(assert_resumes(variant("vectors"), tmp_path, **flags)) >= 400


def losses(module, method, double=True):
    """td_loss of a minibatch, its columns, and outputs: Q(s), Q'(s), Q(s'), Q'(s'); Q(s) again."""
    torch.manual_seed(0)
    networks = [module.QNetwork((4, 84, 84), 6, True) for _ in range(2)]
    for network in networks:
        list(network.parameters())[-2].data.mul_(40)  # far enough apart to disagree
    args, batch = module.Args(), make_batch(8)
    vars(args).update(double=double, munchausen_alpha=0.7, munchausen_clip=-0.8, munchausen_tau=0.3)
    loss, errors, metrics = module.td_loss(*networks, batch, args)
    with torch.no_grad():
        x = [getattr(n, method)(batch[k]).double().numpy() for k in (0, 4) for n in networks]
        q_values = networks[0](batch[0])
        assert module.QNetwork((4, 84, 84), 6, False)(batch[0]).shape == (8, 6)
    taken = q_values[range(8), batch[1]].mean()
    torch.testing.assert_close(metrics["q_values"], taken, rtol=1e-4, atol=1e-4)
    value = networks[0].value(networks[0].trunk(batch[0].float() / 255)).squeeze(1)
    torch.testing.assert_close(getattr(networks[0], method)(batch[0]).mean(1), value)
    columns = [column.numpy() for column in batch[1:4] + batch[5:]]
    return loss.item(), errors.numpy(), columns, x, q_values


@quick
def test_distributional_losses_are_the_vectors(variant):
    for case in cases("distributional", "c51_projection"):
        x = {name: torch.from_numpy(value) for name, value in case["inputs"].items()}
        x["atoms"] = torch.linspace(x.pop("v_min").item(), x.pop("v_max").item(), 5).double()
        check(case, "projected", variant("c51").c51_projection(**x))
    for case in cases("distributional", "quantile_huber_loss"):
        x = {name: torch.from_numpy(value) for name, value in case["inputs"].items()}
        quantiles = x["quantiles"].requires_grad_()
        values = variant("qr").quantile_huber_loss(quantiles, x["targets"], x["taus"])
        values.sum().backward()
        check(case, "losses", values.detach())
        check(case, "grad_quantiles", quantiles.grad)


@quick
@pytest.mark.parametrize("double", [True, False])
def test_c51_loss_is_a_cross_entropy_and_its_priority_the_divergence(variant, double):
    loss, errors, (actions, *step, weights), x, q_values = losses(variant("c51"), "logits", double)
    p, _, next_q, next_p = (np.exp(y - np.logaddexp.reduce(y, 2, keepdims=True)) for y in x)
    z = np.linspace(-10, 10, 51)
    np.testing.assert_allclose(q_values, p @ z, rtol=1e-4, atol=1e-4)
    next_p = next_p[ROWS, ((next_q if double else next_p) @ z).argmax(1)]
    m = variant("c51").c51_projection(*map(torch.from_numpy, (next_p, *step, z))).numpy()
    logs = np.log(p[ROWS, actions])
    assert loss == pytest.approx(-(weights * (m * logs).sum(1)).mean(), rel=1e-4)
    divergences = (m * (np.log(m + 1e-300) - logs)).sum(1)
    np.testing.assert_allclose(errors, divergences, rtol=1e-3, atol=1e-4)


@quick
@pytest.mark.parametrize("double", [True, False])
def test_qr_loss(variant, double):
    loss, errors, columns, x, q_values = losses(variant("qr"), "quantiles", double)
    actions, returns, discounts, weights = columns
    np.testing.assert_allclose(q_values, x[0].mean(2), rtol=1e-4, atol=1e-4)
    theta, best = x[0][ROWS, actions], x[2 if double else 3].mean(2).argmax(1)
    y, taus = returns[:, None] + discounts[:, None] * x[3][ROWS, best], np.arange(0.5, 200) / 200
    expected = variant("qr").quantile_huber_loss(*map(torch.from_numpy, (theta, y, taus))).numpy()
    assert loss == pytest.approx((weights * expected).mean(), rel=1e-4)
    np.testing.assert_allclose(errors, y.mean(1) - theta.mean(1), atol=1e-3)


@quick
def test_munchausen_target(variant):
    _, td_errors, (actions, rewards, discounts, _), x, _ = losses(variant("munchausen"), "forward")
    logs = [y / 0.3 - np.logaddexp.reduce(y / 0.3, 1, keepdims=True) for y in x]
    bonuses = 0.7 * np.clip(0.3 * logs[1][ROWS, actions], -0.8, 0)
    assert min(bonuses) == 0.7 * -0.8 < max(bonuses)  # some are clipped
    soft_values = (np.exp(logs[3]) * (x[3] - 0.3 * logs[3])).sum(1)
    deltas = rewards + bonuses + discounts * soft_values - x[0][ROWS, actions]
    np.testing.assert_allclose(td_errors, deltas, rtol=1e-3, atol=1e-3)
    with pytest.raises(SystemExit, match="n-step must be 1"):
        variant("munchausen").train(variant("munchausen").Args(n_step=2), None, None)


@quick
def test_noisy_layer(variant):
    """Noise of rank one with the moments of f(x) f(y); none at sigma 0 and in evaluation."""
    torch.manual_seed(0)
    module, obs = variant("noisy"), torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    network = module.QNetwork((4, 84, 84), 6, True)
    assert not any(type(x) is nn.Linear for x in network.modules())
    assert not network(obs).equal(network(obs)) and network.eval()(obs).equal(network(obs))
    layer, identity = module.NoisyLinear(300, 200), torch.eye(301)[:, :300]
    plain = nn.functional.linear(identity, layer.weight, layer.bias).detach()
    noise, other = (((layer(identity) - plain) / (0.5 * 300**-0.5)).detach() for _ in range(2))
    assert not noise.isclose(other).any(dim=1).all() and module.Args().start_epsilon == 0
    weights, bias = noise[:300] - noise[300], noise[300]  # rows: of x_i
    assert torch.linalg.matrix_rank(weights, rtol=1e-3) == 1 and len([*layer.parameters()]) == 4
    for f in ((weights / bias).median(dim=1).values, bias):  # f(x)^2 = |x|: mean sqrt(2 / pi)
        assert (f**2).mean().item() == pytest.approx((2 / np.pi) ** 0.5, abs=0.15)
    assert_same(layer.eval()(identity).detach(), plain)
    layer.weight_sigma.data.zero_()
    layer.bias_sigma.data.zero_()
    torch.testing.assert_close(layer.train()(identity), plain)


@quick
def test_pqn_network_loss_and_returns(variant):
    module, obs = variant("pqn"), torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    network, actions, returns = module.QNetwork((4, 84, 84), 6, False), [5, 0, 2], torch.randn(3)
    assert sum(isinstance(x, nn.LayerNorm) for x in network.modules()) == 4
    loss, _ = module.td_loss(network, obs, torch.tensor(actions), returns)
    errors = returns - network(obs)[range(3), actions]
    torch.testing.assert_close(loss, errors.square().mean() / 2)
    for case in cases("qmix", "td_lambda_targets"):
        rewards, next_values, terminations, mask, gamma, td_lambda = case["inputs"].values()
        last = mask & ~np.concatenate([mask[1:], np.zeros_like(mask[:1])])
        columns = map(torch.from_numpy, (rewards, next_values, terminations, last & ~terminations))
        returns = variant("pqn").lambda_returns(*columns, gamma.item(), td_lambda.item())
        check(case, "targets", returns.where(torch.from_numpy(mask), 0), "float32")


def test_pqn_bootstraps_from_the_largest_value(variant, monkeypatch, tmp_path):
    module = variant("pqn")

    def returns_of(rewards, next_values, terminations, truncations, *coefficients):
        assert coefficients == (0.9, 0.3)
        assert (next_values == 200).all() and (terminations.sum(), truncations.sum()) == (28, 4)
        return rewards

    def forward(network, obs):
        return 0 * network.head.bias + torch.stack([(x := obs[:, -1].amax((1, 2))) / 2, x], 1)

    monkeypatch.setattr(module.QNetwork, "forward", forward)
    monkeypatch.setattr(module, "AtariVectorEnv", Tiny)
    monkeypatch.setattr(module, "lambda_returns", returns_of)
    flags = dict(num_envs=4, num_minibatches=4, gamma=0.9, td_lambda=0.3, eval_episodes=2)
    train(module, tmp_path, **flags, total_timesteps=256)


def test_live_learning_rate(variant, monkeypatch, tmp_path, capsys):
    """Taken over when losses are logged, and exact, also when killed before the file is deleted."""
    module, live = variant("live_learning_rate"), '\ufeff{"learning_rate": 5e-05}'
    for nonsense in ("-1", "NaN", "1e99", '"x"', "{"):
        (tmp_path / "live.json").write_text(f'{{"learning_rate": {nonsense}}}')
        assert module.live_learning_rate(tmp_path) is None, nonsense
        assert not (tmp_path / "live.json").exists() and "ignored" in capsys.readouterr().err
    progress = module.Run.progress

    def progress_and_write(self, step):
        progress(self, step)
        if step == 96:
            (self.folder / "live.json").write_text(live)

    monkeypatch.setattr(module, "AtariVectorEnv", Tiny)
    monkeypatch.setattr(module.Run, "progress", progress_and_write)
    whole = train(module, tmp_path / "whole", **SMALL | dict(checkpoint_interval=10**6))
    assert not (whole / "live.json").exists()
    middle, last = sorted(whole.glob("checkpoint_*.pt"))
    expected, args = load(last), module.load_checkpoint(last)["args"]
    assert load(middle)["global_step"] == 96 and expected["global_step"] == 220
    assert expected["optimizer"]["param_groups"][0]["lr"] == args["learning_rate"] == 5e-5
    last.unlink()
    assert_same(load(resume(module, whole, tmp_path / "after") / last.name), expected)
    (whole / "live.json").write_text(live)
    assert_same(load(resume(module, whole, tmp_path / "before") / last.name), expected)
