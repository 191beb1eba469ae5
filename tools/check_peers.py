"""Try the test vectors against other implementations and print the table of vectors/README.md.

    python -m venv peers
    peers/bin/pip install torch stable-baselines3 pfrl packaging gymnasium optax rlax
    peers/bin/python tools/check_peers.py

Libraries are called. What is part of a program and cannot be imported (CleanRL, JaxMARL's QMIX,
PyMARL, Dopamine's tree) is restated as a formula, with the place it was read from.
"""

import importlib.metadata
import sys
from pathlib import Path

import gymnasium as gym
import jax
import numpy as np
import optax
import rlax
import torch
from pfrl.agents.categorical_dqn import _apply_categorical_projection
from pfrl.agents.dqn import compute_weighted_value_loss
from pfrl.agents.iqn import compute_eltwise_huber_quantile_loss
from pfrl.collections import prioritized
from pfrl.replay_buffer import batch_experiences
from pfrl.replay_buffers import PrioritizedReplayBuffer, ReplayBuffer
from stable_baselines3.common import buffers, running_mean_std
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from conftest import cases

SPACE = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
CHECKS = []


def peer(name: str, subject: str, operation: str, precision: str, why: str = ""):
    """Register a function of a case that gives {output: values} or {output: (values, mask)}."""

    def register(function):
        CHECKS.append((name, subject, operation, precision, why, function))
        return function

    return register


def agreement(subject, operation, precision, function) -> tuple[int, list[str], float]:
    """How many cases agree, the names of the others, and the largest difference."""
    good, bad, largest = 0, [], 0.0
    for case in cases(subject, operation):
        answer = function(case)
        if answer is None:
            continue
        close = True
        for name, values in answer.items():
            expected, mask = case["outputs"][name], True
            if isinstance(values, tuple):
                values, mask = values
            values = np.asarray(values).astype(float)
            expected = expected.astype(float)
            mask = np.broadcast_to(mask, expected.shape)
            difference = np.where(mask, np.abs(values - expected), 0.0)
            tolerance = case["tolerance"][precision]
            close &= bool(
                (difference <= tolerance["atol"] + tolerance["rtol"] * abs(expected)).all()
            )
            if not close:
                largest = max(largest, float(difference.max()))
        good += close
        bad += [] if close else [case["name"]]
    return good, bad, largest


# Generalized advantage estimation --------------------------------------------------------------


@peer("Stable-Baselines3 RolloutBuffer", "gae", "gae", "float32")
def sb3_gae(case):
    i = case["inputs"]
    ends, T, N = i["terminations"] | i["truncations"], *i["rewards"].shape
    gamma = float(i["gamma"])
    buffer = buffers.RolloutBuffer(T, SPACE, SPACE, "cpu", float(i["gae_lambda"]), gamma, N)
    # OnPolicyAlgorithm.collect_rollouts adds gamma V(final observation) to the reward at truncation
    only_truncated = i["truncations"] & ~i["terminations"]
    buffer.rewards[:] = i["rewards"] + gamma * only_truncated * i["next_values"]
    buffer.values[:] = i["values"]
    buffer.episode_starts[1:] = ends[:-1]
    buffer.compute_returns_and_advantage(torch.tensor(i["next_values"][-1]), ends[-1])
    return {"advantages": buffer.advantages, "returns": buffer.returns}


@peer(
    "Stable-Baselines3 RolloutBuffer, without that reward",
    "gae",
    "gae",
    "float32",
    "a copy of the buffer alone treats a truncation as a termination",
)
def sb3_gae_alone(case):
    i = case["inputs"]
    only = case["inputs"] | {"terminations": i["terminations"] | i["truncations"]}
    return sb3_gae({"inputs": only})


@peer("Stable-Baselines3 RolloutBuffer, gae_lambda=1", "gae", "n_step_return", "float32")
def sb3_n_step_return(case):
    return sb3_gae({"inputs": case["inputs"] | {"gae_lambda": 1.0}})


@peer(
    "CleanRL ppo_continuous_action.py, lines 236-246, restated",
    "gae",
    "gae",
    "float64",
    "a truncation is treated as a termination",
)
def cleanrl_gae(case):
    i = case["inputs"]
    done = (i["terminations"] | i["truncations"]).astype(float)
    next_values = np.concatenate([i["values"][1:], i["next_values"][-1:]])
    advantages, last = np.zeros_like(done), np.zeros(done.shape[1])
    for t in reversed(range(len(done))):
        delta = i["rewards"][t] + i["gamma"] * next_values[t] * (1 - done[t]) - i["values"][t]
        last = delta + i["gamma"] * i["gae_lambda"] * (1 - done[t]) * last
        advantages[t] = last
    return {"advantages": advantages, "returns": advantages + i["values"]}


