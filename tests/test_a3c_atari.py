"""A3C: its mathematics against plain formulas in float64, and its processes under real kills.

A `Tape` records a short run of one worker in this process: what the emulator was told and said, and
the gradients that the optimizer was given. What they should have been follows from the emulator.
"""

import contextlib
import copy
import os
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_same, load
from torch import nn
from vectors_reader import cases, check

import a3c_atari as a3c

SMALL = dict(
    env_id="BreakoutNoFrameskip-v4",
    num_workers=1,
    num_steps=7,
    total_timesteps=95,
    checkpoint_interval=40,
    max_episode_length=60,
    log_interval=2,
    eval_episodes=2,
)


torch.set_num_threads(1)  # for fixtures of the module too


def make_optimizers(args, agent):
    """The optimizers that workers share."""
    kind, options = a3c.SharedAdam, dict(betas=(0.9, 0.999), eps=1e-8)
    if args.optimizer == "rmsprop":
        kind, options = a3c.SharedRMSprop, dict(alpha=args.rmsprop_alpha, eps=args.rmsprop_eps)
    number = 1 if args.shared_optimizer else args.num_workers
    return [kind(agent.parameters(), lr=args.learning_rate, **options) for _ in range(number)]


def flat(tensors):
    return torch.cat([x.detach().flatten() for x in tensors])


def states(optimizer):
    return [x for state in optimizer.state.values() for x in state.values()]


class Tape:
    """A run of `actor_learner`, whose other workers have taken `others` steps already."""

    def __init__(self, folder, worker=0, others=0, agent=None, **options):
        self.args = a3c.Args(**SMALL | dict(max_episode_length=27_000) | options)
        self.messages, self.updates, self.steps, self.resets = [], [], [], []
        self.stops, self.rng_seeds = 0, []
        torch.manual_seed(0)
        envs = a3c.AtariEnvs(self.args, 1)
        self.has_fire, self.fire_action = envs.has_fire, envs.fire_action
        make = agent or a3c.Agent
        self.model = make(envs.obs_shape, envs.num_actions, self.args)
        self.optimizers = make_optimizers(self.args, self.model)
        self.counts = torch.zeros(self.args.num_workers, dtype=torch.int64)
        self.counts[worker - 1] = others
        self.checkpoint_step = torch.tensor(others)
        shared = a3c.Shared(self.model, self.optimizers, self.counts, self.checkpoint_step, self)
        with pytest.MonkeyPatch.context() as patch:
            self.record(patch)
            a3c.actor_learner(worker, self.args, folder, shared)

    def put(self, message):
        if message[-1] is None:  # the worker has stopped: the parent's part at a checkpoint
            self.stops += 1
            self.checkpoint_step.fill_(self.counts.sum())
        else:
            self.messages.append(message)

    def record(self, patch):
        tape = self

        class AtariEnvs(a3c.AtariEnvs):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                emulator_step = self.envs.step

                def step(actions):
                    tape.emulated, tape.action = emulator_step(actions), int(actions[0])
                    return tape.emulated

                self.envs.step = step

            def reset(self, seed, video_folder=None):
                tape.now, tape.fresh, tape.frames = super().reset(seed, video_folder), True, 0
                tape.resets.append((len(tape.steps), seed))
                tape.rng_seeds.append(torch.initial_seed())
                return tape.now

            def step(self, actions):
                result = super().step(actions)
                obs, reward, terminated, truncated, info = tape.emulated
                frames = info["episode_frame_number"][0]
                ended, lost = bool((terminated | truncated)[0]), bool(terminated[0])
                over = ended and frames <= tape.frames
                row = dict(obs=tape.now, next=info["final_obs"] if over else obs, over=over)
                row |= dict(sampled=int(actions[0]), action=tape.action, reward=int(reward[0]))
                row |= dict(fresh=tape.fresh, truncated=bool(truncated[0]))
                row |= dict(terminated=lost and (over or tape.args.episodic_life))
                tape.steps.append(row)
                tape.now, tape.frames, tape.fresh = obs, frames, ended
                return result

        def noted(kind):
            step = kind.step

            def noted_step(self):
                parameters = [p for group in self.param_groups for p in group["params"]]
                row = dict(before=flat(parameters), grad=flat([p.grad for p in parameters]))
                row |= dict(steps=len(tape.steps), rate=self.param_groups[0]["lr"])
                step(self)
                tape.updates.append(row | {"after": flat(parameters)})

            return noted_step

        patch.setattr(a3c, "prepare_worker", lambda args: None)
        for kind in (a3c.SharedAdam, a3c.SharedRMSprop):
            patch.setattr(kind, "step", noted(kind))
        patch.setattr(a3c, "AtariEnvs", AtariEnvs)

    def rollouts(self):
        """The steps of each update."""
        edges = [0, *(update["steps"] for update in self.updates)]
        return [self.steps[i:j] for i, j in pairwise(edges)]


