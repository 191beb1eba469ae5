"""A3C: its mathematics on real environments, its processes under real kills.

A `Tape` is all that happened in a short real run of one worker in this process: what the emulator was told and said,
and the gradients that the optimiser was given. What they should have been is worked out from the emulator alone.
"""

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, Run, checkpoints, curves, files_below, load, run_folder_in, wait_for

import a3c_atari as a3c


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_shared(args, model):
    """What the parent shares, with a queue that a test may replace."""
    theta, _ = a3c.flatten(model)
    make = {"adam": a3c.SharedAdam, "rmsprop": a3c.SharedRMSprop}[args.optimizer]
    optimizers = [make(len(theta), args) for _ in range(1 if args.shared_optimizer else args.num_workers)]
    steps = torch.zeros(args.num_workers, dtype=torch.int64)
    return a3c.Shared(theta, torch.nn.ModuleList(optimizers), steps, torch.tensor(0), None)


class Tape:
    """A run of a3c.actor_learner, one worker in this process. The other workers have taken `others` steps already."""

    def __init__(self, folder, worker=0, others=0, seed_of_parameters=0, **options):
        defaults = dict(env_id="BreakoutNoFrameskip-v4", num_workers=1, total_timesteps=100)
        self.args = a3c.Args(**defaults | options)
        self.messages, self.updates, self.steps, self.resets, self.acted = [], [], [], [], []
        torch.manual_seed(seed_of_parameters)
        envs = a3c.AtariEnvs(self.args, 1, folder)
        self.num_actions, self.fire_action = envs.num_actions, envs.fire_action
        self.model = a3c.Agent(self.num_actions, self.args.lstm)
        self.shared = make_shared(self.args, self.model)
        self.shared.metrics = self
        self.shared.steps[worker - 1] = others
        self.start = self.shared.theta.clone()
        with pytest.MonkeyPatch.context() as patch:
            self.record(patch)
            a3c.actor_learner(worker, self.args, folder, self.shared)

    def put(self, message):
        if not message[1]:  # the parent's part at a checkpoint
            self.shared.checkpoint_step.fill_(self.shared.steps.sum())
        else:
            self.messages.append(message)

    def record(self, patch):
        tape = self

        class AtariEnvs(a3c.AtariEnvs):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                emulator_step = self.envs.step

                def step(actions):
                    tape.emulated = emulator_step(actions)
                    tape.action = int(actions[0])
                    return tape.emulated

                self.envs.step = step

            def reset(self, *key):
                tape.now, tape.fresh = super().reset(*key), True
                tape.frames = self.frames[0]
                tape.resets.append((len(tape.steps), key, self.seeds.tolist()))
                return tape.now

            def step(self, actions):
                result = super().step(actions)
                obs, reward, terminated, truncated, info = tape.emulated
                over = bool((terminated | truncated)[0]) and info["episode_frame_number"][0] < tape.frames
                row = dict(obs=tape.now, sampled=int(actions[0]), action=tape.action, fresh=tape.fresh, over=over)
                row |= dict(next=info["final_obs"] if over else obs, reward=int(reward[0]), score=self.finished)
                row |= dict(terminated=bool(terminated[0]) and (over or tape.args.episodic_life))
                row |= dict(truncated=bool(truncated[0]), lost=bool(terminated[0]))
                tape.steps.append(row)
                tape.now, tape.fresh, tape.frames = obs, bool((terminated | truncated)[0]), self.frames[0]
                return result

        def note(kind):
            class Optimizer(kind):
                pass

            step = kind.step

            def noted(self, theta, grad, learning_rate):
                row = dict(before=theta.clone(), grad=grad.clone(), steps=len(tape.steps), rate=learning_rate)
                step(self, theta, grad, learning_rate)
                tape.updates.append(row | {"after": theta.clone()})

            return noted

        def sample(logits, gumbel_noise, sample=a3c.sample):
            self.acted.append(logits[0].clone())
            return sample(logits, gumbel_noise)

        patch.setattr(a3c, "sample", sample)
        patch.setattr(a3c, "prepare_worker", lambda args: torch.device("cuda" if args.cuda else "cpu"))
        patch.setattr(a3c.SharedAdam, "step", note(a3c.SharedAdam))
        patch.setattr(a3c.SharedRMSprop, "step", note(a3c.SharedRMSprop))
        patch.setattr(a3c, "AtariEnvs", AtariEnvs)

    def rollouts(self):
        """The steps of each update."""
        edges = [0, *(update["steps"] for update in self.updates)]
        return [self.steps[i:j] for i, j in pairwise(edges)]


def parameters(tape, theta):
    """A vector as named float64 tensors with gradients, in the order of the network."""
    named = [(name, p.shape, p.numel()) for name, p in tape.model.named_parameters()]
    pieces = theta.double().split([size for *_, size in named])
    return {name: piece.reshape(shape).requires_grad_() for (name, shape, _), piece in zip(named, pieces)}