@peer(
    "RLax truncated_generalized_advantage_estimation",
    "gae",
    "gae",
    "float32",
    "one discount cuts both the bootstrap and the sum, so a truncation cannot be expressed",
)
def rlax_gae(case):
    i = case["inputs"]
    columns = []
    for n in range(i["rewards"].shape[1]):
        discounts = i["gamma"] * ~(i["terminations"] | i["truncations"])[:, n]
        values = np.append(i["values"][:, n], i["next_values"][-1, n])
        arguments = [
            np.float32(x) for x in (i["rewards"][:, n], discounts, i["gae_lambda"], values)
        ]
        columns.append(rlax.truncated_generalized_advantage_estimation(*arguments))
    return {"advantages": np.stack(columns, 1)}


# PPO, optimizers -------------------------------------------------------------------------------


@peer("CleanRL ppo_continuous_action.py, lines 265-301, restated", "ppo", "ppo_loss", "float64")
def cleanrl_ppo(case):
    i = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    logprobs, values = i["logprobs"].requires_grad_(), i["values"].requires_grad_()
    logratio = logprobs - i["old_logprobs"]
    ratio, clip, advantages = logratio.exp(), float(i["clip_coef"]), i["advantages"]
    if i["norm_adv"]:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = torch.max(
        -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)
    ).mean()
    errors = (values - i["returns"]) ** 2
    if i["clip_vloss"]:
        clipped = i["old_values"] + (values - i["old_values"]).clamp(-clip, clip)
        errors = torch.max(errors, (clipped - i["returns"]) ** 2)
    value_loss = 0.5 * errors.mean()
    loss = policy_loss - i["ent_coef"] * i["entropy"].mean() + i["vf_coef"] * value_loss
    loss.backward()
    return {
        "loss": loss.detach(),
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "old_approx_kl": (-logratio).mean().detach(),
        "approx_kl": (ratio - 1 - logratio).mean().detach(),
        "clipfrac": ((ratio - 1).abs() > clip).double().mean(),
        "grad_logprobs": logprobs.grad,
        "grad_values": values.grad,
    }


@peer(
    "Stable-Baselines3 ppo.py, train, restated",
    "ppo",
    "ppo_loss",
    "float64",
    "the squared value error is not halved, and a clipped value replaces the value (no maximum)",
)
def sb3_ppo(case):
    i = case["inputs"]
    ratio, clip, advantages = (
        np.exp(i["logprobs"] - i["old_logprobs"]),
        i["clip_coef"],
        i["advantages"],
    )
    if i["norm_adv"]:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    clipped = advantages * ratio.clip(1 - clip, 1 + clip)
    values = i["values"]
    if i["clip_vloss"]:
        values = i["old_values"] + (values - i["old_values"]).clip(-clip, clip)
    return {
        "policy_loss": -np.minimum(advantages * ratio, clipped).mean(),
        "approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "clipfrac": (abs(ratio - 1) > clip).mean(),
        "value_loss": ((i["returns"] - values) ** 2).mean(),
    }


@peer("RLax clipped_surrogate_pg_loss (policy loss)", "ppo", "ppo_loss", "float32")
def rlax_ppo(case):
    i = case["inputs"]
    if i["norm_adv"]:
        return None
    ratio = np.exp(np.float32(i["logprobs"] - i["old_logprobs"]))
    advantages = np.float32(i["advantages"])
    return {"policy_loss": rlax.clipped_surrogate_pg_loss(ratio, advantages, float(i["clip_coef"]))}


@peer("PyTorch Normal", "ppo", "gaussian_policy", "float64")
def torch_normal(case):
    i = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    policy = torch.distributions.Normal(i["means"], i["log_std"].exp())
    return {"logprobs": policy.log_prob(i["actions"]).sum(1), "entropy": policy.entropy().sum(1)}


@peer("PyTorch Adam and clip_grad_norm_", "adam", "adam", "float64", "adds 1e-6 to the norm")
def torch_adam(case):
    i = case["inputs"]
    sizes = i["sizes"].tolist()
    parameters = [torch.nn.Parameter(x.clone()) for x in torch.tensor(i["theta"]).split(sizes)]
    optimizer = torch.optim.Adam(parameters, eps=float(i["eps"]))
    history, norms = [], []
    for grad, rate in zip(torch.tensor(i["grads"]), i["learning_rates"], strict=True):
        for parameter, part in zip(parameters, grad.split(sizes), strict=True):
            parameter.grad = part.clone()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, float(i["max_grad_norm"]))))
        optimizer.param_groups[0]["lr"] = float(rate)
        optimizer.step()
        history.append(torch.cat([parameter.detach() for parameter in parameters]).numpy())
    return {"theta": history, "grad_norms": norms}


