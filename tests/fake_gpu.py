"""A pretended GPU: the CPU's values under CUDA's rules, so that device bugs show without a GPU.

    with fake_gpu.pretend():
        module.train(args, folder, None)
    fake_gpu.waits  # Counter({"ppo_continuous.py:210": 24, ...})

A tensor on "cuda" wraps one on the CPU. Operations that CUDA refuses raise, all others run on the
CPU, so results equal the CPU's to the bit. `waits` counts, by source line, how often the host waits
for the device: `.item()`, `bool(t)`, `.tolist()`, `.cpu()`, boolean masks as indices, results whose
shape depends on values. Started processes pretend as well, with counts of their own.

Not pretended: CUDA's rounding, nondeterminism, asynchrony, memory; several GPUs; operations that
autocast leaves in float32; the device's own generator (it draws from the CPU's); files (a forgotten
`map_location` passes); torch.compile, gradients through `.to`, changes of shape in place, printing;
threads; device tensors in other processes. A module that moves gets new parameters, so an optimizer
must be made afterwards. What C++ makes on its argument's device (`t.new_tensor`) raises when used.
"""

import contextlib
import sys
from collections import Counter
from multiprocessing.process import BaseProcess
from unittest.mock import patch

import torch
import torch._dynamo  # compares signatures when it is imported, so before the patches below
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
# Operations with a result in Python, or whose shape depends on values
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "bincount"}
ANSWERS = {"is_available": True, "is_current_stream_capturing": False, "_lazy_init": None}
GROUP = "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype"
real_to, real_autocast, real_start = torch.Tensor.to, torch.autocast, BaseProcess.start
waits: Counter = Counter()


def count() -> None:
    """Count a wait, at the innermost line outside of PyTorch and this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith((torch.__path__[0], __file__)):
        frame = frame.f_back
    waits[f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"] += 1


def check(func, args, tensors) -> None:
    """Raise what CUDA would raise, and count the operations for which the host waits."""
    name, indices = func._opname, []
    if name in ("copy_", "_to_copy"):  # from one device to the other
        return count() if name == "copy_" and not args[0].is_cuda else None
    if name.strip("_") in ("index", "index_put", "index_put_impl"):
        indices = [x for x in args[1] if x is not None]
    # Indices and scalars may be on the CPU, but not what the operation writes to
    inputs = [x for x in args[func._schema.is_mutable :] if isinstance(x, torch.Tensor)]
    free = {id(x) for x in [*indices, *(x for x in inputs if x.dim() == 0)]}
    if any(x.is_cuda for x in tensors) and any(not (x.is_cuda or id(x) in free) for x in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name}, cuda:0 and cpu")
    if name in WAITING or any(x.is_cuda and x.dtype == torch.bool for x in indices):
        count()


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one operation on the CPU, under CUDA's rules if the device has a part in it."""
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        wrapped = {id(x.raw): x for x in tensors if x.is_cuda}
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = CPU
        elif not wrapped:
            return func(*args, **kwargs)
        check(func, args, tensors)
        raw_args, raw_kwargs = tree_map_only(DeviceTensor, lambda x: x.raw, (args, kwargs))
        result = func(*raw_args, **raw_kwargs)
        if func._opname == "copy_":
            return args[0]
        # An operation in place returns its argument
        return tree_map_only(torch.Tensor, lambda x: wrapped.get(id(x), DeviceTensor(x)), result)


class DeviceTensor(torch.Tensor):
    """A tensor on the device: Python sees it on CUDA, PyTorch's C++ code on the CPU."""

    __torch_dispatch__ = classmethod(Mode.__torch_dispatch__)
    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda = (property(lambda self, x=x: x) for x in (CUDA, True))

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "DeviceTensor":
        self = cls._make_wrapper_subclass(cls, raw.shape, strides=raw.stride(), dtype=raw.dtype)
        self.raw = raw
        return self

    def numpy(self, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self):
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol):
        return self.raw.__reduce_ex__(protocol)


def to(self, *args, **kwargs):  # Tensor.to
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if device and device.type != self.device.type:
        if self.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("gradients through Tensor.to")
        if self.is_cuda:
            count()
        self = self.raw.clone() if self.is_cuda else DeviceTensor(self.detach().clone())
    return real_to(self, dtype or self.dtype, memory_format=memory_format or torch.preserve_format)


def constructor(real):  # torch.tensor or torch.as_tensor: on the CPU first
    return lambda *args, device=CPU, **kwargs: real(*args, **kwargs).to(device or CPU)


def within(context, function, *args, **kwargs):
    with context():
        return function(*args, **kwargs)


def start(process, context):  # BaseProcess.start: the new process enters the context as well
    process._target, process._args = within, (context, process._target, *process._args)
    real_start(process)


@contextlib.contextmanager
def pretend():
    """Make "cuda" the pretended device, and count anew."""
    waits.clear()
    answers = {name: lambda *_, value=value, **__: value for name, value in ANSWERS.items()}
    with (
        patch.multiple(torch.cuda, **answers),
        patch.multiple(torch.Tensor, to=to, cpu=lambda self: to(self, CPU)),
        patch("torch.tensor", constructor(torch.tensor)),
        patch("torch.as_tensor", constructor(torch.as_tensor)),
        patch("torch.autocast", lambda x, *y, **z: real_autocast({"cuda": "cpu"}[x], *y, **z)),
        patch("torch._has_compatible_shallow_copy_type", lambda x, y: not (x.is_cuda or y.is_cuda)),
        patch("torch.backends.cudnn.is_acceptable", lambda tensor: False),
        patch(GROUP, lambda lists: {(lists[0][0].device, None): (lists, None)}),
        patch.object(BaseProcess, "start", lambda process: start(process, pretend)),
        Mode(),
    ):
        yield
