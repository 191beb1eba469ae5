"""Copy a finished run's model to models/, without what belongs to the machine it was trained on.

python tools/add_model.py runs/HalfCheetah-v4__...    # writes models/HalfCheetah-v4.pt
"""

import sys
from pathlib import Path

import torch

for folder in map(Path, sys.argv[1:]):
    model = torch.load(folder / "model.pt", weights_only=True)
    model["args"] |= {"run_folder": None, "resume": None, "evaluate": None}
    path = Path(__file__).parent.parent / "models" / f"{model['args']['env_id']}.pt"
    torch.save(model, path)
    print(path)