def plain_step(w, obs, state, crop):
    """The network of one frame, written out: logits (A,), value (), the next state."""
    x = torch.from_numpy(obs).double()
    if crop:
        x = x[:, :, 9:51]
    x = (x - x.mean()) / x.std().clamp(min=1)
    for layer in (0, 2, 4, 6):
        x = F.elu(F.conv2d(x, w[f"trunk.{layer}.weight"], w[f"trunk.{layer}.bias"], stride=2, padding=1))
    x = x.flatten()
    if "lstm.weight_ih_l0" in w:
        h, c = state
        gates = w["lstm.weight_ih_l0"] @ x + w["lstm.bias_ih_l0"] + w["lstm.weight_hh_l0"] @ h + w["lstm.bias_hh_l0"]
        i, f, g, o = gates.reshape(4, 256)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        state, x = (h, c), h
    else:
        x = F.elu(w["linear.0.weight"] @ x + w["linear.0.bias"])
    return (
        w["policy_head.weight"] @ x + w["policy_head.bias"],
        (w["value_head.weight"] @ x + w["value_head.bias"])[0],
        state,
    )


def papers_gradient(tape, theta, rollout, state):
    """[A3C] Alg. S3 as it stands there, step by step in one graph; FIRE that was pressed is not the policy's.

    Returns the gradient (P,), the logits [(A,)] of each step, and the state that the next rollout begins with.
    """
    args, w = tape.args, parameters(tape, theta)
    state = tuple(part.detach() for part in state)
    outputs = []
    for row in rollout:
        *output, state = plain_step(w, row["obs"], state, args.crop)
        outputs.append(output)
    last = rollout[-1]
    bootstrap = plain_step(w, last["next"], state, args.crop)[1].item()
    values = [value.item() for _, value in outputs] + [0.0 if last["terminated"] else bootstrap]
    rewards = [max(-1, min(1, row["reward"])) for row in rollout]
    deltas = [reward + args.gamma * values[j + 1] - values[j] for j, reward in enumerate(rewards)]
    loss = 0
    for i, (row, (logits, value)) in enumerate(zip(rollout, outputs)):
        advantage = sum((args.gamma * args.gae_lambda) ** k * delta for k, delta in enumerate(deltas[i:]))
        if not row["fresh"] or tape.fire_action is None:
            policy = logits.softmax(0)
            entropy = -(policy * policy.log()).sum()
            loss = loss - policy[row["sampled"]].log() * advantage - args.ent_coef * entropy
        loss = loss + args.vf_coef * (advantage + values[i] - value) ** 2 / 2
    grads = torch.autograd.grad(loss, list(w.values()), materialize_grads=True)  # of one step, where FIRE was pressed
    grad = torch.cat([g.flatten() for g in grads])
    grad = grad * min(1, args.max_grad_norm / (grad.norm().item() + 1e-6))
    state = NO_STATE if last["terminated"] or last["truncated"] else state
    return grad, [logits.detach() for logits, _ in outputs], state


NO_STATE = (torch.zeros(256, dtype=torch.float64),) * 2
LEARNERS = {
    "LSTM, Adam": {},
    "LSTM, the paper's RMSprop, own averages": dict(
        optimizer="rmsprop", shared_optimizer=False, max_grad_norm=1.0, learning_rate=1e-3
    ),
    "lambda 0.9, lives, truncated": dict(
        gae_lambda=0.9, episodic_life=True, max_episode_length=90, ent_coef=0.1, anneal_lr=True
    ),
    "feed-forward, RMSprop, rewards up to 30": dict(
        env_id="SpaceInvadersNoFrameskip-v4", lstm=False, optimizer="rmsprop", crop=False
    ),
}


@pytest.fixture(scope="module", params=LEARNERS)
def tape(request, tmp_path_factory):
    options = dict(num_steps=10, total_timesteps=300, checkpoint_interval=250) | LEARNERS[request.param]
    return Tape(tmp_path_factory.mktemp("tape"), **options)


def test_the_gradient_that_is_applied_is_the_papers(tape):
    """In each of many consecutive updates, also after episodes have ended. (Known programs: only in the first.)

    So the LSTM's state is carried from rollout to rollout, not differentiated there, and zero after an end and at a
    checkpoint, in acting and in learning.
    """
    rollouts = tape.rollouts()
    assert len(rollouts) == len(tape.updates) >= 30 and 300 <= sum(map(len, rollouts)) < 310
    (first, *_), (checkpoint, *_) = tape.resets
    done = 0
    for rollout, update in zip(rollouts, tape.updates):
        if done in (first, checkpoint):
            state = NO_STATE
        expected, logits, state = papers_gradient(tape, update["before"], rollout, state)
        assert torch.linalg.norm(update["grad"] - expected) < 1e-3 * torch.linalg.norm(expected)
        acted = torch.stack(tape.acted[done : done + len(rollout)])
        torch.testing.assert_close(acted.double(), torch.stack(logits), atol=1e-5, rtol=1e-4)
        done += len(rollout)
    ended = [[row["terminated"] or row["truncated"] for row in rollout] for rollout in rollouts]
    assert not any(any(rows[:-1]) for rows in ended) and all(len(rows) == 10 or rows[-1] for rows in ended)
    assert any(row["reward"] for row in tape.steps) and any(row["fresh"] for row in tape.steps)
    if "Breakout" in tape.args.env_id:
        assert sum(map(sum, ended)) >= 1
    else:
        assert max(row["reward"] for row in tape.steps) > 1


