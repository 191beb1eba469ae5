"""A3C: its mathematics on real games, its processes under real kills.

A `Tape` is all that happened in a short real run of one worker in this process: what the game was told and said, and
the gradients that the optimiser was given. What they should have been is worked out from the games alone.
"""

import functools
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
from conftest import ROOT, Run, checkpoints, load, run_folder_in, scalars, wait_for
from test_resume import assert_same_run, kill_in

import a3c_atari as a3c


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Enough(Exception):
    """The worker has asked for more orders than there are."""


class Tape:
    """A run of a3c.actor_learner, one worker in this process; `orders` are (stop, quota, step to begin anew at)."""

    def __init__(self, folder, orders=((100, 0, 0), (100, 100, None)), worker=0, seed_of_parameters=0, **options):
        self.args = a3c.Args(**dict(env_id="BreakoutNoFrameskip-v4", num_workers=1, seed=1) | options)
        self.orders, self.messages, self.updates, self.steps, self.resets = list(orders), [], [], [], []
        self.acted = []
        torch.manual_seed(seed_of_parameters)
        envs = a3c.make_envs(self.args, 1)
        self.model = a3c.Agent(envs.single_action_space.n, self.args.lstm)
        envs.close()
        theta, _ = a3c.flatten_parameters(self.model)
        one = self.args.optimizer == "rmsprop" and not self.args.torch_rmsprop
        moments = torch.full((1 if self.args.shared_optimizer else self.args.num_workers, 2, len(theta)), float(one))
        self.shared = a3c.Shared(theta, moments, *torch.zeros(2, self.args.num_workers, dtype=torch.int64))
        self.start = theta.clone()
        with pytest.MonkeyPatch.context() as patch:
            self.record(patch)
            with pytest.raises(Enough):
                a3c.actor_learner(worker, self.args, folder, self.shared, self)

    def send(self, message):
        self.messages.append(message)

    def recv(self):
        if not self.orders:
            raise Enough
        return self.orders.pop(0)

    def record(self, patch):
        tape = self

        class Games(a3c.Games):
            def reset(self, seeds):
                tape.now = super().reset(seeds)
                tape.resets.append((len(tape.steps), seeds))
                return tape.now

            def press_fire(self, actions):
                tape.chosen = super().press_fire(actions)
                return tape.chosen

            def step(self, actions):
                row = dict(pixels=tape.now, action=int(actions[0]), chosen=bool(tape.chosen[0]))
                result = super().step(actions)
                pixels, reward, terminated, truncated, over, final, _ = result
                row |= dict(reward=int(reward[0]), terminated=bool(terminated[0]), truncated=bool(truncated[0]))
                row |= dict(over=bool(over[0]), next=final if over[0] else pixels)
                tape.steps.append(row)
                tape.now = pixels
                return result

        def note(kind):
            function = getattr(a3c, kind)

            def step(theta, grad, *rest):
                row = dict(kind=kind, before=theta.clone(), grad=grad.clone(), steps=len(tape.steps), rest=rest)
                function(theta, grad, *rest)
                tape.updates.append(row | {"after": theta.clone()})

            return step

        def sample(logits, rng, sample=a3c.sample):
            self.acted.append(logits[0].clone())
            return sample(logits, rng)

        patch.setattr(a3c, "sample", sample)
        patch.setattr(a3c, "shared_adam_step", note("shared_adam_step"))
        patch.setattr(a3c, "shared_rmsprop_step", note("shared_rmsprop_step"))
        patch.setattr(a3c, "Games", Games)

    def rollouts(self):
        """The steps of each update."""
        edges = [0, *(update["steps"] for update in self.updates)]
        return [self.steps[i:j] for i, j in pairwise(edges)]


def parameters(tape, theta):
    """A vector as named float64 tensors with gradients, in the order of the network."""
    named = [(name, p.shape, p.numel()) for name, p in tape.model.named_parameters()]
    pieces = theta.double().split([size for *_, size in named])
    return {name: piece.reshape(shape).requires_grad_() for (name, shape, _), piece in zip(named, pieces)}