NO_STATE = (torch.zeros(256, dtype=torch.float64),) * 2


def plain_step(w, obs, state, crop):
    """The network of one frame, written out: logits (A,), value (), the next state."""
    x = torch.from_numpy(obs).double()
    if crop:  # rows 34 to 194 of the screen
        x = x[:, :, 17:97]
    x = F.interpolate(x, (42, 42), mode="bilinear")
    x = (x - x.mean()) / x.std().clamp(min=1)
    for layer in (0, 2, 4, 6):
        weight, bias = w[f"trunk.{layer}.weight"], w[f"trunk.{layer}.bias"]
        x = F.elu(F.conv2d(x, weight, bias, stride=2, padding=1))
    x = x.flatten()
    if "lstm.weight_ih_l0" in w:
        h, c = state
        gates = w["lstm.weight_ih_l0"] @ x + w["lstm.bias_ih_l0"]
        gates = gates + w["lstm.weight_hh_l0"] @ h + w["lstm.bias_hh_l0"]
        i, f, g, o = gates.reshape(4, 256)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        x = h = o.sigmoid() * c.tanh()
        state = (h, c)
    else:
        x = F.elu(w["linear.0.weight"] @ x + w["linear.0.bias"])
    logits = w["policy_head.weight"] @ x + w["policy_head.bias"]
    return logits, (w["value_head.weight"] @ x + w["value_head.bias"])[0], state


def papers_gradient(tape, theta, rollout, state):
    """[A3C] Alg. S3 step by step in one graph, in float64. Returns the gradient and the state."""
    args, names = tape.args, [name for name, _ in tape.model.named_parameters()]
    shapes = [p.shape for p in tape.model.parameters()]
    pieces = theta.double().split([shape.numel() for shape in shapes])
    pieces = [piece.reshape(shape) for piece, shape in zip(pieces, shapes)]
    w = {name: piece.requires_grad_() for name, piece in zip(names, pieces)}
    state = tuple(part.detach() for part in state)
    outputs = []
    for row in rollout:
        *output, state = plain_step(w, row["obs"], state, args.crop)
        outputs.append(output)
    last = rollout[-1]
    bootstrap = plain_step(w, last["next"], state, args.crop)[1].item()
    v = [value.item() for _, value in outputs] + [0.0 if last["terminated"] else bootstrap]
    rewards = [max(-1, min(1, row["reward"])) for row in rollout]
    deltas = [reward + args.gamma * v[i + 1] - v[i] for i, reward in enumerate(rewards)]
    loss = 0
    for i, (row, (logits, value)) in enumerate(zip(rollout, outputs)):
        discount = args.gamma * args.gae_lambda
        advantage = sum(discount**k * delta for k, delta in enumerate(deltas[i:]))
        if not (row["fresh"] and tape.has_fire):  # else FIRE was pressed for the policy
            policy = logits.softmax(0)
            loss = loss - policy[row["sampled"]].log() * advantage
            loss = loss + args.ent_coef * (policy * policy.log()).sum()
        loss = loss + args.vf_coef * (advantage + v[i] - value) ** 2 / 2
    grad = flat(torch.autograd.grad(loss, list(w.values()), materialize_grads=True))
    grad = grad * min(1, args.max_grad_norm / (grad.norm().item() + 1e-6))
    return grad, NO_STATE if last["terminated"] or last["truncated"] else state


LEARNERS = {
    "LSTM, Adam": {},
    "RMSprop, own averages, clipped": dict(
        optimizer="rmsprop", shared_optimizer=False, max_grad_norm=0.5, learning_rate=1e-3
    ),
    "lambda 0.9, lives, truncated": dict(
        gae_lambda=0.9, episodic_life=True, max_episode_length=60, ent_coef=0.1, anneal_lr=True
    ),
    "no LSTM, no crop, RMSprop, rewards up to 30": dict(
        env_id="SpaceInvadersNoFrameskip-v4", lstm=False, optimizer="rmsprop", crop=False
    ),
}


