# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "gymnasium==1.3.0", "ale-py==0.12.1", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0", "moviepy==2.2.1", "huggingface-hub==2.4.0",
# ]
# ///
r"""Asynchronous advantage actor-critic (A3C) on Atari, with an LSTM: workers that improve one shared model.

Each worker is a process that plays its own environment with its own copy of the model. After a few steps it computes
the gradient of what it has just played: actions that returned more than the value function expected become more likely,
values move towards the returns, and the policy's entropy is kept up. It applies this gradient to the shared model at
once and without a lock ("Hogwild"), whatever the others are doing, takes a new copy and plays on.

[A3C]   Mnih et al. 2016, "Asynchronous methods for deep reinforcement learning", ICML, arXiv:1602.01783
[HOG]   Recht et al. 2011, "Hogwild: a lock-free approach to parallelizing stochastic gradient descent", arXiv:1106.5730
[ADAM]  Kingma, Ba 2015, "Adam: a method for stochastic optimization", ICLR, arXiv:1412.6980
[DQN]   Mnih et al. 2015, "Human-level control through deep reinforcement learning", Nature 518
[GAE]   Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation",
        arXiv:1506.02438
[TIME]  Pardo et al. 2018, "Time limits in reinforcement learning", ICML, arXiv:1712.00378
[ALE]   Machado et al. 2018, "Revisiting the arcade learning environment", JAIR 61, arXiv:1709.06009
[PPO]   Schulman et al. 2017, "Proximal policy optimization algorithms", arXiv:1707.06347
[37]    Huang et al. 2022, "The 37 implementation details of PPO", ICLR blog track

    symbol          variable           shape            meaning (t steps of a rollout, P parameters)
    \theta          shared.theta       (P,)             parameters of the shared model, in one vector
    \theta'         local_theta        (P,)             those of the worker's copy, `local_model`
    d\theta         grad               (P,)             gradient of a rollout's loss with respect to theta'
    T               global_step                         agent steps of all workers together, `shared.steps.sum()`
    t_max           num_steps                           longest rollout; the end of an episode ends it too
    s_t             obs                (1, 1, 55, 42)   one frame, uint8 (four with --no-lstm; 42 rows with --no-crop)
                    lstm_state         (1, 256) twice   h and c of the LSTM
    a_t             actions            (t,)             index among the environment's actions
    r_t             rewards            (t,)             reward, its sign only
    R               returns            (t,)             n-step return, [A3C] Alg. S3; with lambda < 1 the lambda-return
    R - V           advantages         (t,)             with lambda < 1 [GAE] Eq. (16)
                    chosen             (t,)             1 where the agent chose a_t, 0 where FIRE was pressed for it
    \pi(a|s)        logits             (t+1, A)         before the softmax, A actions
    V(s)            values             (t+1,)           value function
    H, \beta        entropy, ent_coef  (), ()           summed entropy of the policy, its weight, [A3C] Sec. 4
    m, v, t         m, v, t            (P,), (P,), ()   Adam's averages, its count of updates, [ADAM] Alg. 1
    g               square_avg         (P,)             RMSprop's average of squared gradients, [A3C] Sec. 4

Where this differs from the paper or from common practice, and why:
  * The gradient is one vector, zeroed before each backward pass. Well-known programs share `.grad` between two models;
    since `zero_grad` sets it to None, they add up all gradients, or apply the very first one for ever.
  * [HOG] proves that updates without a lock converge if each of them touches few parameters. Here each touches all:
    that it works all the same is what [A3C] found. The length of a step of Adam is bounded, see `SharedAdam`.
  * Acting builds no graph. The rollout is computed again as one batch for the gradient: cheaper than step by step.
  * Size of frames, network, Adam and its rate, 20 steps and the clipping are github.com/ikostrikov/pytorch-a3c's. The
    paper has 84x84 frames, two convolutions and a layer of 256 units ([A3C] Suppl. Sec. 8) before 256 LSTM cells,
    RMSprop (`--optimizer rmsprop`), a falling rate (`--anneal-lr`), 5 steps, no clipping.
  * pytorch-a3c crops the same rows to the pixel (our last row has some of Pong's lower border in it), normalises by
    running averages of each process, never saved (here each observation by its own mean and deviation), and begins its
    convolutions with uniform weights (here orthogonal, as in OpenAI's baselines ([37])). Its value loss weighs the
    squared error by 1/4, as ours; the paper's by 1. With lambda < 1 the values' target stays the n-step return there.
  * A time limit is not a failure: at a truncation the value of the last observation is bootstrapped ([TIME]).
  * On the first step of each life FIRE is pressed for the agent: an environment like Breakout would otherwise wait for
    ever for a policy that has forgotten to. Such a step fits the value function; the policy's terms leave it out.
  * `PongNoFrameskip-v4` (or `PongDeterministic-v4`: the same environment here) has no sticky actions, `ALE/Pong-v5`
    repeats the last action with probability 0.25 ([ALE]). An agent step is always four frames.
  * At each checkpoint the workers wait, the model is evaluated and saved, and new episodes begin with seeds made of
    (seed, global_step, worker). So with one worker resuming is exact to the bit. With more, the order of updates is
    the operating system's, in any run.

Scores and speeds: README.md.

    python a3c_atari.py --env-id PongDeterministic-v4                    # writes runs/PongDeterministic-v4__a3c_...
    python a3c_atari.py --resume runs/PongDeterministic-v4__...          # continues an interrupted run
    python a3c_atari.py --evaluate runs/PongDeterministic-v4__.../model.pt --eval-episodes 20
"""

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Literal