@peer("Optax clip_by_global_norm and adam", "adam", "adam", "float32")
def optax_adam(case):
    i = case["inputs"]
    rates = np.float32(i["learning_rates"])
    optimizer = optax.chain(
        optax.clip_by_global_norm(float(i["max_grad_norm"])),
        optax.adam(lambda step: jax.numpy.asarray(rates)[step], eps=float(i["eps"])),
    )
    theta = jax.numpy.asarray(np.float32(i["theta"]))
    state, history = optimizer.init(theta), []
    for grad in np.float32(i["grads"]):
        updates, state = optimizer.update(grad, state)
        theta = theta + updates
        history.append(np.asarray(theta))
    return {"theta": history}


def rmsprop(case, kind):
    i = case["inputs"]
    parameter = torch.nn.Parameter(torch.tensor(i["theta"]))
    rates = {"lr": float(i["learning_rate"]), "alpha": float(i["alpha"]), "eps": float(i["eps"])}
    optimizer, history = kind([parameter], **rates), []
    for grad in torch.tensor(i["grads"]):
        parameter.grad = grad.clone()
        optimizer.step()
        history.append(parameter.detach().clone().numpy())
    return {"theta": history}


@peer(
    "PyTorch RMSprop", "rmsprop", "rmsprop", "float64", "epsilon outside the root, average from 0"
)
def torch_rmsprop(case):
    return rmsprop(case, torch.optim.RMSprop)


@peer(
    "Stable-Baselines3 RMSpropTFLike",
    "rmsprop",
    "rmsprop",
    "float64",
    "epsilon inside the root, average from 1: TensorFlow's, the two cases it should agree with",
)
def sb3_rmsprop(case):
    return rmsprop(case, RMSpropTFLike)


# A2C and A3C -----------------------------------------------------------------------------------


@peer("Stable-Baselines3 a2c.py, train, restated", "a2c_a3c", "a2c_loss", "float64")
def sb3_a2c(case):
    i = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    logits, values = i["logits"].requires_grad_(), i["values"].requires_grad_()
    policy = torch.distributions.Categorical(logits=logits)
    policy_loss = -(i["advantages"] * policy.log_prob(i["actions"])).mean()
    value_loss = torch.nn.functional.mse_loss(i["returns"], values)
    loss = policy_loss - i["ent_coef"] * policy.entropy().mean() + i["vf_coef"] * value_loss
    loss.backward()
    return {"loss": loss.detach(), "grad_logits": logits.grad, "grad_values": values.grad}


@peer(
    "RLax policy_gradient_loss and entropy_loss (parts of the loss)",
    "a2c_a3c",
    "a2c_loss",
    "float32",
)
def rlax_a2c(case):
    i = case["inputs"]
    logits, weights = np.float32(i["logits"]), np.ones(len(i["actions"]), np.float32)
    advantages = np.float32(i["advantages"])
    return {
        "policy_loss": rlax.policy_gradient_loss(logits, i["actions"], advantages, weights),
        "entropy": -rlax.entropy_loss(logits, weights),
    }


def pytorch_a3c(case, bootstrap_truncations):
    i = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    logits, values = i["logits"].requires_grad_(), i["values"].requires_grad_()
    log_probs = logits.log_softmax(-1)
    entropies = -(log_probs * log_probs.exp()).sum(-1)
    chosen = log_probs.gather(1, i["actions"][:, None])[:, 0]
    # train.py ends a rollout at every end of an episode, so each part is a rollout of its own
    ends = i["terminations"] | i["truncations"]
    policy_loss = value_loss = 0
    for t in reversed(range(len(values))):
        cut = i["terminations"][t] if bootstrap_truncations else ends[t]
        if t == len(values) - 1 or ends[t]:
            R = i["next_values"][t] * ~cut
            gae, later = 0, R
        R = i["gamma"] * R + i["rewards"][t]
        gae = gae * i["gamma"] + i["rewards"][t] + i["gamma"] * later - values[t].detach()
        later = values[t].detach()
        value_loss = value_loss + 0.5 * (R - values[t]) ** 2
        policy_loss = policy_loss - chosen[t] * gae - i["ent_coef"] * entropies[t]
    loss = policy_loss + i["vf_coef"] * value_loss
    loss.backward()
    return {"loss": loss.detach(), "grad_logits": logits.grad, "grad_values": values.grad}


