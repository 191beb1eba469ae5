"""variants/qmix_smac: the equations of each patch, games, short runs, exact resume, evaluation."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import assert_same, load, logged, resume, train
from test_qmix_smac import SMALL, make_games, make_networks, minibatch, random_episodes

quick = pytest.mark.quick
PAYOFFS = np.array([[8, -12, -12], [-12, 0, 0], [-12, 0, 0]])  # not monotone: [WQMIX], [QPLEX]
AGENTS = [0, 1, 2]
JOINT = torch.tensor(list(itertools.product(range(3), repeat=2)))  # actions of two agents


@pytest.mark.parametrize("name", ["own_environment", "weighted", "qplex", "mappo"])
def test_run_resume_evaluate(patched, monkeypatch, tmp_path, name):
    """A run resumed from its middle equals the whole one; evaluation repeats the final one."""
    module = patched("qmix_smac", name)
    flags = {flag: value for flag, value in SMALL.items() if hasattr(module.Args, flag)}
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
    returns = module.evaluate(module.Args(**model["args"]), model, whole)
    assert returns == json.loads((whole / "result.json").read_text())["episodic_return"]
    assert all(np.isfinite(list(x.values())).all() for x in logged(whole).values())


@pytest.mark.parametrize("mixer, best", [("qmix", 8), ("vdn", 7)])
def test_own_environment_learns_the_two_step_game(patched, tmp_path, mixer, best):
    """[QMIX] Sec. 5: QMIX finds the best return, VDN does not. In half a minute on a core."""
    flags = dict(epsilon_finish=1, optimizer="adam", learning_rate=2e-3, updates_per_episode=0.25)
    flags |= dict(mixer=mixer, total_timesteps=6000, target_update_interval=50, test_interval=6000)
    folder = train(patched("qmix_smac", "own_environment"), tmp_path / "run", **flags)
    assert set(json.loads((folder / "result.json").read_text())["episodic_return"]) == {best}


@pytest.mark.parametrize("weighting, alpha, best", [("ow", 0.1, 8), ("cw", 0.1, 8), ("ow", 1, 0)])
def test_weighted_learns_a_game_that_is_not_monotone(patched, weighting, alpha, best):
    """From all joint actions equally often; with weights of 1, a suboptimal one is learned."""
    module, ones = patched("qmix_smac", "weighted"), torch.ones(2, 9, 2, 1)
    masks = torch.ones(2, 9, 2, 3).bool(), torch.ones(2, 9).bool()  # nine episodes of one step
    rewards, ends = torch.tensor(PAYOFFS).float().view(1, 9, 1), torch.ones(1, 9, 1)
    batch = module.Episode(ones, ones[:, :, 0], *masks, JOINT[None], rewards, ends)
    torch.manual_seed(1)
    args = module.Args(weighting=weighting, alpha=alpha)
    networks = module.Networks(args, module.Shape(2, 3, 1, 1))
    optimizer = torch.optim.Adam(networks.parameters(), lr=2e-3)
    for _ in range(600):
        module.update(networks, networks, optimizer, batch, args)
    inputs = (ones[:1, :1], torch.full((1, 1, 2), -1), torch.ones(1, 1).bool())
    qs, _ = networks.agent(*inputs, networks.agent.initial_hidden(1))
    assert PAYOFFS[tuple(qs[0, 0].argmax(dim=-1))] == best


def values(agent, episode):
    """Q (T+1, n, A) of one episode."""
    actions = torch.cat([torch.full((1, 3), -1), episode.actions])
    inputs = (episode.obs[:, None], actions[:, None], episode.filled[:, None])
    return agent(*inputs, agent.initial_hidden(1))[0][:, 0].detach()


def greedy(qs, avail):
    """The greedy available action of each agent (n,), by a loop."""
    return [max(range(4), key=lambda u: (avail[a, u].item(), qs[a, u].item())) for a in AGENTS]


@quick
@pytest.mark.parametrize("weighting", ["ow", "cw"])
def test_weighted_loss_by_loops(patched, weighting):
    """[WQMIX] Eqs. (10) to (13)."""
    module, episodes = patched("qmix_smac", "weighted"), random_episodes([2, 6, 4, 9, 5])
    args, rows = module.Args(weighting=weighting), []
    networks, targets = make_networks(args, module=module)
    loss, metrics = module.qmix_loss(networks, targets, minibatch(episodes), args)
    for episode in episodes:
        agents = (networks.agent, networks.central_agent, targets.central_agent)
        q, central, target = (values(agent, episode) for agent in agents)
        s, best = episode.state, [greedy(*x) for x in zip(q, episode.avail_actions)]
        for t, u in enumerate(episode.actions.tolist()):
            bootstrap = targets.central_mixer(target[t + 1, AGENTS, best[t + 1]], s[t + 1])
            y = episode.rewards[t] + 0.99 * (1 - episode.terminations[t]) * bootstrap
            q_tot = networks.mixer(q[t, AGENTS, u], s[t])
            highest = targets.central_mixer(target[t, AGENTS, best[t]], s[t])
            important = {"ow": q_tot < y, "cw": y > highest or u == best[t]}[weighting]
            q_star, w = networks.central_mixer(central[t, AGENTS, u], s[t]), 1 if important else 0.5
            rows.append((w, w * (y - q_tot).item() ** 2, (y - q_star).item() ** 2))
    weight, td_loss, central_loss = np.mean(rows, axis=0)
    assert 0.5 < weight < 1 and metrics["weight_mean"].item() == pytest.approx(weight)
    assert metrics["td_loss"].item() == pytest.approx(td_loss, rel=1e-9)
    assert loss.item() == pytest.approx(td_loss + central_loss, rel=1e-9)


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
        v_tot, importances = (w * best + b).sum(), mixer.importances(states, joint)
        assert (importances > 0).all() and importances.std(dim=0).min() > 0
        v, phi, expected = mixer.hyper_v(state).abs(), mixer.hyper_phi(state).sigmoid(), []
        for u in joint:
            x = torch.cat([state, torch.eye(4).double()[u].flatten()])
            score, total = mixer.hyper_lambda(x).sigmoid(), v_tot
            for k, i in itertools.product(range(4), AGENTS):  # heads and agents
                term = score[3 * k + i] * phi[3 * k + i] * v[k]
                total = total + term * w[i] * (qs[i, u[i]] - best[i])
            expected.append(total)
        torch.testing.assert_close(q_tot, torch.stack(expected), rtol=1e-6, atol=1e-6)
        (slopes,) = torch.autograd.grad(q_tot.sum(), chosen)
        torch.testing.assert_close(slopes, w.expand_as(slopes))  # none through A_i


@quick
@pytest.mark.parametrize("double_q", [True, False])
def test_qplex_loss_by_loops(patched, double_q):
    """The mixer gets the agents' highest available values, of the same network."""
    module, episodes, squares = patched("qmix_smac", "qplex"), random_episodes([2, 6, 4]), []
    args = module.Args(double_q=double_q)
    networks, targets = make_networks(args, module=module)
    loss, _ = module.qmix_loss(networks, targets, minibatch(episodes), args)

    def mix(mixer, qs, state, avail, u):
        return mixer(qs[AGENTS, u], state, qs[AGENTS, greedy(qs, avail)], torch.tensor(u))

    for episode in episodes:
        q, target = values(networks.agent, episode), values(targets.agent, episode)
        s, avail = episode.state, episode.avail_actions
        for t, u in enumerate(episode.actions.tolist()):
            best = greedy((q if double_q else target)[t + 1], avail[t + 1])
            bootstrap = mix(targets.mixer, target[t + 1], s[t + 1], avail[t + 1], best)
            y = episode.rewards[t] + 0.99 * (1 - episode.terminations[t]) * bootstrap
            squares.append((y - mix(networks.mixer, q[t], s[t], avail[t], u)).item() ** 2)
    assert loss.item() == pytest.approx(np.mean(squares), rel=1e-9)