@pytest.fixture(scope="module", params=LEARNERS)
def tape(request, tmp_path_factory):
    options = dict(num_steps=9, total_timesteps=200, checkpoint_interval=130)
    return Tape(tmp_path_factory.mktemp("tape"), **options | LEARNERS[request.param])


def test_every_gradient_that_is_applied_is_the_papers(tape):
    """So gradients do not accumulate, and the LSTM's state is carried, cut and reset rightly."""
    rollouts = tape.rollouts()
    assert len(rollouts) == len(tape.updates) >= 22 and 200 <= sum(map(len, rollouts)) < 209
    resets = [at for at, _ in tape.resets]
    assert resets[0] == 0 and 130 <= resets[1] < 139 and len(resets) == 2
    done, grad_norms = 0, []
    for i, (rollout, update) in enumerate(zip(rollouts, tape.updates)):
        if done in resets:
            state = NO_STATE
        expected, state = papers_gradient(tape, update["before"], rollout, state)
        error = torch.linalg.norm(update["grad"] - expected) / torch.linalg.norm(expected)
        assert error < 1e-3, f"update {i} differs by {error}"
        grad_norms.append(expected.norm())
        done += len(rollout)
    for row in tape.steps:  # FIRE is pressed on the first step of each life and only there
        assert row["action"] == (tape.fire_action if row["fresh"] else row["sampled"])
    ended = [[row["terminated"] or row["truncated"] for row in rollout] for rollout in rollouts]
    assert not any(any(rows[:-1]) for rows in ended)
    assert all(len(rows) == 9 or rows[-1] for rows in ended)
    if tape.args.max_grad_norm < 1:
        assert max(grad_norms) > 0.499
    if tape.args.episodic_life:
        assert sum(map(sum, ended)) > 2


def test_the_optimizer_is_the_one_of_its_name_with_its_rate(tape):
    args, theta = tape.args, tape.updates[0]["before"].double().requires_grad_()
    adam, square_avg = torch.optim.Adam([theta]), torch.ones_like(theta)
    for update, rollout in zip(tape.updates, tape.rollouts()):
        progress = (update["steps"] - len(rollout)) / args.total_timesteps
        rate = args.learning_rate * (1 - progress * args.anneal_lr)
        assert update["rate"] == pytest.approx(rate)
        adam.param_groups[0]["lr"] = rate
        theta.grad = update["grad"].double()
        if args.optimizer == "adam":
            adam.step()
        else:
            square_avg = 0.99 * square_avg + 0.01 * theta.grad**2
            theta.data -= rate * theta.grad / (square_avg + 1e-5).sqrt()
        torch.testing.assert_close(update["after"].double(), theta.data, atol=2e-6, rtol=1e-5)
    assert tape.counts.tolist() == [len(tape.steps)] and tape.stops == 2


# Mathematics


