"""The peers that speed.py compares with, each set to the hyperparameters of our script.

    python benchmark/peers.py sb3_ppo --steps 100000 --threads 1

Each prints a line `point STEP SECONDS` after every update: agent steps so far, and the clock.
"""

import argparse
import time
import warnings

import torch

warnings.filterwarnings("ignore")


def sb3_ppo(steps: int) -> None:
    """Stable-Baselines3's PPO with VecNormalize on HalfCheetah-v4, at the defaults of ppo_continuous.py."""
    import gymnasium as gym
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    env = VecNormalize(DummyVecEnv([lambda: gym.make("HalfCheetah-v4")]), gamma=0.99)
    network = {"pi": [64, 64], "vf": [64, 64]}
    model = PPO(
        "MlpPolicy",
        env,
        learning_rate=lambda progress: 3e-4 * progress,
        n_steps=2048,
        batch_size=64,
        n_epochs=10,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        clip_range_vf=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": network, "activation_fn": torch.nn.Tanh},
        seed=1,
        device="cpu",
    )
    learn(model, steps, updates_between_points=1)


def sb3_a2c(steps: int) -> None:
    """Stable-Baselines3's A2C on Breakout, 16 environments of 5 steps, with its TensorFlow-like RMSprop."""
    import ale_py
    import gymnasium as gym
    from stable_baselines3 import A2C
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    env = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", n_envs=16, seed=1), n_stack=4)
    optimizer = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5, "alpha": 0.99}}
    model = A2C("CnnPolicy", env, ent_coef=0.01, vf_coef=0.5, policy_kwargs=optimizer, seed=1, device="cpu")
    learn(model, steps, updates_between_points=10)


def learn(model, steps: int, updates_between_points: int) -> None:
    """Train, and print a point whenever so many updates are done."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Points(BaseCallback):
        rollouts = 0

        def _on_rollout_start(self) -> None:  # the update before this rollout is done
            if self.rollouts % updates_between_points == 0:
                print("point", self.num_timesteps, time.time(), flush=True)
            self.rollouts += 1

        def _on_step(self) -> bool:
            return True

    model.learn(steps, callback=Points())
    print("point", model.num_timesteps, time.time(), flush=True)


PEERS = {"sb3_ppo": sb3_ppo, "sb3_a2c": sb3_a2c}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    PEERS[args.peer](args.steps)