@peer(
    "pytorch-a3c train.py, restated",
    "a2c_a3c",
    "a3c_rollout",
    "float64",
    "R = 0 at the time limit too: a truncation is treated as a termination",
)
def pytorch_a3c_as_it_is(case):
    return pytorch_a3c(case, False)


@peer("the same, with V of the final observation there", "a2c_a3c", "a3c_rollout", "float64")
def pytorch_a3c_bootstrapped(case):
    return pytorch_a3c(case, True)


# DQN -------------------------------------------------------------------------------------------


@peer("PyTorch smooth_l1_loss", "dqn", "huber", "float64")
def torch_huber(case):
    errors = torch.tensor(case["inputs"]["errors"], requires_grad=True)
    losses = torch.nn.functional.smooth_l1_loss(errors, torch.zeros_like(errors), reduction="none")
    losses.sum().backward()
    return {"losses": losses.detach(), "grads": errors.grad}


@peer("PFRL compute_weighted_value_loss", "dqn", "td_loss", "float64")
def pfrl_td_loss(case):
    i = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    values = i["values"].requires_grad_()
    loss = compute_weighted_value_loss(values, i["targets"], i["weights"])
    loss.backward()
    return {"loss": loss.detach(), "grad_values": values.grad}


@peer("RLax double_q_learning", "dqn", "q_targets", "float32")
def rlax_double_q(case):
    i = {name: np.float32(value) for name, value in case["inputs"].items()}
    zeros = np.zeros(3, np.float32)
    rows = zip(i["returns"], i["discounts"], i["target_qs"], i["online_qs"], strict=True)
    return {"double": [rlax.double_q_learning(zeros, 0, r, d, q, p) for r, d, q, p in rows]}


@peer("Stable-Baselines3 NStepReplayBuffer", "dqn", "n_step", "float32")
def sb3_n_step(case):
    i = case["inputs"]
    T, options = len(i["rewards"]), {"n_steps": int(i["n"]), "gamma": float(i["gamma"])}
    buffer = buffers.NStepReplayBuffer(2 * T, SPACE, SPACE, "cpu", 1, **options)
    for t in range(T):
        truncated = bool(i["truncations"][t] and not i["terminations"][t])
        done = np.array([i["terminations"][t] or i["truncations"][t]])
        # The next observation of row t is t, so that it names the last row of a window
        columns = (np.array([[t]]), np.array([[t]]), np.zeros((1, 1)), i["rewards"][t : t + 1])
        buffer.add(*columns, done, [{"TimeLimit.truncated": truncated}])
    batch = buffer._get_samples(np.arange(T))
    complete = case["outputs"]["complete"]
    return {
        "returns": (batch.rewards[:, 0], complete),
        "discounts": ((batch.discounts * (1 - batch.dones))[:, 0], complete),
        "last_rows": (batch.next_observations[:, 0], complete),
    }


@peer("PFRL ReplayBuffer with num_steps", "dqn", "n_step", "float32")
def pfrl_n_step(case):
    i = case["inputs"]
    buffer = ReplayBuffer(100, num_steps=int(i["n"]))
    for t in range(len(i["rewards"])):
        terminated = bool(i["terminations"][t])
        buffer.append(np.float32([t]), 0, i["rewards"][t], np.float32([t]), 0, terminated)
        if i["truncations"][t] and not terminated:
            buffer.stop_current_episode()
    gamma = float(i["gamma"])
    batch = batch_experiences(list(buffer.memory), "cpu", lambda x: x, gamma)
    rows = batch["state"][:, 0].long().numpy()
    discounts = batch["discount"] * (1 - batch["is_state_terminal"])
    answer = {}
    for name, values in (
        ("returns", batch["reward"]),
        ("discounts", discounts),
        ("last_rows", batch["next_state"][:, 0]),
    ):
        full = np.full(len(i["rewards"]), np.nan)
        full[rows] = values
        answer[name] = (full, case["outputs"]["complete"])
    return answer


@peer(
    "CleanRL rainbow_atari.py, lines 292-330, restated",
    "dqn",
    "n_step",
    "float64",
    "the window is emptied at a termination, so the last n - 1 steps before it are never stored; "
    "it runs on past a truncation into the next episode",
)
def cleanrl_n_step(case):
    i, window = case["inputs"], []
    T, n, gamma = len(i["rewards"]), int(i["n"]), float(i["gamma"])
    returns, discounts = np.full(T, np.inf), np.full(T, np.inf)
    for t in range(T):
        window = [*window, t][-n:]
        if len(window) < n:
            continue
        ends = [k for k in window if i["terminations"][k]]
        last = ends[0] if ends else t
        first = window[0]
        returns[first] = sum(gamma ** (k - first) * i["rewards"][k] for k in range(first, last + 1))
        discounts[first] = 0.0 if ends else gamma**n
        if ends:
            window = []
    complete = case["outputs"]["complete"]
    return {"returns": (returns, complete), "discounts": (discounts, complete)}