@pytest.mark.quick
def test_adam_is_torchs():
    adam_parameter = nn.Parameter(torch.randn(50, dtype=torch.float64))
    torchs_parameter = nn.Parameter(adam_parameter.detach().clone())
    adam = a3c.SharedAdam([adam_parameter], lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    torchs = torch.optim.Adam([torchs_parameter], lr=0.01)
    first = adam_parameter.detach().clone()
    for step in range(40):
        grad = torch.randn(50, dtype=torch.float64) * 10.0 ** -(step % 5)
        adam_parameter.grad, torchs_parameter.grad = grad, grad.clone()
        adam.step()
        torchs.step()
        torch.testing.assert_close(adam_parameter, torchs_parameter, rtol=1e-12, atol=1e-14)
        if step == 0:  # the bias correction makes the first step as long as the learning rate
            length = (adam_parameter - first).abs()
            torch.testing.assert_close(length, torch.full_like(length, 0.01), rtol=1e-3, atol=0)


@pytest.mark.quick
@pytest.mark.parametrize("alpha, eps", [(0.99, 1e-5), (0.9, 1e-2)])
def test_rmsprop_is_the_papers(alpha, eps):
    """Epsilon inside the root, and an average that starts at one."""
    p = nn.Parameter(torch.randn(50, dtype=torch.float64))
    rmsprop = a3c.SharedRMSprop([p], lr=1.0, alpha=alpha, eps=eps)
    expected, g = p.detach().clone(), torch.ones_like(p)
    for step in range(40):
        p.grad = torch.randn(50, dtype=torch.float64) * 10.0 ** -(step % 5)
        rmsprop.param_groups[0]["lr"] = 1e-2 / (step + 1)
        rmsprop.step()
        g = alpha * g + (1 - alpha) * p.grad**2
        expected -= 1e-2 / (step + 1) * p.grad / (g + eps).sqrt()
        torch.testing.assert_close(p.data, expected.data, rtol=1e-12, atol=1e-14)


@pytest.mark.quick
@pytest.mark.parametrize("betas, bound", [((0.9, 0.999), 7.271), ((0.9, 0.9999), 22.94)])
def test_adams_bound_is_what_its_betas_allow(betas, bound):
    """Those gradients step furthest that grow as (beta_1 / beta_2)^k k steps before the last."""
    k = torch.arange(200_000, dtype=torch.float64)
    ratio = betas[0] / betas[1]
    m = ((1 - betas[0]) * betas[0] ** k * ratio**k).sum()
    v = ((1 - betas[1]) * betas[1] ** k * ratio ** (2 * k)).sum()
    assert m / v.sqrt() == pytest.approx(bound, rel=1e-3)
    p = nn.Parameter(torch.zeros(1))
    adam = a3c.SharedAdam([p], lr=1.0, betas=betas, eps=1e-8)
    for state in adam.state.values():  # as if another worker had written its first moment only
        next(x for x in state.values() if x.dim() and x.is_floating_point()).fill_(1.0)
    p.grad = torch.zeros(1)
    adam.step()
    assert -p.item() == pytest.approx(bound, rel=1e-3)
    adam.param_groups[0]["betas"] = (0.99, 0.9)  # for which there is no bound
    with pytest.raises(ValueError):
        adam.step()


@pytest.mark.parametrize("name, bound", [("SharedAdam", 7.3), ("SharedRMSprop", 10.001)])
def test_workers_that_write_at_once_do_not_destroy_the_model(name, bound):
    """One has large gradients and one hardly any; alone, neither's step exceeds the bound."""
    options = dict(alpha=0.99) if name == "SharedRMSprop" else dict(betas=(0.9, 0.999))

    def work(p, grad, optimizer, together):
        mine = nn.Parameter(p.data)  # this worker's view of the shared parameter, with its gradient
        optimizer = copy.copy(optimizer)
        optimizer.param_groups = [optimizer.param_groups[0] | {"params": [mine]}]
        optimizer.state = {mine: optimizer.state[p]}
        mine.grad = grad
        together.wait()
        for _ in range(2):
            optimizer.step()

    for _ in range(15):
        p = nn.Parameter(torch.zeros(300_000))
        optimizer, together = (
            getattr(a3c, name)([p], lr=1.0, eps=1e-8, **options),
            threading.Barrier(2),
        )
        grads = torch.randn(300_000), torch.randn(300_000) * 1e-7
        work_of = [threading.Thread(target=work, args=(p, g, optimizer, together)) for g in grads]
        for thread in work_of:
            thread.start()
        for thread in work_of:
            thread.join()
        assert p.abs().max() <= 4 * bound


@pytest.mark.quick
@pytest.mark.parametrize("gae_lambda", [1.0, 0.8])
def test_returns_are_the_double_sum(gae_lambda):
    gamma, T = 0.97, 20
    rewards, v = torch.randn(T, 1).double(), torch.randn(T + 1, 1).double()
    for bootstrap in (v[-1:], torch.zeros(1, 1)):
        next_values = torch.cat([v[1:-1], bootstrap])
        found = a3c.compute_returns(rewards, next_values, gamma, gae_lambda)
        delta = rewards + gamma * next_values - v[:-1]
        for t in range(T):
            advantage = sum((gamma * gae_lambda) ** k * delta[t + k] for k in range(T - t))
            assert found[t].item() == pytest.approx((advantage + v[t]).item())
            n_step = sum(gamma**k * rewards[t + k] for k in range(T - t))
            if gae_lambda == 1:
                n_step = n_step + gamma ** (T - t) * bootstrap[0]
                assert found[t].item() == pytest.approx(n_step.item())


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_loss_and_gradient_of_a_rollout(precision):
    case = list(cases("a2c_a3c", "a3c_loss"))[-1]  # its advantages are returns minus values
    names = ("logits", "values", "returns")
    inputs = [torch.tensor(case["inputs"][x]).to(getattr(torch, precision)) for x in names]
    logits, values = (x.requires_grad_() for x in inputs[:2])
    bootstrap, args = torch.tensor([0.75], dtype=logits.dtype), a3c.Args()
    args.ent_coef, args.vf_coef = (case["inputs"][x].item() for x in ("ent_coef", "vf_coef"))
    rewards = inputs[2] - args.gamma * torch.cat([inputs[2][1:], bootstrap])
    actions = torch.tensor(case["inputs"]["actions"])
    rollout = (torch.zeros(5), actions, torch.ones_like(rewards), rewards, None, bootstrap)
    loss, metrics = a3c.a3c_loss(lambda obs, lstm_state: (logits, values, None), rollout, args)
    loss.backward()
    check(case, "loss", loss.detach(), precision)
    for name, metric in metrics.items():
        check(case, name, 5 * metric, precision)
    check(case, "grad_logits", logits.grad, precision)
    check(case, "grad_values", values.grad, precision)


@pytest.mark.quick
@pytest.mark.parametrize("lstm", [True, False])
def test_a_batch_is_its_steps_one_after_the_other(lstm):
    agent = a3c.Agent((1, 105, 80), 5, a3c.Args(lstm=lstm))
    obs = torch.randint(0, 256, (12, 3, 1, 105, 80), dtype=torch.uint8)
    state = first = tuple(torch.randn(2, 3, 256))
    logits, values, last = agent(obs, first)
    close = dict(atol=1e-5, rtol=1e-4)
    assert logits.shape == (12, 3, 5) and values.shape == (12, 3)
    for t in range(12):
        one, value, state = agent(obs[t : t + 1], state)
        torch.testing.assert_close(one[0], logits[t], **close)
        torch.testing.assert_close(value[0], values[t], **close)
    torch.testing.assert_close(tuple(state), tuple(last), **close)
    one, _, _ = agent(obs[:1, 1:2], tuple(x[1:2] for x in first))  # environments do not mix
    torch.testing.assert_close(one[0, 0], logits[0, 1], **close)


def test_the_network_sees_the_field_without_the_borders():
    """Pong's field has one gray value but for ball and paddles; its borders are much brighter."""
    envs = a3c.make_atari(a3c.Args(), 1)
    obs, _ = envs.reset(seed=np.array([1]))
    assert obs[0, 0, 16].mean() > 200 and obs[0, 0, 97].mean() > 200
    seen = []
    agent = a3c.Agent((1, 105, 80), 6, a3c.Args())
    agent.trunk.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, 0]))
    agent(torch.from_numpy(obs[None]), agent.initial_state(1))
    (frame,) = seen
    assert frame.shape == (42, 42) and abs(frame.mean()) < 1e-5
    background = frame.median()
    assert ((frame - background).abs() < 1e-3).float().mean() > 0.9
    assert (frame[[0, -1]] - background).abs().max() < 1e-3