def test_a_checkpoint_is_where_all_steps_have_passed_it(tape):
    (_, first_key, first_seeds), (at, key, seeds) = tape.resets
    assert 250 <= at < 260 and tape.rollouts()[0][0]["obs"] is not None
    assert (first_key, key) == ((0, 2), (at, 2)) and first_seeds != seeds
    assert at in np.cumsum([len(rollout) for rollout in tape.rollouts()])


def test_fire_is_pressed_on_the_first_step_of_each_life_and_only_there(tape):
    assert any(row["lost"] and not row["over"] for row in tape.steps) or "Invaders" in tape.args.env_id
    for row in tape.steps:
        assert row["action"] == (tape.fire_action if row["fresh"] else row["sampled"])


def test_the_optimiser_is_the_one_of_its_name(tape):
    args, theta = tape.args, tape.start.double().requires_grad_()
    adam, square_avg = torch.optim.Adam([theta]), torch.ones_like(theta)
    for update, rollout in zip(tape.updates, tape.rollouts()):
        rate = args.learning_rate
        if args.anneal_lr:
            rate *= 1 - (update["steps"] - len(rollout)) / args.total_timesteps
        adam.param_groups[0]["lr"] = rate
        theta.grad = update["grad"].double()
        if args.optimizer == "adam":
            adam.step()
        else:
            square_avg = 0.99 * square_avg + 0.01 * theta.grad**2
            theta.data -= rate * theta.grad / (square_avg + 1e-5).sqrt()
        torch.testing.assert_close(update["after"].double(), theta.data, atol=2e-6, rtol=1e-5)
    assert (theta - tape.start).abs().max() > 1e-4
    assert tape.shared.steps.tolist() == [len(tape.steps)]


def test_adam_is_torchs_from_its_first_step():
    """Its bias correction too, which makes the first step as long as the learning rate, whatever the gradient."""
    adam = a3c.SharedAdam(50, a3c.Args()).double()
    theta = torch.randn(50, dtype=torch.float64)
    parameter = torch.nn.Parameter(theta.clone())
    torchs = torch.optim.Adam([parameter], lr=0.01)
    first = theta.clone()
    for step in range(40):
        parameter.grad = torch.randn(50, dtype=torch.float64) * 10.0 ** -(step % 5)
        adam.step(theta, parameter.grad, 0.01)
        torchs.step()
        torch.testing.assert_close(theta, parameter.data, rtol=1e-12, atol=1e-14)
        if step == 0:
            torch.testing.assert_close((theta - first).abs(), torch.full_like(theta, 0.01), rtol=1e-3, atol=0)
    assert adam.t == 40


