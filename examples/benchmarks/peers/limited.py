"""Do models that nobody here wrote train under a memory limit that a cut without a thought for memory exceeds?

    python examples/benchmarks/peers/limited.py FOLDER [--only NAME ...] [--share 0.8] [--out FILE]

FOLDER has a checkout of each public repository, as ``OWNER+NAME``; nothing is downloaded, and no code of theirs
stands here. Each model trains for some steps under Lightning, in one line of settings: on one process; on two
with the cut that balances parameters (``algorithm="parameters"``) and no limit; and with ``strategy="madpipe"``
under an enforced limit, a share of what the largest rank of the other cut needed. Losses are compared with one
process, and each rank's peak with the limit and the plan.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[3]))
from deepspeed_partition import Plan
from deepspeed_partition.planner.units import format_bytes
from deepspeed_partition.profiling import counted_memory
from tests.ranks import run_ranks

NUM_BATCHES, NUM_MICRO_BATCHES, BATCH = 4, 4, 16
CLASSES, WORDS, LENGTH = 10, 50, 32
LIMIT_SECONDS = 300


@dataclass(frozen=True)
class Model:
    """A model of others, and one sample of its input."""

    make: Callable[[Path], nn.Module]
    sample: tuple[int, ...]
    is_text: bool = False


def loaded(path: Path, name: str | None = None) -> Any:
    """Import a file of others by its path."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def with_timm() -> None:
    """Stand in for what ConvNeXt imports of timm, which would bring torchvision."""

    class DropPath(nn.Identity):
        def __init__(self, rate: float) -> None:
            super().__init__()

    layers = types.ModuleType("timm.models.layers")
    layers.trunc_normal_, layers.DropPath = nn.init.trunc_normal_, DropPath  # type: ignore[attr-defined]
    registry = types.ModuleType("timm.models.registry")
    registry.register_model = lambda function: function  # type: ignore[attr-defined]
    sys.modules |= {"timm": types.ModuleType("timm"), "timm.models": types.ModuleType("timm.models")}
    sys.modules |= {"timm.models.layers": layers, "timm.models.registry": registry}


def amoebanet(folder: Path) -> nn.Module:
    sys.path.insert(0, str(folder / "kakaobrain+torchgpipe/benchmarks/models"))
    return importlib.import_module("amoebanet").amoebanetd(num_classes=CLASSES, num_layers=6, num_filters=64)


def resnet(folder: Path) -> nn.Module:
    sys.path[:0] = [str(folder / "kakaobrain+torchgpipe"), str(folder / "kakaobrain+torchgpipe/benchmarks/models")]
    return importlib.import_module("resnet").resnet101(num_classes=CLASSES)


def convnext(folder: Path) -> nn.Module:
    with_timm()
    made = loaded(folder / "facebookresearch+ConvNeXt/models/convnext.py")
    return made.ConvNeXt(num_classes=CLASSES, depths=[2, 2, 4, 2], dims=[24, 48, 96, 192], head_init_scale=1.0)


def vit(name: str, **more: Any) -> Callable[[Path], nn.Module]:
    def make(folder: Path) -> nn.Module:
        made = loaded(folder / f"lucidrains+vit-pytorch/vit_pytorch/{name}.py")
        kind = {"simple_vit": "SimpleViT", "vit": "ViT", "deepvit": "DeepViT", "parallel_vit": "ViT"}
        common = {"image_size": 64, "num_classes": CLASSES, "dim": 96, "heads": 4, "mlp_dim": 384}
        return getattr(made, kind[name])(**common, **more)

    return make


