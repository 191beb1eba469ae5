"""variants/qmix_smac: the equations of each patch, games, short runs, exact resume, evaluation."""

import importlib.util
import itertools
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_same, load, logged, resume, train
from test_qmix_smac import SHAPE, SMALL, make_games, minibatch, random_episodes

quick = pytest.mark.quick
NAMES = ("own_environment", "weighted", "qplex")
PAYOFFS = np.array([[8, -12, -12], [-12, 0, 0], [-12, 0, 0]])  # not monotone: [WQMIX], [QPLEX]


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """The patched scripts as modules, by name."""
    modules = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / "qmix_smac.py", folder)
        patch = ROOT / "variants" / "qmix_smac" / f"{name}.patch"
        subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
        spec = importlib.util.spec_from_file_location(f"qmix_{name}", folder / "qmix_smac.py")
        modules[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    return modules


def returns(folder):
    return json.loads((folder / "result.json").read_text())["episodic_return"]


@pytest.mark.parametrize("name", NAMES)
def test_run_resume_evaluate(variants, monkeypatch, tmp_path, name):
    """A run resumed from its middle equals the whole one; evaluation repeats the final one."""
    module, flags = variants[name], SMALL | dict(total_timesteps=500)
    if name != "own_environment":
        monkeypatch.setattr(module, "make_envs", make_games)
    whole, cut = train(module, tmp_path / "whole", **flags), tmp_path / "cut"
    middle, last = sorted(path.name for path in whole.glob("checkpoint_*.pt"))
    cut.mkdir()
    shutil.copy(whole / middle, cut)
    assert_same(load(resume(module, cut, tmp_path / "resumed") / last), load(whole / last))
    before, after = (load(whole / path)["networks"] for path in (middle, last))
    assert all(not x.equal(after[key]) for key, x in before.items() if "weight" in key)
    model = module.load_checkpoint(whole / "model.pt")
    assert module.evaluate(module.Args(**model["args"]), model, whole) == returns(whole)
    assert all(np.isfinite(list(x.values())).all() for x in logged(whole).values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mixer, best", [("qmix", 8), ("vdn", 7)])
def test_own_environment_learns_the_two_step_game(variants, tmp_path, mixer, best):
    """[QMIX] Sec. 5: QMIX finds the best return, VDN does not. In half a minute on a core."""
    flags = dict(epsilon_finish=1, optimizer="adam", learning_rate=2e-3, updates_per_episode=0.25)
    flags |= dict(mixer=mixer, total_timesteps=6000, target_update_interval=50, test_interval=6000)
    folder = train(variants["own_environment"], tmp_path / "run", **flags)
    assert set(returns(folder)) == {best}


@pytest.mark.parametrize("weighting, alpha, best", [("ow", 0.1, 8), ("cw", 0.1, 8), ("ow", 1, 0)])
def test_weighted_learns_a_game_that_is_not_monotone(variants, weighting, alpha, best):
    """From all joint actions equally often; with weights of 1, a suboptimal one is learned."""
    module, episodes = variants["weighted"], []
    for u in itertools.product(range(3), repeat=2):
        ones, avail = torch.ones(2, 2, 1), torch.ones(2, 2, 3, dtype=torch.bool)
        actions, rewards = torch.tensor([u]).byte(), torch.tensor([[float(PAYOFFS[u])]])
        steps = (ones, ones[:, 0], avail, torch.ones(2).bool(), actions, rewards)
        episodes.append(module.Episode(*steps, torch.ones(1, 1)))
    torch.manual_seed(1)
    args = module.Args(weighting=weighting, alpha=alpha)
    networks = module.Networks(args, module.Shape(2, 3, 1, 1))
    optimizer = torch.optim.Adam(networks.parameters(), lr=2e-3)
    for _ in range(600):
        module.update(networks, networks, optimizer, minibatch(episodes), args)
    inputs = (ones[:1, None], torch.full((1, 1, 2), -1), torch.ones(1, 1).bool())
    qs, _ = networks.agent(*inputs, networks.agent.initial_hidden(1))
    assert PAYOFFS[tuple(qs[0, 0].argmax(dim=-1))] == best


def make_networks(module, args):
    """Networks and target networks with large random parameters."""
    pair = [module.Networks(args, SHAPE).double() for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    for parameter in itertools.chain(*(networks.parameters() for networks in pair)):
        parameter.data.normal_(0, 0.4, generator=generator)
    return pair


def values(agent, episode):
    """Q (T+1, n, A) of one episode."""
    actions = torch.cat([torch.full((1, 3), -1), episode.actions.long()])
    inputs = (episode.obs[:, None], actions[:, None], episode.filled[:, None])
    return agent(*inputs, agent.initial_hidden(1))[0][:, 0].detach()


def best_actions(qs, avail_actions):
    """The greedy available action of each agent (n,), by a loop."""
    legal = [avail.nonzero().flatten().tolist() for avail in avail_actions]
    return [max(us, key=lambda u: q[u].item()) for q, us in zip(qs, legal)]


def pick(qs, u):
    return torch.stack([qs[a, u[a]] for a in range(3)])


@quick
@pytest.mark.parametrize("weighting", ["ow", "cw"])
def test_weighted_loss_by_loops(variants, weighting):
    """[WQMIX] Eqs. (10) to (13)."""
    module, episodes = variants["weighted"], random_episodes([2, 6, 4, 9, 5])
    args, td_losses, central_losses, weights = module.Args(weighting=weighting), [], [], []
    networks, targets = make_networks(module, args)
    loss, metrics = module.qmix_loss(networks, targets, minibatch(episodes), args)
    for episode in episodes:
        agents = (networks.agent, networks.central_agent, targets.central_agent)
        q, central, target = (values(agent, episode) for agent in agents)
        s, best = episode.state, [best_actions(*x) for x in zip(q, episode.avail_actions)]
        for t, u in enumerate(episode.actions.tolist()):
            bootstrap = targets.central_mixer(pick(target[t + 1], best[t + 1]), s[t + 1])
            y = episode.rewards[t] + 0.99 * (1 - episode.terminations[t]) * bootstrap
            q_tot = networks.mixer(pick(q[t], u), s[t])
            if weighting == "ow":
                weights.append(1.0 if q_tot < y else 0.5)
            else:
                highest = targets.central_mixer(pick(target[t], best[t]), s[t])
                weights.append(1.0 if y > highest or u == best[t] else 0.5)
            td_losses.append(weights[-1] * (y - q_tot).item() ** 2)
            q_star = networks.central_mixer(pick(central[t], u), s[t])
            central_losses.append((y - q_star).item() ** 2)
    assert 0.5 < np.mean(weights) < 1
    assert metrics["weight_mean"].item() == pytest.approx(np.mean(weights))
    assert metrics["td_loss"].item() == pytest.approx(np.mean(td_losses), rel=1e-9)
    assert loss.item() == pytest.approx(np.mean(td_losses) + np.mean(central_losses), rel=1e-9)


@quick
def test_qplex_mixer_over_all_joint_actions(variants):
    """Q_tot = V_tot + sum of lambda_i A_i, lambda_i > 0; the greedy joint action is the agents'."""
    module = variants["qplex"]
    for seed in range(10):
        torch.manual_seed(seed)
        mixer = make_networks(module, module.Args())[0].mixer
        for parameter in mixer.parameters():
            parameter.data.normal_(0, 0.5)
        qs, state = 5 * torch.randn(3, 4).double(), torch.randn(6).double()
        w, b = mixer.hyper_w(state).abs() + 1e-10, mixer.hyper_b(state)
        joint = torch.tensor(list(itertools.product(range(4), repeat=3)))
        chosen = qs.gather(1, joint.T).T.clone().requires_grad_()
        best, states = qs.max(dim=1).values, state.expand(len(joint), 6)
        q_tot = mixer(chosen, states, best.expand(len(joint), 3), joint)[:, 0]
        assert joint[q_tot.argmax()].equal(qs.argmax(dim=1)), f"seed {seed}"
        v_tot, importances = (w * best + b).sum(), mixer.importances(states, joint)
        assert q_tot.max().item() == pytest.approx(v_tot.item(), rel=1e-12)
        assert (importances > 0).all() and importances.std(dim=0).min() > 0
        v, phi = mixer.hyper_v(state).abs(), mixer.hyper_phi(state).sigmoid()
        for u, value, importance in zip(joint.tolist(), q_tot, importances):
            one_hot = torch.eye(4).double()[u].flatten()
            score, expected = mixer.hyper_lambda(torch.cat([state, one_hot])).sigmoid(), v_tot
            for i in range(3):
                total = sum(score[3 * k + i] * phi[3 * k + i] * v[k] for k in range(4))
                assert importance[i].item() == pytest.approx(total.item(), rel=1e-6)
                expected = expected + total * w[i] * (qs[i, u[i]] - best[i])
            assert value.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
        (slopes,) = torch.autograd.grad(q_tot.sum(), chosen)
        torch.testing.assert_close(slopes, w.expand_as(slopes))  # none through A_i


@quick
@pytest.mark.parametrize("double_q", [True, False])
def test_qplex_loss_by_loops(variants, double_q):
    """The mixer gets the agents' highest available values, of the same network."""
    module, episodes, squares = variants["qplex"], random_episodes([2, 6, 4]), []
    args = module.Args(double_q=double_q)
    networks, targets = make_networks(module, args)
    loss, _ = module.qmix_loss(networks, targets, minibatch(episodes), args)

    def mix(mixer, qs, state, avail, u):
        return mixer(pick(qs, u), state, pick(qs, best_actions(qs, avail)), torch.tensor(u))

    for episode in episodes:
        q, target = values(networks.agent, episode), values(targets.agent, episode)
        s, avail = episode.state, episode.avail_actions
        for t, u in enumerate(episode.actions.tolist()):
            greedy = best_actions((q if double_q else target)[t + 1], avail[t + 1])
            bootstrap = mix(targets.mixer, target[t + 1], s[t + 1], avail[t + 1], greedy)
            y = episode.rewards[t] + 0.99 * (1 - episode.terminations[t]) * bootstrap
            squares.append((y - mix(networks.mixer, q[t], s[t], avail[t], u)).item() ** 2)
    assert loss.item() == pytest.approx(np.mean(squares), rel=1e-9)


@quick
def test_qplex_represents_what_qmix_cannot(variants):
    """The payoffs that are not monotone, for values whose greedy actions are the best ones."""
    module, errors = variants["qplex"], []
    joint = torch.tensor(list(itertools.product(range(3), repeat=2)))
    inputs = (-(joint > 0).float(), torch.ones(9, 1), torch.zeros(9, 2), joint)
    for name in ("qplex", "qmix"):
        torch.manual_seed(1)
        mixer = module.Networks(module.Args(mixer=name), module.Shape(2, 3, 1, 1)).mixer
        optimizer = torch.optim.Adam(mixer.parameters(), lr=3e-2)
        for _ in range(400):
            loss = (mixer(*inputs)[:, 0] - torch.tensor(PAYOFFS).flatten()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        errors.append(loss.item())
    assert errors[0] < 0.01 and errors[1] > 30
