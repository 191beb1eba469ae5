"""Every script on the GPU, or on the pretended one, where models equal the CPU's to the bit."""

import contextlib
import importlib
import json
import multiprocessing
import shutil
from collections import Counter
from multiprocessing.pool import ThreadPool
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from unittest.mock import patch

import fake_gpu
import pytest
import torch
from conftest import SCRIPTS, load, resume, train
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

REAL = torch.cuda.is_available()
DRAWS = (torch.normal, torch.multinomial, torch.Tensor.multinomial, torch.randperm, torch.rand)

ATARI = dict(env_id="BreakoutNoFrameskip-v4", eval_episodes=1, torch_threads=1)
ENVS = ATARI | dict(num_envs=2, total_timesteps=64, checkpoint_interval=32, env_threads=1)
SMALL = {
    "ppo_continuous": dict(env_id="Pendulum-v1", num_envs=2, num_steps=64, num_minibatches=2)
    | dict(update_epochs=1, total_timesteps=768, checkpoint_interval=384, eval_episodes=2),
    "a2c_atari": ENVS | dict(conv3_filters=4, num_steps=4),
    "a3c_atari": ATARI
    | dict(num_workers=1, total_timesteps=60, checkpoint_interval=30, max_episode_length=40),
    "dqn_per_atari": ENVS
    | dict(train_frequency=8, batch_size=2, buffer_size=66, learning_starts=4, eval_epsilon=0.5),
    "qmix_smac": dict(num_envs=2, total_timesteps=200, checkpoint_interval=100, batch_size=4)
    | dict(buffer_size=24, rnn_hidden_dim=16, target_update_interval=7, updates_per_episode=0.5)
    | dict(test_nepisode=2, eval_episodes=2),
}
# How often the host may wait for the GPU: per step of all environments, per gradient step, once
WAITS = {
    "ppo_continuous": (1, 4, 0),  # eight metrics in two minibatches
    "a2c_atari": (1, 1, 5),  # whether the gradient is finite
    "a3c_atari": (1, 19, 8),  # 16 gradients, if finite; two checks by Categorical; metrics, twice
    "dqn_per_atari": (1, 4, 0),  # priorities, and three metrics
    "qmix_smac": (2, 5, 5),  # Categorical checks its argument; three masks, the gradient
}


class CpuDraws(TorchFunctionMode):
    """Random numbers of the CPU's generator on a real GPU, whose own would be others."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in DRAWS:
            return func(*args, **(kwargs or {}))
        device = (kwargs or {}).pop("device", None) or getattr(args[0], "device", "cpu")
        args = tree_map_only(torch.Tensor, torch.Tensor.cpu, args)
        return func(*args, **(kwargs or {})).to(device)


@contextlib.contextmanager
def cpu_draws():
    """CpuDraws, and in the processes that are started."""
    with CpuDraws(), patch.object(BaseProcess, "start", lambda x: fake_gpu.start(x, CpuDraws)):
        yield


on_gpu, in_thread = (cpu_draws, CpuDraws) if REAL else (fake_gpu.pretend, fake_gpu.Mode)


@pytest.fixture
def prepare(monkeypatch):
    """A function that makes a script's runs short: games for QMIX, A3C's worker in a thread."""

    def spawn(worker, args, num_workers, **options):
        def work():
            torch.set_num_threads(1)
            with in_thread() if args[0].cuda else contextlib.nullcontext():  # one per thread
                worker(0, *args)

        def join(timeout):
            with contextlib.suppress(multiprocessing.TimeoutError):
                result.get(timeout)  # raises what the worker raised

        result = ThreadPool(1).apply_async(work)
        return SimpleNamespace(join=join, processes=[])

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    def change(module):
        monkeypatch.setattr(module, "EVAL_STEPS", 30)
        if module.SCRIPT == "qmix_smac":
            games = importlib.import_module("test_qmix_smac").make_games
            monkeypatch.setattr(module, "make_envs", games)
        if module.SCRIPT == "a3c_atari":
            monkeypatch.setattr(module, "prepare_worker", lambda args: None)
            monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
        return module

    return change


def assert_same_model(folder, other):
    """To the bit on the pretended GPU. On a real one Adam may turn rounding into a whole step."""
    models = [tree_leaves(load(path / "model.pt")) for path in (folder, other)]
    models = [torch.cat([x.flatten() for x in m if torch.is_tensor(x)]) for m in models]
    far = ~torch.isclose(*models, rtol=1e-3, atol=1e-5)
    assert far.float().mean() < 0.05 if REAL else models[0].equal(models[1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_trains_and_resumes_as_on_the_cpu(script, tmp_path, prepare, monkeypatch):
    module, waits, steps = prepare(importlib.import_module(script)), [], []
    flags, (per_step, per_update, once) = SMALL[script], WAITS[script]

    def count(function):
        return lambda *args: waits.append(Counter(fake_gpu.waits)) or function(*args)

    monkeypatch.setattr(module, "evaluate", count(module.evaluate))
    if hasattr(module, "play"):  # which QMIX tests with
        monkeypatch.setattr(module, "play", count(module.play))
    cpu = train(module, tmp_path / "cpu", **flags, cuda=False)
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    with on_gpu():
        waits.clear()
        gpu = train(module, tmp_path / "gpu", **flags, cuda=True)
    hook.remove()
    for folder, other in ((cpu, "cpu_then_gpu"), (gpu, "gpu_then_cpu")):
        killed = shutil.copytree(folder, tmp_path / f"killed_{other}")
        max(killed.glob("checkpoint_*.pt")).unlink()  # killed after the last but one
        with on_gpu() if other == "cpu_then_gpu" else contextlib.nullcontext():
            resume(module, killed, tmp_path / other, cuda=other == "cpu_then_gpu")
    for folder in ("gpu", "cpu_then_gpu", "gpu_then_cpu"):
        assert_same_model(tmp_path / folder, cpu)
    returns = [json.loads((x / "result.json").read_text())["episodic_return"] for x in (cpu, gpu)]
    assert REAL or returns[0] == returns[1]
    num_steps = load(gpu / "model.pt")["global_step"] / flags.get("num_envs", 1)
    assert REAL or num_steps <= waits[0].total(), "no actions came from the GPU"
    assert waits[0].total() <= num_steps * per_step + len(steps) * per_update + once, waits[0]


def test_a3c_atari_spawns_workers_that_use_the_gpu(tmp_path):
    a3c = importlib.import_module("a3c_atari")
    cpu = train(a3c, tmp_path / "cpu", **SMALL["a3c_atari"], cuda=False)
    with on_gpu():
        gpu = train(a3c, tmp_path / "gpu", **SMALL["a3c_atari"], cuda=True)
    assert_same_model(gpu, cpu)