if __name__ == "__mp_main__" and sys.platform == "linux":
    # A worker imports for seconds. From here on Ctrl-C ends it silently, as does its parent's end (PR_SET_PDEATHSIG)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGINT)

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclasses.dataclass
class Args:
    """Asynchronous advantage actor-critic on Atari."""

    env_id: str = "PongDeterministic-v4"  # NameNoFrameskip-v4, or ALE/Name-v5 with sticky actions
    total_timesteps: int = 10_000_000  # agent steps of all workers together, four frames each (or a few more)
    num_workers: int = 4  # processes that play and learn (paper: 16; on 2 cores 8 are 1/5 slower than 2)
    num_steps: int = 20  # t_max: agent steps of a worker between updates
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 1.0  # lambda of generalised advantage estimation; 1 is the paper's n-step return
    episodic_life: bool = False  # whether a lost life ends return and LSTM state (the episode goes on)
    ent_coef: float = 0.01  # beta: weight of the entropy bonus
    vf_coef: float = 0.5  # weight of half the squared value error
    max_grad_norm: float = 50.0  # norm to which gradients are clipped
    optimizer: Literal["adam", "rmsprop"] = "adam"  # Adam, or the paper's RMSprop
    shared_optimizer: bool = True  # whether the workers share the optimiser's averages as well as the parameters
    learning_rate: float = 1e-4  # step size of the optimiser
    anneal_lr: bool = False  # whether the learning rate falls linearly to zero over the run (extended, it rises again)
    rmsprop_alpha: float = 0.99  # share of the old average of squared gradients in the new
    rmsprop_eps: float = 1e-5  # added to the average of squared gradients
    lstm: bool = True  # whether the network has an LSTM and sees one frame; without, it sees four
    crop: bool = True  # whether the network sees rows 34 to 194 of the screen only (MsPacman needs more: --no-crop)
    max_episode_length: int = 27_000  # agent steps after which an episode is truncated (its first no-ops do not count)
    greedy: bool = False  # whether the evaluation plays the likeliest action instead of sampling the policy
    log_interval: int = 100  # updates of worker 0, from a checkpoint on, between points of the losses in the log

    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of the parameters, the actions and the environments
    torch_deterministic: bool = True  # whether cuDNN must be deterministic
    cuda: bool = False  # whether the workers compute on the GPU, if there is one (one frame is too little work for it)
    torch_threads: int = 1  # threads of torch in each process; it is the workers that keep the cores busy
    compile: bool = False  # whether to compile acting in each worker (takes up to a minute, needs a C++ compiler)
    track: bool = False  # whether to track the run with Weights & Biases
    wandb_project_name: str = "deep-rl-reference"  # project of the tracked run
    wandb_entity: str | None = None  # entity (user or team) of the tracked run
    capture_video: bool = False  # whether to record the first episode after each checkpoint and of the evaluation
    save_model: bool = True  # whether to save the trained model as model.pt in the run folder
    upload_model: bool = False  # whether to upload the model to the Hugging Face hub
    hf_entity: str | None = None  # user or organisation on the Hugging Face hub (default: yours)
    checkpoint_interval: int = 500_000  # agent steps of all workers between checkpoints, where new episodes begin
    run_folder: str | None = None  # start the run in this folder, or continue the one that it holds
    resume: str | None = None  # continue the run in this folder from its newest checkpoint, with its arguments
    evaluate: str | None = None  # do not train: play episodes with this model.pt, checkpoint or run folder
    eval_episodes: int = 10  # whole episodes of the evaluation

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "seed" else 1
            if type(value) is int and value < least:
                sys.exit(f"error: --{name.replace('_', '-')} must be at least {least}")
        if not 0 < self.learning_rate < 1e38:
            sys.exit("error: --learning-rate must be positive, and small enough for float32")
        if self.max_episode_length < 10:  # the end of one with fewer frames than the next one's no-ops is not noticed
            sys.exit("error: --max-episode-length must be at least 10")


def make_atari(args: Args, num_envs: int, colour: bool = False) -> AtariVectorEnv:
    """Make environments with observations (N, C, H, 42) in uint8, or in colour (N, 1, 210, 160, 3), for a video."""
    spec = gym.spec(args.env_id.replace("Deterministic", "NoFrameskip")).kwargs
    if not isinstance(spec.get("frameskip"), int):
        sys.exit(f"error: {args.env_id} is not an Atari environment of this kind: NameNoFrameskip-v4 or ALE/Name-v5")
    return AtariVectorEnv(
        game=spec["game"],
        num_envs=num_envs,
        num_threads=1,
        repeat_action_probability=spec["repeat_action_probability"],
        frameskip=4,
        maxpool=True,  # over the last two frames: sprites flicker ([DQN] Methods)
        grayscale=not colour,
        img_height=210 if colour else 55 if args.crop else 42,  # of the 55 the network takes 42
        img_width=160 if colour else 42,
        stack_num=1 if colour or args.lstm else 4,
        noop_max=30,  # an episode begins with fewer than 30 idle frames
        use_fire_reset=True,
        max_num_frames_per_episode=4 * args.max_episode_length,  # then the episode is truncated
        reward_clipping=False,  # Trap: True, the default, loses the score
        episodic_life=False,  # Trap: True begins a new episode at each lost life
        life_loss_info=True,  # this one terminates at a lost life and lets the episode go on
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,  # no row of a reset ever looks like a step
    )