# What workers do


def test_annealing_follows_the_steps_of_all_workers(tmp_path):
    options = dict(num_workers=2, total_timesteps=1000, num_steps=50, checkpoint_interval=10_000)
    tape = Tape(tmp_path, others=800, anneal_lr=True, **options)
    lengths = [len(rows) for rows in tape.rollouts()]
    done = [800 + update["steps"] - t for update, t in zip(tape.updates, lengths)]
    rates = [1e-4 * (1 - T / 1000) for T in done]
    assert [update["rate"] for update in tape.updates] == pytest.approx(rates)
    assert sum(map(len, tape.rollouts())) + 800 == tape.counts.sum() >= 1000


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_workers_share_the_optimizer_or_have_their_own(tmp_path, optimizer):
    for shared in (True, False):
        options = dict(num_workers=3, shared_optimizer=shared, optimizer=optimizer)
        tape = Tape(tmp_path, worker=1, **options)
        untouched = make_optimizers(tape.args, tape.model)
        assert len(tape.optimizers) == (1 if shared else 3)
        for rank, (found, fresh) in enumerate(zip(tape.optimizers, untouched)):
            moved = [not torch.equal(*pair) for pair in zip(states(found), states(fresh))]
            assert all(moved) if shared or rank == 1 else not any(moved), rank


