"""The pretended GPU: it refuses what CUDA refuses, computes what the CPU computes, and counts."""

import fake_gpu
import numpy as np
import pytest
import torch
from torch import nn

REAL = torch.cuda.is_available()
pytestmark = [pytest.mark.quick, pytest.mark.skipif(REAL, reason="there is a real GPU")]
REFUSED = ["cpu + gpu", "cpu + gpu.sum()", "torch.zeros(()).add_(gpu.sum())", "np.asarray(gpu)"]
REFUSED += ["torch.stack([cpu.sum(), gpu.sum()])", "gpu.gather(0, torch.zeros(1, 3).long())"]
REFUSED += ["nn.Linear(3, 3)(gpu)", "cpu[gpu > 0]", "gpu.index_put_((torch.tensor([0]),), cpu[:1])"]
ALLOWED = ["gpu + torch.tensor(2.0)", "gpu[torch.tensor([2, 0])]", "gpu[cpu > 0]", "gpu.copy_(cpu)"]
ALLOWED += ["gpu.index_put_((torch.tensor([0]),), torch.tensor(1.0))", "cpu.to(gpu)"]
ALLOWED += ["torch.as_tensor(np.ones(3), device='cuda')", "torch.zeros_like(gpu)"]


@pytest.fixture
def device():
    with fake_gpu.pretend():
        yield torch.device("cuda")


@pytest.mark.parametrize("code", REFUSED)
def test_refuses_what_cuda_refuses(device, code):
    cpu, gpu = torch.randn(3, 3), torch.randn(3, 3, device=device)
    with pytest.raises((RuntimeError, TypeError), match="device"):
        eval(code, dict(np=np, nn=nn, torch=torch, cpu=cpu, gpu=gpu))


@pytest.mark.parametrize("code", ALLOWED)
def test_allows_what_cuda_allows(device, code):
    cpu, gpu = torch.randn(3, 3), torch.randn(3, 3, device=device)
    assert eval(code, dict(np=np, nn=nn, torch=torch, cpu=cpu, gpu=gpu)).is_cuda


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