def rwkv(folder: Path) -> nn.Module:
    made = loaded(folder / "BlinkDL+RWKV-LM/RWKV-v1/src/model.py", "rwkv_model")
    config = made.GPTConfig(
        WORDS, LENGTH, model_type="RWKV", n_head=4, n_attn=96, n_ffn=192, n_layer=6, n_embd=96,
        rwkv_emb_scale=0.4, rwkv_tiny_attn=0, rwkv_tiny_head=0,
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = made.GPT(config)

        def forward(self, x: Tensor) -> Tensor:
            return self.gpt(x)[0].transpose(1, 2)

    return Logits()


def unet(folder: Path) -> nn.Module:
    made = loaded(folder / "Lightning-Universe+lightning-bolts/src/pl_bolts/models/vision/unet.py")
    return made.UNet(CLASSES, input_channels=3, num_layers=4, features_start=8)


PICTURE = (3, 64, 64)
MODELS = {
    "torchgpipe: AmoebaNet-D": Model(amoebanet, (3, 224, 224)),
    "torchgpipe: ResNet-101": Model(resnet, PICTURE),
    "ConvNeXt": Model(convnext, PICTURE),
    "vit-pytorch: SimpleViT": Model(vit("simple_vit", patch_size=8, depth=6), PICTURE),
    "vit-pytorch: ViT": Model(vit("vit", patch_size=8, depth=6), PICTURE),
    "vit-pytorch: DeepViT": Model(vit("deepvit", patch_size=8, depth=6), PICTURE),
    "vit-pytorch: ParallelViT": Model(
        vit("parallel_vit", patch_size=8, depth=4, num_parallel_branches=2), PICTURE
    ),
    "RWKV-v1": Model(rwkv, (LENGTH,), is_text=True),
    "bolts: U-Net": Model(unet, PICTURE),
}


class Classifier(pl.LightningModule):
    """What a user would write around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def data_of(model: Model) -> DataLoader:
    random = torch.Generator().manual_seed(1)
    shape = (NUM_BATCHES * BATCH, *model.sample)
    if model.is_text:
        x = torch.randint(WORDS, shape, generator=random)
        y = x.roll(-1, dims=1)
    else:
        x = torch.randn(shape, generator=random)
        y = torch.randint(CLASSES, (len(x), 64, 64) if model.make is unet else (len(x),), generator=random)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def train(name: str, folder: Path, strategy: Any, limit: int | None, out: Path) -> None:
    """Train on this rank, and write losses, the peak and what the plan says of it."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    data = data_of(MODELS[name])
    with counted_memory(limit_bytes=limit) as memory:
        module = Classifier(MODELS[name].make(folder))
        trainer = pl.Trainer(
            accelerator="cpu", devices=2 if strategy != "auto" else 1, strategy=strategy, max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, data)
        found: dict[str, Any] = {"losses": [float(loss) for loss in module.losses], "peak": memory.peak_bytes}
    if strategy != "auto":
        plan, rank = Plan.load(out / "plan.json"), trainer.global_rank
        found |= {
            "boundaries": plan.boundaries,
            "recomputed": [stage.rematerialize for stage in plan.stages],
            "planned": plan.peak_memory_bytes[rank],
        }
    (out / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))


def run(name: str, folder: Path, num_ranks: int | None, strategy: Any, limit: int | None = None) -> Any:
    """Return what each rank wrote, or the end of the log."""
    with tempfile.TemporaryDirectory() as out:
        arguments = ["rank", json.dumps([name, str(folder), strategy, limit, out])]
        log = Path(out, "log")
        if run_ranks(Path(__file__), arguments, num_ranks, log, timeout_seconds=LIMIT_SECONDS):
            Path("/tmp/me_log.txt").write_text(log.read_text())
            return log.read_text()[-300:]
        return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(num_ranks or 1)]


def compared(name: str, folder: Path, share: float) -> dict[str, Any]:
    """Run one model in three ways, and say what came of it in a line."""
    shared = {"num_micro_batches": NUM_MICRO_BATCHES, "warmup_epochs": 0}
    alone = run(name, folder, None, "auto")
    balanced = run(name, folder, 2, {**shared, "algorithm": "parameters"})
    row: dict[str, Any] = {"model": name, "alone": alone, "parameters": balanced}
    if isinstance(alone, str) or isinstance(balanced, str):
        print(f"{name}: {alone if isinstance(alone, str) else balanced}")
        return row
    limit = row["limit"] = int(share * max(rank["peak"] for rank in balanced))
    limited = row["limited"] = run(name, folder, 2, shared, limit)
    if isinstance(limited, str):
        print(f"{name} under {format_bytes(limit)}: {limited}")
        return row

    def difference(ranks: list[dict[str, Any]]) -> float:
        pairs = zip(ranks[0]["losses"], alone[0]["losses"], strict=True)
        return max(abs(ours / one - 1) for ours, one in pairs)

    print(
        f"{name}: {format_bytes(max(rank['peak'] for rank in balanced))} with parameters balanced "
        f"{balanced[0]['boundaries']} (losses {difference(balanced):.1e} from one process), under "
        f"{format_bytes(limit)}: {[format_bytes(rank['peak']) for rank in limited]}, planned "
        f"{[format_bytes(rank['planned']) for rank in limited]}, {limited[0]['boundaries']}, recomputed "
        f"{limited[0]['recomputed']}, losses {difference(limited):.1e} from one process",
        flush=True,
    )
    return row


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        name, folder, strategy, limit, out = json.loads(sys.argv[2])
        if isinstance(strategy, dict):
            from lightning_madpipe import MadPipeStrategy

            strategy = MadPipeStrategy(**strategy, save_plan=Path(out, "plan.json"))
        train(name, Path(folder), strategy, limit, Path(out))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=(), help="words that the name of a model has")
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("MADPIPE_TEST_SERVER", f"{tempfile.mkdtemp()}/server")
    names = [name for name in MODELS if not arguments.only or any(word in name for word in arguments.only)]
    rows = [compared(name, arguments.folder.resolve(), arguments.share) for name in names]
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
