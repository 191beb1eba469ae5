# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch==2.13.0", "gymnasium==1.3.0", "ale-py==0.12.1", "numpy==2.4.6", "tyro==1.0.17",
#     "tqdm", "tensorboard==2.21.0", "wandb==0.31.0", "moviepy==2.2.1", "huggingface-hub==2.4.0",
# ]
# ///
r"""Asynchronous advantage actor-critic (A3C) with an LSTM, on Atari.

Each worker process acts for a few steps in its own environment, with a copy of the shared model. It
computes the gradient of an actor-critic loss, with n-step returns and an entropy bonus, and applies
it to the shared model without a lock ("Hogwild"). Then it copies the shared model again.

[A3C]   Mnih et al. 2016, arXiv:1602.01783     [HOG]  Recht et al. 2011, arXiv:1106.5730
[ADAM]  Kingma, Ba 2015, arXiv:1412.6980       [TIME] Pardo et al. 2018, arXiv:1712.00378

    symbol    variable      shape              meaning (T steps of a rollout, N = 1, A actions)
    \theta    shared_model                     parameters that all workers update
    \theta'   local_model                      a worker's copy
    s_i       obs           (T, N, C, 105, 80) one frame, or four with --no-lstm
              lstm_state    (N, 256) each      h and c of the LSTM
    a_i       actions       (T, N)             action
    r_i       rewards       (T, N)             reward, clipped to its sign
    \pi(a|s)  logits        (T, N, A)          before the softmax
    V(s)      values        (T, N)             value estimate
    R         returns       (T, N)             n-step return, [A3C] Alg. S3
    \beta     ent_coef                         weight of the entropy H, [A3C] Sec. 4

Differences from the paper and from pytorch-a3c (reasons: docs/a3c_atari.md):
  * Gradients are zeroed before each backward pass; pytorch-a3c on PyTorch 2 accumulates them.
  * Layers, crop, Adam, 20 steps and clipping are pytorch-a3c's. The paper (Suppl. Sec. 8) has
    larger frames, two convolutions, 5 steps, and RMSprop with annealed learning rates, sampled from
    1e-4 to 1e-2.
  * The squared value error has the weight 1/4, as in pytorch-a3c; the paper's is 1.
  * Observations are normalized by their own mean and std; pytorch-a3c has running averages.
  * FIRE starts each life; `policy_mask` excludes it from the policy loss and the entropy.
  * Truncated episodes bootstrap from the value of their final observation [TIME], whose newest
    frame is stale in ale-py 0.12.1.
  * Checkpoints reset the environments and reseed all generators: resuming is bit-exact with one
    worker. Several workers update in no fixed order.

    python a3c_atari.py --env-id PongDeterministic-v4  # writes runs/PongDeterministic-v4__...
    python a3c_atari.py --resume runs/...              # resumes an interrupted run
    python a3c_atari.py --evaluate runs/...            # evaluates a trained policy
"""

