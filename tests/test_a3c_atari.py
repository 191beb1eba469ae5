"""A3C: its mathematics against plain formulas in float64, and its processes under real kills."""

import contextlib
import copy
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, cases, check, command, load, logged, run
from torch import nn

import a3c_atari as a3c

SMALL = dict(env_id="BreakoutNoFrameskip-v4", num_workers=1, num_steps=7, total_timesteps=95)
SMALL |= dict(checkpoint_interval=40, max_episode_length=60, log_interval=2, eval_episodes=2)
ADAM, RMSPROP = dict(betas=(0.9, 0.999), eps=1e-8), dict(alpha=0.99, eps=1e-5)


def make_optimizer(args, agent):
    if args.optimizer == "adam":
        return a3c.SharedAdam(agent.parameters(), args.learning_rate, **ADAM)
    return a3c.SharedRMSprop(agent.parameters(), args.learning_rate, **RMSPROP)


def flat(tensors):
    return torch.cat([x.detach().flatten() for x in tensors])


def states(optimizer):
    return [x for state in optimizer.state.values() for x in state.values()]


class Tape:
    """Records steps and gradients of `actor_learner`; other workers have taken `others` steps."""

    def __init__(self, folder, worker=0, others=0, **options):
        self.args = a3c.Args(**SMALL | dict(max_episode_length=27_000) | options)
        self.messages, self.updates, self.steps, self.resets = [], [], [], []
        self.pauses, self.start = 0, others
        torch.manual_seed(0)
        envs, tape = a3c.AtariEnvs(self.args, 1), self
        self.model = a3c.Agent(envs.obs_shape, envs.num_actions, self.args)
        self.optimizer = make_optimizer(self.args, self.model)
        self.optimizer.param_groups[0]["lr"] *= 2  # a rate of its own
        self.optimizer.register_step_pre_hook(self.before_update)
        self.optimizer.register_step_post_hook(self.after_update)
        self.counts = torch.zeros(self.args.num_workers, dtype=torch.int64)
        self.counts[worker - 1] = self.others = others

        class AtariEnvs(a3c.AtariEnvs):
            def reset(self, seed, videos):
                assert videos == (None if worker else folder / f"videos/{int(tape.start)}")
                tape.resets.append((len(tape.steps), seed, torch.initial_seed()))
                self.obs = super().reset(seed, None)
                return self.obs

            def step(self, actions):
                row = dict(obs=self.obs, fire=self.fire[0], sampled=int(actions[0]))
                result = super().step(actions)
                self.obs, row["next"], *rest = result
                row["reward"], row["terminated"], row["truncated"] = (x[0].item() for x in rest[:3])
                tape.steps.append(row | dict(episodes=self.episodes))
                return result

        queue = SimpleNamespace(put=self.messages.append)
        shared = (self.model, self.optimizer, self.counts, self, queue)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(a3c, "prepare_worker", lambda args: None)
            patch.setattr(a3c, "AtariEnvs", AtariEnvs)
            a3c.actor_learner(worker, self.args, folder, *shared)

    def __getitem__(self, rank):
        return self.start  # as `start_steps`, which `train` answers

    def __setitem__(self, rank, value):
        assert value == -1
        self.pauses, self.start = self.pauses + 1, self.counts.sum()

    def before_update(self, optimizer, *_):
        (group,) = optimizer.param_groups
        row = dict(before=flat(group["params"]), grad=flat([p.grad for p in group["params"]]))
        self.updates.append(row | dict(steps=len(self.steps), rate=group["lr"]))

    def after_update(self, optimizer, *_):
        self.updates[-1]["after"] = flat(optimizer.param_groups[0]["params"])

    def rollouts(self):
        """The steps of each update."""
        edges = [0, *(update["steps"] for update in self.updates)]
        return [self.steps[i:j] for i, j in pairwise(edges)]


NO_STATE = (torch.zeros(256, dtype=torch.float64),) * 2


