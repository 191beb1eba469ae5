"""variants/dqn_per_atari: the equations of each patch, learning, exact resume, evaluation."""

import importlib.util
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import vectors_reader
from conftest import ROOT, assert_same, load, run
from test_dqn_per_atari import SMALL, Tiny, make_batch
from torch import nn

quick, ROWS = pytest.mark.quick, np.arange(8)
NAMES = ("vectors", "c51", "qr", "munchausen", "noisy", "live_learning_rate", "pqn")
LEARNS = SMALL | dict(total_timesteps=960, train_frequency=2, gamma=0.5, learning_rate=1e-3)
LEARNS |= dict(buffer_size=900, target_network_frequency=80, end_fraction=0.8, eval_epsilon=0.0)
LEARNS |= dict(checkpoint_interval=330, num_minibatches=2, update_epochs=4, dueling=True)


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """The patched scripts as modules, by name."""
    modules = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / "dqn_per_atari.py", folder)
        patch = ROOT / "variants" / "dqn_per_atari" / f"{name}.patch"
        subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
        spec = importlib.util.spec_from_file_location(f"dqn_{name}", folder / "dqn_per_atari.py")
        modules[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    return modules


def train(module, folder, resumed=None, **flags):
    """Train, or resume from a checkpoint in a new folder; the final checkpoint."""
    if resumed:
        folder.mkdir(exist_ok=True)
        shutil.copy(resumed, folder)
    args = {name: x for name, x in flags.items() if name in module.Args.__annotations__}
    module.train(module.Args(**args), folder, module.load_checkpoint(resumed) if resumed else None)
    return load(max(folder.glob("checkpoint_*.pt")))


@pytest.mark.parametrize("name", NAMES)
def test_learns_resumes_evaluates(variants, monkeypatch, tmp_path, name):
    module, whole = variants[name], tmp_path / "whole"

    class Small(module.QNetwork):  # takes less time
        def __init__(self, *args):
            super().__init__(*args)
            layers = nn.AvgPool2d(42), nn.Flatten(), nn.Linear(16, 512), nn.ReLU()
            self.trunk = nn.Sequential(*layers)

    if name != "vectors":
        monkeypatch.setattr(module, "AtariVectorEnv", Tiny)
        monkeypatch.setattr(module, "QNetwork", Small)
    end = train(module, whole, **LEARNS)
    middle = whole / "checkpoint_000000000672.pt"
    assert any(not x.equal(end["agent"][key]) for key, x in load(middle)["agent"].items())
    assert_same(train(module, tmp_path / "resumed", middle, **LEARNS), end)
    model = module.load_checkpoint(whole / "model.pt")
    returns = module.evaluate(module.Args(**model["args"]), model, whole)
    assert returns == json.loads((whole / "result.json").read_text())["episodic_return"]
    assert name == "vectors" or np.mean(returns) > 0.9 * Tiny.best  # half of it by chance


@pytest.mark.timeout(900)
def test_vectors_learns_cartpole(variants, tmp_path):
    """In less than two minutes on an idle core."""
    run(variants["vectors"].__file__, "--eval-episodes", 20, "--run-folder", "run", cwd=tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert np.mean(result["episodic_return"]) > 400


def test_vectors_are_stacked_as_the_network_saw_them(variants):
    module = variants["vectors"]
    args = module.Args(num_envs=3, buffer_size=90, frame_stack=3)
    envs = module.AtariEnvs(args, 3)
    replay, obs = module.Replay(args, envs.envs.single_observation_space), envs.reset(0, None)
    for t in range(200):
        rows, ages = (replay.count + np.arange(3)) % replay.num_rows, envs.lengths.copy()
        new_obs, _, *step, _, _ = envs.step(np.full(3, t % 3 % 2))
        replay.add(obs, envs.executed_actions, *step, ages)
        np.testing.assert_array_equal(replay.stacks(rows), obs)
        obs = new_obs


def losses(module, method, double=True):
    """td_loss of a minibatch, its columns, and outputs: Q(s), Q'(s), Q(s'), Q'(s'); Q(s) again."""
    torch.manual_seed(0)
    networks = [module.QNetwork((4, 84, 84), 6, True) for _ in range(2)]
    for network in networks:
        list(network.parameters())[-2].data.mul_(40)  # far enough apart to disagree
    args, batch = module.Args(), make_batch(8)
    args.double, args.munchausen_tau = double, 0.3  # the entropy would be tiny
    loss, errors, _ = module.td_loss(*networks, batch, args)
    with torch.no_grad():
        x = [getattr(n, method)(batch[k]).double().numpy() for k in (0, 4) for n in networks]
        q_values = networks[0](batch[0])
    columns = [column.numpy() for column in batch[1:4] + batch[5:]]
    return loss.item(), errors.numpy(), columns, x, q_values


@quick
def test_distributional_losses_are_the_vectors(variants):
    for case in vectors_reader.cases("distributional", "c51_projection"):
        x = {name: torch.from_numpy(value) for name, value in case["inputs"].items()}
        x["atoms"] = torch.linspace(x.pop("v_min").item(), x.pop("v_max").item(), 5).double()
        vectors_reader.check(case, "projected", variants["c51"].c51_projection(**x))
    for case in vectors_reader.cases("distributional", "quantile_huber_loss"):
        x = {name: torch.from_numpy(value) for name, value in case["inputs"].items()}
        quantiles = x["quantiles"].requires_grad_()
        values = variants["qr"].quantile_huber_loss(quantiles, x["targets"], x["taus"])
        values.sum().backward()
        vectors_reader.check(case, "losses", values.detach())
        vectors_reader.check(case, "grad_quantiles", quantiles.grad)


@quick
@pytest.mark.parametrize("double", [True, False])
def test_c51_loss_is_a_cross_entropy_and_its_priority_the_divergence(variants, double):
    loss, errors, (actions, *step, weights), x, q_values = losses(variants["c51"], "logits", double)
    p, _, next_q, next_p = (np.exp(y - np.logaddexp.reduce(y, 2, keepdims=True)) for y in x)
    z = np.linspace(-10, 10, 51)
    np.testing.assert_allclose(q_values, p @ z, rtol=1e-4, atol=1e-4)
    next_p = next_p[ROWS, ((next_q if double else next_p) @ z).argmax(1)]
    m = variants["c51"].c51_projection(*map(torch.from_numpy, (next_p, *step, z))).numpy()
    logs = np.log(p[ROWS, actions])
    assert loss == pytest.approx(-(weights * (m * logs).sum(1)).mean(), rel=1e-4)
    divergences = (m * (np.log(m + 1e-300) - logs)).sum(1)
    np.testing.assert_allclose(errors, divergences, rtol=1e-3, atol=1e-4)


@quick
@pytest.mark.parametrize("double", [True, False])
def test_qr_loss(variants, double):
    loss, errors, columns, x, q_values = losses(variants["qr"], "quantiles", double)
    actions, returns, discounts, weights = columns
    np.testing.assert_allclose(q_values, x[0].mean(2), rtol=1e-4, atol=1e-4)
    theta, best = x[0][ROWS, actions], x[2 if double else 3].mean(2).argmax(1)
    y, taus = returns[:, None] + discounts[:, None] * x[3][ROWS, best], np.arange(0.5, 200) / 200
    expected = variants["qr"].quantile_huber_loss(*map(torch.from_numpy, (theta, y, taus))).numpy()
    assert loss == pytest.approx((weights * expected).mean(), rel=1e-4)
    np.testing.assert_allclose(errors, y.mean(1) - theta.mean(1), atol=1e-3)


@quick
def test_munchausen_target(variants):
    _, td_errors, (actions, rewards, discounts, _), x, _ = losses(variants["munchausen"], "forward")
    logs = [y / 0.3 - np.logaddexp.reduce(y / 0.3, 1, keepdims=True) for y in x]
    bonuses = 0.9 * np.clip(0.3 * logs[1][ROWS, actions], -1, 0)
    assert min(bonuses) == -0.9 < max(bonuses)  # some are clipped
    soft_values = (np.exp(logs[3]) * (x[3] - 0.3 * logs[3])).sum(1)
    deltas = rewards + bonuses + discounts * soft_values - x[0][ROWS, actions]
    np.testing.assert_allclose(td_errors, deltas, rtol=1e-3, atol=1e-3)


@quick
def test_noisy_layer(variants):
    """Noise of rank one with the moments of f(x) f(y); none at sigma 0 and in evaluation."""
    torch.manual_seed(0)
    layer, identity = variants["noisy"].NoisyLinear(300, 200), torch.eye(301)[:, :300]
    plain = nn.functional.linear(identity, layer.weight, layer.bias).detach()
    assert layer.weight.abs().max().item() == pytest.approx(300**-0.5, rel=1e-3)
    noise, other = (((layer(identity) - plain) / (0.5 * 300**-0.5)).detach() for _ in range(2))
    assert not noise.isclose(other).any(dim=1).all()
    weights, bias = noise[:300] - noise[300], noise[300]  # rows: of x_i
    assert torch.linalg.matrix_rank(weights, rtol=1e-3) == 1
    for f in ((weights / bias).median(dim=1).values, bias):  # f(x)^2 = |x|: mean sqrt(2 / pi)
        assert (f**2).mean().item() == pytest.approx((2 / np.pi) ** 0.5, abs=0.15)
        assert f.mean().item() == pytest.approx(0, abs=0.2)
    assert_same(layer.eval()(identity).detach(), plain)
    for sigma in (layer.weight_sigma, layer.bias_sigma):
        sigma.data.zero_()
    torch.testing.assert_close(layer.train()(identity), plain)


@quick
def test_pqn_returns_are_the_forward_view(variants):
    """(1 - lambda) sum_n lambda^{n-1} G^(n), until an episode's or the rollout's end."""
    rng = np.random.default_rng(0)
    rewards, next_values, dice, dice_2 = rng.normal(size=(4, 7, 50))
    columns = rewards, next_values, dice > 1, dice_2 > 1
    returns = variants["pqn"].lambda_returns(*map(torch.from_numpy, columns), 0.9, 0.6)
    for t, i in np.ndindex(7, 50):
        total, expected = 0.0, 0.0
        for n, (reward, next_value, *ends) in enumerate(zip(*(x[t:, i] for x in columns))):
            total += 0.9**n * reward
            over = any(ends) or t + n == 6
            n_step = total + 0.9 ** (n + 1) * next_value * (not ends[0])
            expected += 0.6**n * (1 if over else 0.4) * n_step
            if over:
                break
        assert returns[t, i].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("value", ["5e-05", "-1", "NaN", "1e99", '"x"', "{"])
def test_live_learning_rate(variants, monkeypatch, tmp_path, value):
    """Taken over when losses are logged, and exact, also when killed before the file is deleted."""
    module, text = variants["live_learning_rate"], f'\ufeff{{"learning_rate": {value}}}'
    progress, good = module.Run.progress, value == "5e-05"

    def progress_and_write(self, step):
        progress(self, step)
        if step == 96:
            (self.folder / "live.json").write_text(text)

    monkeypatch.setattr(module, "AtariVectorEnv", Tiny)
    monkeypatch.setattr(module.Run, "progress", progress_and_write)
    flags, changed = SMALL | dict(checkpoint_interval=10**6), "whole/checkpoint_000000000096.pt"
    end = train(module, tmp_path / "whole", **flags)
    assert not (tmp_path / "whole" / "live.json").exists()
    assert end["optimizer"]["param_groups"][0]["lr"] == (5e-5 if good else 1e-4)
    assert (tmp_path / changed).exists() == good  # a checkpoint of its own
    if good:
        assert_same(train(module, tmp_path / "after", tmp_path / changed, **flags), end)
        (tmp_path / "before").mkdir()
        (tmp_path / "before" / "live.json").write_text(text)
        assert_same(train(module, tmp_path / "before", tmp_path / changed, **flags), end)
