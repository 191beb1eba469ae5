"""The pretended GPU: it refuses what CUDA refuses, computes what the CPU computes, and counts."""

import fake_gpu
import numpy as np
import pytest
import torch
from torch import nn

REAL = torch.cuda.is_available()
pytestmark = [pytest.mark.quick, pytest.mark.skipif(REAL, reason="there is a real GPU")]
REFUSED = {
    "add": lambda cpu, gpu: cpu + gpu,
    "add a device scalar": lambda cpu, gpu: cpu + gpu.sum(),
    "add to a CPU scalar in place": lambda cpu, gpu: torch.zeros(()).add_(gpu.sum()),
    "stack of scalars": lambda cpu, gpu: torch.stack([cpu.sum(), gpu.sum()]),
    "gather": lambda cpu, gpu: gpu.gather(0, torch.zeros(1, 3, dtype=torch.long)),
    "linear": lambda cpu, gpu: nn.Linear(3, 3)(gpu),
    "mask of a CPU tensor": lambda cpu, gpu: cpu[gpu > 0],
    "assign a CPU tensor": lambda cpu, gpu: gpu.index_put_((torch.tensor([0]),), cpu[:1]),
    "an array": lambda cpu, gpu: np.asarray(gpu),
}
ALLOWED = {
    "add a CPU scalar": lambda cpu, gpu: gpu + torch.tensor(2.0),
    "CPU index": lambda cpu, gpu: gpu[torch.tensor([2, 0])],
    "CPU mask": lambda cpu, gpu: gpu[cpu > 0],
    "assign a scalar": lambda cpu, gpu: gpu.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "copy from the CPU": lambda cpu, gpu: gpu.copy_(cpu),
    "as_tensor": lambda cpu, gpu: torch.as_tensor(np.ones(3), device="cuda"),
    "zeros_like": lambda cpu, gpu: torch.zeros_like(gpu),
    "to another's device": lambda cpu, gpu: cpu.to(gpu),
}


@pytest.fixture
def device():
    with fake_gpu.pretend():
        yield torch.device("cuda")


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_cuda_refuses(device, case):
    cpu = torch.randn(3, 3)
    with pytest.raises((RuntimeError, TypeError), match="device"):
        REFUSED[case](cpu, torch.randn(3, 3, device=device))


@pytest.mark.parametrize("case", ALLOWED)
def test_allows_what_cuda_allows(device, case):
    cpu = torch.randn(3, 3)
    assert ALLOWED[case](cpu, cpu.to(device)).is_cuda


def test_counts_each_wait_by_its_line(device):
    t = torch.arange(4.0, device=device)
    t[torch.tensor([1])] = (t * 2).sum() + torch.where(t > 1, t, 0).to(device).mean()
    weight = torch.ones(3, device=device, requires_grad=True)
    weight.sum().backward()
    nn.utils.clip_grad_norm_(weight, 0.5)
    assert not fake_gpu.waits, "these do not wait"
    waits = [lambda: t[1].item(), lambda: float(t[1]), lambda: bool(t[1]), lambda: t.tolist()]
    waits += [lambda: t.cpu(), lambda: t.to("cpu"), lambda: torch.zeros(4).copy_(t)]
    waits += [lambda: t[t > 1], lambda: t.nonzero()]
    for number, wait in enumerate(waits):
        wait()
        assert fake_gpu.waits.total() == number + 1
    assert f"test_fake_gpu.py:{waits[0].__code__.co_firstlineno}" in fake_gpu.waits


def test_leaves_nothing_behind():
    with fake_gpu.pretend():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available() and "to" not in vars(torch.Tensor)