# Prioritized replay ----------------------------------------------------------------------------


def pfrl_tree(leaves):
    tree = prioritized.SumTreeQueue()
    for leaf in np.atleast_1d(leaves):
        tree.append(float(leaf))
    return tree


@peer("PFRL SumTreeQueue", "per", "sum_tree", "float64")
def pfrl_sum(case):
    return {"total": pfrl_tree(case["inputs"]["leaves"]).sum()}


@peer(
    "PFRL SumTreeQueue",
    "per",
    "find",
    "float64",
    "rounding may lift the largest value onto a leaf of 0 (a draw of probability about 1e-16)",
)
def pfrl_find(case):
    tree = pfrl_tree(case["inputs"]["leaves"])
    values = case["inputs"]["values"]
    return {"rows": [prioritized._find(*tree.bounds, tree.root, float(v)) for v in values]}


def padded_levels(leaves):
    """The levels of a binary tree of sums, from the root down."""
    level = np.zeros(1 << (len(leaves) - 1).bit_length())
    level[: len(leaves)] = leaves
    levels = [level]
    while len(levels[0]) > 1:
        levels.insert(0, levels[0].reshape(-1, 2).sum(1))
    return levels


def descend(leaves, value, left_if_equal):
    node, levels = 0, padded_levels(np.atleast_1d(leaves))
    for level in levels[1:]:
        left = level[2 * node]
        goes_left = value <= left if left_if_equal else value < left
        value, node = (value, 2 * node) if goes_left else (value - left, 2 * node + 1)
    return node


@peer(
    "Dopamine sum_tree.py (TensorFlow), sample, restated",
    "per",
    "find",
    "float64",
    "rounding as above",
)
def dopamine_find(case):
    i = case["inputs"]
    return {"rows": [descend(i["leaves"], value, False) for value in i["values"]]}


@peer(
    "CleanRL rainbow_atari.py, SumSegmentTree.retrieve, restated (in float64)",
    "per",
    "find",
    "float64",
    "`value <= left`: a boundary goes to the row before, and 0.0 to row 0 even with priority 0",
)
def cleanrl_find(case):
    i = case["inputs"]
    return {"rows": [descend(i["leaves"], value, True) for value in i["values"]]}


@peer(
    "PFRL PrioritizedReplayBuffer, normalize_by_max='batch'", "per", "importance_weights", "float64"
)
def pfrl_weights(case, kind="batch"):
    i = case["inputs"]
    buffer = PrioritizedReplayBuffer(beta0=float(i["beta"]), normalize_by_max=kind)
    probabilities = i["leaves"] / i["leaves"].sum()
    drawn = probabilities[i["rows"]]
    return {"weights": buffer.weights_from_probabilities(drawn, probabilities.min())}


@peer(
    "PFRL PrioritizedReplayBuffer, normalize_by_max='memory'",
    "per",
    "importance_weights",
    "float64",
    "divided by the largest weight in the memory, as the paper's text and baselines do",
)
def pfrl_weights_memory(case):
    return pfrl_weights(case, "memory")


@peer("CleanRL rainbow_atari.py, lines 352-354, restated", "per", "importance_weights", "float64")
def cleanrl_weights(case):
    i = case["inputs"]
    weights = (len(i["leaves"]) * i["leaves"][i["rows"]] / i["leaves"].sum()) ** -i["beta"]
    return {"weights": weights / weights.max()}


@peer(
    "PFRL PrioritizedReplayBuffer, set_last_priority",
    "per",
    "priority_update",
    "float64",
    "with error_max=None and eps=1e-6 (its defaults clip errors at 1 and add 0.01); "
    "max_priority holds p^alpha, not p, to the same effect",
)
def pfrl_update(case):
    i = case["inputs"]
    options = {"alpha": float(i["alpha"]), "eps": float(i["eps"]), "error_max": None}
    buffer = PrioritizedReplayBuffer(**options)
    for leaf in i["leaves"]:
        buffer.memory.append(None, float(leaf))
    buffer.memory.sampled_indices = i["rows"].tolist()
    buffer.memory.flag_wait_priority = True
    buffer.update_errors(np.abs(i["td_errors"]).tolist())
    sums = buffer.memory.priority_sums
    leaves = [sums._write(row, None) for row in range(len(i["leaves"]))]
    return {"leaves": leaves}


# Distributional --------------------------------------------------------------------------------