import contextlib
import copy
import json
import math
import os
import random
import re
import sys
import threading
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
import tyro
from ale_py import Action
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Asynchronous advantage actor-critic on Atari."""

    env_id: str = "PongDeterministic-v4"  # NameDeterministic-v4, or ALE/Name-v5 (sticky actions)
    total_timesteps: int = 10_000_000  # agent steps (four frames) of all workers
    num_workers: int = 4  # processes that act and learn
    num_steps: int = 20  # t_max: steps of a worker between updates
    gamma: float = 0.99  # discount factor
    episodic_life: bool = False  # a lost life is a termination, and resets the LSTM
    ent_coef: float = 0.01  # beta: weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss, which includes a factor 1/2
    max_grad_norm: float = 50.0  # gradient clipping norm
    optimizer: Literal["adam", "rmsprop"] = "adam"  # rmsprop is the paper's
    learning_rate: float = 1e-4  # step size
    anneal_lr: bool = False  # anneal linearly to zero
    lstm: bool = True  # one frame and an LSTM (--no-lstm: four frames and none)
    max_episode_length: int = 27_000  # steps after which an episode is truncated
    log_interval: int = 100  # updates of worker 0 between logged losses

    exp_name: str = Path(__file__).stem
    seed: int = 1  # seed of all generators
    torch_deterministic: bool = True  # in cuDNN
    cuda: bool = False  # use the GPU (slower than the CPU for one frame)
    torch_threads: int = 1  # PyTorch's CPU threads in each process
    track: bool = False  # log to Weights & Biases
    wandb_project_name: str = "deep-rl-reference"
    wandb_entity: str | None = None
    capture_video: bool = False  # record an episode after each checkpoint
    save_model: bool = True
    upload_model: bool = False  # to the Hugging Face Hub
    hf_entity: str | None = None  # Hub user or organization
    checkpoint_interval: int = 500_000  # steps
    run_folder: str | None = None  # start or resume in this folder
    resume: str | None = None  # run folder to resume
    evaluate: str | None = None  # model or run folder to evaluate
    eval_episodes: int = 10


def make_atari(args: Args, num_envs: int) -> VectorEnv:
    """Make parallel environments. Replace this to train on something else.

    Requires SAME_STEP autoreset (at an episode's end, `step` returns the next one's first
    observation, and `info["final_obs"]` holds the last), Discrete(n) actions from 0, and
    observations (N, C, 105, 80) in uint8, which `Agent` crops. `AtariEnvs` clips rewards to their
    sign. `reset(seed=...)` must reset all state.
    """
    spec = gym.registry.get(args.env_id.replace("Deterministic", "NoFrameskip"))
    if not spec or not isinstance(spec.kwargs.get("frameskip"), int):
        sys.exit(f"error: {args.env_id} is neither NameDeterministic-v4 nor ALE/Name-v5")
    return AtariVectorEnv(
        game=spec.kwargs["game"],
        num_envs=num_envs,
        num_threads=1,
        repeat_action_probability=spec.kwargs["repeat_action_probability"],
        frameskip=4,
        maxpool=True,  # over the last two frames, because sprites flicker
        img_height=105,
        img_width=80,
        stack_num=1 if args.lstm else 4,
        noop_max=30,
        use_fire_reset=True,
        max_num_frames_per_episode=4 * args.max_episode_length,
        reward_clipping=False,  # Trap: True, the default, loses the score
        life_loss_info=True,  # a lost life terminates, but the game continues
        autoreset_mode=AutoresetMode.SAME_STEP,
    )


class AtariEnvs:
    """Parallel Atari games that press FIRE on the first step of each life.

    `fire` (N,) marks games whose next action is FIRE; `executed_actions` (N,) is what was executed.
    `episodes` maps each environment whose episode just ended to its (unclipped return, length).
    """

    def __init__(self, args: Args, num_envs: int) -> None:
        self.args, self.num_envs = args, num_envs
        self.envs = make_atari(args, num_envs)
        self.obs_shape = self.envs.single_observation_space.shape
        self.num_actions = int(self.envs.single_action_space.n)
        ale = getattr(self.envs.unwrapped, "ale", None)
        action_set = ale.get_action_set() if ale else []
        self.has_fire = Action.FIRE in action_set
        self.fire_action = action_set.index(Action.FIRE) if self.has_fire else 0

    def reset(self, seed: int, video_folder: Path | None) -> np.ndarray:
        """Reset the games. Returns observations (N, C, H, W)."""
        obs, info = self.envs.reset(seed=seed)
        self.returns, self.lengths = np.zeros((2, self.num_envs))
        self.counter = info.get("episode_frame_number", 0)
        self.fire = np.full(self.num_envs, self.has_fire)
        self.video_folder = video_folder if self.args.capture_video else None
        self.video_frames = []
        return obs.copy()

    def step(self, actions: np.ndarray) -> tuple:
        """Step with actions (N,). Returns obs to act on, next_obs (final ones at an episode's
        end), rewards clipped to their sign, terminations, truncations, info.
        """
        # Detail: the emulator's own FIRE at a reset lasts one frame; sticky actions may override it
        self.executed_actions = np.where(self.fire, self.fire_action, actions)
        obs, rewards, *ends, info = self.envs.step(self.executed_actions)
        terminations, truncations = np.array(ends, bool)
        self.returns += rewards
        self.lengths += 1
        dones = terminations | truncations
        self.fire = dones & self.has_fire
        # Trap: a lost life terminates too; only a new episode resets the frame counter
        counter = info.get("episode_frame_number", 0)
        episode_over = truncations | (terminations & (counter <= self.counter))
        self.counter = counter
        if not self.args.episodic_life:
            terminations = terminations & episode_over
        if self.video_folder:
            self.video_frames.append(obs[0, -1].copy())
            if episode_over[0]:
                self.save_video()
        self.episodes = {}
        obs = obs.copy()  # Trap: with `copy=False`, vector environments reuse this array
        next_obs = obs.copy() if episode_over.any() else obs
        for i in np.flatnonzero(episode_over):
            self.episodes[i] = (self.returns[i], self.lengths[i])
            next_obs[i] = info["final_obs"][i]
            self.returns[i] = self.lengths[i] = 0
        return obs, next_obs, np.sign(rewards, dtype=np.float32), terminations, truncations, info

    def save_video(self) -> None:
        """Save the first game's first episode, as the agent sees it."""
        from gymnasium.utils.save_video import save_video

        frames = [np.stack([frame] * 3, axis=-1) for frame in self.video_frames]
        save_video(frames, str(self.video_folder), lambda _: True, fps=15)
        self.video_folder = None


