"""variants/qmix_smac: the equations of each patch, games, short runs, exact resume, evaluation."""

import itertools
import json

import pytest
import torch
from conftest import assert_resumes, load, train
from test_qmix_smac import SMALL, greedy, make_episodes, make_games, make_networks, to_batch, unroll

quick = pytest.mark.quick
AGENTS = [0, 1, 2]


@pytest.mark.parametrize("name", ["own_environment", "weighted", "qplex", "mappo"])
def test_run_resume_evaluate(patched, monkeypatch, tmp_path, name):
    module = patched("qmix_smac", name)
    flags = {k: x for k, x in SMALL.items() if hasattr(module.Args, k)} | {"env_id": "two-step"}
    if name != "own_environment":
        monkeypatch.setattr(module, "make_envs", make_games)
    whole = assert_resumes(module, tmp_path, **flags)
    before, after = (load(path)["networks"] for path in sorted(whole.glob("checkpoint_*.pt")))
    assert all(not x.equal(after[key]) for key, x in before.items() if "weight" in key)


@pytest.mark.parametrize("mixer, best", [("qmix", 8), ("vdn", 7)])
def test_own_environment_learns_the_two_step_game(patched, tmp_path, mixer, best):
    """[QMIX] Sec. 5: QMIX finds the best return, VDN does not. In 20 seconds on a core."""
    flags = dict(env_id="two-step", epsilon_finish=1, learning_rate=2e-3, num_envs=8, td_lambda=0)
    flags |= dict(mixer=mixer, total_timesteps=6000, target_update_interval=50, test_interval=6000)
    folder = train(patched("qmix_smac", "own_environment"), tmp_path / "run", **flags)
    assert set(json.loads((folder / "result.json").read_text())["episodic_return"]) == {best}


def assert_same_gradient(networks, *losses):
    gradients = [torch.autograd.grad(loss, list(networks.parameters())) for loss in losses]
    torch.testing.assert_close(*gradients)


@quick
@pytest.mark.parametrize("weighting", ["ow", "cw"])
def test_weighted_loss_by_loops(patched, weighting):
    """[WQMIX] Eqs. (10) to (13): loss and gradient."""
    module, episodes = patched("qmix_smac", "weighted"), make_episodes([2, 6, 4, 9, 5])
    args, rows = module.Args(weighting=weighting, alpha=0.25, td_lambda=0.0), []
    networks, targets = make_networks(args, module=module)
    loss, metrics = module.qmix_loss(networks, targets, to_batch(episodes), args)
    for episode in episodes:
        agents = (networks.agent, networks.central_agent, targets.central_agent)
        q, central, target = (unroll(agent, episode) for agent in agents)
        s, best = episode.state, [greedy(*x) for x in zip(q, episode.avail_actions)]
        for t, u in enumerate(episode.actions.tolist()):
            bootstrap = targets.central_mixer(target[t + 1, AGENTS, best[t + 1]], s[t + 1])
            y = episode.rewards[t] + 0.99 * (1 - episode.terminations[t]) * bootstrap.detach()
            q_tot = networks.mixer(q[t, AGENTS, u], s[t])
            highest = targets.central_mixer(target[t, AGENTS, best[t]], s[t])
            important = {"ow": q_tot < y, "cw": y > highest or u == best[t]}[weighting]
            q_star = networks.central_mixer(central[t, AGENTS, u], s[t])
            w = 1 if important else 0.25
            rows.append((torch.tensor([w]), w * (y - q_tot) ** 2, (y - q_star) ** 2))
    weight, td_loss, central_loss = (torch.stack(x).mean() for x in zip(*rows))
    assert 0.25 < weight < 1 and metrics["weight_mean"].item() == pytest.approx(weight.item())
    assert metrics["td_loss"].item() == pytest.approx(td_loss.item(), rel=1e-9)
    assert_same_gradient(networks, loss, td_loss + central_loss)


@quick
def test_qplex_mixer_over_all_joint_actions(patched):
    """Q_tot = V_tot + sum of lambda_i A_i, lambda_i > 0; the greedy joint action is the agents'."""
    module = patched("qmix_smac", "qplex")
    for seed in range(10):
        mixer = make_networks(module.Args(), seed=seed, module=module)[0].mixer
        qs, state = 5 * torch.randn(3, 4).double(), torch.randn(6).double()
        w, b = mixer.hyper_w(state).abs() + 1e-10, mixer.hyper_b(state)
        joint = torch.tensor(list(itertools.product(range(4), repeat=3)))
        chosen = qs.gather(1, joint.T).T.clone().requires_grad_()
        best, states = qs.max(dim=1).values, state.expand(len(joint), 6)
        q_tot = mixer(chosen, states, best.expand(len(joint), 3), joint)[:, 0]
        assert joint[q_tot.argmax()].equal(qs.argmax(dim=1)), f"seed {seed}"
        x = torch.cat([states, torch.eye(4).double()[joint].flatten(1)], dim=1)
        scores, phi = mixer.hyper_lambda(x).sigmoid(), mixer.hyper_phi(state).sigmoid()
        parts = scores.view(64, 4, 3), phi.view(4, 3), mixer.hyper_v(state).abs()
        importances = torch.einsum("uki,ki,k->ui", *parts)  # joint actions u, heads k, agents i
        assert (importances > 0).all() and importances.std(dim=0).min() > 0
        expected = (w * best + b).sum() + (importances * w * (chosen - best)).sum(dim=1)
        torch.testing.assert_close(q_tot, expected, rtol=1e-6, atol=1e-6)
        (slopes,) = torch.autograd.grad(q_tot.sum(), chosen)
        torch.testing.assert_close(slopes, w.expand_as(slopes))  # none through A_i


