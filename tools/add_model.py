"""Copy a finished run's model to models/, without what belongs to the machine it was trained on.

python tools/add_model.py runs/HalfCheetah-v4__...    # writes models/HalfCheetah-v4.pt
"""

import importlib
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
for folder in map(Path, sys.argv[1:] or sys.exit(__doc__)):
    if not (folder / "model.pt").exists():
        sys.exit(f"error: no finished run in {folder}\n{__doc__}")
    model = torch.load(folder / "model.pt", "cpu", weights_only=True)
    known = vars(importlib.import_module(model["script"]).Args())
    model["args"] = {name: x for name, x in model["args"].items() if name in known}
    model["args"] |= {"run_folder": None, "resume": None, "evaluate": None}
    path = ROOT / "models" / f"{model['args']['env_id'].replace('/', '-')}.pt"
    if path.exists() and torch.load(path, "cpu", weights_only=True)["script"] != model["script"]:
        sys.exit(f"error: {path} is of another script")
    torch.save(model, path)
    print(path)