def plain_step(w, pixels, state, crop):
    """The network of one frame, written out: logits (A,), value (), the next state."""
    x = torch.from_numpy(pixels).double()
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
    """[A3C] Alg. S3 as it stands there, step by step in one graph.

    Returns the gradient (P,), the logits [(A,)] of each step, and the state that the next rollout begins with.
    """
    args, w = tape.args, parameters(tape, theta)
    state = tuple(part.detach() for part in state)
    outputs = []
    for row in rollout:
        *output, state = plain_step(w, row["pixels"], state, args.crop)
        outputs.append(output)
    last = rollout[-1]
    bootstrap = plain_step(w, last["next"], state, args.crop)[1].item()
    values = [value.item() for _, value in outputs] + [0.0 if last["terminated"] else bootstrap]
    rewards = [max(-1, min(1, row["reward"])) for row in rollout]
    deltas = [reward + args.gamma * values[j + 1] - values[j] for j, reward in enumerate(rewards)]
    loss = 0
    for i, (row, (logits, value)) in enumerate(zip(rollout, outputs)):
        advantage = sum((args.gamma * args.gae_lambda) ** k * delta for k, delta in enumerate(deltas[i:]))
        policy = logits.softmax(0)
        entropy = -(policy * policy.log()).sum()
        loss = loss - policy[row["action"]].log() * advantage * row["chosen"] - args.ent_coef * entropy
        loss = loss + args.vf_coef * (advantage + values[i] - value) ** 2 / 2
    grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(w.values()))])
    grad = grad * min(1, args.max_grad_norm / (grad.norm().item() + 1e-6))
    state = NO_STATE if last["terminated"] or last["truncated"] else state
    return grad, [logits.detach() for logits, _ in outputs], state


NO_STATE = (torch.zeros(256, dtype=torch.float64),) * 2
LEARNERS = {
    "LSTM, Adam": {},
    "LSTM, the paper's RMSprop, own averages": dict(
        optimizer="rmsprop", shared_optimizer=False, max_grad_norm=1.0, learning_rate=1e-3
    ),
    "lambda 0.9, lives, cut off": dict(
        gae_lambda=0.9, episodic_life=True, max_episode_length=30, ent_coef=0.1, anneal_lr=True, total_timesteps=400
    ),
    "feed-forward, PyTorch's RMSprop": dict(lstm=False, optimizer="rmsprop", torch_rmsprop=True, crop=False),
}
ORDERS = [(250, 0, 0), (250, 250, None), (300, 0, 250), (300, 300, None)]  # with a checkpoint at 250


@pytest.fixture(scope="module", params=LEARNERS)
def tape(request, tmp_path_factory):
    return Tape(tmp_path_factory.mktemp("tape"), ORDERS, num_steps=10, **LEARNERS[request.param])


def test_the_gradient_that_is_applied_is_the_papers(tape):
    """In each of many consecutive updates, also after games have ended. (Known programs: only in the first.)

    So the LSTM's state is carried from rollout to rollout, not differentiated there, and zero after an end and at a
    checkpoint, in acting and in learning.
    """
    rollouts = tape.rollouts()
    assert len(rollouts) == len(tape.updates) >= 30 and sum(map(len, rollouts)) == 300
    done = 0
    for rollout, update in zip(rollouts, tape.updates):
        if done in (0, 250):
            state = NO_STATE
        expected, logits, state = papers_gradient(tape, update["before"], rollout, state)
        assert torch.linalg.norm(update["grad"] - expected) < 1e-3 * torch.linalg.norm(expected)
        acted = torch.stack(tape.acted[done : done + len(rollout)])
        torch.testing.assert_close(acted.double(), torch.stack(logits), atol=1e-5, rtol=1e-4)
        done += len(rollout)
    ended = [[row["terminated"] or row["truncated"] for row in rollout] for rollout in rollouts]
    assert sum(map(sum, ended)) >= 1 and not any(any(rows[:-1]) for rows in ended)
    assert sum(len(rows) != 10 and not rows[-1] for rows in ended) <= 2  # cut short: at 250 and 300
    assert tape.resets == [(at, a3c.reset_seeds(1, 0, at, num=1)) for at in (0, 250)]