class AtariEnvs:
    """N Atari environments in which FIRE is pressed on the first step of each life; they count whole episodes.

    `first`, 0 but in A2C's later ranks, is the number of the first environment here; the seeds follow these numbers.
    `fire` (N,) says where the next step will press FIRE instead of the action, `played` (N,) what the last one played.
    `finished` lists the episodes that it ended: (environment, score, length), unclipped and in agent steps.
    """

    def __init__(self, args: Args, num_envs: int, run_folder: Path, name: str = "training", first: int = 0):
        self.args, self.num_envs, self.run_folder, self.name, self.first = args, num_envs, run_folder, name, first
        self.envs = make_atari(args, num_envs)
        buttons = list(self.envs.ale.get_action_set())
        self.num_actions = len(buttons)
        self.fire_action = buttons.index(ale_py.Action.FIRE) if ale_py.Action.FIRE in buttons else None
        self.recent_scores = deque(maxlen=100)

    def reset(self, *key: int) -> np.ndarray:
        """Begin new episodes, seeded by the run's seed and `key`. Returns the observations (N, C, H, W)."""
        seeds = np.random.SeedSequence([self.args.seed, *key]).generate_state(self.first + self.num_envs)
        self.seeds = seeds[self.first :] >> 1  # 31 bits
        obs, info = self.envs.reset(seed=self.seeds.astype(int))
        self.frames = info["episode_frame_number"]
        self.fire = np.full(self.num_envs, self.fire_action is not None)
        self.scores, self.lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, int)
        self.video = f"{self.name}-{key[0]}.mp4"
        self.recorded = [] if self.args.capture_video and self.first == 0 else None  # actions of the first episode
        return obs

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Play one step with actions (N,).

        Returns observations to act on next (N, C, H, W), those that the actions led to (others where an episode ended),
        rewards, clipped to their sign, terminations (with `episodic_life` at a lost life too), truncations (N,).
        """
        # Detail: the emulator itself presses FIRE at a reset, but for one frame, which a sticky action may swallow
        self.played = np.where(self.fire, self.fire_action, actions) if self.fire.any() else actions
        next_obs, rewards, terminations, truncations, info = self.envs.step(self.played)
        # Trap: a lost life terminates too, and `lives` is already the next episode's; only frames start over
        over = (terminations | truncations) & (info["episode_frame_number"] < self.frames)
        self.frames = info["episode_frame_number"]
        self.fire = (terminations | truncations) & (self.fire_action is not None)
        terminations = terminations & (over | self.args.episodic_life)
        successors = np.where(over[:, None, None, None], info["final_obs"], next_obs) if over.any() else next_obs
        self.scores += rewards
        self.lengths += 1
        self.finished = [(i, float(self.scores[i]), int(self.lengths[i])) for i in np.flatnonzero(over)]
        self.recent_scores.extend(score for _, score, _ in self.finished)
        self.scores[over] = self.lengths[over] = 0
        if self.recorded is not None:
            self.recorded.append(int(self.played[0]))
            if over[0]:
                self.record()
        return next_obs, successors, np.sign(rewards).astype(np.float32), terminations, truncations

    def record(self) -> None:
        """Play the first episode again in colour, from its seed and actions, into a video in the run folder."""
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        (self.run_folder / "videos").mkdir(exist_ok=True)
        envs = make_atari(self.args, 1, colour=True)
        frames, _ = envs.reset(seed=self.seeds[:1].astype(int))
        with FFMPEG_VideoWriter(str(self.run_folder / "videos" / self.video), (320, 420), fps=15) as video:
            for action in self.recorded:  # frame by frame: an episode may be long
                video.write_frame(frames[0, 0].repeat(2, axis=0).repeat(2, axis=1))
                frames, *_ = envs.step(np.array([action]))
        self.recorded = None


def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights with gain `std`, zero bias ([37], core detail 2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function on four convolutions and an LSTM, or without `lstm` a linear layer in its place."""

    def __init__(self, num_actions: int, lstm: bool = True) -> None:
        super().__init__()
        layers = []  # (B, C, 42, 42), (B, 32, 21, 21), (B, 32, 11, 11), (B, 32, 6, 6), (B, 32, 3, 3)
        for channels in (1 if lstm else 4, 32, 32, 32):
            layers += [layer_init(nn.Conv2d(channels, 32, 3, stride=2, padding=1)), nn.ELU()]
        self.trunk = nn.Sequential(*layers, nn.Flatten())
        self.lstm = nn.LSTM(288, 256) if lstm else None
        if lstm:
            nn.init.zeros_(self.lstm.bias_ih_l0)
            nn.init.zeros_(self.lstm.bias_hh_l0)
        else:
            self.linear = nn.Sequential(layer_init(nn.Linear(288, 256)), nn.ELU())
        self.policy_head = layer_init(nn.Linear(256, num_actions), std=0.01)  # Detail: at first nearly uniform
        self.value_head = layer_init(nn.Linear(256, 1), std=1.0)

    def initial_state(self, num_envs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """h and c (N, 256) at the beginning of an episode."""
        zeros = torch.zeros(num_envs, 256, device=self.value_head.weight.device)
        return zeros, zeros

    def features(self, obs: torch.Tensor) -> torch.Tensor:
        """What the convolutions make (B, 288) of observations (B, C, 55 or 42, 42) in uint8."""
        if obs.shape[2] == 55:
            obs = obs[:, :, 9:51]  # rows 34 to 194 of the screen's 210
        # channels_last is faster. Trap: `.to` would leave the strides of one channel as they are
        frames = torch.empty_like(obs, dtype=torch.float32, memory_format=torch.channels_last).copy_(obs)
        std, mean = torch.std_mean(frames, dim=(1, 2, 3), keepdim=True)
        return self.trunk(frames.sub_(mean).div_(std.clamp(min=1)))  # a blank screen has no deviation

    def step(self, obs: torch.Tensor, lstm_state: tuple) -> tuple[torch.Tensor, tuple]:
        """One step in each of N environments: logits (N, A) and the next state, of obs (N, C, H, 42) and a state."""
        hidden = self.features(obs)
        if self.lstm is None:
            return self.policy_head(self.linear(hidden)), lstm_state
        lstm_state = torch.lstm_cell(hidden, lstm_state, *self.lstm.all_weights[0])  # for one step faster than nn.LSTM
        return self.policy_head(lstm_state[0]), lstm_state

    def forward(self, obs: torch.Tensor, lstm_state: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (t, A), values (t,) of t successive obs (t, C, H, 42) of one environment, from the state before."""
        hidden = self.features(obs)
        hidden = self.linear(hidden) if self.lstm is None else self.lstm(hidden, lstm_state)[0]
        return self.policy_head(hidden), self.value_head(hidden).squeeze(-1)


def sample(logits: torch.Tensor, gumbel_noise: np.ndarray) -> np.ndarray:
    """One action (N,) per row of logits: argmax of logits plus Gumbel noise is a draw from their softmax."""
    return (logits.cpu().numpy() + gumbel_noise).argmax(axis=1)


def compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda) -> np.ndarray:
    r"""Generalised advantage estimates of arrays (T, N), or (T,) of one environment.

    \hat A_t = \sum_l (\gamma\lambda)^l \delta_{t+l}, summed to the end of the episode or of the batch, [GAE] Eq. (16)
    \delta_t = r_t + \gamma V(s_{t+1}) - V(s_t), where V is 0 after a termination, [PPO] Eq. (12)

    `next_values` is V of the observation that the action led to, not of the next row: after a truncation the next row
    belongs to another episode. A termination cuts the bootstrap and the sum, a truncation the sum only ([TIME]).
    """
    advantages = np.zeros_like(rewards)
    last_gae = np.zeros_like(rewards[0])
    delta = rewards + gamma * next_values * ~terminations - values
    discount = gamma * gae_lambda * ~(terminations | truncations)
    for t in reversed(range(len(rewards))):
        advantages[t] = last_gae = delta[t] + discount[t] * last_gae
    return advantages


def a3c_loss(logits, values, actions, chosen, advantages, returns, args) -> tuple[torch.Tensor, dict]:
    r"""The loss of a rollout (), and its parts per step {name: ()}. Tensors (t,), logits (t, A).

    \sum -\log\pi(a|s) (R - V(s)) - \beta H(\pi(s)) + vf_coef (R - V(s))^2 / 2: its gradient is minus the d\theta, and
    vf_coef / 2 times the d\theta_v, of [A3C] Alg. S3, with Sec. 4's entropy; sums, as there. `advantages` and `returns`
    are constants. Where FIRE was pressed for the agent, only the values learn.
    """
    log_probs = logits.log_softmax(dim=-1)
    entropy = (chosen * -(log_probs.exp() * log_probs).sum(-1)).sum()
    policy_loss = -(advantages * chosen * log_probs.gather(1, actions[:, None]).squeeze(1)).sum()
    value_loss = 0.5 * (returns - values).square().sum()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return loss, {name: part.detach() / len(values) for name, part in parts.items()}


def flatten(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Move all parameters into one vector (P,) and their gradients into another, and make them views of these.

    A copy of the model, zeroing its gradients and a step of the optimiser are then operations on whole vectors.
    """
    theta = nn.utils.parameters_to_vector(module.parameters()).detach()
    grad = torch.zeros_like(theta)
    nn.utils.vector_to_parameters(theta, module.parameters())
    for parameter, view in zip(module.parameters(), grad.split([p.numel() for p in module.parameters()])):
        parameter.grad = view.view_as(parameter)
    return theta, grad


class SharedAdam(nn.Module):
    r"""Adam on vectors (P,) in shared memory, [ADAM] Alg. 1 (a module, since PyTorch shares and saves these):

    m = \beta_1 m + (1 - \beta_1) g,   \hat m = m / (1 - \beta_1^t),   v and \hat v likewise with g^2 and \beta_2,
    \theta = \theta - \alpha \hat m / (\sqrt{\hat v} + \epsilon)

    No gradients make |\hat m| / \sqrt{\hat v} larger than 7.3 (Cauchy-Schwarz), but two workers that write at once do:
    m may hold the other's gradient, and v not yet. In the first updates, where v is nearly zero, such a step would be
    thousands of times too long and destroy the model. That t may miss an update does no harm.
    """

    def __init__(self, num_parameters: int, args: Args) -> None:
        super().__init__()
        self.m, self.v = nn.Buffer(torch.zeros(num_parameters)), nn.Buffer(torch.zeros(num_parameters))
        self.t = nn.Buffer(torch.tensor(0))

    def step(self, theta: torch.Tensor, grad: torch.Tensor, learning_rate: float) -> None:
        beta1, beta2, eps = 0.9, 0.999, 1e-8
        t = int(self.t.add_(1))
        self.m.mul_(beta1).add_(grad, alpha=1 - beta1)
        self.v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)  # Trap: lerp_ reads v twice, and may make it negative
        m_hat, v_hat = self.m / (1 - beta1**t), self.v / (1 - beta2**t)
        theta.sub_(m_hat.div_(v_hat.sqrt_().add_(eps)).clamp_(-7.3, 7.3), alpha=learning_rate)


class SharedRMSprop(nn.Module):
    r"""RMSprop on vectors (P,) in shared memory, [A3C] Sec. 4 (g starts at one, as in TensorFlow):

    g = \alpha g + (1 - \alpha) \Delta\theta^2,   \theta = \theta - \eta \Delta\theta / \sqrt{g + \epsilon}

    PyTorch divides by \sqrt{g} + \epsilon and starts at zero: where gradients are small (say 1e-4, and epsilon 1e-5)
    its steps are 30 times as large.
    """

    def __init__(self, num_parameters: int, args: Args) -> None:
        super().__init__()
        self.args = args
        self.square_avg = nn.Buffer(torch.ones(num_parameters))

    def step(self, theta: torch.Tensor, grad: torch.Tensor, learning_rate: float) -> None:
        alpha, eps = self.args.rmsprop_alpha, self.args.rmsprop_eps
        average = (self.square_avg * alpha).addcmul_(grad, grad, value=1 - alpha)
        self.square_avg.copy_(average)  # `average` has our gradient in it, whatever others write meanwhile
        theta.addcdiv_(grad, average.add_(eps).sqrt_(), value=-learning_rate)


@dataclasses.dataclass
class Shared:
    """What the processes share: tensors in shared memory, which all read and write without a lock ([HOG])."""

    theta: torch.Tensor  # parameters (P,)
    optimizers: nn.ModuleList  # one for all workers, or one for each
    steps: torch.Tensor  # agent steps of each worker (in the first also those before a resume); only it writes there
    checkpoint_step: torch.Tensor  # agent steps of all at the last checkpoint (), written by the parent
    metrics: mp.SimpleQueue  # to the parent: (global_step, {tag: value}) for the log; {} from a worker that has stopped


def actor_learner(rank: int, args: Args, run_folder: Path, shared: Shared) -> None:
    """Worker `rank`: play with a copy of the shared model, and apply its gradients to the shared one, [A3C] Alg. S3."""
    device = prepare_worker(args)
    envs = AtariEnvs(dataclasses.replace(args, capture_video=args.capture_video and rank == 0), 1, run_folder)
    local_model = Agent(envs.num_actions, args.lstm).to(device)
    local_theta, grad = flatten(local_model)
    optimizer = shared.optimizers[0 if args.shared_optimizer else rank]
    act = traced_step(local_model, envs, args)

    # From checkpoint to checkpoint. A worker stops by itself, as soon as all together have passed the next one
    while (checkpoint_step := int(shared.checkpoint_step)) < args.total_timesteps:
        next_checkpoint = (checkpoint_step // args.checkpoint_interval + 1) * args.checkpoint_interval
        key = (checkpoint_step, 2 + rank)  # of random numbers; the evaluation's is (checkpoint_step, 1)
        obs, rng = envs.reset(*key), np.random.default_rng([args.seed, *key])  # new episodes, and the actions
        lstm_state, updates = local_model.initial_state(1), 0

        while (global_step := int(shared.steps.sum())) < min(next_checkpoint, args.total_timesteps):
            # theta' = theta. Others may write meanwhile: the copy may mix two versions
            local_theta.copy_(shared.theta)

            # Play t_max steps, or to the end of the episode
            rollout, first_state, ended = [], lstm_state, False
            while len(rollout) < args.num_steps and not ended:
                with torch.no_grad():
                    logits, lstm_state = act(torch.from_numpy(obs).to(device), lstm_state)
                action, chosen = sample(logits, rng.gumbel(size=logits.shape)), ~envs.fire
                next_obs, successor, reward, termination, truncation = envs.step(action)
                rollout.append((obs, action, chosen, reward, termination, truncation))
                obs, ended = next_obs, termination[0] or truncation[0]
                if ended:
                    lstm_state = local_model.initial_state(1)

            # The rollout again, as one batch with a graph, from the state before it, a constant. The row behind it is
            # the last successor: R = V(s_t), or 0 if terminal, then R = r_i + gamma R (GAE with lambda = 1: R - V(s_i))
            b_obs, actions, chosen, rewards, terminations, truncations = map(np.concatenate, zip(*rollout))
            logits, values = local_model(torch.from_numpy(np.concatenate([b_obs, successor])).to(device), first_state)
            v = values.detach().cpu().numpy()  # (t + 1,)
            advantages = compute_gae(rewards, v[:-1], v[1:], terminations, truncations, args.gamma, args.gae_lambda)
            returns = advantages + v[:-1]
            batch = (torch.from_numpy(x).to(device) for x in (actions, chosen, advantages, returns))
            loss, metrics = a3c_loss(logits[:-1], values[:-1], *batch, args)
            grad.zero_()  # Trap: without it gradients of all rollouts add up
            loss.backward()
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(local_model.parameters(), args.max_grad_norm)
            if not metrics["grad_norm"].isfinite():
                raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")

            # The gradient with respect to theta' is applied to theta, which others may have moved since
            learning_rate = args.learning_rate * (1 - global_step / args.total_timesteps if args.anneal_lr else 1)
            optimizer.step(shared.theta, grad.cpu(), learning_rate)
            shared.steps[rank] += len(rollout)
            updates += 1

            global_step = int(shared.steps.sum())
            for _, score, length in envs.finished:
                shared.metrics.put((global_step, {"charts/episodic_return": score, "charts/episodic_length": length}))
            if rank == 0 and updates % args.log_interval == 0:
                losses = {f"losses/{name}": metric.item() for name, metric in metrics.items()}
                shared.metrics.put((global_step, losses | {"charts/learning_rate": learning_rate}))

        shared.metrics.put((global_step, {}))  # stopped
        while int(shared.checkpoint_step) == checkpoint_step:  # until all have stopped, and the parent has saved
            time.sleep(0.01)


def train(args: Args, run_folder: Path, checkpoint: dict | None) -> None:
    """The parent: start the workers, log what they send, and evaluate and save whenever they wait at a checkpoint."""
    torch.manual_seed(args.seed)  # the parameters
    shared_model = Agent(AtariEnvs(args, 1, run_folder).num_actions, args.lstm)
    theta, _ = flatten(shared_model)
    make_optimizer = {"adam": SharedAdam, "rmsprop": SharedRMSprop}[args.optimizer]
    num_optimizers = 1 if args.shared_optimizer else args.num_workers
    optimizers = nn.ModuleList(make_optimizer(len(theta), args) for _ in range(num_optimizers))

    parts = {"agent": shared_model, "optimizers": optimizers}  # all that the rest of a run depends on
    global_step = restore(parts, checkpoint) if checkpoint else 0
    run = Run(args, run_folder, checkpoint, parts, args.total_timesteps)
    run.save_checkpoint(global_step)

    steps = torch.tensor([global_step] + [0] * (args.num_workers - 1))
    shared = Shared(theta, optimizers, steps, torch.tensor(global_step), mp.get_context("spawn").SimpleQueue())
    recent_scores = deque(maxlen=100)
    # Tensors that are sent to a process move to shared memory. Daemons end with this process. Trap: forked instead of
    # spawned, a worker would hang with two threads of torch, and fail with CUDA
    workers = mp.spawn(actor_learner, (args, run_folder, shared), nprocs=args.num_workers, join=False, daemon=True)

    while global_step < args.total_timesteps:
        stopped = 0
        while stopped < args.num_workers:
            workers.join(timeout=0.1)  # where one has failed, this ends the others and says why
            while not shared.metrics.empty():
                step, scalars = shared.metrics.get()
                run.log(step, scalars)
                stopped += not scalars
                if "charts/episodic_return" in scalars:
                    recent_scores.append(scalars["charts/episodic_return"])
                else:
                    run.progress(step, recent_scores)

        global_step = int(shared.steps.sum())
        if global_step < args.total_timesteps:
            scores = evaluate(args, run.pack(global_step, "agent"), run_folder)
            run.log(global_step, {f"eval/{name}": np.mean(values) for name, values in scores.items()})
            run.save_checkpoint(global_step)
        shared.checkpoint_step.fill_(global_step)  # for which the workers wait, to begin new episodes or to end

    run.finish(global_step, "agent")


# ----- The run: evaluation, checkpoints, logs and sharing. Nothing below this line belongs to the algorithm. -----

SCRIPT = "a3c_atari"
PACKAGES = ("torch", "gymnasium", "ale-py", "numpy")  # whose versions go into result.json


@torch.no_grad()
def evaluate(args: Args, model: dict, run_folder: Path) -> dict[str, list[float]]:
    """Play `args.eval_episodes` whole episodes side by side, and print their scores: unclipped, all lives together.

    `model` is a checkpoint or what model.pt holds. Returns the scores. Actions are sampled, or the likeliest with
    `--greedy`. The episodes depend on the seed and on the model's step; none of them is one of training's.
    """
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs = AtariEnvs(args, args.eval_episodes, run_folder, name="evaluation")
    agent = Agent(envs.num_actions, args.lstm).to(device)
    restore({"agent": agent}, model)
    rng, scores = np.random.default_rng([args.seed, model["global_step"], 1]), {}
    obs, lstm_state = envs.reset(model["global_step"], 1), agent.initial_state(args.eval_episodes)
    while len(scores) < args.eval_episodes:
        logits, lstm_state = agent.step(torch.from_numpy(obs).to(device), lstm_state)
        noise = 0 if args.greedy else rng.gumbel(size=logits.shape)
        obs, _, _, terminations, truncations = envs.step(sample(logits, noise))
        going = torch.from_numpy(~(terminations | truncations)).to(device)[:, None]
        lstm_state = tuple(part * going for part in lstm_state)
        scores = {i: score for i, score, _ in envs.finished} | scores  # the first episode of each environment
    scores = [scores[i] for i in range(args.eval_episodes)]
    kind = "greedy" if args.greedy else "sampled"
    tqdm.write(f"evaluation: {np.mean(scores):.2f} +- {np.std(scores):.2f}, {len(scores)} episodes of {kind} actions")
    return {"episodic_return": scores}


def write_file(path: Path, content: dict | str) -> None:
    """Write a checkpoint or a text so that `path` never holds a part of it, whenever the process is killed."""
    temporary = path.with_suffix(".tmp")
    # Trap: torch.save, given an open file instead of a path, turns a Ctrl-C into an error of its own
    temporary.write_text(content, "utf-8") if isinstance(content, str) else torch.save(content, temporary)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_checkpoint(path: Path) -> dict:
    """Load a checkpoint or a model, or the newest sound checkpoint of a run folder. Runs no pickled code."""
    for file in sorted(path.glob("checkpoint_*.pt"), reverse=True) if path.is_dir() else [path]:
        with contextlib.suppress(Exception):  # the libraries raise a dozen kinds
            with zipfile.ZipFile(file) as archive:
                # Trap: torch.load compares no checksums, and reads nothing where an entry is marked as a folder
                sound = not archive.testzip() and not any(entry.external_attr for entry in archive.infolist())
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            if sound and checkpoint["script"] == SCRIPT and Args(**checkpoint["args"]):
                return checkpoint
        print(f"note: {file} is damaged or no checkpoint of this {SCRIPT}.py", file=sys.stderr)
    sys.exit(f"error: no sound checkpoint in {path}")


def restore(parts: dict, checkpoint: dict) -> int:
    """Set all parts to their states in the checkpoint, in place. Returns its global step."""
    try:
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        return checkpoint["global_step"]
    except Exception as error:  # torch and we raise half a dozen kinds
        sys.exit(f"error: the checkpoint does not fit: {' '.join(str(error).split())[:200]}")


class Run:
    """What a run writes: TensorBoard and W&B, checkpoints, a line of progress, the result."""

    def __init__(self, args: Args, folder: Path, checkpoint: dict | None, parts: dict, last_step: int) -> None:
        self.args, self.folder, self.parts, before = args, folder, parts, checkpoint or {}
        self.first_step, self.started = before.get("global_step", 0), time.time() - before.get("seconds", 0)
        if args.upload_model:
            from huggingface_hub import HfApi

            self.hub = HfApi()
            self.hub.whoami()  # a missing login is an error now, not after the training
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError, OSError):  # systems without such locks
            import fcntl

            try:
                fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
            except BlockingIOError:
                sys.exit(f"error: another process is at work in {folder}")
        print(f"run folder: {folder}", flush=True)
        if args.track:
            import wandb

            project, entity = args.wandb_project_name, args.wandb_entity
            run_id = re.sub(r"\W+", "-", str(folder.resolve()))[-100:]
            self.wandb = wandb
            os.environ.setdefault("WANDB_SILENT", "true")
            # A resumed run sends the points since its checkpoint again, with the same values
            wandb.init(project=project, entity=entity, id=run_id, resume="allow", sync_tensorboard=True)
            wandb.config.update(vars(args), allow_val_change=True)
        # TensorBoard hides older points beyond the checkpoint's step, which will be logged again
        self.writer = SummaryWriter(str(folder), purge_step=self.first_step + bool(checkpoint), flush_secs=10)
        write_file(folder / "args.json", json.dumps(vars(args), indent=2))
        interval = 0.1 if sys.stderr.isatty() else 10
        self.bar = tqdm(total=last_step, initial=self.first_step, unit=" steps", mininterval=interval)

    def log(self, global_step: int, scalars: dict) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, global_step)

    def progress(self, global_step: int, recent_scores: deque) -> None:
        """Show how far the run is and the mean return of the last 100 episodes; log the speed."""
        self.log(global_step, {"charts/SPS": global_step / (time.time() - self.started)})
        if recent_scores:
            self.bar.set_postfix_str(f"return {np.mean(recent_scores):.1f}", refresh=False)
        self.bar.update(global_step - self.bar.n)

    def pack(self, global_step: int, *names: str) -> dict:
        """What a checkpoint holds, or only the parts that are named. `seconds` include those before a resume."""
        seconds = time.time() - self.started
        header = {"script": SCRIPT, "args": vars(self.args), "global_step": global_step, "seconds": seconds}
        return header | {name: self.parts[name].state_dict() for name in names or self.parts}

    def save_checkpoint(self, global_step: int) -> None:
        """Write checkpoint_{global_step}.pt and keep the one before it."""
        self.writer.flush()
        write_file(self.folder / f"checkpoint_{global_step:012}.pt", self.pack(global_step))
        for path in sorted(self.folder.glob("checkpoint_*.pt"))[:-2]:
            path.unlink()

    def finish(self, global_step: int, *names: str) -> None:
        """Evaluate; write the last checkpoint, model.pt with the parts that are named, and result.json."""
        self.bar.close()
        args, model = self.args, self.pack(global_step, *names)
        scores = evaluate(args, model, self.folder)
        means = {f"eval/{name}": float(np.mean(values)) for name, values in scores.items()}
        if global_step > self.first_step:  # Trap: a run that is continued after its end has logged this already
            self.log(global_step, means)
            self.save_checkpoint(global_step)
        self.writer.close()
        if args.save_model or args.upload_model:
            write_file(self.folder / "model.pt", model)
        result = {name: model[name] for name in ("script", "args", "global_step", "seconds")} | means | scores
        result["versions"] = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
        gpu = f", {torch.cuda.get_device_name()}" if args.cuda and torch.cuda.is_available() else ""
        result["machine"] = f"{os.cpu_count()} cores, {platform.platform()}{gpu}"
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no repository
            git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
            result["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        write_file(self.folder / "result.json", json.dumps(result, indent=2))
        if args.track:
            self.wandb.log({path.stem: self.wandb.Video(str(path)) for path in self.folder.glob("videos/*.mp4")})
            self.wandb.finish()
        if args.upload_model:
            card = f"---\ntags: [reinforcement-learning, {args.env_id}, {SCRIPT}]\n---\n# {args.env_id}: {means}\n"
            card += f"Trained by `{shlex.join(['python', *sys.argv])}`, played by `{SCRIPT}.py --evaluate model.pt`.\n"
            write_file(self.folder / "README.md", card)
            name = re.sub(r"\W+", "-", f"{args.env_id}-{args.exp_name}-{args.seed}")
            repo = self.hub.create_repo(f"{args.hf_entity}/{name}" if args.hf_entity else name, exist_ok=True)
            patterns = ["README.md", "model.pt", "args.json", "result.json", "videos/*"]
            self.hub.upload_folder(repo_id=repo.repo_id, folder_path=self.folder, allow_patterns=patterns)


def speed_up_cpu() -> None:
    """Two settings without which training on the CPU is slower."""
    # The optimiser's averages of units that died fade below 1e-38, where a CPU may take far longer. They become zero
    torch.set_flush_denormal(True)
    # glibc gives large pieces of memory back and takes them again for the next update; then every page costs a fault
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        for option, size in ((-1, 2**28), (-3, 2**25)):  # M_TRIM_THRESHOLD; M_MMAP_THRESHOLD, the largest there is
            ctypes.CDLL(None).mallopt(option, size)


def prepare_worker(args: Args) -> torch.device:
    """Set up this process as a worker, which ends with its parent on any system. Returns its device."""
    threading.Thread(target=lambda: (mp.parent_process().join(), os._exit(1)), daemon=True).start()
    speed_up_cpu()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # Trap: a pool of compilers would outlive a worker
    warnings.filterwarnings("ignore", "RNN module weights")  # of cuDNN: views of a vector are copied at each call
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")


def traced_step(agent: Agent, envs: AtariEnvs, args: Args) -> Callable:
    """`agent.step` without Python between its operations, which costs time where a batch is one frame."""
    if args.compile:
        return torch.compile(agent.step)
    obs = torch.zeros(envs.envs.observation_space.shape, dtype=torch.uint8, device=agent.value_head.weight.device)
    with warnings.catch_warnings(action="ignore"):  # deprecated in favour of torch.compile, which needs a compiler
        return torch.jit.trace_module(agent, {"step": (obs, agent.initial_state(1))}, check_trace=False).step


def parse_args() -> tuple[Args, Path, dict | None]:
    """The arguments, the run folder, and the checkpoint to evaluate or to continue from, if there is one."""
    names = ("run_folder", "resume", "evaluate")
    Given = dataclasses.make_dataclass("Given", [(name, str | None, None) for name in names])
    given, _ = tyro.cli(Given, return_unknown_args=True, add_help=False)
    if (given.evaluate, given.resume, given.run_folder).count(None) < 2:
        sys.exit("error: --evaluate, --resume and --run-folder cannot be combined")
    path = Path(given.evaluate or given.resume or given.run_folder or "runs")
    if not given.evaluate and not given.resume and not (given.run_folder and any(path.glob("checkpoint_*.pt"))):
        args = tyro.cli(Args)
        name = re.sub(r"[^\w.-]+", "-", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
        return args, path if given.run_folder else path / name, None
    checkpoint = load_checkpoint(path)
    saved = Args(**checkpoint["args"])
    # What is not given is as it was, but for the module in an id like "module:Name-v0", which gym.make would import
    args = tyro.cli(Args, default=dataclasses.replace(saved, env_id=saved.env_id.split(":")[-1]))
    if args.env_id != saved.env_id or (args.seed != saved.seed and not args.evaluate):
        sys.exit(f"error: {path} is of --env-id {saved.env_id} --seed {saved.seed}, not {args.env_id} and {args.seed}")
    return args, path if path.is_dir() else path.parent, checkpoint


def main() -> None:
    """Train, continue or evaluate, as the arguments say."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: shells start background jobs with it ignored
        signal.signal(signum, signal.default_int_handler)
    args, folder, checkpoint = parse_args()
    if args.cuda and not torch.cuda.is_available():
        print("note: torch finds no CUDA device; the CPU is used", file=sys.stderr)
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    try:
        evaluate(args, checkpoint, folder) if args.evaluate else train(args, folder, checkpoint)
    except KeyboardInterrupt:
        command = shlex.join(["python", sys.argv[0], "--resume", str(folder)])
        hint = f"; continue with: {command}" if not args.evaluate and any(folder.glob("checkpoint_*.pt")) else ""
        print(f"\ninterrupted{hint}", file=sys.stderr)
        sys.exit(130)
    except (gym.error.Error, OSError, FloatingPointError) as error:
        sys.exit(f"\nerror: {error}")


if __name__ == "__main__":
    main()
