# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "gymnasium==1.3.0", "ale-py==0.12.1", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0", "moviepy==2.2.1", "huggingface-hub==2.4.0",
# ]
# ///
r"""Advantage actor-critic (A2C) on Atari: the synchronous, batched variant of A3C.

The policy plays `num_steps` steps in every environment. An action's return is the sum of its discounted rewards up to a
termination, or up to the end of the rollout, and then the discounted value of the observation there. One step of
gradient descent raises the probability of actions whose return exceeded the value function, lowers that of the others,
fits the value function, and keeps the entropy up.

[A3C]   Mnih et al. 2016, "Asynchronous methods for deep reinforcement learning", ICML, arXiv:1602.01783
[DQN]   Mnih et al. 2015, "Human-level control through deep reinforcement learning", Nature 518
[GAE]   Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation",
        arXiv:1506.02438
[TIME]  Pardo et al. 2018, "Time limits in reinforcement learning", ICML, arXiv:1712.00378
[ALE]   Machado et al. 2018, "Revisiting the arcade learning environment", JAIR 61, arXiv:1709.06009
[PPO]   Schulman et al. 2017, "Proximal policy optimization algorithms", arXiv:1707.06347
[37]    Huang et al. 2022, "The 37 implementation details of PPO", ICLR blog track

    symbol          variable           shape            meaning (T num_steps, N num_envs, B = T * N)
    s_t             next_obs           (N, 4, 84, 84)   the last four frames, uint8, one per agent step
    a_t             actions            (T, N)           index among the environment's actions
    r_t             rewards            (T, N)           reward, its sign only; what is logged is the episode's score
    R_t             returns            (T, N)           n-step return, [A3C] Alg. S3
    A               advantages         (T, N)           R_t - V(s_t), [A3C] Sec. 4; with lambda < 1 [GAE] Eq. (16)
    \pi(a|s)        logits             (B, num_actions) before the softmax
    V(s)            values             (T, N)           value function
    H               entropy            ()               entropy of the policy
    \beta           ent_coef                            weight of the entropy, [A3C] Sec. 4
    t_max           num_steps                           length of a rollout
    g               square_avg                          moving average of the squared gradient, [A3C] Sec. 4

Where this differs from common practice, and why:
  * RMSprop is TensorFlow's: epsilon inside the root, the average starts at one. PyTorch's (`--torch-rmsprop`) makes
    the first steps thousands of times as large, and later ones 30 times where gradients are near 1e-4.
  * A lost life ends the return, not the episode, and the stack of frames goes on. On the first step of each life FIRE
    is pressed for the agent: an environment like Breakout would otherwise wait for ever for a policy that has forgotten
    to. The policy gets no credit for it; such a step still fits the value function and counts in the entropy.
  * [A3C] itself has one worker per environment without a lock, a smaller network, a learning rate that falls to zero
    (`--anneal-lr`), sums over the rollout where this has means, and no clipping of the gradient.
  * A time limit is not a failure: at a truncation the value of the last observation is bootstrapped ([TIME]).
  * ale-py preprocesses: the maximum of two frames is taken of grey values (Stable-Baselines3's of colours), and the
    first stack of an episode is padded with zeros.
  * `BreakoutNoFrameskip-v4` (or `BreakoutDeterministic-v4`: the same environment here) has no sticky actions,
    `ALE/Breakout-v5` repeats the last action with probability 0.25 ([ALE]). An agent step is always four frames.
  * At each checkpoint new episodes begin and random numbers restart, with seeds made of (seed, global_step), since
    the vectorised emulator cannot save its state. So resuming is exact to the bit.

`torchrun` divides the environments among processes, the ranks. Scores and speeds: README.md.

    python a2c_atari.py --env-id BreakoutNoFrameskip-v4            # writes runs/BreakoutNoFrameskip-v4__a2c_...
    python a2c_atari.py --resume runs/BreakoutNoFrameskip-v4__...   # continues an interrupted run, exactly
    python a2c_atari.py --evaluate runs/BreakoutNoFrameskip-v4__.../model.pt --eval-episodes 20
"""

