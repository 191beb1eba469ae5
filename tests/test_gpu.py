"""Every script on the GPU: a real one if there is one, otherwise the pretended one of fake_gpu.py.

One process per script runs `STEPS` one after the other, on the CPU and on the GPU: train on each,
resume what the other trained, evaluate. The tests look at what it left. On the pretended GPU models
equal the CPU's to the bit; on a real one, nearly.
"""

import contextlib
import fcntl
import importlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from dataclasses import fields
from pathlib import Path

import fake_gpu
import pytest
import torch

TESTS = Path(__file__).resolve().parent
REAL = torch.cuda.is_available()

# Runs of a few seconds with a checkpoint in the middle
ATARI = "--env-id BreakoutNoFrameskip-v4 --log-interval 1 --eval-episodes 1"
SMALL = {
    "ppo_continuous": "--env-id Pendulum-v1 --num-envs 2 --num-steps 64 --num-minibatches 2 "
    "--update-epochs 2 --total-timesteps 768 --checkpoint-interval 384 --eval-episodes 2",
    "a2c_atari": f"{ATARI} --num-envs 2 --num-steps 4 --total-timesteps 64 "
    "--checkpoint-interval 32 --env-threads 1",
    "a3c_atari": f"{ATARI} --num-workers 1 --num-steps 10 --total-timesteps 250 "
    "--checkpoint-interval 200 --max-episode-length 40",
    "dqn_per_atari": f"{ATARI} --num-envs 2 --num-steps 4 --train-frequency 8 --batch-size 2 "
    "--buffer-size 66 --learning-starts 4 --total-timesteps 64 --checkpoint-interval 32 "
    "--eval-epsilon 0.5 --env-threads 1",
    "qmix_smac": "--env-id 3m --num-envs 2 --total-timesteps 400 --checkpoint-interval 200 "
    "--batch-size 4 --buffer-size 24 --log-interval 100 --test-interval 300 --test-nepisode 2 "
    "--eval-episodes 2 --rnn-hidden-dim 16 --target-update-interval 7",
}
STEPS = {  # name -> (whether on the GPU, how the script is called)
    "train on the CPU": (False, "--run-folder cpu {small}"),
    "train on the GPU": (True, "--run-folder gpu {small}"),
    "resume the CPU's on the GPU": (True, "--resume cpu_then_gpu"),
    "resume the GPU's on the CPU": (False, "--resume gpu_then_cpu"),
    "evaluate the CPU's on the GPU": (True, "--evaluate cpu/model.pt"),
    "evaluate the GPU's on the CPU": (False, "--evaluate gpu/model.pt"),
}
# In training the host waits for the GPU once per step of all environments, for the actions. Beyond
# that it may wait a few times per update, for logs and priorities: (steps per update, these waits)
WAITS = {
    "ppo_continuous": (64, 18),  # seven metrics of each epoch, and checkpoints
    "a2c_atari": (4, 10),
    "dqn_per_atari": (4, 10),
    "qmix_smac": (1, 3),
}


def interrupted(folder: str, copy: str) -> None:
    """Copy a run folder as if the run had been killed after its last checkpoint but one."""
    shutil.copytree(folder, copy)
    checkpoints = sorted(Path(copy).glob("checkpoint_*.pt"))
    for path in (checkpoints[-1], Path(copy, "model.pt"), Path(copy, "result.json")):
        path.unlink()


