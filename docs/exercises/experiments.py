"""The five-minute experiments of the pages. `check.py ppo_continuous_experiment` runs one."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))


def run(folder: Path, script: str, flags: str) -> None:
    """Run a script in a folder."""
    print(f"python {script}.py {flags}", flush=True)
    words = [sys.executable, str(ROOT / f"{script}.py"), *flags.split(), "--run-folder"]
    subprocess.run([*words, str(folder)], check=True, stdout=subprocess.DEVNULL)


def ppo_continuous(folder: Path) -> None:
    """What the clip range does to the KL divergence and to the return."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for clip_coef in (0.2, 10.0):
        path = folder / str(clip_coef)
        flags = f"--env-id Hopper-v4 --total-timesteps 200000 --clip-coef {clip_coef}"
        run(path, "ppo_continuous", f"{flags} --no-clip-vloss --compile")
        events = EventAccumulator(str(path))
        events.Reload()
        kl = np.mean([point.value for point in events.Scalars("losses/approx_kl")])
        score = np.mean(json.loads((path / "result.json").read_text())["episodic_return"])
        print(f"mean losses/approx_kl {kl:.4f}, evaluation {score:.0f}")


def a2c_atari(folder: Path) -> None:
    """How much larger the steps of PyTorch's RMSprop are than those of TensorFlow's."""
    from a2c_atari import RMSprop

    parameters = [torch.nn.Parameter(torch.zeros(1, dtype=torch.double)) for _ in range(2)]
    options = dict(alpha=0.99, eps=1e-5)
    classes = RMSprop, torch.optim.RMSprop
    optimizers = [make([p], 1.0, **options) for make, p in zip(classes, parameters)]
    for step in range(1, 3001):
        before = [parameter.item() for parameter in parameters]
        for parameter, optimizer in zip(parameters, optimizers):
            parameter.grad = torch.full((1,), 1e-4, dtype=torch.double)
            optimizer.step()
        if step in (1, 10, 100, 3000):
            ours, theirs = (x - p.item() for x, p in zip(before, parameters))
            print(f"step {step}: {theirs / ours:,.0f} times as large")


def a3c_atari(folder: Path) -> None:
    """Which runs with the same seed end with the same parameters."""
    for workers in (1, 2):
        agents = []
        for attempt in (1, 2):
            path = folder / f"{workers}_{attempt}"
            flags = "--env-id PongDeterministic-v4 --total-timesteps 20000 --eval-episodes 1"
            run(path, "a3c_atari", f"{flags} --max-episode-length 1000 --num-workers {workers}")
            agents.append(torch.load(path / "model.pt", weights_only=True)["agent"])
        same = all(x.equal(agents[1][name]) for name, x in agents[0].items())
        print(f"--num-workers {workers}: the parameters are {'equal' if same else 'not equal'}")


def dqn_per_atari(folder: Path) -> None:
    """The maximum of noise, and other noise where that maximum is."""
    first, second = np.random.default_rng(0).normal(size=(2, 1000, 4))
    best = first.argmax(axis=1)
    print(f"mean of the maximum: {first.max(axis=1).mean():.2f}")
    print(f"mean of the second set there: {second[np.arange(1000), best].mean():.2f}")


def qmix_smac(folder: Path) -> None:
    """Best fits of two games, by QMIX's mixer and by a sum."""
    from qmix_smac import QMixer, Shape

    for game, payoffs in (("both", [0.0, 0, 0, 1]), ("the same", [1.0, 0, 0, 1])):
        for seed, name in enumerate(("sum", "QMixer", "QMixer", "QMixer")):
            torch.manual_seed(seed)
            values, state = torch.randn(2, 2).requires_grad_(), torch.ones(4, 1)
            mixer = QMixer(Shape(2, 2, 1, 1), 32, 64)
            optimizer = torch.optim.Adam([values, *mixer.parameters()], 1e-2)
            for _ in range(2000):
                joint = torch.stack([values[0][[0, 0, 1, 1]], values[1][[0, 1, 0, 1]]], dim=1)
                q_tot = joint.sum(dim=1) if name == "sum" else mixer(joint, state)[:, 0]
                optimizer.zero_grad()
                (q_tot - torch.tensor(payoffs)).square().mean().backward()
                optimizer.step()
            print(f"{game}, {name}: {' '.join(f'{x:.2f}' for x in q_tot.tolist())}")


def main(script: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        globals()[script](Path(folder))