def plain_step(w, obs, state):
    """The network of one frame, written out: logits (A,), value (), the next state."""
    x = torch.from_numpy(obs).double()[:, :, 17:97]  # rows 34 to 194 of the screen
    x = F.interpolate(x, (42, 42), mode="bilinear")
    x = (x - x.mean()) / x.std().clamp(min=1)
    for layer in (0, 2, 4, 6):
        weight, bias = w[f"trunk.{layer}.weight"], w[f"trunk.{layer}.bias"]
        x = F.elu(F.conv2d(x, weight, bias, stride=2, padding=1))
    x = x.flatten()
    if "lstm.weight_ih_l0" in w:
        h, c = state
        gates = w["lstm.weight_ih_l0"] @ x + w["lstm.bias_ih_l0"]
        i, f, g, o = (gates + w["lstm.weight_hh_l0"] @ h + w["lstm.bias_hh_l0"]).reshape(4, 256)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        x = h = o.sigmoid() * c.tanh()
        state = (h, c)
    else:
        x = F.elu(w["trunk.9.weight"] @ x + w["trunk.9.bias"])
    logits = w["policy_head.weight"] @ x + w["policy_head.bias"]
    return logits, (w["value_head.weight"] @ x + w["value_head.bias"])[0], state


def papers_gradient(tape, theta, rollout, state):
    """[A3C] Alg. S3 step by step in one graph, in float64. Returns the gradient and the state."""
    args, model = tape.args, copy.deepcopy(tape.model).double()
    nn.utils.vector_to_parameters(theta.double(), model.parameters())
    w = dict(model.named_parameters())
    state = tuple(part.detach() for part in state)
    outputs = []
    for row in rollout:
        *output, state = plain_step(w, row["obs"], state)
        outputs.append(output)
    last = rollout[-1]
    bootstrap = plain_step(w, last["next"], state)[1].item()
    rewards = [row["reward"] for row in rollout] + [0.0 if last["terminated"] else bootstrap]
    loss = 0
    for i, (row, (logits, value)) in enumerate(zip(rollout, outputs)):
        R = sum(args.gamma**k * reward for k, reward in enumerate(rewards[i:]))
        advantage = R - value.item()
        if not row["fire"]:
            policy = logits.softmax(0)
            loss = loss - policy[row["sampled"]].log() * advantage
            loss = loss + args.ent_coef * (policy * policy.log()).sum()
        loss = loss + args.vf_coef * (R - value) ** 2 / 2
    grad = flat(torch.autograd.grad(loss, list(w.values()), materialize_grads=True))
    grad = grad * min(1, args.max_grad_norm / (grad.norm().item() + 1e-6))
    return grad, NO_STATE if last["terminated"] or last["truncated"] else state


CLIPPED = dict(optimizer="rmsprop", max_grad_norm=0.5, learning_rate=1e-3)
LIVES = dict(episodic_life=True, others=300, num_workers=2, ent_coef=0.1, vf_coef=0.25, gamma=0.9)
LIVES |= dict(anneal_lr=True, max_episode_length=60, total_timesteps=500, checkpoint_interval=430)
NO_LSTM = dict(env_id="SpaceInvadersNoFrameskip-v4", lstm=False, optimizer="rmsprop")
LEARNERS = {"LSTM, Adam": {}, "RMSprop, clipped": CLIPPED, "lives": LIVES, "no LSTM": NO_LSTM}


@pytest.fixture(scope="module", params=LEARNERS)
def tape(request, tmp_path_factory):
    options = dict(num_steps=9, total_timesteps=200, checkpoint_interval=130)
    return Tape(tmp_path_factory.mktemp("tape"), **options | LEARNERS[request.param])


