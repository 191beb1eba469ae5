"""A3C: its mathematics on real games, its processes under real kills.

A `Tape` is all that happened in a short real run of one worker in this process: what the game was told and said, and
the gradients that the optimiser was given. What they should have been is worked out from the games alone.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import a3c_atari as a3c


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Enough(Exception):
    """The worker has asked for more orders than there are."""


class Tape:
    """A run of a3c.actor_learner, one worker in this process; `orders` are (stop, quota, whether to begin anew)."""

    def __init__(self, folder, orders=((100, 0, True), (100, 100, False)), worker=0, seed_of_parameters=0, **options):
        self.args = a3c.Args(**dict(env_id="BreakoutNoFrameskip-v4", num_workers=1, seed=1) | options)
        self.orders, self.messages, self.updates, self.steps, self.resets = list(orders), [], [], [], []
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

        patch.setattr(a3c, "adam_step", note("adam_step"))
        patch.setattr(a3c, "rmsprop_step", note("rmsprop_step"))
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
    """[A3C] Alg. S3 as it stands there, step by step in one graph; returns the gradient (P,) and the next state."""
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
    loss = 0
    for i, (row, (logits, value)) in enumerate(zip(rollout, outputs)):
        deltas = [rewards[j] + args.gamma * values[j + 1] - values[j] for j in range(len(rollout))]
        weights = [(args.gamma * args.gae_lambda) ** (j - i) for j in range(i, len(rollout))]
        advantage = sum(weight * delta for weight, delta in zip(weights, deltas[i:]))
        policy = logits.softmax(0)
        entropy = -(policy * policy.log()).sum()
        loss = loss - policy[row["action"]].log() * advantage * row["chosen"] - args.ent_coef * entropy
        loss = loss + args.vf_coef * (advantage + values[i] - value) ** 2 / 2
    grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(w.values()))])
    grad = grad * min(1, args.max_grad_norm / (grad.norm().item() + 1e-6))
    zeros = torch.zeros(256, dtype=torch.float64)
    return grad, (zeros, zeros) if last["terminated"] or last["truncated"] else state


LEARNERS = {
    "LSTM, Adam": {},
    "LSTM, the paper's RMSprop": dict(optimizer="rmsprop", max_grad_norm=1.0, learning_rate=1e-3),
    "lambda 0.9, lives, cut off": dict(gae_lambda=0.9, episodic_life=True, max_episode_length=30, ent_coef=0.1),
    "feed-forward, PyTorch's RMSprop": dict(lstm=False, optimizer="rmsprop", torch_rmsprop=True, crop=False),
}


@pytest.mark.parametrize("options", LEARNERS.values(), ids=LEARNERS)
def test_the_gradient_that_is_applied_is_the_papers(tmp_path, options):
    """In each of many consecutive updates, also after games have ended. (Known programs: only in the first.)"""
    tape = Tape(tmp_path, orders=[(300, 0, True), (300, 300, False)], num_steps=10, **options)
    rollouts = tape.rollouts()
    assert len(rollouts) == len(tape.updates) >= 30 and sum(map(len, rollouts)) == 300
    state = (torch.zeros(256, dtype=torch.float64),) * 2
    for rollout, update in zip(rollouts, tape.updates):
        expected, state = papers_gradient(tape, update["before"], rollout, state)
        assert torch.linalg.norm(update["grad"] - expected) < 1e-4 * torch.linalg.norm(expected)
    ended = [[row["terminated"] or row["truncated"] for row in rollout] for rollout in rollouts]
    assert sum(map(sum, ended)) >= 1 and not any(any(rows[:-1]) for rows in ended)
    assert all(rows[-1] or len(rows) == 10 for rows in ended[:-1])


@pytest.mark.parametrize("options", LEARNERS.values(), ids=LEARNERS)
def test_the_optimiser_is_the_one_of_its_name(tmp_path, options):
    tape = Tape(tmp_path, **options)
    theta = tape.start.double().requires_grad_()
    rate = tape.args.learning_rate
    adam, rmsprop = torch.optim.Adam([theta], lr=rate), torch.optim.RMSprop([theta], lr=rate, alpha=0.99, eps=1e-5)
    square_avg = torch.ones_like(theta)
    for update in tape.updates:
        theta.grad = update["grad"].double()
        if tape.args.optimizer == "adam":
            adam.step()
        elif tape.args.torch_rmsprop:
            rmsprop.step()
        else:
            square_avg = 0.99 * square_avg + 0.01 * theta.grad**2
            theta.data -= rate * theta.grad / (square_avg + 1e-5).sqrt()
        torch.testing.assert_close(update["after"].double(), theta.data, atol=2e-6, rtol=1e-5)
    assert (theta - tape.start).abs().max() > 10 * 2e-6