def test_episodes_are_logged_whole_and_unclipped_and_losses_at_their_interval(tmp_path):
    options = dict(total_timesteps=900, env_id="SpaceInvadersNoFrameskip-v4", num_steps=20)
    tape = Tape(tmp_path, checkpoint_interval=5000, log_interval=7, **options)
    score, length, expected = 0, 0, []
    for step, row in enumerate(tape.steps, start=1):
        score, length = score + row["reward"], length + 1
        if row["over"]:
            expected.append((step, score, length))
            score = length = 0
    assert expected and expected[0][1] > 20
    found = [(step, *rest) for step, episodes, _ in tape.messages for rest in episodes.values()]
    assert found == expected
    losses = [(step, tags) for step, _, tags in tape.messages if tags]
    assert [step for step, _ in losses] == [update["steps"] for update in tape.updates][6::7]
    for _, tags in losses:
        assert 0 < tags["losses/entropy"] < np.log(6) + 1e-6
        assert tags["charts/learning_rate"] == 1e-4


def test_workers_seeds_and_checkpoints_have_different_episodes_and_random_numbers(tmp_path):
    runs = [Tape(tmp_path, worker=rank, num_workers=4) for rank in range(4)]
    runs.append(Tape(tmp_path, num_workers=4, seed=2))
    env_seeds = [seed for run in runs for _, seed in run.resets]
    streams = [seed for run in runs for seed in run.rng_seeds]
    assert all(len(run.resets) == 3 for run in runs)
    assert len(set(env_seeds)) == len(env_seeds) == len(set(streams)) == 15
    again = Tape(tmp_path, worker=2, num_workers=4)
    assert [row["sampled"] for row in again.steps] == [row["sampled"] for row in runs[2].steps]
    assert torch.equal(again.updates[-1]["after"], runs[2].updates[-1]["after"])


def test_a_worker_uses_the_threads_it_is_given(monkeypatch):
    monkeypatch.setattr(a3c.threading.Thread, "start", lambda self: None)
    a3c.prepare_worker(a3c.Args(torch_threads=2))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("episodic_life", [False, True])
def test_an_evaluation_resets_the_lstm_where_training_does(tmp_path, monkeypatch, episodic_life):
    zero, ended = [], [np.ones(2, bool)]

    class AtariEnvs(a3c.AtariEnvs):
        def step(self, actions):
            result = super().step(actions)
            ended.append(result[3] | result[4])
            return result

    class Agent(a3c.Agent):
        def forward(self, obs, lstm_state):
            zero.append((torch.stack(list(lstm_state)) == 0).all(-1).all(0).numpy())
            return super().forward(obs, lstm_state)

    monkeypatch.setattr(a3c, "AtariEnvs", AtariEnvs)
    monkeypatch.setattr(a3c, "Agent", Agent)
    args = a3c.Args(**SMALL | dict(episodic_life=episodic_life, max_episode_length=150))
    model = {"agent": a3c.Agent((1, 105, 80), 4, args).state_dict(), "global_step": 0}
    returns = a3c.evaluate(args, model, tmp_path)
    assert len(returns) == 2
    np.testing.assert_array_equal(zero, ended[:-1])
    assert sum(map(sum, ended)) > (5 if episodic_life else 3)
    assert a3c.evaluate(args, model, tmp_path) == returns


# Changes that readers make