class Agent(nn.Module):
    """Policy and value function on four convolutions and an LSTM (without it, a linear layer)."""

    def __init__(self, obs_shape: tuple, num_actions: int, args: Args) -> None:
        super().__init__()
        layers = []  # (B, 32, 21, 21), (B, 32, 11, 11), (B, 32, 6, 6), (B, 32, 3, 3)
        for channels in (obs_shape[0], 32, 32, 32):
            layers += [nn.Conv2d(channels, 32, 3, stride=2, padding=1), nn.ELU(inplace=True)]
        layers += [nn.Flatten()] if args.lstm else [nn.Flatten(), nn.Linear(288, 256), nn.ELU()]
        self.trunk = nn.Sequential(*layers)
        self.lstm = nn.LSTM(288, 256) if args.lstm else None
        self.policy_head, self.value_head = nn.Linear(256, num_actions), nn.Linear(256, 1)
        for name, parameter in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            elif "weight_" not in name and parameter.dim() > 1:  # Detail: nearly uniform policy
                gain = {"policy_head.weight": 0.01, "value_head.weight": 1.0}.get(name, 2**0.5)
                nn.init.orthogonal_(parameter, gain)
        self.to(memory_format=torch.channels_last)  # faster convolutions

    def initial_state(self, num_envs: int) -> tuple[Tensor, Tensor]:
        """The LSTM's h and c (N, 256) at an episode's start: zeros."""
        zeros = torch.zeros(num_envs, 256, device=self.value_head.weight.device)
        return zeros, zeros

    def features(self, obs: Tensor) -> Tensor:
        """Features (B, 288), or without an LSTM (B, 256), of observations (B, C, H, W) in uint8."""
        field = obs[:, :, 17:97]  # rows 34 to 194 of 210, in Pong between the borders
        frames = F.interpolate(field.float(), (42, 42), mode="bilinear")
        std, mean = torch.std_mean(frames, dim=(1, 2, 3), keepdim=True)
        return self.trunk((frames - mean) / std.clamp(min=1))  # a blank screen's std is 0

    def forward(self, obs: Tensor, lstm_state: tuple) -> tuple:
        """Logits (T, N, A) and values (T, N) of obs (T, N, C, H, W), and the next LSTM state."""
        T, N = obs.shape[:2]
        hidden = self.features(obs.flatten(0, 1)).unflatten(0, (T, N))
        if self.lstm and T == 1:  # lstm_cell takes one step, and h and c (N, 256); it is faster
            lstm_state = torch.lstm_cell(hidden[0], lstm_state, *self.lstm.all_weights[0])
            hidden = lstm_state[0][None]
        elif self.lstm:  # nn.LSTM takes h and c (layers, N, 256)
            h, c = lstm_state
            hidden, (h, c) = self.lstm(hidden, (h[None], c[None]))
            lstm_state = h[0], c[0]
        return self.policy_head(hidden), self.value_head(hidden).squeeze(-1), lstm_state