@quick
@pytest.mark.parametrize("double_q", [True, False])
def test_qplex_loss_by_loops(patched, double_q):
    """The mixer gets the agents' highest available values, of the same network."""
    module, episodes, squares = patched("qmix_smac", "qplex"), make_episodes([2, 6, 4]), []
    args = module.Args(double_q=double_q, td_lambda=0.0)
    networks, targets = make_networks(args, module=module)
    loss, _ = module.qmix_loss(networks, targets, to_batch(episodes), args)

    def mix(mixer, qs, state, avail, u):
        return mixer(qs[AGENTS, u], state, qs[AGENTS, greedy(qs, avail)], torch.tensor(u))

    for episode in episodes:
        q, target = (unroll(x.agent, episode) for x in (networks, targets))
        s, avail = episode.state, episode.avail_actions
        for t, u in enumerate(episode.actions.tolist()):
            best = greedy((q if double_q else target)[t + 1], avail[t + 1])
            bootstrap = mix(targets.mixer, target[t + 1], s[t + 1], avail[t + 1], best)
            y = episode.rewards[t] + 0.99 * (1 - episode.terminations[t]) * bootstrap.detach()
            squares.append((y - mix(networks.mixer, q[t], s[t], avail[t], u)) ** 2)
    expected = torch.cat(squares).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert_same_gradient(networks, loss, expected)


@quick
def test_mappo_loss_by_loops(patched, monkeypatch):
    """[MAPPO] App. A; in the first epoch of `update`, and where values have moved by 0.3."""
    module, calls, rows = patched("qmix_smac", "mappo"), [], []
    args, mappo_loss = module.Args(update_epochs=1, gamma=0.9), module.mappo_loss
    networks = make_networks(args, module=module)[0]
    networks.critic.observe(torch.tensor([3.0, 5.0]))  # mean 4, deviation 1
    logprobs, episodes = torch.rand(20, 3).double().log() / 4 - 1, make_episodes([6, 5, 4])
    episodes = [module.Episode(*x[:5], logprobs[-len(x.rewards) :], *x[5:]) for x in episodes]
    batch = module.Episode(*map(torch.nn.utils.rnn.pad_sequence, zip(*episodes)))
    for e in episodes:
        v = 4 + networks.critic(e.state)[:, 0].detach()
        logits = unroll(networks.agent, e)
        r, discounts = e.rewards[:, 0], 0.9 * (1 - e.terminations[:, 0])
        deltas = r + discounts * v[1:] - v[:-1]
        for t in range(len(r)):
            gae = sum(deltas[k] * (0.9 * 0.95) ** (k - t) for k in range(t, len(r)))
            rows.append((gae, v[t] + gae, v[t] - 4, e, t, logits[t]))
    gaes, returns, old = (torch.stack(x) for x in zip(*(row[:3] for row in rows)))
    mean, square = (4 + returns.mean()) / 2, (17 + returns.square().mean()) / 2
    errors, objectives, entropies = old - (returns - mean) / (square - mean**2).sqrt(), [], []
    for gae, (*_, e, t, logits) in zip((gaes - gaes.mean()) / (gaes.std() + 1e-5), rows):
        for a in AGENTS:
            p = logits[a].exp() * e.avail_actions[t, a]
            p = p / p.sum()
            if e.avail_actions[t, a].sum() > 1:
                ratio = p[e.actions[t, a]] / e.logprobs[t, a].exp()
                objectives.append(min(ratio * gae, ratio.clamp(0.8, 1.2) * gae))
                entropies.append(-(p * (p + 1e-300).log()).sum())
    policy_loss, entropy = -torch.stack(objectives).mean(), torch.stack(entropies).mean()
    weights = list(networks.agent.parameters())
    gradient = torch.autograd.grad(policy_loss - 0.01 * entropy, weights)
    monkeypatch.setattr(module, "mappo_loss", lambda *x: calls.append(x) or mappo_loss(*x))
    metrics = module.update(networks, torch.optim.SGD(networks.parameters(), lr=0.0), batch, args)
    value_loss, names = errors.square().mean().item(), ("policy_loss", "entropy", "value_loss")
    measured = [metrics[name].item() for name in names]
    expected = [policy_loss.item(), entropy.item(), value_loss]
    assert measured == pytest.approx(expected, rel=1e-6)
    *inputs, (old_values, *data), _ = calls[0]
    loss, metrics = mappo_loss(*inputs, (old_values + 0.3, *data), args)
    clipped = torch.max(errors.square(), (errors + 0.1).square()).mean().item()
    assert loss.item() == pytest.approx(expected[0] - 0.01 * expected[1] + clipped, rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, weights), gradient)