@peer("PFRL _apply_categorical_projection", "distributional", "c51_projection", "float32")
def pfrl_c51(case):
    i = {name: torch.tensor(value).float() for name, value in case["inputs"].items()}
    z = torch.linspace(float(i["v_min"]), float(i["v_max"]), i["probabilities"].shape[1])
    moved = i["returns"][:, None] + i["discounts"][:, None] * z
    return {"projected": _apply_categorical_projection(moved, i["probabilities"], z)}


@peer("RLax categorical_l2_project", "distributional", "c51_projection", "float32")
def rlax_c51(case):
    i = {name: np.float32(value) for name, value in case["inputs"].items()}
    z = np.linspace(i["v_min"], i["v_max"], i["probabilities"].shape[1], dtype=np.float32)
    rows = zip(i["returns"], i["discounts"], i["probabilities"], strict=True)
    return {"projected": [rlax.categorical_l2_project(R + d * z, p, z) for R, d, p in rows]}


@peer(
    "CleanRL c51_atari.py, lines 235-250, restated", "distributional", "c51_projection", "float64"
)
def cleanrl_c51(case):
    i = case["inputs"]
    K = i["probabilities"].shape[1]
    z = np.linspace(i["v_min"], i["v_max"], K)
    projected = np.zeros((len(i["returns"]), K))
    for row, (R, d, p) in enumerate(
        zip(i["returns"], i["discounts"], i["probabilities"], strict=True)
    ):
        b = ((R + d * z).clip(i["v_min"], i["v_max"]) - i["v_min"]) / (z[1] - z[0])
        low, high = np.floor(b).clip(0, K - 1), np.ceil(b).clip(0, K - 1)
        np.add.at(projected[row], low.astype(int), (high + (low == high) - b) * p)
        np.add.at(projected[row], high.astype(int), (b - low) * p)
    return {"projected": projected}


@peer("PyTorch cross_entropy", "distributional", "c51_loss", "float64")
def torch_c51_loss(case):
    i = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    logits = i["logits"].requires_grad_()
    losses = torch.nn.functional.cross_entropy(logits, i["target"], reduction="none")
    losses.sum().backward()
    return {"losses": losses.detach(), "grad_logits": logits.grad}


@peer(
    "PFRL compute_eltwise_huber_quantile_loss, summed over i, averaged over j",
    "distributional",
    "quantile_huber_loss",
    "float64",
)
def pfrl_quantiles(case):
    i = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    taus = i["taus"].expand_as(i["quantiles"])
    losses = compute_eltwise_huber_quantile_loss(i["quantiles"], i["targets"], taus)
    return {"losses": losses.sum(1).mean(1)}


@peer("RLax quantile_regression_loss", "distributional", "quantile_huber_loss", "float32")
def rlax_quantiles(case):
    i = {name: np.float32(value) for name, value in case["inputs"].items()}
    rows = zip(i["quantiles"], i["targets"], strict=True)
    return {"losses": [rlax.quantile_regression_loss(q, i["taus"], y, 1.0) for q, y in rows]}


# QMIX ------------------------------------------------------------------------------------------


@peer(
    "PyMARL mixers/qmix.py and JaxMARL's MixingNetwork, restated", "qmix", "qmix_mixer", "float64"
)
def peers_mixer(case):
    i = {name: torch.tensor(value) for name, value in case["inputs"].items()}

    def layer(name, x):
        return torch.nn.functional.linear(x, i[name + ".weight"], i[name + ".bias"])

    def two_layers(name):
        return layer(name + ".2", layer(name + ".0", i["states"]).relu())

    qs = i["qs"].requires_grad_()
    w1 = two_layers("hyper_w1").abs().view(len(qs), qs.shape[1], -1)
    hidden = torch.nn.functional.elu(qs[:, None] @ w1 + layer("hyper_b1", i["states"])[:, None])
    q_tot = (hidden @ two_layers("hyper_w2").abs()[..., None])[:, 0, 0] + two_layers("hyper_v")[
        :, 0
    ]
    q_tot.sum().backward()
    return {"q_tot": q_tot.detach(), "grad_qs": qs.grad}


@peer(
    "JaxMARL qmix_rnn.py, lines 484-491, restated",
    "qmix",
    "td_lambda_targets",
    "float64",
    "its `dones` are stored before the step but read as if after it: it bootstraps across the end "
    "of an episode and cuts the bootstrap one step later; one-step targets only",
)
def jaxmarl_targets(case):
    i = case["inputs"]
    if i["td_lambda"] > 0:
        return None
    dones_before = np.concatenate([np.zeros_like(i["no_bootstrap"][:1]), i["no_bootstrap"][:-1]])
    targets = i["rewards"] + (1 - dones_before) * i["gamma"] * i["next_values"]
    return {"targets": (targets, i["mask"])}