def compute_returns(rewards: Tensor, bootstrap: Tensor, gamma: float) -> Tensor:
    r"""Returns (T, N) from rewards (T, N) and the bootstrap value (1, N).

    R \leftarrow r_i + \gamma R, from the last step to the first: [A3C] Alg. S3.
    """
    returns, R = torch.zeros_like(rewards, dtype=bootstrap.dtype), bootstrap[0]
    for i in reversed(range(len(rewards))):
        returns[i] = R = rewards[i] + gamma * R
    return returns


def a3c_loss(agent: Agent, rollout: list, args: Args) -> tuple[Tensor, dict]:
    r"""The loss of a rollout, to be minimized, and metrics per step, all of shape ().

    \sum_i -\log\pi(a_i|s_i) (R - V(s_i)) - \beta H(\pi(s_i)) + c (R - V(s_i))^2 / 2, with R and the
    first V(s_i) constant. c = `vf_coef`, 2 in [A3C] Alg. S3; the entropy: Sec. 4.
    """
    obs, actions, policy_mask, rewards, lstm_state, bootstrap = rollout
    logits, values, _ = agent(obs, lstm_state)
    policy, values = Categorical(logits=logits), values.view_as(rewards)
    returns = compute_returns(rewards, bootstrap, args.gamma)
    advantages = returns - values.detach()
    policy_loss = -(policy_mask * policy.log_prob(actions) * advantages).sum()
    entropy = (policy_mask * policy.entropy()).sum()
    value_loss = 0.5 * (returns - values).square().sum()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return loss, {name: metric.detach() / len(obs) for name, metric in metrics.items()}


class SharedOptimizer(torch.optim.Optimizer):
    """Creates its state at once, to share it. Subclasses: `make_state`, and in-place `update`."""

    def __init__(self, params, lr: float, **defaults) -> None:
        super().__init__(params, {"lr": lr, **defaults})
        for group in self.param_groups:
            self.state.update((p, self.make_state(p)) for p in group["params"])

    def share_memory(self) -> None:
        for state in self.state.values():
            for tensor in state.values():
                tensor.share_memory_()

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group, **self.state[p])


class SharedAdam(SharedOptimizer):
    r"""[ADAM] Alg. 1.

    m = \beta_1 m + (1 - \beta_1) g,  \hat m = m / (1 - \beta_1^t);  v: with g^2 and \beta_2
    \theta = \theta - \alpha \hat m / (\sqrt{\hat v} + \epsilon)

    By Cauchy-Schwarz the quotient is below `bound`, 7.3 for betas (0.9, 0.999). But m may hold the
    gradient of a worker that writes at the same time while v does not yet: an early step could be
    thousands of times too long, so the quotient is clipped.
    """

    def make_state(self, p: Tensor) -> dict:
        # Trap: on loading, PyTorch casts all but "step" to the parameter's type
        return {"step": torch.tensor(0), "m": torch.zeros_like(p), "v": torch.zeros_like(p)}

    def update(self, p, grad, group: dict, step, m, v) -> None:
        beta1, beta2 = group["betas"]
        bound = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
        t = int(step.add_(1))
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        quotient = m_hat.div_(v_hat.sqrt_().add_(group["eps"]))
        p.sub_(quotient.clamp_(-bound, bound), alpha=group["lr"])