def test_every_gradient_that_is_applied_is_the_papers(tape):
    """So gradients do not accumulate, and the LSTM's state is carried, cut and reset rightly."""
    rollouts = tape.rollouts()
    assert len(rollouts) == len(tape.updates) >= 22 and 200 <= sum(map(len, rollouts)) < 209
    resets = [at for at, *_ in tape.resets]
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
    ended = [[row["terminated"] or row["truncated"] for row in rollout] for rollout in rollouts]
    assert not any(any(rows[:-1]) for rows in ended)
    assert all(len(rows) == 9 or rows[-1] for rows in ended)
    assert tape.args.max_grad_norm > 1 or max(grad_norms) > 0.499
    assert not tape.args.episodic_life or sum(map(sum, ended)) > 2


def test_the_optimizer_is_the_one_of_its_name_with_its_rate(tape):
    args, theta = tape.args, tape.updates[0]["before"].double().requires_grad_()
    adam, square_avg = torch.optim.Adam([theta]), torch.ones_like(theta)
    for update, rollout in zip(tape.updates, tape.rollouts()):
        done = tape.others + update["steps"] - len(rollout)  # by all workers
        rate = 2 * args.learning_rate * (1 - done / args.total_timesteps * args.anneal_lr)
        assert update["rate"] == pytest.approx(rate)
        adam.param_groups[0]["lr"] = rate
        theta.grad = update["grad"].double()
        if args.optimizer == "adam":
            adam.step()
        else:
            square_avg = 0.99 * square_avg + 0.01 * theta.grad**2
            theta.data -= rate * theta.grad / (square_avg + 1e-5).sqrt()
        torch.testing.assert_close(update["after"].double(), theta.data, atol=2e-6, rtol=1e-5)
    assert tape.counts[0] == len(tape.steps) and tape.pauses == 2
    logged_rates = {tags["charts"]["learning_rate"] for *_, tags in tape.messages if tags}
    assert logged_rates <= {update["rate"] for update in tape.updates}


@pytest.mark.quick
def test_optimizers_are_the_vectors():
    """Without clipping, and TensorFlow's RMSprop."""
    for case in [*cases("adam"), *cases("rmsprop")]:
        inputs, thetas = case["inputs"], []
        if inputs.get("max_grad_norm", 1e6) < 1e6 or inputs.get("initial_square_avg", 1) == 0:
            continue
        p, options = nn.Parameter(torch.tensor(inputs["theta"])), dict(eps=inputs["eps"].item())
        if case["operation"] == "adam":
            optimizer = a3c.SharedAdam([p], 0.0, betas=(0.9, 0.999), **options)
        else:
            optimizer = a3c.SharedRMSprop([p], 0.0, alpha=inputs["alpha"].item(), **options)
        for i, grad in enumerate(torch.tensor(inputs["grads"])):
            rates = inputs.get("learning_rates", [inputs.get("learning_rate")] * (i + 1))
            optimizer.param_groups[0]["lr"] = float(rates[i])
            p.grad = grad.clone()
            optimizer.step()
            thetas.append(p.detach().clone().numpy())
        check(case, "theta", np.array(thetas))


@pytest.mark.quick
@pytest.mark.parametrize("betas, bound", [((0.9, 0.999), 7.271), ((0.9, 0.9999), 22.94)])
def test_adams_bound_is_what_its_betas_allow(betas, bound):
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
    loss, metrics = a3c.a3c_loss(lambda *_: (logits, values[..., None], None), rollout, args)
    loss.backward()
    check(case, "loss", loss.detach(), precision)
    for name, metric in metrics.items():
        check(case, name, 5 * metric, precision)
    check(case, "grad_logits", logits.grad, precision)
    check(case, "grad_values", values.grad, precision)


