"""The trained models in models/ can be evaluated, and have learned."""

import pytest
import torch
from conftest import ROOT

import ppo_continuous as ppo


@pytest.mark.quick
@pytest.mark.parametrize("path", sorted(ROOT.glob("models/*.pt")), ids=lambda path: path.stem)
def test_a_trained_model(path, tmp_path):
    model = ppo.load_checkpoint(path)
    assert not {"optimizer", "return_stats"} & model.keys()
    args = ppo.Args(**model["args"] | {"eval_episodes": 2})
    assert args.run_folder is None
    returns = torch.tensor(ppo.evaluate(args, model, tmp_path))
    assert (returns > 500).all(), returns  # a policy that moves at random stays far below
