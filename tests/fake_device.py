"""The tensors of the pretended GPU (fake_gpu.py): what works on them, and what is counted."""

import os
import sys
from collections import Counter

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
# Operations with a result in Python, or whose shape depends on values
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "bincount"}
real_to = torch.Tensor.to
transfers: Counter = Counter()  # "file:line" -> how often the host waited there for the device


def count() -> None:
    """Count a wait, at the innermost line that is neither PyTorch's nor in this folder's fakes."""
    frame, inside = sys._getframe(1), os.path.join(os.path.dirname(__file__), "fake_")
    while frame.f_code.co_filename.startswith((torch.__path__[0], inside)) and frame.f_back:
        frame = frame.f_back
    transfers[f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"] += 1


def dispatch(self, func, types, args=(), kwargs=None):
    """Run one ATen operation on the CPU, under CUDA's rules if the device has a part in it."""
    kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    wrapped = {id(x.raw): x for x in tensors if x.is_cuda}
    if "cuda" in str(kwargs.get("device")):
        kwargs["device"] = CPU
    elif not wrapped:
        return func(*args, **kwargs)
    check(func, args, kwargs, tensors)
    raw_args, raw_kwargs = tree_map_only(DeviceTensor, lambda x: x.raw, (args, kwargs))
    result = func(*raw_args, **raw_kwargs)
    if func._opname == "copy_":
        return args[0]
    if torch.Tag.inplace_view in func.tags:  # `t_`: what C++ knows of the wrapper changes as well
        with no_dispatch():
            func(*args, **kwargs)
    if any((x.shape, x.stride()) != (x.raw.shape, x.raw.stride()) for x in wrapped.values()):
        raise NotImplementedError(f"{func} changes the shape of a device tensor")

    def wrap(x):  # an operation in place returns its argument
        return wrapped[id(x)] if id(x) in wrapped else DeviceTensor(x)

    return tree_map_only(torch.Tensor, wrap, result)


def check(func, args, kwargs, tensors) -> None:
    """Raise what CUDA would raise, and count the operations for which the host waits."""
    name, indices = func._opname, []
    if name in ("copy_", "_to_copy", "_has_compatible_shallow_copy_type"):  # for both devices
        return count() if name == "copy_" and not args[0].is_cuda else None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [x for x in args[1] if x is not None]
        if any(x.is_cuda for x in indices) and not args[0].is_cuda:
            raise RuntimeError("indices should be either on cpu or on the tensor's device (cpu)")
    # Indices and scalars may be on the CPU, but not what the operation writes to
    inputs = [*args[func._schema.is_mutable :], *kwargs.values()]
    free = {id(x) for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 0}
    free |= {id(x) for x in indices}
    if any(x.is_cuda for x in tensors) and any(not (x.is_cuda or id(x) in free) for x in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name}, cuda:0 and cpu")
    if kwargs.get("generator"):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if name in WAITING or any(x.is_cuda and x.dtype == torch.bool for x in indices):
        count()


class Mode(TorchDispatchMode):
    __torch_dispatch__ = dispatch


class DeviceTensor(torch.Tensor):
    """A tensor on the device: Python sees it on CUDA, PyTorch's C++ code on the CPU."""

    __torch_dispatch__ = classmethod(dispatch)
    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda, is_cpu = (property(lambda self, x=x: x) for x in (CUDA, True, False))
    data = property(torch.Tensor.detach, lambda self, other: setattr(self, "raw", other.raw))

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "DeviceTensor":
        self = cls._make_wrapper_subclass(cls, raw.shape, strides=raw.stride(), dtype=raw.dtype)
        self.raw = raw
        return self

    def numpy(self, **kwargs):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )

    def tolist(self):
        return self.detach().cpu().tolist()

    def __format__(self, spec):
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def __repr__(self, **kwargs):
        return f"{self.detach().cpu()!r}"[:-1] + ", device='cuda:0')"

    def __reduce_ex__(self, protocol):
        self.raw.untyped_storage().on_device = True  # torch.save then writes "cuda:0"
        return self.raw.detach().__reduce_ex__(protocol)


class Move(torch.autograd.Function):
    """A copy on the other device; the gradient moves back."""

    @staticmethod
    def forward(ctx, x):
        if not x.is_cuda:
            return DeviceTensor(x.clone())
        count()
        return x.raw.clone()

    @staticmethod
    def backward(ctx, grad):
        return Move.apply(grad)


def to(self, *args, **kwargs):
    """Tensor.to."""
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if device and device.type != self.device.type:
        self = Move.apply(self)
    options = {"memory_format": memory_format or torch.preserve_format}
    return real_to(self, dtype or self.dtype, copy=kwargs.get("copy", False), **options)