def test_the_optimiser_is_the_one_of_its_name(tape):
    args, theta = tape.args, tape.start.double().requires_grad_()
    adam, rmsprop = torch.optim.Adam([theta]), torch.optim.RMSprop([theta], alpha=0.99, eps=1e-5)
    square_avg = torch.ones_like(theta)
    for update, rollout in zip(tape.updates, tape.rollouts()):
        rate = args.learning_rate
        if args.anneal_lr:
            rate *= 1 - (update["steps"] - len(rollout)) / args.total_timesteps
        adam.param_groups[0]["lr"] = rmsprop.param_groups[0]["lr"] = rate
        theta.grad = update["grad"].double()
        if args.optimizer == "adam":
            adam.step()
        elif args.torch_rmsprop:
            rmsprop.step()
        else:
            square_avg = 0.99 * square_avg + 0.01 * theta.grad**2
            theta.data -= rate * theta.grad / (square_avg + 1e-5).sqrt()
        torch.testing.assert_close(update["after"].double(), theta.data, atol=2e-6, rtol=1e-5)
    assert (theta - tape.start).abs().max() > 1e-4
    assert tape.shared.steps.tolist() == [300] and tape.shared.updates.tolist() == [len(tape.updates)]


@pytest.mark.parametrize("optimizer, bound", [("adam", 7.3), ("rmsprop", 10.001)])
def test_workers_that_write_at_once_do_not_throw_the_model_away(optimizer, bound):
    """One has large gradients and one has next to none; alone, neither's step exceeds the bound times the rate."""
    args = a3c.Args(optimizer=optimizer, torch_rmsprop=True, rmsprop_eps=1e-8)

    def work(grad, theta, moments, together):
        together.wait()
        for step in (1, 2):
            if optimizer == "adam":
                a3c.shared_adam_step(theta, grad, moments, step, 1.0)
            else:
                a3c.shared_rmsprop_step(theta, grad, moments[1], 1.0, args)

    for _ in range(30):
        shared = torch.zeros(500_000), torch.zeros(2, 500_000), threading.Barrier(2)
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


def test_games_are_logged_whole_and_unclipped(tmp_path):
    tape = Tape(tmp_path, [(600, 0, 0), (600, 600, None)], env_id="SpaceInvadersNoFrameskip-v4", log_interval=7)
    score, length, expected = 0, 0, []
    for step, row in enumerate(tape.steps, start=1):
        score, length = score + row["reward"], length + 1
        if row["over"]:
            expected.append((step, score, length))
            score = length = 0
    sent = [(step, tags) for step, tags in filter(None, tape.messages)]
    games = [(step, *(tags.get(f"charts/episodic_{name}") for name in ("return", "length"))) for step, tags in sent]
    assert expected and expected[0][1] > 20
    assert [game for game in games if game[1] is not None] == expected
    ends = [update["steps"] for update in tape.updates]
    assert [step for step, tags in sent if "losses/entropy" in tags] == ends[6::7]


def test_the_batch_is_the_steps_one_after_the_other():
    for lstm in (True, False):
        agent = a3c.Agent(5, lstm)
        pixels = torch.randint(0, 256, (20, 1 if lstm else 4, 55, 42), dtype=torch.uint8)
        first = state = tuple(torch.randn(2, 1, 256))
        logits, values = agent(pixels, first)
        assert logits.shape == (20, 5) and values.shape == (20,)
        for t in range(20):
            one, state = agent.step(pixels[t : t + 1], state)
            torch.testing.assert_close(one[0], logits[t], atol=1e-5, rtol=1e-4)
        three = torch.cat([pixels[:1]] * 3)  # in three games at once
        many, _ = agent.step(three, tuple(part.expand(3, 256) for part in first))
        torch.testing.assert_close(many, logits[:1].expand(3, 5), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.8])