def test_the_network_sees_the_field_without_the_borders():
    """Pong's field has one gray value but for ball and paddles; its borders are much brighter."""
    obs, _ = a3c.make_atari(a3c.Args(), 1).reset(seed=np.array([1]))
    assert obs[0, 0, 16].mean() > 200 and obs[0, 0, 97].mean() > 200
    agent = a3c.Agent((1, 105, 80), 6, a3c.Args())
    for layer, gain in ((agent.policy_head, 0.01), (agent.value_head, 1), (agent.trunk[0], 2**0.5)):
        values = torch.linalg.svdvals(layer.weight.detach().flatten(1))
        assert values.allclose(torch.full_like(values, gain), 1e-3)
    assert agent.lstm.weight_hh_l0.abs().max() <= 1 / 16  # uniform, as PyTorch initializes it
    assert not any(p.any() for name, p in agent.named_parameters() if "bias" in name)
    assert agent.features(torch.zeros(1, 1, 105, 80)).isfinite().all()
    agent.trunk = nn.Identity()
    frame = agent.features(torch.from_numpy(obs))[0, 0]
    assert frame.shape == (42, 42) and abs(frame.mean()) < 1e-5
    background = frame.median()
    assert ((frame - background).abs() < 1e-3).float().mean() > 0.9
    assert (frame[[0, -1]] - background).abs().max() < 1e-3


def test_exploration_and_what_is_logged(tmp_path):
    options = dict(total_timesteps=350, num_steps=20, max_episode_length=100, log_interval=7)
    tape = Tape(tmp_path, checkpoint_interval=5000, num_workers=2, others=50, **options)
    expected = [(i + 51, row["episodes"]) for i, row in enumerate(tape.steps) if row["episodes"]]
    assert [message[:2] for message in tape.messages if message[1]] == expected != []
    assert {row["sampled"] for row in tape.steps} == {0, 1, 2, 3}  # all actions are explored
    losses = [(step, tags) for step, _, tags in tape.messages if tags]
    assert [step - 50 for step, _ in losses] == [x["steps"] for x in tape.updates][::7]
    for _, tags in losses:
        assert 0 < tags["losses"]["entropy"] < np.log(4) + 1e-6
        assert tags["charts"]["learning_rate"] == 2e-4


def test_workers_seeds_and_checkpoints_have_different_episodes_and_random_numbers(tmp_path):
    options = dict(num_workers=3, total_timesteps=30, checkpoint_interval=21, max_episode_length=15)
    runs = [Tape(tmp_path, **options, worker=rank, seed=s) for rank, s in ((0, 1), (1, 1), (0, 2))]
    seeds = [seeds for run in runs for _, *seeds in run.resets]  # the environment's and PyTorch's
    assert [len(set(column)) for column in zip(*seeds)] == [6, 6]
    assert a3c.seed_everything(1, 0, 1) not in {x for pair in seeds for x in pair}  # evaluation's
    again = Tape(tmp_path, **options, worker=1)
    assert [row["sampled"] for row in again.steps] == [row["sampled"] for row in runs[1].steps]
    assert torch.equal(again.updates[-1]["after"], runs[1].updates[-1]["after"])
    runs += [Tape(tmp_path, **options | dict(log_interval=1), worker=rank) for rank in (0, 1)]
    assert [any(tags for *_, tags in run.messages) for run in runs[-2:]] == [True, False]
    assert all(any(episodes for _, episodes, _ in run.messages) for run in runs)