class Feedforward(a3c.Agent):
    """No memory: the state is passed on."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.lstm, self.hidden = None, nn.Linear(288, 256)

    def forward(self, obs, lstm_state):
        hidden = self.hidden(self.features(obs[:, 0])).tanh()[:, None]
        return self.policy_head(hidden), self.value_head(hidden).squeeze(-1), lstm_state


class Frozen(a3c.Agent):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.trunk.requires_grad_(False)


def test_a_network_without_memory_and_a_frozen_layer_are_trained_as_they_say(tmp_path):
    tape = Tape(tmp_path, agent=Feedforward)
    for update, rows in list(zip(tape.updates, tape.rollouts()))[:3]:
        nn.utils.vector_to_parameters(update["before"], tape.model.parameters())
        obs = torch.from_numpy(np.stack([row["obs"] for row in rows] + [rows[-1]["next"]]))
        logits, values, _ = tape.model(obs, None)
        policy = torch.distributions.Categorical(logits=logits)
        R, loss = 0 if rows[-1]["terminated"] else values[-1].detach(), 0
        actions = torch.tensor([row["sampled"] for row in rows] + [0])[:, None]
        logprobs, entropies = policy.log_prob(actions), policy.entropy()
        for i in reversed(range(len(rows))):
            R = np.sign(rows[i]["reward"]) + 0.99 * R
            if not rows[i]["fresh"]:
                loss = loss - logprobs[i] * (R - values[i].detach()) - 0.01 * entropies[i]
            loss = loss + 0.25 * (R - values[i]) ** 2
        expected = flat(torch.autograd.grad(loss, list(tape.model.parameters())))
        torch.testing.assert_close(update["grad"], expected, atol=1e-5, rtol=1e-3)

    args = a3c.Args()
    frozen = Frozen((1, 105, 80), 4, args)
    before, local = copy.deepcopy(frozen.state_dict()), copy.deepcopy(frozen)
    obs = torch.randint(0, 256, (5, 1, 1, 105, 80), dtype=torch.uint8)
    actions, ones = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    rollout = obs, actions, ones.bool(), ones, frozen.initial_state(1), ones[:1]
    a3c.update(local, frozen, make_optimizers(args, frozen)[0], rollout, args)
    for name, p in frozen.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("trunk"), name


@pytest.mark.quick
def test_optimizers_are_shared_with_their_state_or_refused():
    agent = a3c.Agent((1, 105, 80), 4, a3c.Args())
    for args in (a3c.Args(), a3c.Args(optimizer="rmsprop")):
        (optimizer,) = make_optimizers(args, agent)
        optimizer.share_memory()
        assert all(x.is_shared() for x in states(optimizer))
    assert not hasattr(torch.optim.AdamW(agent.parameters()), "share_memory")  # `train` fails


# Processes. A user's program imports the script, changes it and calls `main`

USER = """
import os, signal, sys
sys.path.insert(0, {root!r})
import numpy as np, gymnasium as gym, torch
import a3c_atari as a3c

