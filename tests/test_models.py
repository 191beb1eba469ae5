"""The trained models in models/ can be evaluated, and have learned."""

import importlib

import numpy as np
import pytest
import torch
from conftest import ROOT

LEAST = {"ppo_continuous": 500, "qmix_smac": 15}  # random players stay far below


@pytest.mark.quick
@pytest.mark.parametrize("path", sorted(ROOT.glob("models/*.pt")), ids=lambda path: path.stem)
def test_a_trained_model(path, tmp_path):
    script = torch.load(path, weights_only=True)["script"]
    module = importlib.import_module(script)
    model = module.load_checkpoint(path)
    assert not {"optimizer", "return_stats", "replay"} & model.keys()
    args = module.Args(**model["args"] | {"eval_episodes": 2 if "ppo" in script else 16})
    assert np.mean(module.evaluate(args, model, tmp_path)) > LEAST[script]