def test_a_worker_uses_the_threads_it_is_given_and_flushes_denormals(monkeypatch):
    monkeypatch.setattr(a3c.threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    torch.set_flush_denormal(False)
    a3c.prepare_worker(a3c.Args(torch_threads=2))
    assert torch.get_num_threads() == 2 and torch.backends.cudnn.deterministic
    assert (torch.full((8,), 1e-30) * 1e-9).view(torch.int32).eq(0).all()


@pytest.mark.quick
def test_a_frozen_layer_stays_and_a_gradient_that_is_not_finite_is_an_error():
    args = a3c.Args(max_grad_norm=1e-3)
    shared = a3c.Agent((1, 105, 80), 4, args)
    shared.trunk.requires_grad_(False)
    before, local = copy.deepcopy(shared.state_dict()), copy.deepcopy(shared)
    obs = torch.randint(0, 256, (5, 1, 1, 105, 80), dtype=torch.uint8)
    actions, ones = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    rollout = obs, actions, ones.bool(), ones, shared.initial_state(1), ones[:1]
    metrics = a3c.update(local, shared, make_optimizer(args, shared), rollout, args)
    assert metrics["grad_norm"] > 1  # before clipping
    for name, p in shared.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("trunk"), name
    rollout = obs, actions, ones.bool(), ones * np.nan, shared.initial_state(1), ones[:1]
    with pytest.raises(RuntimeError, match="non-finite"):
        a3c.update(local, shared, None, rollout, args)


def test_evaluation(tmp_path, monkeypatch, capsys):
    """The first episode of each environment counts; the state is reset where it is in training."""
    zero, ended, actions = [], [np.ones(2, bool)], []

    def step(self, chosen, step=a3c.AtariEnvs.step):
        result = step(self, chosen)
        if len(actions) == 20:
            self.episodes = self.episodes | {1: (7.0, 20)}  # a second one follows
        actions.append(chosen)
        self.lengths[1] = 0  # as if its episodes were short
        self.returns += len(actions) > 60  # in the last evaluation, whose episodes do not end
        ended.append(result[3] | result[4])
        return result

    def forward(self, obs, lstm_state, forward=a3c.Agent.forward):
        assert not self.training and not torch.is_grad_enabled()
        zero.append((torch.stack(list(lstm_state)) == 0).all(-1).all(0).numpy())
        return forward(self, obs, lstm_state)

    monkeypatch.setattr(a3c.AtariEnvs, "step", step)
    monkeypatch.setattr(a3c.Agent, "forward", forward)
    args = a3c.Args(**SMALL | dict(episodic_life=True, seed=2))
    agent = a3c.Agent((1, 105, 80), 4, args)
    model = {"agent": agent.state_dict(), "global_step": 0}
    returns = a3c.evaluate(args, model, tmp_path)
    assert returns[0] < 7 == returns[1] and len(actions) == 60
    np.testing.assert_array_equal(zero, ended[:-1])
    assert sum(map(sum, ended)) > 3  # lives
    assert np.unique(actions).tolist() == [0, 1, 2, 3]  # sampled
    assert torch.initial_seed() == a3c.seed_everything(2, 0, 1)  # no worker's
    monkeypatch.setattr(a3c, "EVAL_STEPS", 10)
    assert a3c.evaluate(args, model, tmp_path) == [10.0] * 2
    output = capsys.readouterr().out
    assert f" +- {np.std(returns):.2f}, 2 episodes" in output
    assert "cut off after 10 " in output and "10.00 +- 0.00, 0 episodes" in output


def test_what_workers_start_from(tmp_path, monkeypatch):
    """The seed's or a checkpoint's model, optimizer, with the flags' settings, and steps."""

    def start(name, checkpoint=None, **options):
        shared = []
        monkeypatch.setattr(a3c.mp, "spawn", lambda _, args, *x, **y: shared.extend(args))
        monkeypatch.setattr(a3c.Run, "save_checkpoint", lambda *_: sys.exit(shared[2:6]))
        with pytest.raises(SystemExit) as given:
            args = a3c.Args(**SMALL | dict(num_workers=3) | options)
            a3c.train(args, tmp_path / name, checkpoint)
        model, optimizer, steps, start_steps = given.value.code
        assert (start_steps == -1).all()  # workers wait while a checkpoint is saved
        for x in (*model.state_dict().values(), *states(optimizer), steps):
            assert x.is_shared()
        return model, optimizer, steps

    one, adam, _ = start("1", seed=1)
    assert not flat(one.parameters()).equal(flat(start("2", seed=2)[0].parameters()))
    assert isinstance(adam, a3c.SharedAdam)
    assert adam.param_groups[0].items() >= {"lr": 1e-4, **ADAM}.items()
    agent = a3c.Agent((1, 105, 80), 4, a3c.Args())
    saved = make_optimizer(a3c.Args(optimizer="rmsprop", learning_rate=2e-4), agent)
    for i, x in enumerate(states(saved)):
        x.fill_(i)
    checkpoint = {"agent": agent.state_dict(), "optimizer": saved.state_dict()}
    checkpoint |= {"global_step": 50, "seconds": 1.0, "args": vars(a3c.Args(optimizer="rmsprop"))}
    model, optimizer, steps = start("again", checkpoint, optimizer="rmsprop", learning_rate=0.5)
    assert_same(dict(model.state_dict()), dict(agent.state_dict()))
    assert_same(states(optimizer), states(saved))
    assert optimizer.defaults.items() >= {"lr": 0.5, **RMSPROP}.items() and steps.sum() == 50
    assert optimizer.param_groups[0].items() >= {"lr": pytest.approx(1.0), **RMSPROP}.items()
    with pytest.raises(SystemExit, match="--optimizer"):
        a3c.train(a3c.Args(**SMALL), tmp_path / "other", checkpoint)


@pytest.mark.quick
def test_what_workers_could_not_share_or_finish_is_refused(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="--checkpoint-interval"):
        a3c.train(a3c.Args(checkpoint_interval=79), tmp_path, None)
    monkeypatch.setattr(a3c, "SharedAdam", torch.optim.Adam)
    with pytest.raises(SystemExit, match="SharedOptimizer"):
        a3c.train(a3c.Args(), tmp_path, None)
    monkeypatch.setattr(a3c.Agent, "buffers", lambda self: [torch.zeros(1)])  # BatchNorm's
    with pytest.raises(SystemExit, match="buffers"):
        a3c.train(a3c.Args(), tmp_path, None)


FLAGS = "--num-workers 2 --max-episode-length 40 --eval-episodes 1 --run-folder run "


def wait_for(condition, process=None):
    end = time.time() + 300
    while not condition():
        assert time.time() < end, "it took too long"
        assert not process or process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def processes_in(folder):
    """The processes whose working directory it is, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            zombie = "State:\tZ" in (path / "status").read_text()
            if os.readlink(path / "cwd") == str(folder) and not zombie:
                found.append(int(path.name))
    return found


def test_two_workers_to_the_end(tmp_path):
    flags = f"{FLAGS} --total-timesteps 400 --checkpoint-interval 250 --log-interval 2".split()
    run("a3c_atari", *flags, cwd=tmp_path)
    folder = tmp_path / "run"
    steps = [load(path)["global_step"] for path in sorted(folder.glob("checkpoint_*.pt"))]
    assert 250 <= steps[0] < 290 and 400 <= steps[1] < 440 and len(steps) == 2
    points = logged(folder)
    lengths, entropy = points["charts/episodic_length"], points["losses/entropy"]
    assert set(lengths.values()) == {40} and max(lengths) > 200
    assert {*lengths, *entropy, *steps} <= {*points["charts/SPS"]} - {0}  # when they happened


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGINT", "diverged", "Ctrl-C", "killed"])
def test_every_process_ends_with_a_cause_and_a_hint(tmp_path, fault):
    flags = f"{FLAGS} --total-timesteps 1000000 --checkpoint-interval 150".split()
    options = dict(cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True)
    ignore_sigint = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"] if fault == "killed" else []
    if fault == "diverged":
        flags += ["--learning-rate", "1e30"]
    process = subprocess.Popen([*ignore_sigint, *command("a3c_atari", *flags)], **options)
    if fault != "diverged":
        wait_for(lambda: list(tmp_path.glob("run/checkpoint_*[1-9]??.pt")), process)
    if fault in ("SIGKILL", "SIGINT"):  # a worker gets it
        names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in processes_in(tmp_path)}
        os.kill(next(x for x in names if "spawn_main" in names[x]), getattr(signal, fault))
    if fault == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    if fault == "killed":
        process.kill()
    _, stderr = process.communicate(timeout=300)
    wait_for(lambda: not processes_in(tmp_path))
    messages = {"SIGKILL": "SIGKILL", "SIGINT": "a worker exited", "diverged": "nan"}
    assert process.returncode != 0 and messages.get(fault, "") in stderr
    assert ("resume with" in stderr) == (fault != "killed")
    assert stderr.count("Traceback") == (fault == "diverged")
