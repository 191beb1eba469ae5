"""Programs that a user might choose instead, each at the hyperparameters of our script.

    python benchmark/peers.py sb3_ppo --env-id HalfCheetah-v4 --threads 1
    python benchmark/peers.py sb3_ppo --env-id Humanoid-v4 --seed 2 --run-folder runs/sb3_ppo/2
    JAXMARL=~/JaxMARL python benchmark/peers.py jaxmarl_qmix --env-id 3m

The last one, jaxmarl_vdn and jaxmarl_pqn_vdn need a clone of github.com/FLAIROx/JaxMARL. Each
prints lines `point STEP SECONDS` after updates: steps so far, and the clock. With --run-folder it
writes what our scripts write, TensorBoard events and result.json, and provenance.json, but no
checkpoints: an interrupted run starts from scratch.
"""

import argparse
import copy
import functools
import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from provenance import PACKAGES, PEERS, write_provenance

warnings.filterwarnings("ignore")


def atari(env_id: str, num_envs: int, seed: int):
    """Stable-Baselines3's own environments, with stacks of four."""
    import ale_py
    import gymnasium as gym
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    return VecFrameStack(make_atari_env(env_id, n_envs=num_envs, seed=seed), n_stack=4)


def ppo(args, library: str) -> list[float]:
    """PPO of Stable-Baselines3 or SBX with VecNormalize, at the defaults of ppo_continuous.py.

    Their value loss is the squared error, ours half of it: a `vf_coef` of 0.25 gives it our weight.
    """
    import gymnasium as gym
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    env = VecNormalize(DummyVecEnv([lambda: Monitor(gym.make(args.env_id))]), gamma=0.99)
    options = dict(learning_rate=lambda progress: 3e-4 * progress, vf_coef=args.vf_coef)
    options |= dict(seed=args.seed, device=args.device)
    if library == "stable_baselines3":  # SBX has this network by default, and clips no value loss
        layers = {"pi": [64, 64], "vf": [64, 64]}
        network = {"net_arch": layers, "activation_fn": torch.nn.Tanh}
        options |= dict(clip_range_vf=0.2, policy_kwargs=network)
    return learn(
        importlib.import_module(library).PPO("MlpPolicy", env, **options), args, deterministic=True
    )


def a2c(args) -> list[float]:
    """Stable-Baselines3's A2C, 16 environments of 5 steps, with its TensorFlow-like RMSprop."""
    from stable_baselines3 import A2C
    from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike

    optimizer = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5, "alpha": 0.99}}
    options = dict(ent_coef=0.01, vf_coef=0.5, seed=args.seed, device=args.device)
    envs = atari(args.env_id, 16, args.seed)
    model = A2C("CnnPolicy", envs, policy_kwargs=optimizer, **options)
    return learn(model, args, deterministic=False)


def dqn(args, library: str) -> list[float]:
    """DQN of Stable-Baselines3 or SBX at the defaults of dqn_per_atari.py.

    It is neither double nor dueling nor prioritized. A hidden layer of 512 units replaces the two
    streams of 256, so the network has as many parameters as ours. The replay is small, since only
    speed counts, and training starts after 2,000 transitions.
    """
    memory = {"handle_timeout_termination": False}  # required by optimize_memory_usage
    options = dict(
        learning_rate=1e-4,
        buffer_size=20_000,
        optimize_memory_usage=True,
        replay_buffer_kwargs=memory,
    )
    options |= dict(
        learning_starts=2_000,
        batch_size=32,
        target_update_interval=8_000,
        seed=args.seed,
        device=args.device,
    )
    options |= dict(train_freq=4, gradient_steps=8)  # 4 steps of each of the 8 environments
    if library == "stable_baselines3":
        options["max_grad_norm"] = 0.5
    envs, network = atari(args.env_id, 8, args.seed), {"net_arch": [512]}
    algorithm = importlib.import_module(library).DQN
    model = algorithm("CnnPolicy", envs, policy_kwargs=network, **options)
    return learn(model, args, deterministic=True)