def test_gae_is_the_double_sum(gae_lambda):
    rng, gamma, T = np.random.default_rng(0), 0.97, 20
    rewards, v = rng.normal(size=(T, 1)), rng.normal(size=(T + 1, 1))
    for terminated in (True, False):
        terminations = np.zeros((T, 1), bool)
        terminations[-1] = terminated
        found = a3c.compute_gae(rewards, v[:-1], v[1:], terminations, np.zeros((T, 1), bool), gamma, gae_lambda)
        after = v[1:] * ~terminations
        delta = rewards + gamma * after - v[:-1]
        for t in range(T):
            expected = sum((gamma * gae_lambda) ** k * delta[t + k, 0] for k in range(T - t))
            assert found[t, 0] == pytest.approx(expected)
            n_step = sum(gamma**k * rewards[t + k, 0] for k in range(T - t)) + gamma ** (T - t) * after[-1, 0]
            if gae_lambda == 1:
                assert found[t, 0] == pytest.approx(n_step - v[t, 0])


def test_a_seed_is_a_run_and_each_worker_has_its_own(tmp_path):
    def theta(**options):
        return Tape(tmp_path, num_workers=2, **options).shared.theta

    one = theta()
    assert torch.equal(one, theta())
    assert not torch.equal(one, theta(worker=1)) and not torch.equal(one, theta(seed=2))


def test_the_playing_field_fills_the_frame():
    """42 rows of 55 are rows 34 to 194 of the screen, to a third of a row: where Pong's ball can be."""
    assert abs(9 * 210 / 55 - 34) < 0.4 and abs(51 * 210 / 55 - 194) < 0.8
    envs = a3c.make_envs(a3c.Args(), 1)
    pixels, _ = envs.reset(seed=np.array([1]))
    assert pixels.shape == (1, 1, 55, 42)
    walls = pixels[0, 0].mean(1)
    assert walls[7] > 200 and walls[52] > 200 and walls[9:51].max() < 120
    envs.close()


# Processes. A worker in these runs plays a toy, or fails on command


class Catch:
    """A ball is seen once, at the top; after two more steps the paddle should be in its column. Needs a memory."""

    single_action_space = gym.spaces.Discrete(3)
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
        final = pixels = self.draw()
        rewards = np.where(ends, np.where(self.ball == self.paddle, 1, -1), 0)
        if ends[0]:
            pixels = self.begin()
        info = {"episode_frame_number": np.full(self.num_envs, 4 * self.time), "final_obs": final}
        return pixels, rewards, ends, np.zeros_like(ends), info

    def close(self):
        pass


def play_catch():
    a3c.make_envs = lambda args, num_envs: Catch(num_envs)


RUN_WORKER = a3c.run_worker


def toy_worker(*args):
    play_catch()
    RUN_WORKER(*args)


def failing_worker(rank, *args):
    """A worker that raises at its 20th update."""
    shared_adam_step = a3c.shared_adam_step

    def fail(theta, grad, moments, step, learning_rate):
        if rank == 1 and step > 20:
            raise ZeroDivisionError("on command")
        shared_adam_step(theta, grad, moments, step, learning_rate)

    a3c.shared_adam_step = fail
    RUN_WORKER(rank, *args)