class SharedRMSprop(SharedOptimizer):
    r"""[A3C] Sec. 4. As in TensorFlow 1, g starts at one.

    g = \alpha g + (1 - \alpha) \Delta\theta^2
    \theta = \theta - \eta \Delta\theta / \sqrt{g + \epsilon}
    """

    def make_state(self, p: Tensor) -> dict:
        return {"g": torch.ones_like(p)}

    def update(self, p, grad, group: dict, g) -> None:
        average = (group["alpha"] * g).addcmul_(grad, grad, value=1 - group["alpha"])
        g.copy_(average)  # `average` holds our gradient, whatever others write meanwhile
        p.addcdiv_(grad, average.add_(group["eps"]).sqrt_(), value=-group["lr"])


def update(local_model: Agent, shared_model: Agent, optimizer, rollout: list, args) -> dict:
    """Apply the gradient with respect to theta' to theta. Returns metrics."""
    loss, metrics = a3c_loss(local_model, rollout, args)
    local_model.zero_grad()  # Trap: `optimizer.zero_grad()` zeroes the shared model's gradients
    loss.backward()
    parameters, max_norm = local_model.parameters(), args.max_grad_norm
    metrics["grad_norm"] = nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)
    for shared, local in zip(shared_model.parameters(), local_model.parameters()):
        shared.grad = None if local.grad is None else local.grad.cpu()
    optimizer.step()
    return metrics


