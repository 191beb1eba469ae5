"""Helpers of the tests: short runs of a script, in this process or another, and comparisons."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ppo_continuous", "a2c_atari", "a3c_atari", "dqn_per_atari", "qmix_smac")
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["WANDB_MODE"] = "disabled"
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job
torch.set_num_threads(1)  # before the fixtures that train, which are of wider scope than one_thread
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles faster
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # what one process compiles, the others load
    jax_cache = tempfile.TemporaryDirectory(prefix="jax-cache-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = jax_cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


@pytest.fixture(autouse=True)
def one_thread():
    """One thread, as many tests may run beside each other."""
    torch.set_num_threads(1)


def load_module(path: Path):
    """A script in another folder as a module of its own."""
    name = f"{path.stem}_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def patched(tmp_path_factory):
    """patched(script, variant): the patched script as a module."""

    def patch(script, name):
        folder = tmp_path_factory.mktemp(f"{script}_{name}")
        path = shutil.copy(ROOT / f"{script}.py", folder)
        words = ["git", "apply", ROOT / f"variants/{script}/{name}.patch"]
        subprocess.run(words, cwd=folder, check=True)
        return load_module(Path(path))

    return patch


@pytest.fixture
def limit_games(monkeypatch):
    """A function that truncates the episodes of a script's games after so many frames."""

    def limit(module, frames):
        make, settings = module.AtariVectorEnv, {"max_num_frames_per_episode": frames}
        monkeypatch.setattr(module, "AtariVectorEnv", lambda **kw: make(**kw | settings))

    return limit


def call(script: str, *flags) -> None:
    """Run a script in this process, as from the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        importlib.import_module(script).main()


def train(module, folder: Path, **flags) -> Path:
    """Train in this process, in `folder`. Returns the folder."""
    module.train(module.Args(**flags), Path(folder), None)
    return Path(folder)


def resume(module, folder: Path, new_folder: Path, **flags) -> Path:
    """Copy a run and resume it in this process, with changed flags. Returns the new folder."""
    shutil.copytree(folder, new_folder)
    checkpoint = module.load_checkpoint(Path(new_folder))
    module.train(module.Args(**checkpoint["args"] | flags), Path(new_folder), checkpoint)
    return Path(new_folder)


def assert_resumes(module, folder: Path, **flags) -> Path:
    """Train, resume from the middle, and evaluate again: all the same. Returns the whole run."""
    whole, killed = train(module, folder / "whole", **flags), folder / "killed"
    middle, last = sorted(whole.glob("checkpoint_*.pt"))
    killed.mkdir()
    shutil.copy(middle, killed)
    assert_same(load(resume(module, killed, folder / "again") / last.name), load(last))
    model = module.load_checkpoint(whole / "model.pt")
    returns = module.evaluate(module.Args(**model["args"]), model, whole)
    assert returns == json.loads((whole / "result.json").read_text())["episodic_return"]
    return whole


def load(path: Path) -> dict:
    """A model or checkpoint, without what differs between equal runs."""
    content = torch.load(path, "cpu", weights_only=True)
    return {name: x for name, x in content.items() if name not in ("args", "seconds")}


def command(script: str, *flags) -> list[str]:
    """The command line of a script; a path is taken as it is."""
    path = ROOT / f"{script}.py" if script in SCRIPTS else Path(script)
    return [sys.executable, str(path), *map(str, flags)]


def run(script: str, *flags, cwd: Path, check: bool = True) -> subprocess.CompletedProcess:
    """Run a script in a process of its own. Fails with its output if it fails and `check`."""
    process = subprocess.run(command(script, *flags), cwd=cwd, capture_output=True, text=True)
    output = f"{process.stdout}\n{process.stderr}"
    assert not check or process.returncode == 0, f"{script} {flags} failed:\n{output}"
    return process


def assert_same(a, b, name: str = "value") -> None:
    """Assert that two nested structures are equal to the bit, naming the first difference."""
    assert type(a) is type(b), f"{name}: {type(a)} and {type(b)}"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{name}: keys {a.keys() ^ b.keys()} differ"
        for key in a:
            assert_same(a[key], b[key], f"{name}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert_same(dict(enumerate(a)), dict(enumerate(b)), name)
    elif isinstance(a, torch.Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.shape} and {b.shape}"
        assert torch.equal(a, b), f"{name} differs by up to {(a.double() - b.double()).abs().max()}"
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b, name)
    else:
        assert a == b, f"{name}: {a} and {b}"


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """The scalars that TensorBoard shows: {tag: {step: value}}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True)
    tags = events.Reload().Tags()["scalars"]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


def cases(subject: str, operation: str | None = None) -> Iterator[dict]:
    """Test vectors of a subject; arrays float64, int64 or bool, strings as they are."""
    path = ROOT / "vectors" / f"{subject}.json"
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        if operation in (None, case["operation"]):
            for group in ("inputs", "outputs"):
                case[group] = {name: np.array(x) for name, x in case[group].items()}
            yield case


def check(case: dict, output: str, values, precision: str = "float64") -> None:
    """Fail where `values` differ from an output by more than atol + rtol |output|."""
    name = f"{case['operation']}, {case['name']}: {output}"
    expected = case["outputs"][output]
    np.testing.assert_allclose(values, expected, **case["tolerance"][precision], err_msg=name)
