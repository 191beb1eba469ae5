"""A pretended GPU: the CPU's values under CUDA's rules, so that device bugs show without a GPU.

    with fake_gpu.pretend():                           # in this process
        train(args)
    fake_gpu.transfers                                 # Counter({"ppo_continuous.py:210": 24, ...})

    python tests/fake_gpu.py SCRIPT ARGS...            # a script, with the processes it starts
    FAKE_GPU_REPORT=FILE python tests/fake_gpu.py ...  # ... that writes `transfers` as JSON

A tensor on "cuda" wraps a tensor on the CPU (fake_device.py). Operations that CUDA refuses raise,
all others run on the CPU, so results equal the CPU's to the bit.
`transfers` counts, by source line, how often the host waits for the device: `.item()`, `bool(t)`,
`.tolist()`, `.cpu()`, printing, boolean masks as indices, results whose shape depends on values.

Not pretended:
  * CUDA's kernels: rounding, nondeterminism, asynchrony, memory. Several GPUs.
  * CUDA's own generator: the device draws from the CPU's, so a checkpoint that forgets the state of
    one of the two passes here. torch.Generator("cuda") and torch.cuda.get_rng_state fail.
  * torch.compile, torch.jit, CUDA graphs, storages, dlpack.
  * Device tensors sent to other processes; threads other than the one that entered `pretend`.
  * Tensors that C++ code makes on the device of its argument, in `t.new_tensor` and `quantile`, and
    `zeros_like(t, device="cpu")`: they are on the wrong device, and the next operation raises.
    `resize_` raises.
  * torch.autocast is the CPU's, which keeps fewer operations in float32 than CUDA's.
"""

import atexit
import contextlib
import functools
import json
import os
import runpy
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import torch
from fake_device import CPU, CUDA, DeviceTensor, Mode, to, transfers

# What functions of torch.cuda return
ANSWERS = {"is_available": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0}
ANSWERS |= {"get_device_name": "pretended GPU", "set_device": None, "synchronize": None}
ANSWERS |= {"manual_seed_all": None, "_lazy_init": None, "is_current_stream_capturing": False}
real_start, real_autocast = BaseProcess.start, torch.autocast.__init__
real_rebuild = torch._utils._rebuild_tensor
real_group = torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype


def constructor(real):
    """torch.tensor or torch.as_tensor: on the CPU first."""

    def construct(data, *, device=None, **kwargs):
        return real(data, **kwargs) if device is None else real(data, **kwargs).to(device)

    return construct


def autocast(self, device_type, *args, **kwargs):
    """torch.autocast.__init__."""
    real_autocast(self, "cpu", *args, **kwargs)


def group(tensors, **kwargs):
    """How clip_grad_norm_ groups tensors by device and type, with the device that Python sees."""
    groups = real_group(tensors, **kwargs)
    return {(lists[0][0].device, key[1]): (lists, i) for key, (lists, i) in groups.items()}


def one_hot(indices, *args, **kwargs):
    """functional.one_hot, which makes a tensor on the device that C++ sees."""
    result = torch._C._nn.one_hot(getattr(indices, "raw", indices), *args, **kwargs)
    return result.to(indices.device)


def tag(storage):
    """The device that torch.save writes beside a storage."""
    return "cuda:0" if hasattr(storage, "on_device") else None


def restore(storage, location):
    """Where torch.load puts a storage."""
    if location.startswith("cuda"):
        storage.on_device = True
        return storage


def rebuild(storage, *args):
    """The tensor that torch.load makes of a storage."""
    tensor = real_rebuild(storage, *args)
    return DeviceTensor(tensor) if hasattr(storage._untyped_storage, "on_device") else tensor


def start(process):
    """BaseProcess.start: the new process pretends as well."""
    process._target = process._target and functools.partial(pretended, process._target)
    real_start(process)


def pretended(function, *args, **kwargs):
    with pretend():
        return function(*args, **kwargs)


def moves_a_module():
    """Whether parameters are swapped in place: where a module moves, so that they stay the same."""
    return sys._getframe(1).f_code.co_name == "_apply"


@contextlib.contextmanager
def pretend():
    """Make "cuda" the pretended device."""
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU, a real one or this one")
    answers = {name: lambda *_, value=value, **__: value for name, value in ANSWERS.items()}
    registry = [(0, tag, restore), *torch.serialization._package_registry]
    with (
        patch.multiple(torch.cuda, **answers),
        patch.multiple(torch.Tensor, to=to, type_as=to, pin_memory=torch.Tensor.clone),
        patch("torch.Tensor.cpu", lambda self, **kwargs: to(self, CPU, **kwargs)),
        patch("torch.Tensor.cuda", lambda self, *_, **kwargs: to(self, CUDA)),
        patch.multiple(
            torch, tensor=constructor(torch.tensor), as_tensor=constructor(torch.as_tensor)
        ),
        patch("torch.nn.functional.one_hot", one_hot),
        patch("torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", group),
        patch("torch.backends.cudnn.is_acceptable", lambda tensor: False),
        patch("torch.autocast.__init__", autocast),
        patch("torch.serialization._package_registry", registry),
        patch("torch._utils._rebuild_tensor", rebuild),
        patch("torch.__future__.get_swap_module_params_on_conversion", moves_a_module),
        patch("multiprocessing.process.BaseProcess.start", start),
        Mode(),
    ):
        yield


if __name__ == "__main__":
    import fake_gpu  # not `__main__`: the processes that are started import it

    del sys.argv[0]
    sys.path.append(sys.path[0])
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    if report := os.environ.get("FAKE_GPU_REPORT"):
        atexit.register(lambda: Path(report).write_text(json.dumps(transfers)))
    fake_gpu.pretended(runpy.run_path, sys.argv[0], run_name="__main__")