def test_catch_is_learned_by_two_workers_and_every_step_counted(tmp_path, monkeypatch):
    """A random player scores -1/3, and so does the best one without a memory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(a3c, "make_envs", lambda args, num_envs: Catch(num_envs))
    monkeypatch.setattr(a3c, "run_worker", toy_worker)
    monkeypatch.setattr(a3c, "evaluate", lambda *_: ([0.0], 0.0))
    options = dict(num_workers=2, total_timesteps=4001, learning_rate=1e-3, gamma=0.9, checkpoint_interval=3000)
    a3c.train(a3c.Args(**options), tmp_path, None)
    scores = [score for _, score in scalars(tmp_path)["charts/episodic_return"]]
    assert np.mean(scores[-200:]) > 0.8
    last = load(checkpoints(tmp_path)[-1])
    assert last["global_step"] == last["counts"][0].sum() == os.path.getsize("steps") == 4001
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint_3000.pt", "checkpoint_4001.pt"]
    assert last["counts"].dtype == torch.int64 and last["counts"][1].sum() >= 4001 / 3 and last["counts"].min() > 50


def test_steps_of_four_workers_are_counted_exactly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(a3c, "make_envs", lambda args, num_envs: Catch(num_envs))
    monkeypatch.setattr(a3c, "run_worker", toy_worker)
    monkeypatch.setattr(a3c, "evaluate", lambda *_: ([0.0], 0.0))
    monkeypatch.setattr(a3c, "CORES", 3)  # they take turns
    a3c.train(a3c.Args(num_workers=4, total_timesteps=1003, checkpoint_interval=500), tmp_path, None)
    last = load(checkpoints(tmp_path)[-1])
    assert last["global_step"] == last["counts"][0].sum() == os.path.getsize("steps") == 1003
    assert last["counts"].shape == (2, 4) and last["counts"].min() > 0
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint_1000.pt", "checkpoint_1003.pt"]

    # Another number of workers goes on from there
    for num_workers, total in ((2, 1217), (5, 1500)):
        a3c.train(a3c.Args(num_workers=num_workers, total_timesteps=total, checkpoint_interval=500), tmp_path, last)
        before, last = last, load(checkpoints(tmp_path)[-1])
        assert last["global_step"] == last["counts"][0].sum() == os.path.getsize("steps") == total
        assert last["counts"].shape == (2, num_workers) and last["counts"].min() > 0
        assert last["counts"][1].sum() > before["counts"][1].sum()


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
    """The workers of a run in order, once they train."""
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
    --eval-interval 150 --eval-episodes 2 --max-episode-length 40 --log-interval 5 --anneal-lr""".split()