class Catch:
    '''A ball is seen once, at the top; two steps later the paddle should be in its column.'''

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, (1, 42, 42), np.uint8)
        self.single_action_space = gym.spaces.Discrete(3)
        self.log = os.open("steps", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def reset(self, *, seed):
        self.rng = np.random.default_rng(seed)
        return self.begin(), {{}}

    def begin(self):
        self.time, self.ball = 0, self.rng.integers(3, size=self.num_envs)
        self.paddle = np.ones(self.num_envs, int)
        return self.draw()

    def draw(self):
        grid, rows = np.zeros((self.num_envs, 1, 3, 3), np.uint8), np.arange(self.num_envs)
        grid[rows, 0, 2, self.paddle] = 128
        if self.time == 0:
            grid[rows, 0, 0, self.ball] = 255
        return grid.repeat(14, 2).repeat(14, 3)

    def step(self, actions):
        os.write(self.log, b"." * self.num_envs)
        self.paddle = (self.paddle + np.array([0, 1, -1])[actions]).clip(0, 2)
        self.time += 1
        ends, obs = np.full(self.num_envs, self.time == 3), self.draw()
        rewards = np.where(ends, np.where(self.ball == self.paddle, 1.0, -1.0), 0.0)
        info = {{"final_obs": obs}}
        return self.begin() if ends[0] else obs, rewards, ends, np.zeros_like(ends), info

    def close(self):
        os.close(self.log)

class Dropout(a3c.Agent):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.trunk.append(torch.nn.Dropout(0.5))

a3c.make_atari = lambda args, num_envs, color=False: Catch(num_envs)
{change}
if __name__ == "__main__":
    a3c.main()
"""


def user_program(cwd, change=""):
    (cwd / "user.py").write_text(USER.format(root=str(ROOT), change=change))


def start(cwd, *flags):
    command = [sys.executable, "user.py", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=cwd, start_new_session=True, **pipes)


def finish(process):
    stdout, stderr = process.communicate(timeout=300)
    return SimpleNamespace(status=process.returncode, stdout=stdout, stderr=stderr)


def wait_for(condition, process=None, seconds=120):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "it took too long"
        assert not process or process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def newest(folder):
    return load(max(folder.glob("checkpoint_*.pt")))


def processes_in(folder):
    """The processes whose working directory it is, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            zombie = "State:\tZ" in (path / "status").read_text()
            if os.readlink(path / "cwd") == str(folder) and not zombie:
                found.append(int(path.name))
    return found


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_catch_is_learned_by_two_workers_and_every_step_is_counted(tmp_path):
    """A random player scores -1/3, and so does the best one without memory."""
    flags = "--num-workers 2 --total-timesteps 4001 --learning-rate 1e-3 --gamma 0.9"
    flags += " --checkpoint-interval 3000 --eval-episodes 100 --run-folder run"
    user_program(tmp_path)
    result = finish(start(tmp_path, *flags.split()))
    assert result.status == 0, result.stderr
    score = float(result.stdout.split("evaluation: ")[1].split()[0])
    assert score > 0.7
    last = newest(tmp_path / "run")
    steps = last["global_step"]
    evaluated = 3 * 100  # each episode takes three steps, in 100 environments at once
    assert 4001 <= steps == os.path.getsize(tmp_path / "steps") - evaluated < 4001 + 2 * 20


def test_a_killed_and_resumed_run_with_dropout_is_bit_identical(tmp_path):
    flags = "--num-workers 1 --num-steps 7 --total-timesteps 905 --checkpoint-interval 200"
    flags += " --eval-episodes 2 --run-folder run"
    folders = tmp_path / "whole", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
        user_program(folder, "a3c.Agent = Dropout")
    whole = start(folders[0], *flags.split())
    killed = start(folders[1], *flags.split())
    seed = int(time.time())
    delay = random.Random(seed).uniform(0, 0.5)
    print(f"seed of the kill: {seed}")
    wait_for(lambda: list(folders[1].glob("run/checkpoint_*[1-9]??.pt")), killed)
    time.sleep(delay)
    killed.kill()
    killed.communicate()
    wait_for(lambda: not processes_in(folders[1]))  # no worker outlives its parent
    for process in (whole, start(folders[1], *flags.split())):
        result = finish(process)
        assert result.status == 0, result.stderr
    one, two = (newest(folder / "run") for folder in folders)
    assert one["global_step"] >= 905
    assert_same(one, two)


LONG = "--num-workers 2 --total-timesteps 1000000 --checkpoint-interval 150 --eval-episodes 1"
FAIL = """
update = a3c.update
def fail(*arguments, calls=[]):
    calls.append(1)
    if len(calls) == 30:
        raise ZeroDivisionError("on command")
    return update(*arguments)
a3c.update = fail
"""


@pytest.mark.parametrize("fault", ["killed", "raises"])
def test_a_worker_that_fails_ends_the_run_with_its_cause_and_a_hint(tmp_path, fault):
    user_program(tmp_path, FAIL if fault == "raises" else "")
    process = start(tmp_path, *LONG.split(), "--run-folder", "run")
    if fault == "killed":
        wait_for(lambda: list(tmp_path.glob("run/checkpoint_*[1-9]??.pt")), process)
        workers = [x for x in processes_in(tmp_path) if "spawn_main" in command_of(x)]
        os.kill(random.choice(workers), signal.SIGKILL)
    result = finish(process)
    assert result.status == 1
    wait_for(lambda: not processes_in(tmp_path))
    assert "--resume run" in result.stderr
    assert ("SIGKILL" if fault == "killed" else "on command") in result.stderr
    assert result.stderr.count("Traceback") == (fault == "raises")


def test_ctrl_c_ends_everything_with_one_line(tmp_path):
    user_program(tmp_path)
    process = start(tmp_path, *LONG.split(), "--run-folder", "run")
    wait_for(lambda: list(tmp_path.glob("run/checkpoint_*[1-9]??.pt")), process)
    os.killpg(process.pid, signal.SIGINT)
    result = finish(process)
    assert result.status != 0
    wait_for(lambda: not processes_in(tmp_path))
    assert "interrupted" in result.stderr and "Traceback" not in result.stderr


def test_what_would_silently_go_wrong_is_refused():
    for options in (dict(checkpoint_interval=79), dict(num_steps=0), dict(max_episode_length=9)):
        with pytest.raises(SystemExit, match="error: --"):
            a3c.Args(**options).check()
    a3c.Args(checkpoint_interval=80).check()
