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
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    class Points(BaseCallback):
        def _on_rollout_start(self) -> None:  # the update before this rollout is done
            print("point", self.num_timesteps, time.time(), flush=True)

        def _on_step(self) -> bool:
            return True

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
    model.learn(steps, callback=Points())
    print("point", model.num_timesteps, time.time(), flush=True)


PEERS = {"sb3_ppo": sb3_ppo}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    PEERS[args.peer](args.steps)
