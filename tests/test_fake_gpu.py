"""The pretended GPU: it refuses what CUDA refuses, computes what the CPU computes, and counts."""

import copy
import io
import pickle

import fake_gpu
import numpy as np
import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="there is a real GPU (test_gpu.py uses it)"
    ),
]


@pytest.fixture(autouse=True)
def one_thread():
    """With tests in parallel, more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def device():
    fake_gpu.transfers.clear()
    with fake_gpu.pretend():
        yield torch.device("cuda")


REFUSED = {
    "add": lambda cpu, gpu: cpu + gpu,
    "add a device scalar": lambda cpu, gpu: cpu + gpu.sum(),
    "add to a CPU scalar in place": lambda cpu, gpu: torch.zeros(()).add_(gpu.sum()),
    "cat": lambda cpu, gpu: torch.cat([cpu, gpu]),
    "stack of scalars": lambda cpu, gpu: torch.stack([cpu.sum(), gpu.sum()]),
    "gather": lambda cpu, gpu: gpu.gather(0, torch.zeros(1, 3, dtype=torch.long)),
    "embedding": lambda cpu, gpu: nn.Embedding(3, 3).to("cuda")(torch.tensor([0])),
    "linear": lambda cpu, gpu: nn.Linear(3, 3)(gpu),
    "index of a CPU tensor": lambda cpu, gpu: cpu[torch.tensor([0], device="cuda")],
    "mask of a CPU tensor": lambda cpu, gpu: cpu[gpu > 0],
    "assign a CPU tensor": lambda cpu, gpu: gpu.index_put_((torch.tensor([0]),), cpu[:1]),
    "CPU generator": lambda cpu, gpu: torch.randperm(3, device="cuda", generator=torch.Generator()),
}
ALLOWED = {
    "add a CPU scalar": lambda cpu, gpu: gpu + torch.tensor(2.0),
    "CPU index": lambda cpu, gpu: gpu[torch.tensor([2, 0])],
    "CPU mask": lambda cpu, gpu: gpu[cpu > 0],
    "assign a scalar": lambda cpu, gpu: gpu.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "copy from the CPU": lambda cpu, gpu: gpu.copy_(cpu),
    "pinned": lambda cpu, gpu: cpu.pin_memory().to("cuda", non_blocking=True),
    "as_tensor": lambda cpu, gpu: torch.as_tensor(np.ones(3), device="cuda"),
    "one_hot": lambda cpu, gpu: nn.functional.one_hot(torch.tensor([1], device="cuda"), 3),
    "zeros_like": lambda cpu, gpu: torch.zeros_like(gpu),
    "type_as": lambda cpu, gpu: cpu.type_as(gpu),
    "transpose in place": lambda cpu, gpu: gpu.t_() + gpu,
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_cuda_refuses(device, case):
    cpu = torch.randn(3, 3)
    with pytest.raises(RuntimeError, match="device"):
        REFUSED[case](cpu, torch.randn(3, 3, device=device))


@pytest.mark.parametrize("case", ALLOWED)
def test_allows_what_cuda_allows(device, case):
    cpu = torch.randn(3, 3)
    result = ALLOWED[case](cpu, cpu.to(device))
    assert result.device == torch.device("cuda:0")
    assert result.device.type == "cuda" and result.is_cuda and not result.is_cpu


@pytest.mark.parametrize("convert", [lambda t: t.numpy(), np.asarray])
def test_numpy_needs_cpu(device, convert):
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        convert(torch.ones(3, device=device))
    assert torch.from_numpy(np.ones(3)).device.type == "cpu"


def test_counts_each_wait_by_its_line(device):
    t = torch.arange(4.0, device=device)
    waits = [
        lambda: t[1].item(),
        lambda: float(t[1]),
        lambda: bool(t[1]),
        lambda: t.tolist(),
        lambda: t.cpu(),
        lambda: t.to("cpu"),
        lambda: torch.zeros(4).copy_(t),
        lambda: t[t > 1],
        lambda: t.nonzero(),
        lambda: f"{t[1]:.2f}",
        lambda: repr(t),
    ]
    for wait in waits:
        before = fake_gpu.transfers.total()
        wait()
        assert fake_gpu.transfers.total() == before + 1, wait.__code__.co_firstlineno
    assert f"test_fake_gpu.py:{waits[0].__code__.co_firstlineno}" in fake_gpu.transfers
    before = fake_gpu.transfers.total()
    t[torch.tensor([1])] = (t * 2).sum() + torch.where(t > 1, t, 0).to(device).mean()
    weight = torch.ones(3, device=device, requires_grad=True)
    weight.sum().backward()
    nn.utils.clip_grad_norm_(weight, 0.5)
    assert fake_gpu.transfers.total() == before, "these do not wait"


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        if isinstance(self.cell, nn.RNNBase):
            return self.cell(x)[0]
        state, outputs = None, []
        for x_t in x:
            state = self.cell(x_t, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


def conv():
    net = nn.Sequential(nn.Conv2d(4, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    return net.to(memory_format=torch.channels_last)


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), (7, 5)),
    "conv": (conv, (6, 4, 9, 9)),
    "GRU": (lambda: Recurrent(nn.GRU(5, 6, batch_first=True)), (4, 3, 5)),
    "GRUCell": (lambda: Recurrent(nn.GRUCell(5, 6)), (4, 3, 5)),
    "LSTM": (lambda: Recurrent(nn.LSTM(5, 6)), (4, 3, 5)),
    "LSTMCell": (lambda: Recurrent(nn.LSTMCell(5, 6)), (4, 3, 5)),
}
OPTIMIZERS = {
    "Adam fused": lambda params: torch.optim.Adam(params, 1e-2, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 1e-2),
}


def make(network, optimizer, device):
    torch.manual_seed(0)
    net = NETWORKS[network][0]().to(device)
    return net, OPTIMIZERS[optimizer](net.parameters())


def train(net, optimizer, shape, device, bf16=False, steps=4):
    """Some steps of an actor's loss with all that the scripts use."""
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(shape).to(device)[torch.randperm(shape[0], device=device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            mean = net(x).float()
        policy = torch.distributions.Normal(mean, 0.5)
        action = torch.distributions.Categorical(logits=mean).sample()
        loss = -policy.log_prob(policy.sample()).mean() + mean.gather(-1, action[..., None]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


def state(net, optimizer):
    """Everything that training changed, as tensors on the CPU."""
    moments = {
        f"{index}.{name}": value
        for index, moment in optimizer.state_dict()["state"].items()
        for name, value in moment.items()
    }
    return {name: value.cpu() for name, value in (net.state_dict() | moments).items()}


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_trains_as_on_the_cpu_to_the_bit(network, optimizer, bf16):
    states = []
    for context, device in (
        (None, torch.device("cpu")),
        (fake_gpu.pretend(), torch.device("cuda")),
    ):
        with context or torch.enable_grad():
            parts = make(network, optimizer, device)
            train(*parts, NETWORKS[network][1], device, bf16)
            assert next(parts[0].parameters()).grad.device.type == device.type
            states.append(state(*parts))
    assert differing(states[1], states[0]) == []


@pytest.mark.parametrize("there_and_back", ["cpu cuda", "cuda cpu", "cuda cuda"])
def test_checkpoint_goes_from_one_device_to_the_other(device, there_and_back):
    first, second = map(torch.device, there_and_back.split())
    shape = NETWORKS["mlp"][1]
    parts = make("mlp", "Adam fused", first)
    train(*parts, shape, first)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    train(*parts, shape, first)

    file.seek(0)
    resumed = make("mlp", "Adam fused", second)
    for part, saved in zip(resumed, torch.load(file, map_location="cpu", weights_only=True)):
        part.load_state_dict(saved)
    train(*resumed, shape, second)
    assert differing(state(*resumed), state(*parts)) == []
    assert resumed[1].state[resumed[0][0].weight]["exp_avg"].device.type == second.type


def test_a_file_from_the_gpu_needs_map_location_without_one(device):
    file = io.BytesIO()
    torch.save(torch.arange(3, device=device), file)
    file.seek(0)
    assert torch.load(file, map_location=device).device.type == "cuda"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(
            torch.serialization, "_package_registry", torch.serialization._package_registry[1:]
        )
        file.seek(0)
        with pytest.raises(RuntimeError, match="map_location"):
            torch.load(file)


def test_modules_and_gradients_move(device):
    net = nn.Linear(3, 1)
    weight, optimizer = net.weight, torch.optim.Adam(net.parameters(), fused=True)
    net.to(device)
    assert net.weight is weight and weight.is_cuda, "an optimizer made before keeps its parameters"
    x = torch.ones(2, 3, requires_grad=True)
    net(x.to(device)).cpu().sum().backward()
    optimizer.step()
    assert not x.grad.is_cuda and weight.grad.is_cuda
    assert not copy.deepcopy(net).cpu().weight.is_cuda and net.weight.is_cuda
    assert torch.equal(pickle.loads(pickle.dumps(weight.detach())), weight)


def collect_and_learn(device, bug=None):
    """A training loop as in the scripts, with a place for each device bug."""
    net = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    obs = np.ones((4, 3), np.float32)
    for _ in range(2):
        b_obs = torch.from_numpy(obs).to(device)
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=net(b_obs)).sample()
        actions.numpy() if bug == "numpy without cpu" else actions.cpu().numpy()
        rewards = torch.ones(4, device=None if bug == "created without device" else device)
        dones = torch.zeros(4, dtype=torch.bool)
        indices = torch.randperm(4, device=device)
        if bug != "CPU mask indexed on the device":
            dones = dones.to(device)
        keep = ~dones[indices]
        loss = (net(b_obs)[indices].logsumexp(-1) * rewards[indices] * keep).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("bug", "error"),
    [
        (None, None),
        ("created without device", RuntimeError),
        ("numpy without cpu", TypeError),
        ("CPU mask indexed on the device", RuntimeError),
    ],
)
def test_planted_device_bugs_are_caught(device, bug, error):
    collect_and_learn(torch.device("cpu"), bug)  # on the CPU nobody notices
    if error is None:
        return collect_and_learn(device)
    with pytest.raises(error):
        collect_and_learn(device, bug)


def test_leaves_nothing_behind():
    with fake_gpu.pretend():
        assert torch.cuda.is_available() and torch.cuda.get_device_name()
        with pytest.raises(RuntimeError, match="there is a GPU"), fake_gpu.pretend():
            pass
    assert not torch.cuda.is_available()
    assert "to" not in vars(torch.Tensor)
    assert type(torch.tensor(1.0)) is torch.Tensor
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
