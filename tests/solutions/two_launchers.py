import os
import subprocess
import sys
import tempfile
from pathlib import Path

from labkit.course import check

SCRIPT = """
import torch
from labkit import train
from labkit.data import digits
from labkit.models import mlp

def main():
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = torch.nn.functional.cross_entropy
    train.fit(model, digits(), loss_fn, optimizer=sgd, batch_size=256)

train.run(main, **vars(train.parser("single").parse_args()))
"""
LAUNCHERS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}
# As in a shell: a rank's own place is not the script's.
OF_RANKS = ("RANK", "WORLD_SIZE", "MASTER_")
SHELL = {k: v for k, v in os.environ.items() if not any(w in k for w in OF_RANKS)}
if rank == 0:
    folder = Path(tempfile.mkdtemp())
    files = {}
    for name, words in LAUNCHERS.items():
        files[name] = folder / f"{name}.csv"
        script = folder / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, *words, str(script), "--losses", str(files[name])]
        subprocess.run(command, check=True, capture_output=True, env=SHELL)
    check("two_launchers", files)