import atexit
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
import time
import zipfile
from collections import deque
from importlib.metadata import version
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclasses.dataclass
class Args:
    """Advantage actor-critic on Atari."""

    env_id: str = "BreakoutNoFrameskip-v4"  # NameNoFrameskip-v4, or ALE/Name-v5 with sticky actions
    total_timesteps: int = 10_000_000  # agent steps of the run, four frames each (rounded up to whole batches)
    num_envs: int = 16  # N: environments played side by side
    num_steps: int = 5  # t_max: agent steps in each environment between updates
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 1.0  # lambda of generalised advantage estimation; 1 is the paper's n-step return
    episodic_life: bool = True  # whether a lost life ends the return (the episode goes on)
    bootstrap_truncation: bool = True  # whether to bootstrap an episode that its time limit ended
    ent_coef: float = 0.01  # beta: weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the squared value error, without a factor 1/2
    learning_rate: float = 7e-4  # step size of RMSprop
    anneal_lr: bool = False  # whether the learning rate falls linearly to zero over the run (extended, it rises again)
    max_grad_norm: float = 0.5  # norm to which gradients are clipped
    rmsprop_alpha: float = 0.99  # share of the old average of squared gradients in the new
    rmsprop_eps: float = 1e-5  # added to the average of squared gradients (with --torch-rmsprop: to its root)
    torch_rmsprop: bool = False  # whether RMSprop is PyTorch's instead of TensorFlow's
    conv3_filters: int = 64  # filters of the third convolution (64: as in DQN; 32: as in OpenAI's first A2C)
    greedy: bool = False  # whether the evaluation plays the likeliest action instead of sampling the policy
    bf16: bool = False  # whether the network computes in bfloat16: faster on some processors, far slower on others
    env_threads: int = 0  # threads of the emulator (0: as many as there are cores)
    log_interval: int = 100  # updates between points of the losses in the log

    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of the parameters, the actions and the environments
    torch_deterministic: bool = True  # whether cuDNN must be deterministic
    cuda: bool = True  # whether to compute on the GPU, if there is one
    torch_threads: int = 2  # threads of torch on the CPU; two gain on a quiet machine and lose much on a busy one
    compile: bool = False  # whether to compile the network (takes up to a minute, needs a C++ compiler on the CPU)
    track: bool = False  # whether to track the run with Weights & Biases
    wandb_project_name: str = "deep-rl-reference"  # project of the tracked run
    wandb_entity: str | None = None  # entity (user or team) of the tracked run
    capture_video: bool = False  # whether to record the first episode after each checkpoint and of the evaluation
    save_model: bool = True  # whether to save the trained model as model.pt in the run folder
    upload_model: bool = False  # whether to upload the model to the Hugging Face hub
    hf_entity: str | None = None  # user or organisation on the Hugging Face hub (default: yours)
    checkpoint_interval: int = 500_000  # agent steps of all environments between checkpoints, where new episodes begin
    run_folder: str | None = None  # start the run in this folder, or continue the one that it holds
    resume: str | None = None  # continue the run in this folder from its newest checkpoint, with its arguments
    evaluate: str | None = None  # do not train: play episodes with this model.pt, checkpoint or run folder
    eval_episodes: int = 10  # whole episodes of the evaluation

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("seed", "env_threads") else 1
            if type(value) is int and value < least:
                sys.exit(f"error: --{name.replace('_', '-')} must be at least {least}")
        if not 0 < self.learning_rate < 1e38:
            sys.exit("error: --learning-rate must be positive, and small enough for float32")


