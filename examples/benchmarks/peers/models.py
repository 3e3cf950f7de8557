"""Do pipelines that nobody here wrote train alike with MadPipe and without, to five digits?

    python examples/benchmarks/peers/models.py --gpt-neox FOLDER --megatron-deepspeed FOLDER \
        --transpeeder FOLDER --gdgpt FOLDER --diffusion-pipe FOLDER --gpt-lite FOLDER --alexnet FOLDER \
        --mpp-llava FOLDER --llama-pipeline-parallel FOLDER --chatglm-finetuning FOLDER \
        --huggingface-utils FOLDER --qlora-pipe FOLDER --huggingface-utils-vit FOLDER --gdgpt-bloom FOLDER \
        --decentralized-fm FOLDER --fmengine FOLDER --bigscience-megatron FOLDER --minimal-llama FOLDER \
        --easyllm FOLDER --easyllm-dropout FOLDER --gpt-x FOLDER --ml815 FOLDER \
        [--mode plain madpipe warm-up] [--zero 0 1] [--ranks 2] [--boundaries 0 5 10]

Each FOLDER is a checkout of the public repository, whose own model code runs here on random text, tiny; nothing is
downloaded. The LLaMA pipelines, ChatGLM and T5 need ``transformers==4.34.1``, BLOOM 4.37.2. Losses are compared
with plain DeepSpeed's: of the steps; after a checkpoint is saved, of an evaluation and two steps; after it is
loaded again, of two steps and an evaluation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAMES = [
    "gpt-neox", "megatron-deepspeed", "transpeeder", "gdgpt", "diffusion-pipe", "gpt-lite", "alexnet",
    "mpp-llava", "llama-pipeline-parallel", "chatglm-finetuning", "huggingface-utils", "qlora-pipe",
    "huggingface-utils-vit", "gdgpt-bloom", "decentralized-fm", "fmengine", "bigscience-megatron",
    "minimal-llama", "easyllm", "easyllm-dropout", "gpt-x", "ml815",
]  # fmt: skip
MODES = ["plain", "madpipe", "warm-up"]
NUM_AFTER = 6
"""Steps and evaluations after those that are asked for."""


def train(name: str, folder: Path, mode: str, zero: int, num_steps: int, warmup_steps: int, out: Path) -> None:
    """Train on this rank. Rank 0 writes the losses and the cut to ``out``."""
    import deepspeed
    import torch
    from strangers import NUM_MICRO_BATCHES, SAMPLES_PER_MICRO_BATCH, STRANGERS, draw_weights

    import deepspeed_partition
    from deepspeed_partition.engine.runtime.environment import prepare_cpu

    prepare_cpu()
    if mode != "plain":
        deepspeed_partition.install()
        os.environ["PEERS_METHOD"] = "madpipe"  # where a program takes the method from its own options
    deepspeed.init_distributed(dist_backend="gloo")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES_PER_MICRO_BATCH,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        # Without ZeRO, plain DeepSpeed clips fp32 gradients by a norm that depends on the cut.
        "gradient_clipping": 1.0 if zero else 0.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10_000,
    }
    if mode != "plain":
        options = {
            "memory": "2GB",
            "time_limit_seconds": 10,
            "warmup_steps": warmup_steps if mode == "warm-up" else 0,
        }
        if boundaries := json.loads(os.environ["PEERS_BOUNDARIES"]):
            options["algorithm"] = boundaries
        config["pipeline"] = {"partition_method": "madpipe", "madpipe": options}
    torch.manual_seed(3)
    module, data = STRANGERS[name](folder, num_steps + NUM_AFTER)
    draw_weights(module)
    engine, *_ = deepspeed.initialize(model=module, config=config)
    batches = data(engine) if callable(data) else itertools.repeat(iter(data))
    losses = [engine.train_batch(next(batches)).item() for _ in range(num_steps)]
    # What is told after the last step depends on what was saved, evaluated and loaded again.
    engine.save_checkpoint("checkpoint")
    losses.append(engine.eval_batch(next(batches)).item())
    losses += [engine.train_batch(next(batches)).item() for _ in range(2)]
    engine.load_checkpoint("checkpoint")
    losses += [engine.train_batch(next(batches)).item() for _ in range(2)]
    losses.append(engine.eval_batch(next(batches)).item())
    if torch.distributed.get_rank() == 0:
        plan = getattr(engine, "plan", None)
        parts = [int(part) for part in module.parts]
        cut = parts if plan is None else [[*stage.layers, stage.device] for stage in plan.stages]
        out.write_text(json.dumps({"losses": losses, "cut": cut}))
    torch.distributed.destroy_process_group()


def losses_of(arguments: argparse.Namespace, name: str, mode: str, zero: int) -> dict[str, Any] | str:
    """Train on processes of their own. Returns what rank 0 wrote, or the last lines of what was said."""
    folder = getattr(arguments, name.replace("-", "_")).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out.json")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={arguments.ranks}",
        ]
        command += [__file__, "--worker", name, str(folder), mode, str(zero), str(arguments.steps)]
        command += [str(arguments.warmup_steps), str(out)]
        path = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "PEERS_BOUNDARIES": json.dumps(arguments.boundaries)}
        try:
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=arguments.limit, cwd=scratch
            )
        except subprocess.TimeoutExpired:
            return f"did not end in {arguments.limit} s"
        if out.exists():
            return json.loads(out.read_text())
        Path(tempfile.gettempdir(), f"peers-{name}.txt").write_text(run.stdout + run.stderr)
        errors = [line for line in run.stderr.splitlines() if "Error" in line and "ChildFailed" not in line]
        return "\n        ".join(errors[:4] or run.stderr.splitlines()[-5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in NAMES:
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--zero", nargs="+", type=int, choices=(0, 1), default=[0, 1])
    parser.add_argument("--boundaries", nargs="+", type=int, help="the cut of the plan; left out: the best one")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--limit", type=int, default=300, help="seconds for one run")
    arguments = parser.parse_args()
    given = [name for name in NAMES if getattr(arguments, name.replace("-", "_")) is not None]
    if not given:
        parser.error(f"give the folder of at least one of {', '.join(f'--{name}' for name in NAMES)}")

    num_different = 0
    for name in given:
        for zero in arguments.zero:
            plain: list[float] | None = None
            for mode in arguments.mode:
                result = losses_of(arguments, name, mode, zero)
                row = f"{name:18} ZeRO {zero}  {mode:8}"
                if isinstance(result, str):
                    print(f"{row} failed:\n        {result}", flush=True)
                    num_different += 1
                    continue
                losses = result["losses"]
                if mode == "plain":
                    plain = losses
                told = ""
                if plain is not None and mode != "plain":
                    worst = max(
                        abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, plain, strict=True)
                    )
                    told = f"differs by {worst:.1e} at the most"
                    num_different += worst > 1e-5
                last = losses[arguments.steps - 1]
                print(f"{row} {losses[0]:.5f} ... {last:.5f}  cut {result['cut']}  {told}", flush=True)
    raise SystemExit(1 if num_different else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _, _, name, folder, mode, zero, num_steps, warmup_steps, out = sys.argv
        train(name, Path(folder), mode, int(zero), int(num_steps), int(warmup_steps), Path(out))
    else:
        main()