def run_steps(script: str) -> None:
    """Run all steps in this process and folder; write what happened to steps.json."""
    module, outcome = importlib.import_module(script), {}
    flags = {field.name for field in fields(module.Args)}
    for name, (on_gpu, call) in STEPS.items():
        if name.startswith("resume"):
            interrupted(call.split("_then_")[0].split()[-1], call.split()[-1])
        call = call.format(small=SMALL[script])
        if "torch_threads" in flags:
            call += " --torch-threads 1"
        if "cuda" in flags:
            call += " --cuda" if on_gpu else " --no-cuda"
        sys.argv = [f"{script}.py", *call.split()]
        fake_gpu.transfers.clear()
        outcome[name] = {"error": None}
        try:
            with fake_gpu.pretend() if on_gpu and not REAL else contextlib.nullcontext():
                module.main()
        except SystemExit as exit_:
            if exit_.code:
                outcome[name]["error"] = f"exit {exit_.code}"
        except BaseException:
            outcome[name]["error"] = traceback.format_exc()
        outcome[name]["transfers"] = dict(fake_gpu.transfers)
        Path("steps.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))
    run_steps(sys.argv[1])


@pytest.fixture(scope="module", params=SMALL)
def runs(request, tmp_path_factory):
    """The script, the folder that its steps have left, and what happened in each."""
    script, root = request.param, tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # shared by the workers, of which one runs the steps
    folder = root / f"gpu_{script}"
    with open(root / f"gpu_{script}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            command = [sys.executable, str(TESTS / "test_gpu.py"), script]
            with open(folder / "output", "w") as output:
                subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=300)
    assert (folder / "steps.json").exists(), (folder / "output").read_text()[-3000:]
    return script, folder, json.loads((folder / "steps.json").read_text())


def tensors_of(content, name=""):
    """All tensors of a model: {path: tensor}."""
    if isinstance(content, torch.Tensor):
        return {name: content}
    items = content.items() if isinstance(content, dict) else []
    return {k: t for key, value in items for k, t in tensors_of(value, f"{name}.{key}").items()}


def model_of(folder):
    """All tensors of a run's model."""
    assert (folder / "model.pt").exists(), "the step that writes it has failed"
    return tensors_of(torch.load(folder / "model.pt", map_location="cpu", weights_only=True))


@pytest.mark.parametrize("step", STEPS)
def test_step_succeeds(runs, step):
    _, _, outcome = runs
    assert step in outcome, "the process ended before"
    assert outcome[step]["error"] is None, outcome[step]["error"]


@pytest.mark.parametrize("folder", ["gpu", "cpu_then_gpu", "gpu_then_cpu"])
def test_model_equals_the_cpus(runs, folder):
    _, path, _ = runs
    found, expected = model_of(path / folder), model_of(path / "cpu")
    assert expected and found.keys() == expected.keys()
    same = torch.allclose if REAL else torch.equal
    assert [name for name in expected if not same(found[name], expected[name])] == []


def test_evaluation_equals_the_cpus(runs):
    _, path, _ = runs
    results = [json.loads((path / name / "result.json").read_text()) for name in ("cpu", "gpu")]
    if not REAL:
        assert results[0]["episodic_return"] == results[1]["episodic_return"]


@pytest.mark.skipif(REAL, reason="only the pretended GPU counts")
def test_waits_for_the_gpu_no_more_than_documented(runs):
    script, folder, outcome = runs
    if script == "a3c_atari":
        pytest.skip("its workers are other processes, which have counters of their own")
    waits = Counter(outcome["train on the GPU"]["transfers"])
    assert waits, "no tensor ever came back from the GPU: nothing was computed there"
    waits -= Counter(outcome["evaluate the CPU's on the GPU"]["transfers"])
    result = json.loads((folder / "gpu" / "result.json").read_text())
    steps_per_update, beyond = WAITS[script]
    updates = result["global_step"] / result["args"]["num_envs"] / steps_per_update
    assert waits.total() <= updates * (steps_per_update + beyond), dict(waits)


def test_script_and_its_processes_on_the_command_line(tmp_path):
    """`python tests/fake_gpu.py SCRIPT` as a script with spawned workers would be run."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "import torch.multiprocessing as mp\n"
        "def worker(rank):\n"
        "    t = torch.full((2,), 3.0, device='cuda')\n"
        "    print(sys.argv[1], torch.cuda.is_available(), (t + rank).sum().item())\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(worker, nprocs=1)\n"
        "    worker(1)\n"
    )
    fake = [] if REAL else [str(TESTS / "fake_gpu.py")]
    env = os.environ | {"FAKE_GPU_REPORT": str(tmp_path / "report.json")}
    command = [sys.executable, *fake, str(script), "flag"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["flag True 6.0", "flag True 8.0"], done.stderr
    if not REAL:
        assert json.loads((tmp_path / "report.json").read_text()) == {"script.py:6": 1}