def make_atari(args: Args, num_envs: int, colour: bool = False) -> AtariVectorEnv:
    """Make environments with observations (N, 4, 84, 84) in uint8, or in colour (N, 1, 210, 160, 3), for a video."""
    spec = gym.spec(args.env_id.replace("Deterministic", "NoFrameskip")).kwargs
    if not isinstance(spec.get("frameskip"), int):
        sys.exit(f"error: {args.env_id} is not an Atari environment of this kind: NameNoFrameskip-v4 or ALE/Name-v5")
    return AtariVectorEnv(
        game=spec["game"],
        num_envs=num_envs,
        num_threads=args.env_threads,
        repeat_action_probability=spec["repeat_action_probability"],
        frameskip=4,
        maxpool=True,  # over the last two frames: sprites flicker ([DQN] Methods)
        grayscale=not colour,
        img_height=210 if colour else 84,
        img_width=160 if colour else 84,
        stack_num=1 if colour else 4,
        noop_max=30,  # an episode begins with fewer than 30 idle frames
        use_fire_reset=True,
        max_num_frames_per_episode=108_000,  # half an hour of play, then the episode is truncated
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
    """Policy and value function on one convolutional trunk ([DQN] Methods, with two heads as in [A3C] Sec. 4)."""

    def __init__(self, num_actions: int, conv3_filters: int = 64, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16  # whether to compute in bfloat16; the parameters stay float32
        self.convolutions = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),  # (B, 32, 20, 20)
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),  # (B, 64, 9, 9)
            nn.ReLU(),
            layer_init(nn.Conv2d(64, conv3_filters, 3, stride=1)),  # (B, conv3_filters, 7, 7)
            nn.ReLU(),
            nn.Flatten(),
        )
        self.linear = nn.Sequential(layer_init(nn.Linear(conv3_filters * 7 * 7, 512)), nn.ReLU())
        self.policy_head = layer_init(nn.Linear(512, num_actions), std=0.01)  # Detail: at first nearly uniform
        self.value_head = layer_init(nn.Linear(512, 1), std=1.0)

    def features(self, obs: torch.Tensor) -> torch.Tensor:
        """What the convolutions make (B, conv3_filters * 49) of observations (B, 4, 84, 84) in uint8."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            # channels_last: the layout that convolutions like on the CPU; converted while still uint8
            obs = obs.contiguous(memory_format=torch.channels_last)
            return self.convolutions(obs.to(torch.bfloat16 if self.bf16 else torch.float32).div_(255))

    def heads(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, num_actions) and values (B,) of features."""
        with torch.autocast(features.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.linear(features)
            return self.policy_head(hidden).float(), self.value_head(hidden).squeeze(-1).float()

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and values of observations."""
        return self.heads(self.features(obs))


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


def a2c_loss(logits, values, actions, chosen, advantages, returns, args) -> tuple[torch.Tensor, dict]:
    r"""The loss to be minimised (), and its metrics {name: ()}. Tensors (B,), logits (B, num_actions).

    -\log\pi(a|s) A - \beta H(\pi(s)) + vf_coef (R - V)^2, averaged. The policy's gradient is minus that of [A3C] Sec. 4
    (which ascends), the value's is that of Alg. S3 times vf_coef. `advantages` and `returns` are constants. `chosen`
    is 0 where FIRE was pressed for the agent, which is not its merit.
    """
    log_probs = logits.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    policy_loss = -(advantages * chosen * log_probs.gather(1, actions[:, None]).squeeze(1)).mean()
    value_loss = (returns - values).square().mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}


class RMSprop(torch.optim.Optimizer):
    r"""RMSprop without momentum, [A3C] Sec. 4 (g starts at one, as in TensorFlow):

    g = \alpha g + (1 - \alpha) \Delta\theta^2,   \theta = \theta - \eta \Delta\theta / \sqrt{g + \epsilon}
    """

    def __init__(self, parameters, args: Args) -> None:
        super().__init__(parameters, {"lr": args.learning_rate})
        self.args = args
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["square_avg"] = torch.full_like(parameter, 0.0 if args.torch_rmsprop else 1.0)

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter against its gradient."""
        alpha, eps = self.args.rmsprop_alpha, self.args.rmsprop_eps
        for parameter in self.param_groups[0]["params"]:
            square_avg = self.state[parameter]["square_avg"]
            square_avg.mul_(alpha).addcmul_(parameter.grad, parameter.grad, value=1 - alpha)
            root = square_avg.sqrt().add_(eps) if self.args.torch_rmsprop else (square_avg + eps).sqrt_()
            parameter.addcdiv_(parameter.grad, root, value=-self.param_groups[0]["lr"])


def train(args: Args, run_folder: Path, checkpoint: dict | None) -> None:
    """Train from the beginning or from a checkpoint. Raises FloatingPointError where a gradient is not finite."""
    first, N = join_ranks(args)  # N environments from number `first` on: all, or this rank's share under torchrun
    T, batch_size = args.num_steps, args.num_steps * args.num_envs
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    speed_up_cpu()
    torch.manual_seed(args.seed)  # the parameters
    envs = AtariEnvs(args, N, run_folder, first=first)
    agent = Agent(envs.num_actions, args.conv3_filters, args.bf16).to(device)
    optimizer = RMSprop(agent.parameters(), args)
    if args.compile:
        agent.features, agent.heads = torch.compile(agent.features), torch.compile(agent.heads)

    parts = {"agent": agent, "optimizer": optimizer}  # all that the rest of a run depends on
    global_step = start = share(parts, restore(parts, checkpoint) if checkpoint else 0)  # all ranks begin as the first
    last_step = math.ceil(args.total_timesteps / batch_size) * batch_size
    run = Run(args, run_folder, checkpoint, parts, last_step) if first == 0 else SilentRun()

    actions = np.zeros((T, N), int)
    chosen, rewards, values, next_values = np.zeros((4, T, N), np.float32)
    terminations, truncations = np.zeros((2, T, N), bool)

    while global_step < last_step:
        if global_step == start or global_step % args.checkpoint_interval < batch_size:
            run.save_checkpoint(global_step)
            next_obs = envs.reset(global_step)  # new episodes, interrupted here or not: resuming is exact
            rng = np.random.default_rng([args.seed, global_step])  # and new random numbers
        learning_rate = args.learning_rate * (1 - global_step / last_step if args.anneal_lr else 1)

        # Collect T steps in each environment with the policy held fixed: [A3C] Alg. S3, the inner "repeat"
        b_features = []
        gumbel_noise = rng.gumbel(size=(T, args.num_envs, envs.num_actions))[:, first : first + N]
        with torch.no_grad():
            for t in range(T):
                # Keep the graph: until the update the parameters stay as they are, so it can use these features again
                with torch.enable_grad():
                    b_features.append(agent.features(torch.from_numpy(next_obs).to(device)))  # uint8 across the bus
                logits, value = agent.heads(b_features[t])
                values[t] = value.cpu().numpy()
                actions[t], chosen[t] = sample(logits, gumbel_noise[t]), ~envs.fire
                next_obs, successors, rewards[t], terminations[t], truncations[t] = envs.step(actions[t])
                global_step += args.num_envs
                if truncations[t].any():  # the next row is another episode's
                    next_values[t] = agent(torch.from_numpy(successors).to(device))[1].cpu().numpy()
                for _, score, length in envs.finished:
                    run.log(global_step, {"charts/episodic_return": score, "charts/episodic_length": length})
            last_value = agent(torch.from_numpy(next_obs).to(device))[1].cpu().numpy()

        # Returns: [A3C] Alg. S3, R = V(s_t) at the end of the rollout, 0 after a terminal state, then R = r_i + gamma R
        # (GAE with lambda = 1 sums up to R - V(s_t))
        next_values = np.where(truncations, next_values, np.concatenate([values[1:], last_value[None]]))
        ends = terminations if args.bootstrap_truncation else terminations | truncations
        advantages = compute_gae(rewards, values, next_values, ends, truncations, args.gamma, args.gae_lambda)
        returns = advantages + values
        batch = (torch.from_numpy(x).view(-1).to(device) for x in (actions, chosen, advantages, returns))

        # One step of gradient descent on the whole rollout: [A3C] Alg. S3, the gradients and the update
        logits, new_values = agent.heads(torch.cat(b_features))
        loss, metrics = a2c_loss(logits, new_values, *batch, args)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(agent)  # over the ranks
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        if not metrics["grad_norm"].isfinite():
            raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()

        if global_step // batch_size % args.log_interval == 0 or global_step >= last_step:
            metrics["explained_variance"] = 1 - np.var(advantages) / max(np.var(returns), 1e-12)
            run.log(global_step, {f"losses/{name}": metric for name, metric in metrics.items()})
            run.log(global_step, {"charts/learning_rate": learning_rate})
            run.progress(global_step, envs.recent_scores)

    leave_ranks()
    run.finish(global_step, "agent")


# ----- The run: evaluation, checkpoints, logs and sharing. Nothing below this line belongs to the algorithm. -----

SCRIPT = "a2c_atari"
PACKAGES = ("torch", "gymnasium", "ale-py", "numpy")  # whose versions go into result.json


@torch.no_grad()
def evaluate(args: Args, model: dict, run_folder: Path) -> dict[str, list[float]]:
    """Play `args.eval_episodes` whole episodes side by side, and print their scores: unclipped, all lives together.

    `model` is a checkpoint or what model.pt holds. Returns the scores. Actions are sampled, or the likeliest with
    `--greedy`. The episodes depend on the seed and on the model's step; none of them is one of training's.
    """
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs = AtariEnvs(args, args.eval_episodes, run_folder, name="evaluation")
    agent = Agent(envs.num_actions, args.conv3_filters, args.bf16).to(device)
    restore({"agent": agent}, model)
    rng, scores = np.random.default_rng([args.seed, model["global_step"], 1]), {}
    obs = envs.reset(model["global_step"], 1)
    while len(scores) < args.eval_episodes:
        logits, _ = agent(torch.from_numpy(obs).to(device))
        noise = 0 if args.greedy else rng.gumbel(size=logits.shape)
        obs, *_ = envs.step(sample(logits, noise))
        scores = {i: score for i, score, _ in envs.finished} | scores  # the first episode of each environment
    scores = [scores[i] for i in range(args.eval_episodes)]
    kind = "greedy" if args.greedy else "sampled"
    print(f"evaluation: {np.mean(scores):.2f} +- {np.std(scores):.2f}, {len(scores)} episodes of {kind} actions")
    return {"episodic_return": scores}


def speed_up_cpu() -> None:
    """Two settings without which training on the CPU is slower."""
    # The optimiser's averages of units that died fade below 1e-38, where a CPU may take far longer. They become zero
    torch.set_flush_denormal(True)
    # glibc gives large pieces of memory back and takes them again for the next update; then every page costs a fault
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        for option, size in ((-1, 2**28), (-3, 2**25)):  # M_TRIM_THRESHOLD; M_MMAP_THRESHOLD, the largest there is
            ctypes.CDLL(None).mallopt(option, size)


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


def join_ranks(args: Args) -> tuple[int, int]:
    """Under torchrun: join the other ranks. Returns the number of this rank's first environment, and how many it has.

    Every rank draws the random numbers of all environments and takes those of its own. The first rank of a training
    evaluates and writes all files; the episodes in its log are its own.
    """
    if not dist.is_torchelastic_launched():
        return 0, args.num_envs
    if args.cuda and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, num_ranks = next(dist.rendezvous("env://"))
    N, rest = divmod(args.num_envs, num_ranks)
    if rest:
        sys.exit(f"error: {args.num_envs} environments cannot be divided among {num_ranks} processes")
    # Trap: torchrun's store outlives a restart, with the addresses of ranks that have died: hence the prefix
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group(store=store, rank=rank, world_size=num_ranks)  # gloo on the CPU, nccl on GPUs
    return rank * N, N


def leave_ranks() -> None:
    """End what join_ranks began, before the first rank alone goes on."""
    if dist.is_initialized():
        if dist.get_rank() > 0:  # Trap: gloo's threads outlive the group and at times abort a process as Python ends
            atexit.register(os._exit, 0)
        dist.destroy_process_group()


def share(parts: dict, global_step: int) -> int:
    """Give all ranks the parts and the global step of the first one. Returns that step."""
    if not dist.is_initialized():
        return global_step
    states = [{"global_step": global_step} | {name: part.state_dict() for name, part in parts.items()}]
    dist.broadcast_object_list(states)
    return restore(parts, states[0])


def average_gradients(module: nn.Module) -> None:
    """Replace the gradients by their means over the ranks, in one message."""
    if dist.is_initialized():
        gradients = [parameter.grad for parameter in module.parameters()]
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / dist.get_world_size(), gradients)


class SilentRun:
    """Stands for `Run` in all ranks but the first: it does nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


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