def learn(model, args, deterministic: bool) -> list[float]:
    """Train, print a point after each update, log the returns of whole episodes, and evaluate.

    Returns the returns of the evaluation's episodes.
    """
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy

    class Points(BaseCallback):
        def _on_rollout_start(self) -> None:  # the update before this rollout is done
            point(args, self.num_timesteps)

        def _on_step(self) -> bool:
            for info in self.locals["infos"]:
                if args.writer and "episode" in info:
                    args.writer.add_scalar(
                        "charts/episodic_return", info["episode"]["r"], self.num_timesteps
                    )
            return True

    model.learn(args.total_timesteps, callback=Points())
    point(args, model.num_timesteps)
    env = model.get_env()
    env.training = env.norm_reward = False  # of VecNormalize: the statistics of training, frozen
    options = {
        "n_eval_episodes": 10,
        "deterministic": deterministic,
        "return_episode_rewards": True,
    }
    return evaluate_policy(model, env, **options)[0] if args.run_folder else []


def point(args, step: int) -> None:
    """Note how far the program is."""
    args.step = step
    print("point", step, time.time(), flush=True)


def pfrl_a3c(args) -> list[float]:
    """PFRL's A3C on Pong in 42 x 42 at the settings of a3c_atari.py, with Adam in shared memory."""
    import ale_py
    import gymnasium as gym
    import pfrl
    from pfrl.agents import a3c
    from torch.nn import ELU, LSTM, Conv2d, Flatten, Linear, Sequential

    class Env:
        """The environment as gym had it."""

        def __init__(self, rank: int) -> None:
            gym.register_envs(ale_py)
            env = gym.make("PongNoFrameskip-v4")
            self.env, self.seed = (
                gym.wrappers.AtariPreprocessing(env, frame_skip=4, screen_size=42),
                rank,
            )

        def reset(self):
            obs, _ = self.env.reset(seed=self.seed)
            self.seed = None
            return obs[None]

        def step(self, action):
            obs, reward, terminated, truncated, _ = self.env.step(action)
            return obs[None], float(np.sign(reward)), terminated, {"needs_reset": truncated}

        def close(self):
            self.env.close()

    class Scaled(torch.nn.Module):
        def forward(self, obs):
            obs = obs.float()
            std, mean = torch.std_mean(obs, dim=(1, 2, 3), keepdim=True)
            return (obs - mean) / std.clamp(min=1)

    convolutions = [
        layer for i in range(4) for layer in (Conv2d(32 if i else 1, 32, 3, 2, 1), ELU())
    ]
    policy = Sequential(Linear(256, 6), pfrl.policies.SoftmaxCategoricalHead())
    heads = pfrl.nn.Branched(policy, Linear(256, 1))
    model = pfrl.nn.RecurrentSequential(Scaled(), *convolutions, Flatten(), LSTM(288, 256), heads)
    model.share_memory()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        state = {
            name: torch.zeros_like(parameter).share_memory_() for name in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[parameter] = state | {"step": torch.zeros(()).share_memory_()}
    options = dict(t_max=20, gamma=0.99, beta=0.01, max_grad_norm=50.0, recurrent=True)
    run = dict(
        agent=a3c.A3C(model, optimizer, **options), steps=args.total_timesteps, eval_interval=None
    )
    run |= dict(random_seeds=list(range(args.workers)))
    run |= dict(global_step_hooks=[lambda env, agent, step: step % 200 or point(args, step)])
    pfrl.experiments.train_agent_async("pfrl", args.workers, lambda rank, test: Env(rank), **run)
    return []


def jaxmarl_qmix(args, program: str = "qmix_rnn") -> list[float]:
    """JaxMARL's qmix_rnn.py on SMAX, at the sizes of qmix_smac.py, with `args.updates` updates.

    8 environments (its own: 16) take 128 steps each, then it makes 8 updates of 32 sequences of 128
    steps, once its buffer holds 32 rounds (from 32,768 steps on). The step size is ten times that
    of its configuration, made for networks of 512 units. Its environments start new episodes within
    a sequence, so that its updates train on all 128 steps, ours on one episode. jaxmarl_vdn is its
    vdn_rnn.py with the same settings.
    """
    changes = dict(NUM_ENVS=8, NUM_EPOCHS=args.updates, LR=5e-4, LEARNING_STARTS=1_024)
    changes |= dict(MIXER_EMBEDDING_DIM=32, MIXER_HYPERNET_HIDDEN_DIM=64)
    return jaxmarl(args, program, "ql_rnn_smax", changes)


def jaxmarl_pqn_vdn(args) -> list[float]:
    """JaxMARL's pqn_vdn_rnn.py on SMAX, at the width of qmix_smac.py.

    The step size is four times that of its configuration, made for networks of 512 units; all else
    is its own: 128 environments take 128 steps each, then it makes 64 updates of 8 sequences of 132
    steps.
    """
    return jaxmarl(args, "pqn_vdn_rnn", "pqn_vdn_rnn_smax", dict(LR=1e-3))


def jaxmarl(args, program: str, configuration: str, changes: dict) -> list[float]:
    """Run a program of JaxMARL's with its configuration and these changes."""
    if "JAXMARL" not in os.environ:
        sys.exit(
            "error: JAXMARL must name a clone of github.com/FLAIROx/JaxMARL, "
            f"whose package lacks {program}.py"
        )
    folder = Path(os.environ["JAXMARL"]) / "baselines" / "QLearning"
    sys.path.insert(0, str(folder))
    import jax
    import yaml

    module = importlib.import_module(program)
    config = yaml.safe_load((folder / "config" / "alg" / f"{configuration}.yaml").read_text())
    config |= dict(TOTAL_TIMESTEPS=args.total_timesteps, MAP_NAME=args.env_id, HIDDEN_SIZE=64)
    config |= dict(TEST_DURING_TRAINING=bool(args.run_folder), TEST_NUM_ENVS=32)
    config |= dict(WANDB_MODE="taken by log below") | changes
    returns = []

    def log(metrics: dict, step: int | None = None) -> None:
        point(args, int(metrics["env_step"]))
        if (
            args.writer
        ):  # tests are every twentieth of a run: the same values are logged until the next
            returns.append(config["REW_SCALE"] * float(metrics["test_returned_episode_returns"]))
            args.writer.add_scalar(
                "eval/battle_won_rate", float(metrics["test_returned_won_episode"]), args.step
            )

    module.wandb = type("wandb", (), {"log": staticmethod(log)})
    env, _ = module.env_from_config(copy.deepcopy(config))
    train = jax.jit(module.make_train(config, env))
    jax.block_until_ready(train(jax.random.PRNGKey(args.seed)))
    jax.effects_barrier()
    return returns[-1:]


PROGRAMS = {
    "sb3_ppo": functools.partial(ppo, library="stable_baselines3"),
    "sbx_ppo": functools.partial(ppo, library="sbx"),
    "sb3_a2c": a2c,
    "sb3_dqn": functools.partial(dqn, library="stable_baselines3"),
    "sbx_dqn": functools.partial(dqn, library="sbx"),
    "pfrl_a3c": pfrl_a3c,
    "jaxmarl_qmix": jaxmarl_qmix,
    "jaxmarl_vdn": functools.partial(jaxmarl_qmix, program="vdn_rnn"),
    "jaxmarl_pqn_vdn": jaxmarl_pqn_vdn,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=PROGRAMS)
    parser.add_argument("--env-id", default="HalfCheetah-v4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=1_000_000)
    parser.add_argument("--device", default="cpu", help="of Stable-Baselines3: cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--workers", type=int, default=2, help="of an asynchronous peer")
    parser.add_argument("--vf-coef", type=float, default=0.25, help="of PPO; its own default: 0.5")
    parser.add_argument("--updates", type=int, default=8, help="of JaxMARL's, per 1,024 steps")
    parser.add_argument(
        "--run-folder", type=Path, help="leave result.json and TensorBoard events there"
    )
    args = parser.parse_args()
    if args.peer == "pfrl_a3c" and args.run_folder:
        parser.error("pfrl_a3c plays Pong for speed.py only, without --run-folder")
    torch.set_num_threads(args.threads)
    args.writer, started = None, time.time()
    if folder := args.run_folder:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        write_provenance(folder, f"{PACKAGES} {PEERS}")
        for left_behind in folder.glob("events.*"):
            left_behind.unlink()
        args.writer = SummaryWriter(str(folder))
    returns = PROGRAMS[args.peer](args)
    if folder:
        args.writer.add_scalar("eval/episodic_return", np.mean(returns), args.step)
        args.writer.close()
        names = ["env_id", "seed", "total_timesteps", "threads"]
        if args.peer in ("jaxmarl_qmix", "jaxmarl_vdn"):
            names.append("updates")
        if args.vf_coef != parser.get_default("vf_coef"):
            names.append("vf_coef")
        result = {"script": args.peer, "episodic_return": returns, "global_step": args.step}
        result["seconds"] = time.time() - started
        result["args"] = {name: getattr(args, name) for name in names}
        (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