@quick
def test_mappo_loss_by_loops(patched, monkeypatch):
    """[MAPPO] App. A; in the first epoch of `update`, and where values have moved by 0.3."""
    module, calls, rows = patched("qmix_smac", "mappo"), [], []
    args, mappo_loss = module.Args(update_epochs=1, gamma=0.9), module.mappo_loss
    networks = make_networks(args, module=module)[0]
    networks.critic.observe(torch.tensor([3.0, 5.0]))  # mean 4, deviation 1
    logprobs = torch.rand(20, 3).double().log() / 4 - 1
    episodes = random_episodes([6, 5, 4])
    episodes = [module.Episode(*x[:5], logprobs[-len(x.rewards) :], *x[5:]) for x in episodes]
    batch = module.Episode(*map(torch.nn.utils.rnn.pad_sequence, zip(*episodes)))
    for e in episodes:
        v, logits = 4 + networks.critic(e.state)[:, 0].detach(), values(networks.agent, e)
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
    policy_loss, entropy = -np.mean(objectives), np.mean(entropies)
    monkeypatch.setattr(module, "mappo_loss", lambda *x: calls.append(x) or mappo_loss(*x))
    metrics = module.update(networks, torch.optim.SGD(networks.parameters(), lr=0.0), batch, args)
    value_loss, names = errors.square().mean().item(), ("policy_loss", "entropy", "value_loss")
    measured = [metrics[name].item() for name in names]
    assert measured == pytest.approx([policy_loss, entropy, value_loss], rel=1e-6)
    *inputs, (old_values, *data), _ = calls[0]
    loss, metrics = mappo_loss(*inputs, (old_values + 0.3, *data), args)
    clipped = torch.max(errors.square(), (errors + 0.1).square()).mean().item()
    assert loss.item() == pytest.approx(policy_loss - 0.01 * entropy + clipped, rel=1e-6)


@quick
def test_mappo_samples_available_actions_by_the_policy(patched):
    module, avail = patched("qmix_smac", "mappo"), torch.tensor([True, False, True, False])
    torch.manual_seed(0)
    pi = module.policy(torch.tensor([1.0, 9.0, 0.0, 9.0]).expand(20000, 4), avail)
    shares = pi.sample().bincount(minlength=4) / 20000
    assert shares[0] == pytest.approx(1 / (1 + np.exp(-1)), abs=0.02) and shares[[1, 3]].sum() == 0
    assert (pi.mode == 0).all() and pi.entropy().isfinite().all()