@peer("PyMARL q_learner.py, one-step targets, restated", "qmix", "td_lambda_targets", "float64")
def pymarl_targets(case):
    i = case["inputs"]
    if i["td_lambda"] > 0:
        return None
    targets = i["rewards"] + i["gamma"] * (1 - i["no_bootstrap"]) * i["next_values"]
    return {"targets": (targets, i["mask"])}


@peer(
    "PyMARL2 rl_utils.py, build_td_lambda_targets, restated",
    "qmix",
    "td_lambda_targets",
    "float64",
    "a truncated episode shorter than the longest of its batch takes lambda of its bootstrap from "
    "the padding (here -1,000)",
)
def pymarl2_targets(case):
    i = case["inputs"]
    gamma, lam, T = i["gamma"], i["td_lambda"], len(i["rewards"])
    later = i["next_values"][-1] * (1 - i["no_bootstrap"].sum(0))
    targets = np.zeros_like(i["rewards"])
    for t in reversed(range(T)):
        one_step = i["rewards"][t] + (1 - lam) * gamma * i["next_values"][t] * ~i["no_bootstrap"][t]
        later = lam * gamma * later + i["mask"][t] * one_step
        targets[t] = later
    return {"targets": (targets, i["mask"])}


@peer(
    "PyMARL q_learner.py, double Q with -9999999, restated", "qmix", "double_q_available", "float64"
)
def pymarl_double_q(case):
    i = case["inputs"]
    online = np.where(i["avail_actions"], i["online_qs"], -9999999)[1:]
    target = np.where(i["avail_actions"], i["target_qs"], -9999999)[1:]
    best = online.argmax(-1)[..., None]
    mask = i["mask"][..., None]
    return {
        "double": (np.take_along_axis(target, best, -1)[..., 0], mask),
        "single": (target.max(-1), mask),
    }


@peer("JaxMARL qmix_rnn.py, lines 469-477, restated", "qmix", "double_q_available", "float64")
def jaxmarl_double_q(case):
    i = case["inputs"]
    best = (i["online_qs"] - 1e10 * ~i["avail_actions"]).argmax(-1)[..., None]
    values = np.take_along_axis(i["target_qs"], best, -1)[1:, ..., 0]
    return {"double": (values, i["mask"][..., None])}


@peer("PyMARL q_learner.py, masked loss, restated", "qmix", "masked_loss", "float64")
def pymarl_loss(case):
    i = case["inputs"]
    errors = (i["q_tot"] - i["targets"]) * i["mask"]
    return {"loss": (errors**2).sum() / i["mask"].sum()}


@peer(
    "JaxMARL qmix_rnn.py, line 496, restated",
    "qmix",
    "masked_loss",
    "float64",
    "no mask: it trains on fragments of fixed length, which have no padding",
)
def jaxmarl_loss(case):
    return {"loss": ((case["inputs"]["q_tot"] - case["inputs"]["targets"]) ** 2).mean()}


# Statistics and environments ---------------------------------------------------------------------


def running(case, stats):
    i, row = case["inputs"], 0
    means, variances = [], []
    for size in i["batch_sizes"]:
        stats.update(i["rows"][row : row + size])
        row += size
        means.append(stats.mean)
        variances.append(stats.var)
    return {"means": means, "variances": variances}


PRIOR = "starts with a count of 1e-4 at mean 0 and variance 1, which still shows after ten rows"


@peer("Stable-Baselines3 RunningMeanStd", "running_stats", "running_moments", "float64", PRIOR)
def sb3_moments(case):
    shape = case["inputs"]["rows"].shape[1:]
    return running(case, running_mean_std.RunningMeanStd(shape=shape))


@peer("Stable-Baselines3 RunningMeanStd(epsilon=0)", "running_stats", "running_moments", "float64")
def sb3_moments_without_prior(case):
    shape = case["inputs"]["rows"].shape[1:]
    return running(case, running_mean_std.RunningMeanStd(0.0, shape))


@peer("Gymnasium RunningMeanStd", "running_stats", "running_moments", "float64", PRIOR)
def gymnasium_moments(case):
    shape = case["inputs"]["rows"].shape[1:]
    return running(case, gym.wrappers.utils.RunningMeanStd(shape=shape))


class Script(gym.Env):
    """Plays given rewards and ends of one column."""

    observation_space = action_space = SPACE

    def __init__(self, inputs, column):
        self.inputs, self.column, self.t = inputs, column, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        names = ("rewards", "terminations", "truncations")
        reward, terminated, truncated = (self.inputs[x][self.t, self.column].item() for x in names)
        self.t += 1
        return np.zeros(1, np.float32), reward, terminated, truncated, {}