@pytest.mark.parametrize("alpha, eps", [(0.99, 1e-5), (0.9, 1e-2)])
def test_rmsprop_is_the_papers(alpha, eps):
    """Epsilon inside the root, and an average that begins at one, as in TensorFlow."""
    rmsprop = a3c.SharedRMSprop(50, a3c.Args(rmsprop_alpha=alpha, rmsprop_eps=eps)).double()
    theta = torch.randn(50, dtype=torch.float64)
    expected, g = theta.clone(), torch.ones_like(theta)
    for step in range(40):
        grad = torch.randn(50, dtype=torch.float64) * 10.0 ** -(step % 5)
        rmsprop.step(theta, grad, 1e-2 / (step + 1))
        g = alpha * g + (1 - alpha) * grad**2
        expected -= 1e-2 / (step + 1) * grad / (g + eps).sqrt()
        torch.testing.assert_close(theta, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer, bound", [("adam", 7.3), ("rmsprop", 10.001)])
def test_workers_that_write_at_once_do_not_throw_the_model_away(optimizer, bound):
    """One has large gradients and one has next to none; alone, neither's step exceeds the bound times the rate."""
    args = a3c.Args(optimizer=optimizer, rmsprop_eps=1e-8)

    def work(grad, theta, optimizer, together):
        together.wait()
        for _ in range(2):
            optimizer.step(theta, grad, 1.0)

    for _ in range(30):
        make = a3c.SharedAdam if optimizer == "adam" else a3c.SharedRMSprop
        shared = torch.zeros(500_000), make(500_000, args), threading.Barrier(2)
        if optimizer == "rmsprop":
            shared[1].square_avg.zero_()  # where steps are longest
        grads = torch.ones(500_000), torch.full((500_000,), 1e-7)
        threads = [threading.Thread(target=work, args=(grad, *shared)) for grad in grads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shared[0].abs().max() <= 4 * bound


def test_no_gradients_make_adam_step_further_than_its_bound():
    """Those that do most: the larger the later, by Cauchy-Schwarz as (beta_1 / beta_2)^k of k steps ago."""
    k = torch.arange(20_000, dtype=torch.float64)
    m, v = (0.1 * 0.9**k * (0.9 / 0.999) ** k).sum(), (0.001 * 0.999**k * (0.9 / 0.999) ** (2 * k)).sum()
    assert 7.2 < m / v.sqrt() < 7.3


def test_the_learning_rate_falls_with_the_steps_of_all_workers(tmp_path):
    """Two workers, of which the other has played 600 of 1,000 steps, or none."""
    for others in (0, 600):
        tape = Tape(tmp_path, num_workers=2, others=others, total_timesteps=1000, num_steps=50, anneal_lr=True)
        done = [others + update["steps"] - len(rollout) for update, rollout in zip(tape.updates, tape.rollouts())]
        assert [update["rate"] for update in tape.updates] == pytest.approx([1e-4 * (1 - T / 1000) for T in done])
        assert sum(map(len, tape.rollouts())) + others == tape.shared.steps.sum() >= 1000


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_workers_share_the_optimiser_or_have_their_own(tmp_path, optimizer):
    """Worker 1 moves the averages of all, or its own and nobody else's."""
    for shared in (True, False):
        tape = Tape(tmp_path, worker=1, num_workers=3, shared_optimizer=shared, optimizer=optimizer)
        untouched = make_shared(tape.args, tape.model).optimizers
        assert len(tape.shared.optimizers) == (1 if shared else 3)
        for rank, (found, begun) in enumerate(zip(tape.shared.optimizers, untouched)):
            moved = [not torch.equal(*pair) for pair in zip(found.buffers(), begun.buffers())]
            assert all(moved) if shared or rank == 1 else not any(moved)
            if optimizer == "adam":
                assert found.t == (len(tape.updates) if shared or rank == 1 else 0)


def test_episodes_are_logged_whole_and_unclipped(tmp_path):
    tape = Tape(tmp_path, total_timesteps=1200, env_id="SpaceInvadersNoFrameskip-v4", log_interval=7)
    score, length, expected = 0, 0, []
    for step, row in enumerate(tape.steps, start=1):
        score, length = score + row["reward"], length + 1
        if row["over"]:
            expected.append((step, score, length))
            score = length = 0
    assert expected and expected[0][1] > 20
    episodes = [(step, tags) for step, tags in tape.messages if "charts/episodic_return" in tags]
    assert [(step, *tags.values()) for step, tags in episodes] == expected
    losses = [(step, tags) for step, tags in tape.messages if "losses/entropy" in tags]
    assert [step for step, _ in losses] == [update["steps"] for update in tape.updates][6::7]
    for _, tags in losses:
        assert 0 < tags["losses/entropy"] < np.log(6) + 1e-6 and tags["charts/learning_rate"] == 1e-4


def test_the_loss_is_the_papers():
    """Sums of the three terms; what FIRE was pressed in is neither the policy's merit nor its entropy."""
    logits, values = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    logits.requires_grad_(), values.requires_grad_()
    advantages, returns = torch.randn(2, 9, dtype=torch.float64)
    actions, chosen = torch.randint(5, (9,)), torch.rand(9) < 0.7
    args = a3c.Args(ent_coef=0.02, vf_coef=0.7)
    loss, parts = a3c.a3c_loss(logits, values, actions, chosen, advantages, returns, args)
    policy = torch.distributions.Categorical(logits=logits)
    entropy = policy.entropy()[chosen].sum()
    policy_loss = -(policy.log_prob(actions) * advantages)[chosen].sum()
    value_loss = 0.5 * F.mse_loss(values, returns, reduction="sum")
    torch.testing.assert_close(loss, policy_loss + 0.7 * value_loss - 0.02 * entropy)
    for name, expected in dict(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy).items():
        torch.testing.assert_close(parts[name], expected.detach() / 9)
    policy_grad, value_grad = torch.autograd.grad(loss, (logits, values))
    assert (policy_grad[~chosen] == 0).all() and (policy_grad[chosen] != 0).any(1).all() and (value_grad != 0).all()


def test_the_batch_is_the_steps_one_after_the_other():
    for lstm in (True, False):
        agent = a3c.Agent(5, lstm)
        obs = torch.randint(0, 256, (20, 1 if lstm else 4, 55, 42), dtype=torch.uint8)
        first = state = tuple(torch.randn(2, 1, 256))
        logits, values = agent(obs, first)
        assert logits.shape == (20, 5) and values.shape == (20,)
        for t in range(20):
            one, state = agent.step(obs[t : t + 1], state)
            torch.testing.assert_close(one[0], logits[t], atol=1e-5, rtol=1e-4)
        three = torch.cat([obs[:1]] * 3)  # in three environments at once
        many, _ = agent.step(three, tuple(part.expand(3, 256) for part in first))
        torch.testing.assert_close(many, logits[:1].expand(3, 5), atol=1e-5, rtol=1e-4)


def test_acting_without_python_is_acting(tmp_path):
    """Also with parameters that have changed since it was traced, as they do after each update."""
    for lstm in (True, False):
        args = a3c.Args(lstm=lstm, crop=lstm)
        agent = a3c.Agent(6, lstm)
        theta, _ = a3c.flatten(agent)
        act = a3c.traced_step(agent, a3c.AtariEnvs(args, 1, tmp_path), args)
        for _ in range(3):
            theta.add_(0.01 * torch.randn_like(theta))
            obs = torch.randint(0, 256, (1, 1 if lstm else 4, 55 if lstm else 42, 42), dtype=torch.uint8)
            state = tuple(torch.randn(2, 1, 256))
            for found, expected in zip(act(obs, state), agent.step(obs, state)):
                torch.testing.assert_close(found, expected)


def test_parameters_and_gradients_are_views_of_two_vectors():
    agent = a3c.Agent(3)
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    theta, grad = a3c.flatten(agent)
    for name, tensor in agent.state_dict().items():
        assert torch.equal(tensor, before[name])
    agent(torch.zeros(2, 1, 42, 42, dtype=torch.uint8), agent.initial_state(1))[1].sum().backward()
    assert torch.equal(grad, torch.cat([p.grad.flatten() for p in agent.parameters()])) and grad.any()
    theta.zero_()
    assert not any(p.any() for p in agent.parameters())


@pytest.mark.parametrize("gae_lambda", [1.0, 0.8])
def test_gae_is_the_double_sum(gae_lambda):
    rng, gamma, T = np.random.default_rng(0), 0.97, 20
    rewards, v = rng.normal(size=T), rng.normal(size=T + 1)
    for terminated in (True, False):
        terminations = np.zeros(T, bool)
        terminations[-1] = terminated
        found = a3c.compute_gae(rewards, v[:-1], v[1:], terminations, np.zeros(T, bool), gamma, gae_lambda)
        after = v[1:] * ~terminations
        delta = rewards + gamma * after - v[:-1]
        for t in range(T):
            expected = sum((gamma * gae_lambda) ** k * delta[t + k] for k in range(T - t))
            assert found[t] == pytest.approx(expected)
            n_step = sum(gamma**k * rewards[t + k] for k in range(T - t)) + gamma ** (T - t) * after[-1]
            if gae_lambda == 1:
                assert found[t] == pytest.approx(n_step - v[t])


def test_a_seed_is_a_run_and_each_worker_has_its_own(tmp_path):
    def theta(**options):
        return Tape(tmp_path, num_workers=2, **options).shared.theta

    one = theta()
    assert torch.equal(one, theta())
    assert not torch.equal(one, theta(worker=1)) and not torch.equal(one, theta(seed=2))


def test_no_two_workers_checkpoints_or_evaluations_share_episodes(tmp_path, monkeypatch):
    seeds = [tape.resets[0][2] for rank in range(3) for tape in [Tape(tmp_path, worker=rank, num_workers=3)]]
    reset = a3c.AtariEnvs.reset

    def note(self, *key):
        obs = reset(self, *key)
        seeds.append(self.seeds.tolist())
        return obs

    monkeypatch.setattr(a3c.AtariEnvs, "reset", note)
    for step in (0, 100):
        args = a3c.Args(eval_episodes=2, max_episode_length=10)
        a3c.evaluate(args, {"agent": a3c.Agent(6).state_dict(), "global_step": step}, tmp_path)
    flat = [seed for each in seeds for seed in each]
    assert len(flat) == 3 + 4 and len(set(flat)) == len(flat)


def test_the_playing_field_fills_the_frame():
    """42 rows of 55 are rows 34 to 194 of the screen, to a third of a row: where Pong's ball can be."""
    assert abs(9 * 210 / 55 - 34) < 0.4 and abs(51 * 210 / 55 - 194) < 0.8
    envs = a3c.make_atari(a3c.Args(), 1)
    obs, _ = envs.reset(seed=np.array([1]))
    assert obs.shape == (1, 1, 55, 42)
    walls = obs[0, 0].mean(1)
    assert walls[7] > 200 and walls[52] > 200 and walls[9:51].max() < 120


def test_the_longest_episode_counts_steps_after_the_no_ops(tmp_path):
    args = a3c.Args(max_episode_length=10)
    envs = a3c.AtariEnvs(args, 8, tmp_path)
    envs.reset(0)
    assert len(set(envs.frames.tolist())) > 1
    for step in range(1, 21):
        *_, truncations = envs.step(np.zeros(8, int))
        assert (truncations == (step % 10 == 0)).all()
        assert envs.finished == ([(i, 0.0, 10) for i in range(8)] if step % 10 == 0 else [])


# Processes. A worker in these runs plays a toy, or fails on command


class Catch:
    """A ball is seen once, at the top; after two more steps the paddle should be in its column. Needs a memory."""

    ale = SimpleNamespace(get_action_set=lambda: [ale_py.Action.NOOP, ale_py.Action.RIGHT, ale_py.Action.LEFT])

    def __init__(self, num_envs):
        self.num_envs, self.time = num_envs, 0
        self.observation_space = gym.spaces.Box(0, 255, (num_envs, 1, 42, 42), np.uint8)
        self.log = os.open("steps", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def reset(self, *, seed):
        self.rng = np.random.default_rng(seed)
        return self.begin(), {"episode_frame_number": np.zeros(self.num_envs, int)}

    def begin(self):
        self.time = 0
        self.ball = self.rng.integers(3, size=self.num_envs)
        self.paddle = np.ones(self.num_envs, int)
        return self.draw()

    def draw(self):
        grid = np.zeros((self.num_envs, 1, 3, 3), np.uint8)
        rows = np.arange(self.num_envs)
        grid[rows, 0, 2, self.paddle] = 128
        if self.time == 0:
            grid[rows, 0, 0, self.ball] = 255
        return grid.repeat(14, 2).repeat(14, 3)

    def step(self, actions):
        os.write(self.log, b"." * self.num_envs)
        self.paddle = (self.paddle + np.array([0, 1, -1])[actions]).clip(0, 2)
        self.time += 1
        ends = np.full(self.num_envs, self.time == 3)
        final = obs = self.draw()
        rewards = np.where(ends, np.where(self.ball == self.paddle, 1, -1), 0)
        if ends[0]:
            obs = self.begin()
        info = {"episode_frame_number": np.full(self.num_envs, 4 * self.time), "final_obs": final}
        return obs, rewards, ends, np.zeros_like(ends), info

    def close(self):
        pass


def make_catch(args, num_envs, colour=False):
    return Catch(num_envs)


ACTOR_LEARNER = a3c.actor_learner


def toy_worker(*args):
    a3c.make_atari = make_catch
    ACTOR_LEARNER(*args)


def failing_worker(rank, *args):
    """A worker that raises at its 20th update."""
    step, calls = a3c.SharedAdam.step, []

    def fail(*arguments):
        calls.append(1)
        if rank == 1 and len(calls) == 20:
            raise ZeroDivisionError("on command")
        step(*arguments)

    a3c.SharedAdam.step = fail
    ACTOR_LEARNER(rank, *args)


@pytest.fixture
def train_catch(tmp_path, monkeypatch):
    """Train on Catch in a folder of its own. Returns the folder and its last checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(a3c, "make_atari", make_catch)
    monkeypatch.setattr(a3c, "actor_learner", toy_worker)
    monkeypatch.setattr(a3c, "evaluate", lambda *_: {"episodic_return": [0.0]})

    def train(checkpoint=None, **options):
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        a3c.train(a3c.Args(**options), folder, checkpoint)
        return folder, load(checkpoints(folder)[-1])

    return train


def test_catch_is_learned_by_two_workers_and_every_step_counted(train_catch):
    """A random player scores -1/3, and so does the best one without a memory."""
    options = dict(num_workers=2, total_timesteps=4001, learning_rate=1e-3, gamma=0.9, checkpoint_interval=3000)
    folder, last = train_catch(**options)
    points = curves(folder)
    assert np.mean([score for _, score in points["charts/episodic_return"]][-200:]) > 0.8
    steps, updates = last["global_step"], int(last["optimizers"]["0.t"])
    assert 4001 <= steps == os.path.getsize("steps") < 4001 + 2 * 20
    assert steps / 3 - 50 < updates <= steps / 3  # a rollout is an episode; two that write at once may count as one
    first, second = (load(path)["global_step"] for path in checkpoints(folder))
    assert 3000 <= first < 3000 + 2 * 20 and second == steps
    assert [step for step, _ in points["eval/episodic_return"]] == [first, second]


def test_steps_are_counted_exactly_also_by_another_number_of_workers(train_catch):
    last, before = None, 0
    for num_workers, total in ((3, 1303), (2, 1800)):
        folder, last = train_catch(last, num_workers=num_workers, total_timesteps=total, checkpoint_interval=500)
        steps = last["global_step"]
        assert total <= steps == os.path.getsize("steps") < total + num_workers * 20
        crossed = [step for step in (500, 1000, 1500) if before < step < total]
        found = [step for step, _ in curves(folder)["eval/episodic_return"]]
        for at, step in zip(found, [*crossed, total], strict=True):
            assert step <= at < step + num_workers * 20
        before = steps


def processes_in(folder):
    """The processes whose working directory it is."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "cwd") == str(folder) and "State:\tZ" not in (path / "status").read_text():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def workers_of(folder, parent):
    """The workers of a run in order."""
    children = []
    for pid in processes_in(folder):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if f"PPid:\t{parent}\n" in status and "spawn_main" in command:
            children.append(pid)
    return sorted(children)


SMALL = """--env-id BreakoutNoFrameskip-v4 --num-workers 1 --total-timesteps 500 --checkpoint-interval 200
    --eval-episodes 2 --max-episode-length 40 --log-interval 5 --anneal-lr""".split()
LONG = "--total-timesteps 1000000 --checkpoint-interval 100 --eval-episodes 1 --max-episode-length 60".split()


def program(*argv, cwd, **options):
    """`python a3c_atari.py` as anybody would run it, with a session of its own."""
    command = [sys.executable, str(ROOT / "a3c_atari.py"), *argv]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=cwd, start_new_session=True, **pipes | options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a run that nothing ended, and what it said."""
    cwd = tmp_path_factory.mktemp("reference")
    process = program(*SMALL, cwd=cwd)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and not processes_in(cwd)
    return run_folder_in(cwd), said


def test_a_run_says_what_it_does(reference):
    run_folder, said = reference
    name, *lines = said.splitlines()
    assert name == f"run folder: runs/{run_folder.name}"
    for line in lines:
        assert re.fullmatch(r"evaluation: [\d.]+ \+- [\d.]+, 2 episodes of sampled actions", line)
    points = curves(run_folder)
    evaluated = [step for step, _ in points["eval/episodic_return"]]
    assert len(lines) == len(evaluated) == 3
    for step, least in zip(evaluated, (200, 400, 500)):
        assert least <= step < least + 20
    assert all(
        value == pytest.approx(1e-4 * (1 - step / 500), abs=5e-6) for step, value in points["charts/learning_rate"]
    )
    lengths = [value for _, value in points["charts/episodic_length"]]
    assert max(lengths) <= 40 and sum(lengths) <= 520


def run_until_it_trains(tmp_path, num_workers, sabotage=None):
    run = Run("a3c_atari", *LONG, "--num-workers", str(num_workers), cwd=tmp_path, sabotage=sabotage)
    wait_for(lambda: [*tmp_path.glob("runs/*/checkpoint_*2??.pt")], seconds=90)
    time.sleep(random.uniform(0, 0.1))
    return run


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_ends_the_run(tmp_path, signum):
    run = run_until_it_trains(tmp_path, 2)
    rank = random.choice([0, 1])
    os.kill(workers_of(tmp_path, run.process.pid)[rank], signum)
    result = run.wait(120)
    assert run.leaves_no_orphan()
    last = f"torch.multiprocessing.spawn.ProcessExitedException: process {rank} terminated with signal {signum.name}"
    assert result.status == 1 and result.notes[-1] == last
    assert result.stderr.count("Traceback") == 1 and "resource_tracker" not in result.stderr
    load(checkpoints(run_folder_in(tmp_path))[-1])


def kill_a_waiting_worker():
    evaluate = a3c.evaluate

    def kill_and_evaluate(*args):
        os.kill(workers_of(os.getcwd(), os.getpid())[1], signal.SIGKILL)
        return evaluate(*args)

    a3c.evaluate = kill_and_evaluate


def test_a_worker_that_is_killed_while_it_waits_for_the_parent_ends_the_run(tmp_path):
    result = Run("a3c_atari", *LONG, "--num-workers", "2", cwd=tmp_path, sabotage=kill_a_waiting_worker).wait()
    assert result.status == 1 and result.notes[-1].endswith(": process 1 terminated with signal SIGKILL")


def use_failing_worker():
    a3c.actor_learner = failing_worker


def test_a_worker_that_raises_ends_the_run_and_its_cause_is_shown(tmp_path):
    run = Run("a3c_atari", *LONG, "--num-workers", "2", cwd=tmp_path, sabotage=use_failing_worker)
    result = run.wait(120)
    assert result.status == 1
    assert result.notes[-1] == "ZeroDivisionError: on command"
    assert "-- Process 1 terminated with the following error:" in result.notes and run.leaves_no_orphan()


@pytest.mark.parametrize("signum, group", [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["all", "parent"])
def test_a_signal_ends_everything_with_one_line(tmp_path, signum, group):
    process = program(*LONG, "--num-workers", "2", cwd=tmp_path)
    try:
        wait_for(lambda: [*tmp_path.glob("runs/*/checkpoint_*2??.pt")], seconds=90)
        (os.killpg if group else os.kill)(process.pid, signum)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and not processes_in(tmp_path)
    assert "interrupted; continue with: " in stderr and not re.search("Traceback|resource_tracker|error", stderr)


SITE = """
import os, sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    class Stop:
        def find_spec(self, name, *_):
            if name == "ale_py":  # the first of the imports that take seconds
                open(f"started-{os.getpid()}", "w").close()
                time.sleep(600)
    sys.meta_path.insert(0, Stop())
"""


def test_a_parent_that_is_killed_while_workers_import_leaves_none(tmp_path):
    """Here the imports take ten minutes."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    process = program(*LONG, "--num-workers", "2", cwd=tmp_path, env=env)
    try:
        wait_for(lambda: len([*tmp_path.glob("started-*")]) == 2, seconds=90)
        process.kill()
        process.communicate()
        wait_for(lambda: not processes_in(tmp_path), seconds=60)
    finally:
        for pid in processes_in(tmp_path):
            os.kill(pid, signal.SIGKILL)


def worker_without_prctl(*args):
    a3c.ctypes.CDLL(None).prctl(1, 0)  # as where the system is not Linux
    ACTOR_LEARNER(*args)


def use_worker_without_prctl():
    a3c.actor_learner = worker_without_prctl


def test_workers_end_with_their_parent_where_the_system_does_not_end_them(tmp_path):
    run = run_until_it_trains(tmp_path, 2, use_worker_without_prctl)
    assert len(workers_of(tmp_path, run.process.pid)) == 2
    run.process.kill()
    try:
        wait_for(lambda: not processes_in(tmp_path), seconds=60)
    finally:
        for pid in processes_in(tmp_path):
            os.kill(pid, signal.SIGKILL)


def call(monkeypatch, *argv):
    """The status of a call, or the line with which it exits."""
    monkeypatch.setattr(sys, "argv", ["a3c_atari.py", *argv])
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as exit_:
            a3c.main()
        return exit_.value.code
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@pytest.mark.parametrize(
    "flags",
    [
        "--resume --optimizer rmsprop",
        "--resume --no-shared-optimizer --num-workers 2",
        "--resume --no-lstm",
        "--evaluate --no-lstm",
    ],
)
def test_another_network_or_other_averages_are_refused(reference, monkeypatch, flags):
    way, *flags = flags.split()
    before = files_below(reference[0])
    assert call(monkeypatch, way, str(reference[0]), *flags).startswith("error: the checkpoint does not fit")
    assert before == files_below(reference[0])


def test_an_id_that_means_another_number_of_frames_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for env_id in ("Pong-v4", "CartPole-v1"):
        assert re.fullmatch(rf"error: {env_id} is not [^\n]+", call(monkeypatch, "--env-id", env_id))
    assert not list(tmp_path.iterdir())


def test_the_arguments_depend_on_nothing_but_the_script():
    """The number of workers is a hyperparameter: it may not be the number of cores."""
    code = (
        "import os; os.cpu_count = lambda: 77; os.sched_getaffinity = lambda _: set(range(77)); import a3c_atari as a; "
    )
    code += "print(a.Args().num_workers)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout) == a3c.Args().num_workers


# Modes


def test_the_first_episode_after_a_checkpoint_is_recorded(tmp_path):
    """Of worker 0 only."""
    options = dict(
        num_workers=2, max_episode_length=30, capture_video=True, total_timesteps=120, checkpoint_interval=60
    )
    tape = Tape(tmp_path, **options)
    steps = [at for at, *_ in tape.resets]
    assert len(steps) == 2
    assert {path.name for path in (tmp_path / "videos").iterdir()} == {f"training-{step}.mp4" for step in steps}
    Tape(tmp_path / "other", worker=1, **options)
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_worker_on_the_gpu_computes_the_same(tmp_path):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    tape = Tape(tmp_path, cuda=True)
    state = NO_STATE
    for rollout, update in zip(tape.rollouts(), tape.updates):
        expected, _, state = papers_gradient(tape, update["before"], rollout, state)
        assert torch.linalg.norm(update["grad"] - expected) < 1e-3 * torch.linalg.norm(expected)


@pytest.mark.parametrize("episodic_life", [False, True])
def test_an_evaluation_forgets_where_training_does(tmp_path, monkeypatch, episodic_life):
    """At each termination and truncation, as training: two environments side by side."""
    states, ended = [], [np.ones(2, bool)]

    class AtariEnvs(a3c.AtariEnvs):
        def step(self, actions):
            result = super().step(actions)
            ended.append(result[3] | result[4])
            return result

    def step(agent, obs, state, plain=a3c.Agent.step):
        states.append(state[0].abs().sum(1).numpy() == 0)
        return plain(agent, obs, state)

    monkeypatch.setattr(a3c, "AtariEnvs", AtariEnvs)
    monkeypatch.setattr(a3c.Agent, "step", step)
    args = a3c.Args(
        env_id="BreakoutNoFrameskip-v4", episodic_life=episodic_life, eval_episodes=2, max_episode_length=150
    )
    scores = a3c.evaluate(args, {"agent": a3c.Agent(4).state_dict(), "global_step": 0}, tmp_path)
    assert len(scores["episodic_return"]) == 2
    np.testing.assert_array_equal(states, ended[:-1])
    assert sum(map(sum, ended)) > (6 if episodic_life else 3)


def test_an_evaluation_is_reproduced_and_depends_on_the_seed(tmp_path):
    model = {"agent": a3c.Agent(6).state_dict(), "global_step": 7}
    args = a3c.Args(env_id="SpaceInvadersNoFrameskip-v4", eval_episodes=3, max_episode_length=300)
    one, two, other = (
        a3c.evaluate(dataclasses.replace(args, seed=seed), model, tmp_path)["episodic_return"] for seed in (1, 1, 2)
    )
    assert one == two != other
