"""Speed of A3C, DQN and QMIX beside peers and beside their own older forms, which stand at commit 9c02267.

    git worktree add ../older 9c02267
    python benchmark/experiments/against_plain.py ../older --rounds 2      # 35 minutes on two cores

A3C's peer has our network and PyTorch's Adam, tensor by tensor; QMIX's is written as PyMARL is; both are in that
commit's peers.py. DQN's is Stable-Baselines3's. They run by turns as in speed.py; nothing is written to results.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from speed import A3C, ATARI_PEER, DQN, measure

QMIX = "qmix_smac.py --log-interval 1000 --test-interval 10000000 --env-id"
PROGRAMS = {  # steps of a run, the peer, our script of both commits; {older} is the checkout
    "A3C": (40_000, "{older}benchmark/peers.py plain_a3c --workers 2 --steps", "{older}" + A3C + " 2"),
    "DQN": (12_000, f"benchmark/peers.py sb3_dqn {ATARI_PEER} --total-timesteps", "{older}" + DQN),
    "QMIX 3m": (30_000, "{older}benchmark/peers.py plain_qmix_3m --steps", "{older}" + QMIX + " 3m"),
    "QMIX 2s3z": (30_000, "{older}benchmark/peers.py plain_qmix_2s3z --steps", "{older}" + QMIX + " 2s3z"),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("older", type=Path, help="a checkout of commit 9c02267")
parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
parser.add_argument("--rounds", type=int, default=1)
args = parser.parse_args()
for name in args.only:
    steps, peer, ours = PROGRAMS[name]
    ours = f"{ours} --total-timesteps {steps}"
    before = ours + " --eval-interval 100000000" * (name == "A3C")  # it evaluated during training
    commands = [f"{peer} {steps}", before, ours.replace("{older}", "")]
    commands[:2] = [command.replace("{older}", f"{args.older.resolve()}/") for command in commands[:2]]
    for _ in range(args.rounds):
        speeds = [each["steps_per_second"] for each in measure(commands, steps // 4)]
        shown = ", ".join(f"{speed:,.0f} ({speed / speeds[0]:.2f})" for speed in speeds)
        print(f"{name}: peer, older script, script: {shown} steps/s", flush=True)