def actor_learner(
    rank: int, args: Args, folder: Path, shared_model, optimizer, steps, start_steps, messages
) -> None:
    """Worker `rank`, [A3C] Alg. S3. All workers share the model, the optimizer's state and the
    `steps` each has taken (sum: global step), without a lock ([HOG]). At a checkpoint each sets
    `start_steps[rank]` to -1, and waits until `train` writes the global step there.
    """
    prepare_worker(args)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs = AtariEnvs(args, 1)
    local_model = copy.deepcopy(shared_model).to(device)
    learning_rates = [group["lr"] for group in optimizer.param_groups]

    while True:
        while start_steps[rank] < 0:
            time.sleep(0.001)
        global_step = int(start_steps[rank])
        if global_step >= args.total_timesteps:
            return
        seed = seed_everything(args.seed, global_step, 2 + rank)  # same when resuming
        videos = folder / "videos" / str(global_step) if rank == 0 else None
        current_obs = envs.reset(seed, videos)
        lstm_state, updates = local_model.initial_state(1), 0
        next_checkpoint = (global_step // args.checkpoint_interval + 1) * args.checkpoint_interval

        while global_step < min(next_checkpoint, args.total_timesteps):
            # theta' = theta; the copy may mix versions, since others write meanwhile
            local_model.load_state_dict(shared_model.state_dict())

            # Act for t_max steps, or until the episode ends
            rollout, first_state, done = [], lstm_state, False
            while len(rollout) < args.num_steps and not done:
                policy_mask = ~envs.fire
                with torch.no_grad():
                    obs = torch.as_tensor(current_obs[None], device=device)
                    logits, _, lstm_state = local_model(obs, lstm_state)
                    actions = logits[0].softmax(-1).multinomial(1)[:, 0].cpu().numpy()
                new_obs, next_obs, rewards, terminations, truncations, _ = envs.step(actions)
                rollout.append((current_obs, actions, policy_mask, rewards))
                current_obs, done = new_obs, terminations[0] or truncations[0]
                if envs.episodes:
                    messages.put((global_step + len(rollout), envs.episodes, {}))

            # R = 0 for terminal s_t, V(s_t; theta') otherwise
            with torch.no_grad():
                next_obs = torch.as_tensor(next_obs[None], device=device)
                bootstrap = local_model(next_obs, lstm_state)[1] * float(not terminations[0])
            if done:
                lstm_state = local_model.initial_state(1)

            steps[rank] += len(rollout)
            rollout = [torch.as_tensor(np.stack(x), device=device) for x in zip(*rollout)]
            rollout += [first_state, bootstrap]  # gradients stop at first_state
            if args.anneal_lr:
                for group, lr in zip(optimizer.param_groups, learning_rates):
                    group["lr"] = lr * (1 - global_step / args.total_timesteps)
            metrics = update(local_model, shared_model, optimizer, rollout, args)
            global_step = int(steps.sum())
            if rank == 0 and updates % args.log_interval == 0:
                metrics = {name: metric.item() for name, metric in metrics.items()}
                charts = {"learning_rate": optimizer.param_groups[0]["lr"]}
                messages.put((global_step, {}, {"losses": metrics, "charts": charts}))
            updates += 1
        start_steps[rank] = -1


def train(args: Args, folder: Path, checkpoint: dict | None) -> None:
    """Start the workers, log what they report, and save checkpoints while they wait."""
    if min(args.num_workers, args.num_steps, args.log_interval) < 1:
        sys.exit("error: --num-workers, --num-steps or --log-interval below 1")
    if args.checkpoint_interval < args.num_workers * args.num_steps:
        sys.exit("error: --checkpoint-interval below one rollout of each worker")
    seed_everything(args.seed, 0)
    envs = AtariEnvs(args, 1)
    model = Agent(envs.obs_shape, envs.num_actions, args)
    envs.envs.close()
    if list(model.buffers()):
        sys.exit("error: Agent has buffers, which workers do not write back")
    if args.optimizer == "adam":
        optimizer = SharedAdam(model.parameters(), args.learning_rate, betas=(0.9, 0.999), eps=1e-8)
    else:
        optimizer = SharedRMSprop(model.parameters(), args.learning_rate, alpha=0.99, eps=1e-5)
    if not isinstance(optimizer, SharedOptimizer):
        sys.exit("error: workers need a SharedOptimizer, whose state they share")

    parts = {"agent": model, "optimizer": optimizer}
    global_step = checkpoint["global_step"] if checkpoint else 0
    run = Run(args, folder, checkpoint, parts, args.total_timesteps)
    if checkpoint:
        if args.optimizer != checkpoint["args"]["optimizer"]:
            sys.exit("error: --optimizer changed")
        for group in optimizer.param_groups:
            group["lr"] *= args.learning_rate / checkpoint["args"]["learning_rate"]

    steps = torch.tensor([global_step] + [0] * (args.num_workers - 1)).share_memory_()
    start_steps = torch.full_like(steps, -1).share_memory_()
    for part in parts.values():
        part.share_memory()  # of an optimizer, only its state
    # Trap: a forked worker would hang with two threads of PyTorch, and fail with CUDA
    messages = mp.get_context("spawn").SimpleQueue()
    worker_args = (args, folder, model, optimizer, steps, start_steps, messages)
    workers = mp.spawn(actor_learner, worker_args, args.num_workers, join=False, daemon=True)

    while global_step < args.total_timesteps:
        run.save_checkpoint(global_step)
        start_steps.fill_(global_step)
        while (start_steps >= 0).any() or not messages.empty():
            try:
                workers.join(timeout=0.1)
                if any(process.exitcode == 0 for process in workers.processes):
                    raise ChildProcessError("a worker exited")
            except (mp.ProcessExitedException, mp.ProcessRaisedException, OSError) as error:
                sys.exit(f"error: {error}\nresume with --resume '{folder}'")
            while not messages.empty():
                step, episodes, logs = messages.get()
                run.log_episodes(step, episodes)
                for group, scalars in logs.items():
                    run.log(step, group, scalars)
                run.progress(step)
        global_step = int(steps.sum())
        run.progress(global_step)

    start_steps.fill_(global_step)  # the workers end
    run.finish(global_step, "agent")


# ----- The run. Nothing below belongs to the algorithm. -----

SCRIPT = "a3c_atari"
EVAL_STEPS = 100_000  # where evaluation episodes are cut off


@torch.no_grad()
def evaluate(args: Args, model: dict, folder: Path) -> list[float]:
    """Unclipped returns of `args.eval_episodes` episodes."""
    envs = AtariEnvs(args, args.eval_episodes)
    agent = Agent(envs.obs_shape, envs.num_actions, args).eval()
    agent.load_state_dict(model["agent"])
    seed = seed_everything(args.seed, model["global_step"], 1)
    obs, ended = envs.reset(seed, folder / "videos" / "evaluation"), {}
    lstm_state = agent.initial_state(args.eval_episodes)
    while len(ended) < args.eval_episodes and envs.lengths.max() < EVAL_STEPS:
        logits, _, lstm_state = agent(torch.from_numpy(obs[None]), lstm_state)
        actions = Categorical(logits=logits[0]).sample().numpy()
        obs, _, _, terminations, truncations, _ = envs.step(actions)
        continues = torch.from_numpy(~(terminations | truncations))[:, None]
        lstm_state = [x * continues for x in lstm_state]
        ended = envs.episodes | ended  # the first episode of each
    envs.envs.close()
    if len(ended) < args.eval_episodes:
        print(f"note: episodes cut off after {EVAL_STEPS} steps")
    returns = [float(ended[i][0] if i in ended else x) for i, x in enumerate(envs.returns)]
    print(f"evaluation: {np.mean(returns):.2f} +- {np.std(returns):.2f}, {len(ended)} episodes")
    return returns


def prepare_worker(args: Args) -> None:
    """Set up a worker process, which ends with its parent."""
    threading.Thread(target=lambda: (mp.parent_process().join(), os._exit(1)), daemon=True).start()
    torch.set_flush_denormal(True)  # averages of unused weights decay into slow denormals
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic


def seed_everything(*key: int) -> int:
    """Seed all generators. Returns the 31-bit seed."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def write_file(path: Path, content: dict) -> None:
    """Write atomically."""
    file = path.with_suffix(".tmp")
    torch.save(content, file)
    torch.load(file, "meta", mmap=True)  # must load
    os.replace(file, path)


def load_checkpoint(path: Path) -> dict:
    """Load a .pt file, or a run folder's newest intact checkpoint."""
    files = sorted(path.glob("checkpoint_*.pt"))[::-1] if path.is_dir() else [path]
    for file in files:
        try:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            if zipfile.ZipFile(file).testzip() or checkpoint["script"] != SCRIPT:
                raise OSError("damaged or another script's")  # Trap: torch.load does not check
            return checkpoint
        except Exception as error:
            print(f"note: {file} is not a checkpoint of {SCRIPT}.py: {error}")
    sys.exit(f"error: no intact checkpoint in {path}")


class Run:
    """Logs a run, saves its `parts` by state_dict, and loads `checkpoint`."""

    def __init__(self, args, folder: Path, checkpoint: dict | None, parts: dict, last_step: int):
        self.args, self.folder, self.parts = args, folder, parts
        self.recent_returns, self.saves_since_episode = [], 0
        start = checkpoint or dict(global_step=0, seconds=0)
        self.started = time.time() - start["seconds"]
        modules = nn.ModuleList(x for x in parts.values() if isinstance(x, nn.Module))
        groups = [g for x in parts.values() for g in getattr(x, "param_groups", [])]
        if {p for g in groups for p in g["params"]} - set(modules.parameters()):
            sys.exit("error: `parts` lacks a module that an optimizer trains")
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError):  # not on Windows
            import fcntl

            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if checkpoint:
                for name in parts:
                    parts[name].load_state_dict(checkpoint[name])
        except Exception as error:
            sys.exit(f"error: the checkpoint does not fit: {error}")
        print(f"run folder: {folder}", flush=True)
        if args.track:
            import wandb

            setup = dict(project=args.wandb_project_name, entity=args.wandb_entity, resume="allow")
            setup |= dict(config=asdict(args), allow_val_change=True, sync_tensorboard=True)
            try:
                wandb.init(id=re.sub(r"\W+", "-", str(folder.resolve()))[-100:], **setup)
            except wandb.Error:  # deleted
                wandb.init(**setup)
        step = start["global_step"]
        self.writer = SummaryWriter(folder, purge_step=step + bool(checkpoint), flush_secs=10)
        self.bar = tqdm(total=last_step, initial=step, unit=" steps")

    def log(self, global_step: int, group: str, scalars: dict) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(f"{group}/{name}", value, global_step)

    def log_episodes(self, global_step: int, episodes: dict) -> None:
        if episodes:
            self.saves_since_episode = 0
            returns, lengths = np.transpose(list(episodes.values()))
            self.recent_returns = [*self.recent_returns, *returns][-100:]
            means = dict(episodic_return=returns.mean(), episodic_length=lengths.mean())
            self.log(global_step, "charts", means)

    def progress(self, global_step: int) -> None:
        self.log(global_step, "charts", {"SPS": global_step / (time.time() - self.started)})
        if self.recent_returns:
            self.bar.set_postfix_str(f"return {np.mean(self.recent_returns):.1f}", refresh=False)
        self.bar.update(global_step - self.bar.n)

    def pack(self, global_step: int, names) -> dict:
        header = dict(script=SCRIPT, args=asdict(self.args), global_step=global_step)
        header["seconds"] = time.time() - self.started
        return header | {name: self.parts[name].state_dict() for name in names}

    def save_checkpoint(self, global_step: int) -> None:
        """Write a checkpoint; keep it and the one before."""
        if self.saves_since_episode == 1 and global_step < self.bar.total:
            print("note: no episode ended between checkpoints: raise --checkpoint-interval")
        self.saves_since_episode += 1
        self.writer.flush()
        file = self.folder / f"checkpoint_{global_step:012}.pt"
        write_file(file, self.pack(global_step, self.parts))
        files = sorted(self.folder.glob("checkpoint_*.pt"))
        i = files.index(file)
        for path in files[: max(i - 1, 0)] + files[i + 1 :]:
            path.unlink()

    def finish(self, global_step: int, *names: str) -> None:
        """Save run and model (the named parts), evaluate, write result.json."""
        self.bar.close()
        args, model = self.args, self.pack(global_step, names)
        self.save_checkpoint(global_step)
        if args.save_model or args.upload_model:
            write_file(self.folder / "model.pt", model)
        returns = evaluate(args, model, self.folder)
        self.log(global_step, "eval", {"episodic_return": np.mean(returns)})
        self.writer.close()
        for name in names:
            del model[name]
        model |= {"episodic_return": returns, "torch": torch.__version__}
        (self.folder / "result.json").write_text(json.dumps(model, indent=2))
        if args.upload_model:
            from huggingface_hub import HfApi

            name = re.sub(r"\W+", "-", f"{args.env_id}-{args.exp_name}-{args.seed}")
            name = f"{args.hf_entity or ''}/{name}".strip("/")
            repo = HfApi().create_repo(name, exist_ok=True).repo_id
            HfApi().upload_folder(repo_id=repo, folder_path=self.folder, ignore_patterns="check*")


