"""The trained models in models/ can be evaluated, and have learned."""

import importlib

import numpy as np
import pytest
import torch
from conftest import ROOT

LEAST = {"HalfCheetah-v4": 500, "PongDeterministic-v4": 10, "3m": 10}  # random: below


@pytest.mark.parametrize("name", LEAST)
def test_a_trained_model(name, tmp_path):
    path = ROOT / "models" / f"{name}.pt"
    module = importlib.import_module(torch.load(path, weights_only=True)["script"])
    model = module.load_checkpoint(path)
    assert not {"optimizer", "return_stats", "replay"} & model.keys()
    vars(args := module.Args(**model["args"])).update(eval_episodes=2, num_envs=2)
    assert np.mean(module.evaluate(args, model, tmp_path)) > LEAST[name]
