"""Plans with the command line where neither torch nor a host is installed, and reads what is said of both."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from deepspeed_partition import Chain, LayerProfile

MADPIPE = str(Path(sys.executable).with_name("madpipe"))
PLATFORM = ["--devices", "2", "--memory", "1GB", "--bandwidth", "1GB/s"]


def run(command: list[str], status: int, words: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    if done.returncode != status or words not in printed or "Traceback" in printed:
        sys.exit(f"{command} ended with {done.returncode}, not {status} and {words!r}:\n{printed}")


def import_says(program: str, words: str) -> None:
    program = f"try:\n    {program}\nexcept ImportError as error:\n    print(error)"
    run([sys.executable, "-c", program], 0, words)


for package in ("torch", "deepspeed", "pytorch_lightning", "lightning"):
    if find_spec(package) is not None:
        sys.exit(f"the base installation brings {package}")
numbers = {"weight_bytes": 1000, "output_bytes": 1000, "stash_bytes": 2000}
layers = [
    LayerProfile(name=f"layer {i}", forward_seconds=0.01, backward_seconds=0.02, **numbers) for i in range(6)
]
Chain(input_bytes=1000, layers=tuple(layers)).save("chain.json")
run([MADPIPE, "--version"], 0, "madpipe 0.")
run([MADPIPE, "plan", "chain.json", *PLATFORM, "-o", "plan.json"], 0, "proved best")
run([MADPIPE, "plan", "chain.json", *PLATFORM, "--micro-batches", "4", "-o", "step.json"], 0, "madpipe: ")
run([MADPIPE, "check", "plan.json", "chain.json"], 0, "")
run([MADPIPE, "show", "plan.json"], 0, "device 0")
run([MADPIPE, "compare", "chain.json", *PLATFORM], 0, "pipedream")
run([MADPIPE, "frontier", "chain.json", "--devices", "2", "--bandwidth", "1GB/s"], 0, "")
profile = [MADPIPE, "profile", "models.py:gpt", "--micro-batch", "1", "-o", "chain.json"]
run(profile, 2, "madpipe: measuring layers needs torch, which is not installed: pip install")
import_says("import lightning_madpipe", "needs PyTorch Lightning, which is not installed: pip install")
install = "import deepspeed_partition; deepspeed_partition.install()"
import_says(install, "needs torch and deepspeed, which are not installed: pip install")