@peer("Stable-Baselines3 VecNormalize (count from 0)", "normalization", "scale_rewards", "float32")
def sb3_scale(case):
    i = case["inputs"]
    N = i["rewards"].shape[1]
    makers = [lambda n=n: Script(i, n) for n in range(N)]
    options = {"gamma": float(i["gamma"]), "clip_reward": float(i["clip"]), "norm_obs": False}
    envs = VecNormalize(DummyVecEnv(makers), **options)
    envs.ret_rms.count = 0.0
    envs.reset()
    return {"scaled": [envs.step(np.zeros((N, 1)))[1] for _ in i["rewards"]]}


@peer(
    "Gymnasium vector.NormalizeReward (count from 0, clipped)",
    "normalization",
    "scale_rewards",
    "float32",
    "at a termination it drops the return before the last reward is counted, and carries that "
    "reward into the next episode; at a truncation it does not reset at all",
)
def gymnasium_scale(case):
    i = case["inputs"]
    N = i["rewards"].shape[1]
    disabled = gym.vector.AutoresetMode.DISABLED
    envs = gym.vector.SyncVectorEnv(
        [lambda n=n: Script(i, n) for n in range(N)], autoreset_mode=disabled
    )
    envs = gym.wrappers.vector.NormalizeReward(envs, gamma=float(i["gamma"]))
    envs.return_rms.count = 0.0
    envs.reset()
    scaled = []
    for t in range(len(i["rewards"])):
        scaled.append(envs.step(np.zeros((N, 1), np.float32))[1].clip(-i["clip"], i["clip"]))
        ends = i["terminations"][t] | i["truncations"][t]
        if ends.any():
            envs.reset(options={"reset_mask": ends})
    return {"scaled": scaled}


class Counting(gym.Env):
    """The environment of the autoreset vectors."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, lengths, kind):
        self.lengths, self.kind, self.episode = lengths, kind, -1

    def reset(self, *, seed=None, options=None):
        self.episode, self.k = self.episode + 1, 0
        return np.array([100.0 * self.episode]), {}

    def step(self, action):
        self.k += 1
        end = self.k == self.lengths[self.episode % len(self.lengths)]
        terminated = bool(end and self.kind != "truncation")
        truncated = bool(end and self.kind != "termination")
        return np.array([100.0 * self.episode + self.k]), float(self.k), terminated, truncated, {}


def trace(case, kind):
    i = case["inputs"]
    N = len(i["ends_by"])
    makers = [lambda n=n: Counting(i["episode_lengths"][n], i["ends_by"][n]) for n in range(N)]
    envs = kind(makers, autoreset_mode=gym.vector.AutoresetMode[str(i["mode"])])
    envs.reset(seed=0)
    rows = {name: [] for name in ("obs", "rewards", "terminations", "truncations")}
    rows |= {"final_obs": [], "has_final_obs": []}
    for _ in range(int(i["num_steps"])):
        obs, rewards, terminations, truncations, infos = envs.step(np.zeros(N, int))
        has = infos.get("_final_obs", np.zeros(N, bool))
        final = infos.get("final_obs", np.zeros(N))
        rows["obs"].append(obs[:, 0].copy())
        rows["rewards"].append(rewards.copy())
        rows["terminations"].append(terminations.copy())
        rows["truncations"].append(truncations.copy())
        rows["has_final_obs"].append(has.copy())
        rows["final_obs"].append([final[n][0] if has[n] else 0.0 for n in range(N)])
    envs.close()
    return rows


@peer("Gymnasium SyncVectorEnv", "autoreset", "autoreset", "float64")
def gymnasium_sync(case):
    return trace(case, gym.vector.SyncVectorEnv)


@peer("Gymnasium AsyncVectorEnv", "autoreset", "autoreset", "float64")
def gymnasium_async(case):
    return trace(case, gym.vector.AsyncVectorEnv)


def main() -> None:
    torch.set_num_threads(1)
    packages = ("torch", "gymnasium", "stable-baselines3", "pfrl", "optax", "rlax")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages))
    print()
    print("| operation | peer | agrees in | differs in | by at most | why |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, subject, operation, precision, why, function in CHECKS:
        good, bad, largest = agreement(subject, operation, precision, function)
        differs = "; ".join(bad) if len(bad) < 4 else f"{len(bad)} cases"
        size = f"{largest:.2g}" if bad else ""
        size = size.replace("inf", "rows are missing")
        print(
            f"| {operation} | {name} | {good} of {good + len(bad)} | {differs} | {size} | {why} |"
        )


if __name__ == "__main__":
    main()