LONG = "--total-timesteps 1000000 --checkpoint-interval 100 --eval-episodes 1 --max-episode-length 60".split()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a run that nothing ended, and what it said."""
    cwd = tmp_path_factory.mktemp("reference")
    command = [sys.executable, str(ROOT / "a3c_atari.py"), *SMALL]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert not processes_in(cwd)
    return run_folder_in(cwd), done.stdout


def test_a_run_with_one_worker_goes_on_to_the_bit_after_kills_and_leaves_no_orphan(tmp_path, reference):
    argv = SMALL
    for moment in (("os.replace", 0), ("os.replace", 200, 1, True)):
        run = Run("a3c_atari", *argv, cwd=tmp_path, sabotage=functools.partial(kill_in, *moment))
        assert run.wait(120).status == -9
        wait_for(lambda: not processes_in(tmp_path), seconds=10)
        argv = ["--resume", f"runs/{run_folder_in(tmp_path).name}"]
    result = Run("a3c_atari", *argv, cwd=tmp_path).wait(120)
    assert (result.status, result.stderr) == (0, "")
    assert_same_run(run_folder_in(tmp_path), reference[0])
    assert not processes_in(tmp_path)


def test_a_run_says_what_it_does(reference):
    run_folder, said = reference
    name, *lines = said.splitlines()
    assert name == f"run folder: runs/{run_folder.name}"
    evaluations = [line for line in lines if line.startswith("evaluation: ")]
    pattern = r"evaluation: [\d.]+ \+- [\d.]+ over 2 games of sampled actions, [\d.]+ steps long, at step "
    for step, line in zip((150, 300, 450, 500), evaluations, strict=True):
        assert re.fullmatch(pattern + str(step), line)
    assert any(re.match(r"500/500 steps  [\d,]+ steps/s  return [\d.]+ \(last \d+\)", line) for line in lines)
    points = scalars(run_folder)
    assert [step for step, _ in points["eval/episodic_return"]] == [150, 300, 450, 500]
    assert [step for step, _ in points["charts/checkpoint"]] == [0, 200, 400, 500]
    assert all(
        value == pytest.approx(1e-4 * (1 - step / 500), abs=5e-6) for step, value in points["charts/learning_rate"]
    )
    lengths = [value for _, value in points["charts/episodic_length"]]
    assert max(lengths) <= 40 and sum(lengths) <= 500


def run_until_it_trains(tmp_path, num_workers, sabotage=None):
    run = Run("a3c_atari", *LONG, "--num-workers", str(num_workers), cwd=tmp_path, sabotage=sabotage)
    wait_for(lambda: [*tmp_path.glob("runs/*/checkpoint_200.pt")], seconds=90)
    time.sleep(random.uniform(0, 0.1))
    return run


def assert_over(run, tmp_path, status, line, seconds=2.0):
    sent = time.monotonic()
    result = run.wait(120)
    assert time.monotonic() - sent < seconds
    assert not processes_in(tmp_path)
    assert result.status == status, result
    newest = checkpoints(run_folder_in(tmp_path))[-1]
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(rf"{line}; the last good checkpoint is [^\n]*{newest.name}; resume with: [^\n]*", last)
    load(newest)
    return result


def use_one_core():
    a3c.CORES = 1


@pytest.mark.parametrize(
    "signum, status, sabotage",
    [(signal.SIGKILL, -9, None), (signal.SIGTERM, -15, use_one_core), (signal.SIGSEGV, -11, None)],
    ids=["SIGKILL", "SIGTERM where they take turns", "SIGSEGV"],
)
def test_a_worker_that_is_killed_ends_the_run(tmp_path, signum, status, sabotage):
    run = run_until_it_trains(tmp_path, 2, sabotage)
    os.kill(random.choice(workers_of(tmp_path, run.process.pid)), signum)
    result = assert_over(run, tmp_path, 1, rf"error: worker \d of 2 failed: it ended with status {status}")
    assert "resource_tracker" not in result.stderr


def worker_without_prctl(*args):
    a3c.ctypes.CDLL = lambda _: None  # as where the system is not Linux
    RUN_WORKER(*args)


def use_worker_without_prctl():
    a3c.CORES, a3c.run_worker = 1, worker_without_prctl


def test_workers_end_with_their_parent_where_they_take_turns_and_the_system_does_not_end_them(tmp_path):
    run = Run("a3c_atari", "--num-workers", "4", cwd=tmp_path, sabotage=use_worker_without_prctl)
    wait_for(lambda: " steps/s " in Path(run.outputs[0].name).read_text(), seconds=90)
    time.sleep(0.2)  # until all take turns
    workers = workers_of(tmp_path, run.process.pid)
    assert len(workers) == 4
    run.process.kill()
    try:
        wait_for(lambda: not set(workers) & set(processes_in(tmp_path)), seconds=10)
    finally:
        for pid in set(workers) & set(processes_in(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def use_failing_worker():
    a3c.run_worker = failing_worker


def test_a_worker_that_raises_ends_the_run_and_its_cause_is_shown(tmp_path):
    run = Run("a3c_atari", *LONG, "--num-workers", "2", cwd=tmp_path, sabotage=use_failing_worker)
    result = assert_over(run, tmp_path, 1, "error: worker 1 of 2 failed: ZeroDivisionError: on command", seconds=60)
    assert "Traceback" in result.stderr


@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("group", [True, False], ids=["to the group", "to the parent"])
def test_a_signal_ends_everything_with_one_line(tmp_path, signum, status, group):
    command = [sys.executable, str(ROOT / "a3c_atari.py"), *LONG, "--num-workers", "2"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            wait_for(lambda: [*tmp_path.glob("runs/*/checkpoint_200.pt")], seconds=90)
            (os.killpg if group else os.kill)(process.pid, signum)
            sent = time.monotonic()
            _, stderr = process.communicate(timeout=20)
        finally:
            process.kill()
    assert time.monotonic() - sent < 2
    assert process.returncode == status and not processes_in(tmp_path)
    assert re.fullmatch(r"interrupted; [^\n]* --resume [^\n]*\n", stderr)


def test_numbers_that_explode(tmp_path):
    run = Run("a3c_atari", *LONG, "--num-workers", "1", "--learning-rate", "1e30", cwd=tmp_path)
    line = r"error: worker 0 of 1 failed: the gradient is not finite at step \d+"
    assert "Traceback" not in assert_over(run, tmp_path, 1, line, seconds=60).stderr


def test_another_network_or_other_averages_are_refused(tmp_path, reference, capsys, monkeypatch):
    folder = str(reference[0])
    before = {path: path.read_bytes() for path in reference[0].iterdir()}
    wrong = [
        "--resume --optimizer rmsprop",
        "--resume --no-shared-optimizer",
        "--resume --no-lstm",
        "--evaluate --no-lstm",
        "--resume --no-crop",
        "--evaluate --no-crop",
    ]
    for way, *flags in map(str.split, wrong):
        monkeypatch.setattr(sys, "argv", ["a3c_atari.py", way, folder, *flags])
        with pytest.raises(SystemExit) as exit_:
            a3c.main()
        message = capsys.readouterr().err.splitlines()[-1]
        assert exit_.value.code == 2 and re.match(
            rf"error: --(no-)?{flags[0].removeprefix('--').removeprefix('no-')} ", message
        )
    assert before == {path: path.read_bytes() for path in reference[0].iterdir()}


WRONG = {
    "--num-workers 0": "--num-workers",
    "--num-workers -1": "--num-workers",
    "--num-steps 0": "--num-steps",
    "--optimizer sgd": "optimizer",
    "--max-episode-length 3": "--max-episode-length",
    "--eval-interval 0": "--eval-interval",
    "--gamma 1.1": "--gamma",
    "--learning-rate nan": "--learning-rate",
    "--total-timesteps 0": "--total-timesteps",
    "--env-id Pong-v9": "PongNoFrameskip-v4",
    "--env-id Pnog-v4": "PongNoFrameskip-v4",
    "--resume nowhere": "nowhere",
    "--bogus": "--bogus",
}


@pytest.mark.parametrize("flags, word", WRONG.items(), ids=WRONG)
def test_a_wrong_call_is_one_line_and_leaves_no_trace(tmp_path, monkeypatch, capsys, flags, word):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["a3c_atari.py", *flags.split()])
    with pytest.raises(SystemExit) as exit_:
        a3c.main()
    output = capsys.readouterr()
    assert exit_.value.code == 2 and output.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", output.err) and word in output.err
    assert not list(tmp_path.iterdir())


# Modes


def test_the_first_game_after_a_checkpoint_is_filmed(tmp_path):
    Tape(tmp_path, ORDERS, max_episode_length=30, capture_video=True)
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == ["train-step-0.mp4", "train-step-250.mp4"]


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
    """With --episodic-life at each lost life, else at the beginning only: two games of Breakout, side by side."""
    states, lost = [], [np.ones(2, bool)]

    class Games(a3c.Games):
        def step(self, actions):
            result = super().step(actions)
            lost.append(result[2])
            return result

    def step(agent, pixels, state, plain=a3c.Agent.step):
        states.append(state[0].abs().sum(1).numpy() == 0)
        return plain(agent, pixels, state)

    monkeypatch.setattr(a3c, "Games", Games)
    monkeypatch.setattr(a3c.Agent, "step", step)
    args = a3c.Args(
        env_id="BreakoutNoFrameskip-v4", episodic_life=episodic_life, eval_episodes=2, max_episode_length=150
    )
    a3c.evaluate(args, {"agent": a3c.Agent(4).state_dict(), "global_step": 0}, tmp_path)
    lost = np.array(lost[:-1])
    assert lost[1:].any() and states[0].all()
    np.testing.assert_array_equal(states[1:], lost[1:] & episodic_life)