def main() -> None:
    args, checkpoint = tyro.cli(Args), None
    folder = Path(args.evaluate or args.resume or args.run_folder or "runs")
    if args.evaluate or args.resume or (args.run_folder and any(folder.glob("checkpoint_*.pt"))):
        checkpoint = load_checkpoint(folder)
        saved = checkpoint["args"]
        for name in saved.keys() - vars(args).keys():
            print(f"note: the saved flag {name}={saved.pop(name)} is ignored")
        args = tyro.cli(Args, default=Args(**saved))
        folder = folder if folder.is_dir() else folder.parent
    elif not args.run_folder:
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time()}"
        folder /= re.sub(r"[^\w.-]+", "-", name)
    if args.cuda and not torch.cuda.is_available():
        print("note: no CUDA, using the CPU")
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.eval_episodes < 1:
        sys.exit("error: --eval-episodes below 1")
    try:
        if args.evaluate:
            evaluate(args, checkpoint, folder)
        else:
            train(args, folder, checkpoint)
    except KeyboardInterrupt:
        sys.exit(f"\nresume with: python '{sys.argv[0]}' --resume '{folder}'")
    except BlockingIOError:
        sys.exit(f"error: {folder} is in use")
    except (gym.error.Error, ImportError, FloatingPointError) as error:
        sys.exit(f"\nerror: {error}")


if __name__ == "__main__":
    main()
