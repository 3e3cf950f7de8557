"""Do Lightning modules that nobody here wrote train under ``strategy="madpipe"`` as on one device, or say why not?

    python examples/benchmarks/peers/lightning_scripts.py FOLDER [--only NAME ...] [--out FILE]

FOLDER has a checkout (or the files named in ``SCRIPTS``) of each public repository, as ``OWNER+NAME``; nothing is
downloaded, and no code of theirs stands here. Their classes run as they are, on random data, with dropout at 0,
whose numbers differ between one process and two. Each trains on one process with Lightning alone, then on two:
unchanged, and, where its layers are unknown, with the ``pipeline_layers()`` that its user would write. Losses of
every step and the final weights, which every rank has after ``fit``, are compared.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

NUM_BATCHES, BATCH_SIZE, NUM_EPOCHS = 3, 16, 2
LIMIT_SECONDS, SECONDS_EACH = 120, 30
"""For the start of a job, and for each script in it, when the machine is busy."""

UVA, EXAMPLES = "Lightning-AI+tutorials/course_UvA-DL", "Lightning-AI+pytorch-lightning/examples/pytorch"
BASICS, BOLTS = (
    "Lightning-AI+dl-fundamentals/unit05-lightning",
    "Lightning-Universe+lightning-bolts/src/pl_bolts/models",
)


# What the scripts are, and what a user would write for each


@dataclass(frozen=True)
class Script:
    files: Sequence[str]
    """Within FOLDER; the last one has the module, which may use the others' names."""
    build: Callable[[Any], Any]
    """The LightningModule, from the names in the files."""
    data: Callable[[], Dataset]
    layers: Callable[[Any, Any], list[Any]] | None = None
    """What ``pipeline_layers()`` would return, from the module and the names."""
    callbacks: Callable[[Any], list[Any]] = lambda names: []


def images(*shape: int, classes: int = 10) -> Callable[[], TensorDataset]:
    """Random images with labels."""

    def draw() -> TensorDataset:
        num_samples = NUM_BATCHES * BATCH_SIZE
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(num_samples, *shape, generator=generator)
        return TensorDataset(x, torch.randint(classes, (num_samples,), generator=generator))

    return draw


def numbers(inputs: Sequence[int], outputs: Sequence[int]) -> Callable[[], TensorDataset]:
    """Random numbers, and others to be found from them."""

    def draw() -> TensorDataset:
        num_samples = NUM_BATCHES * BATCH_SIZE
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(num_samples, *inputs, generator=generator)
        return TensorDataset(x, torch.randn(num_samples, *outputs, generator=generator))

    return draw


def tokens(length: int, vocabulary: int, *, pairs: bool = True) -> Callable[[], TensorDataset]:
    def draw() -> TensorDataset:
        text = torch.randint(
            vocabulary, (NUM_BATCHES * BATCH_SIZE, length + 1), generator=torch.Generator().manual_seed(3)
        )
        return TensorDataset(text[:, :-1], text[:, 1:]) if pairs else TensorDataset(text)

    return draw


class Samples(Dataset):
    """A data set of anything that a batch is collated from."""

    def __init__(self, sample: Callable[[], Any]) -> None:
        torch.manual_seed(3)
        self._samples = [sample() for _ in range(NUM_BATCHES * BATCH_SIZE)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


class WithTokens(nn.Module):
    """The first layer of a vision transformer, around its parts."""

    def __init__(self, transformer: Any, to_patches: Any) -> None:
        super().__init__()
        self.input_layer, self.dropout = transformer.input_layer, transformer.dropout
        self.cls_token, self.pos_embedding = transformer.cls_token, transformer.pos_embedding
        self._to_patches, self._size = to_patches, transformer.patch_size

    def forward(self, images: Tensor) -> Tensor:
        x = self.input_layer(self._to_patches(images, self._size))
        x = torch.cat([self.cls_token.repeat(len(x), 1, 1), x], dim=1) + self.pos_embedding[:, : x.shape[1] + 1]
        return self.dropout(x).transpose(0, 1)


class Turned(nn.Module):
    """A block whose samples are in dimension 1, between layers whose samples are in dimension 0."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.transpose(0, 1)).transpose(0, 1)


class FirstState(nn.Module):
    def __init__(self, lstm: nn.Module) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class SmallResNet(nn.Module):
    """In the place of torchvision's, which is not installed."""

    def __init__(self, num_classes: int = 10, **_: Any) -> None:
        super().__init__()
        self.conv1, self.bn1, self.maxpool = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.MaxPool2d(2)
        self.relu, self.fc = nn.ReLU(), nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(_pooled(self.maxpool(self.relu(self.bn1(self.conv1(x))))))


def _pooled(x: Tensor) -> Tensor:
    return x.mean(dim=(2, 3))


VIT = {
    "embed_dim": 16, "hidden_dim": 32, "num_heads": 2, "num_layers": 3, "patch_size": 4, "num_channels": 3,
    "num_patches": 64, "num_classes": 10, "dropout": 0.0,
}  # fmt: skip
PREDICTOR = {
    "input_dim": 10, "model_dim": 16, "num_heads": 2, "num_classes": 10, "num_layers": 2, "lr": 5e-4, "warmup": 5,
    "max_iters": 100,
}  # fmt: skip

SCRIPTS: dict[str, Script] = {
    "dl-fundamentals 5.2: MLP": Script(
        [
            f"{BASICS}/5.2-mlp-lightning/shared_utilities.py",
            f"{BASICS}/5.2-mlp-lightning/5.2-part3-lightning-mlp.py",
        ],
        lambda names: names.LightningModel(names.PyTorchMLP(784, 10), 0.05),
        images(1, 28, 28),
        lambda module, names: [nn.Flatten(), *module.model.all_layers],
    ),
    "dl-fundamentals 5.3: MLP with torchmetrics": Script(
        [
            f"{BASICS}/5.3-torchmetrics/shared_utilities.py",
            f"{BASICS}/5.3-torchmetrics/5.3-part2-lightning-torchmetrics.py",
        ],
        lambda names: names.LightningModel(names.PyTorchMLP(784, 10), 0.05),
        images(1, 28, 28),
        lambda module, names: [nn.Flatten(), *module.model.all_layers],
    ),
    "dl-fundamentals: regression": Script(
        [f"{BASICS}/exercises/solutions/1_lightning-regression/shared_utilities.py"],
        lambda names: names.LightningModel(names.PyTorchMLP(3), 0.001),
        numbers([3], []),
        lambda module, names: [*module.model.all_layers, torch.flatten],
    ),
    "dl-fundamentals 6.5: configurable MLP": Script(
        ["Lightning-AI+dl-fundamentals/unit06-dl-tips/6.5-hparam-opt/6.5-part3-cli-configurable/shared_utilities.py"],
        lambda names: names.LightningModel2(None, [20, 10], 0.1),
        images(100, classes=2),
        lambda module, names: [nn.Flatten(), *module.model.layers],
    ),
    "tutorials: hello world, one layer": Script(
        ["Lightning-AI+tutorials/lightning_examples/mnist-hello-world/hello-world.py"],
        lambda names: names.MNISTModel(),
        images(1, 28, 28),
        lambda module, names: [nn.Flatten(), module.l1, torch.relu],
    ),
    "tutorials: hello world, with nn.Sequential": Script(
        ["Lightning-AI+tutorials/lightning_examples/mnist-hello-world/hello-world.py"],
        lambda names: names.LitMNIST(data_dir=""),
        images(1, 28, 28),
    ),
    "tutorials: CIFAR-10 baseline": Script(
        ["Lightning-AI+tutorials/lightning_examples/cifar10-baseline/baseline.py"],
        lambda names: names.LitResnet(lr=0.05),
        images(3, 16, 16),
        lambda module, names: [
            module.model.conv1, module.model.bn1, module.model.relu, module.model.maxpool, _pooled,
            module.model.fc, nn.LogSoftmax(1),
        ],
    ),
    "tutorials: GAN": Script(
        ["Lightning-AI+tutorials/lightning_examples/basic-gan/gan.py"],
        lambda names: names.GAN(1, 28, 28),
        images(1, 28, 28),
    ),
    "tutorials: Barlow twins": Script(
        ["Lightning-AI+tutorials/lightning_examples/barlow-twins/barlow_twins.py"],
        lambda names: names.BarlowTwins(nn.Linear(8, 8), 8, 48, 16),
        lambda: Samples(lambda: ((torch.randn(8), torch.randn(8), torch.randn(8)), 0)),
        lambda module, names: [module.encoder, module.projection_head],
    ),
    "UvA 4: ResNet": Script(
        [f"{UVA}/04-inception-resnet-densenet/notebook.py"],
        lambda names: _uva_resnet(names),
        images(3, 16, 16),
        lambda module, names: [*module.model.input_net, *module.model.blocks, *module.model.output_net],
    ),
    "UvA 5: transformer predictor": Script(
        [f"{UVA}/05-transformers-and-MH-attention/MHAttention.py"],
        lambda names: names.ReversePredictor(**PREDICTOR),
        lambda: TensorDataset(*(lambda x: (x, x.flip(1)))(tokens(6, 10)().tensors[0])),
        lambda module, names: [
            *module.input_net, module.positional_encoding, *module.transformer.layers, *module.output_net,
        ],
    ),
    "UvA 8: convolutional autoencoder": Script(
        [f"{UVA}/08-deep-autoencoders/notebook.py"],
        lambda names: names.Autoencoder(4, 8),
        images(3, 32, 32),
        lambda module, names: [
            *module.encoder.net, *module.decoder.linear, lambda x: x.reshape(x.shape[0], -1, 4, 4),
            *module.decoder.net,
        ],
    ),
    "UvA 11: vision transformer": Script(
        [f"{UVA}/11-vision-transformer/VT.py"],
        lambda names: _uva_vit(names),
        images(3, 32, 32),
        lambda module, names: [
            WithTokens(module.model, names.img_to_patch), lambda x: x.transpose(0, 1),
            *(Turned(block) for block in module.model.transformer), lambda x: x[:, 0], *module.model.mlp_head,
        ],
    ),
    "UvA 13: logistic regression": Script(
        [f"{UVA}/13-contrastive-learning/SimCLR.py"],
        lambda names: names.LogisticRegression(16, 10, 1e-3, 1e-3),
        images(16),
    ),
    "UvA 13: SimCLR": Script(
        [f"{UVA}/13-contrastive-learning/SimCLR.py"],
        lambda names: _simclr(names),
        lambda: Samples(lambda: ([torch.randn(3, 8, 8), torch.randn(3, 8, 8)], 0)),
        lambda module, names: [module.convnet.body, *module.convnet.fc],
    ),
    "Lightning: autoencoder": Script(
        [f"{EXAMPLES}/basics/autoencoder.py"],
        lambda names: names.LitAutoEncoder(),
        images(1, 28, 28),
        lambda module, names: [*module.encoder, *module.decoder],
    ),
    "Lightning: backbone classifier": Script(
        [f"{EXAMPLES}/basics/backbone_image_classifier.py"],
        lambda names: names.LitClassifier(),
        images(1, 28, 28),
        lambda module, names: [nn.Flatten(), module.backbone.l1, torch.relu, module.backbone.l2, torch.relu],
    ),
    "Lightning: backbone classifier, functions left out": Script(
        [f"{EXAMPLES}/basics/backbone_image_classifier.py"],
        lambda names: names.LitClassifier(),
        images(1, 28, 28),
        lambda module, names: [nn.Flatten(), module.backbone.l1, module.backbone.l2],
    ),
    "Lightning: transformer language model": Script(
        [f"{EXAMPLES}/basics/transformer.py"],
        lambda names: names.LanguageModel(vocab_size=20),
        tokens(7, 20),
    ),
    "Lightning: bug report": Script(
        [f"{EXAMPLES}/bug_report/bug_report_model.py"],
        lambda names: names.BoringModel(),
        lambda: Samples(lambda: torch.randn(32)),
        lambda module, names: [module.layer],
    ),
    "Lightning: U-Net": Script(
        [f"{EXAMPLES}/domain_templates/semantic_segmentation.py"],
        lambda names: _unet(names),
        lambda: TensorDataset(torch.randn(48, 3, 8, 8), torch.randint(19, (48, 8, 8))),
    ),
    "Lightning: fine-tuning callback": Script(
        [f"{EXAMPLES}/domain_templates/computer_vision_fine_tuning.py"],
        lambda names: _fine_tuned(names),
        images(3, 8, 8, classes=2),
        lambda module, names: [*module.feature_extractor, nn.Flatten(), *module.fc],
        lambda names: [names.MilestonesFinetuning((1, 2))],
    ),
    "bolts: MNIST": Script(
        [f"{BOLTS}/mnist_module.py"],
        lambda names: names.LitMNIST(),
        images(1, 28, 28),
        lambda module, names: [nn.Flatten(), module.l1, torch.relu, module.l2, torch.relu],
    ),
    "dl-systems-design: LitModel": Script(
        ["bharadwajvyadavalli+dl-systems-design/training/model.py"], lambda names: names.LitModel(), images(784)
    ),
    "Cerebro: LSTM forecast": Script(
        ["tutur90+Cerebro/model.py"],
        lambda names: names.LSTMForecast(4, 8, 2, 0.0, 1e-2),
        numbers([6, 4], [1]),
        lambda module, names: [FirstState(module.lstm), lambda x: x[:, -1, :], module.fc],
    ),
    "rna_sequencing: two layers": Script(
        ["XfensorX+rna_sequencing/experiments/encoding/models/model1.py"],
        lambda names: names.Model1(8, 2, 16),
        numbers([8], [2]),
        lambda module, names: [module.layer1, torch.relu, module.layer2],
    ),
}  # fmt: skip


def _uva_resnet(names: Any) -> Any:
    names.model_dict["ResNet"] = names.ResNet
    hparams = {"num_classes": 10, "c_hidden": [4, 8], "num_blocks": [1, 1], "act_fn_name": "relu"}
    return names.CIFARModule("ResNet", hparams, "SGD", {"lr": 0.1, "momentum": 0.9})


def _uva_vit(names: Any) -> Any:
    names.train_loader = [(torch.zeros(1, 3, 32, 32), None)]
    return names.ViT(VIT, 3e-4)


def _unet(names: Any) -> Any:
    names.KITTI = MagicMock()
    return names.SegModel("", num_layers=2, features_start=4)


def _fine_tuned(names: Any) -> Any:
    names.get_torchvision_model = lambda *_, **__: nn.Sequential(
        nn.Conv2d(3, 2048, 8), nn.BatchNorm2d(2048), nn.ReLU(), nn.Identity()
    )
    return names.TransferLearningModel()


def _simclr(names: Any) -> Any:
    class Small(nn.Module):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
            self.fc = nn.Linear(144, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.body(x))

    names.torchvision.models.resnet18 = Small
    return names.SimCLR(4, 5e-4, 0.07, 1e-4)


# Their definitions, without what runs when a script is started


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that a script imports and that are not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] in self.names else None

    def create_module(self, spec: Any) -> Any:
        stub = MagicMock()
        stub.__path__, stub.__spec__, stub.__name__ = [], spec, spec.name
        stub.resnet18 = stub.models.resnet18 = SmallResNet
        return stub

    def exec_module(self, module: Any) -> None:
        pass

    def __init__(self) -> None:
        self.names: set[str] = set()


def definitions_of(folder: Path, files: Sequence[str]) -> Any:
    """The imports, classes, functions and plain settings of scripts, as attributes of one object."""
    missing = _Missing()
    sys.meta_path.append(missing)
    names: dict[str, Any] = {"__name__": "script"}
    for file in files:
        for node in ast.parse((folder / file).read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                root = (getattr(node, "module", None) or node.names[0].name).split(".")[0]
                if root in ("shared_utilities", "__future__"):  # whose names are there already
                    continue
                if importlib.util.find_spec(root) is None:
                    missing.names.add(root)
            elif isinstance(node, ast.ClassDef):
                node.decorator_list = []  # such as bolts' warnings
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                if any(isinstance(part, ast.Call) and _is_theirs(part, names) for part in ast.walk(node)):
                    continue  # it would train
            elif not isinstance(node, ast.FunctionDef):
                continue
            try:
                exec(compile(ast.Module([node], []), file, "exec"), names)
            except Exception:
                if isinstance(node, ast.ClassDef):
                    raise
                # Otherwise a setting that needs data, a device or a download.
    return _Names(names)


def _is_theirs(call: ast.Call, names: dict[str, Any]) -> bool:
    called = names.get(call.func.id) if isinstance(call.func, ast.Name) else None
    return isinstance(called, types.FunctionType) and called.__module__ == "script"


class _Names:
    """The global names of scripts, as attributes."""

    def __init__(self, names: dict[str, Any]) -> None:
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name: str) -> Any:
        return self._names[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._names[name] = value


# One rank


OF_DATA = ("prepare_data", "setup", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


def train(folder: Path, name: str, mode: str) -> dict[str, Any]:
    """Train a script's module on this rank, and say what came of it."""
    script = SCRIPTS[name]
    names = definitions_of(folder, script.files)
    torch.manual_seed(1)
    module = script.build(names)
    base = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    namespace = "lightning.pytorch" if base.__module__.startswith("lightning.") else "pytorch_lightning"
    host = importlib.import_module(namespace)
    for hook in OF_DATA:  # they would download
        setattr(type(module), hook, getattr(base, hook))
    for part in module.modules():
        if isinstance(part, nn.Dropout | nn.Dropout2d):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention | nn.LSTM):
            part.dropout = 0.0
    if mode == "with layers":
        assert script.layers is not None
        type(module).pipeline_layers = lambda self: script.layers(self, names)  # type: ignore[misc]
    losses: list[float] = []

    class Losses(host.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]) if "loss" in outputs else math.nan)

    arguments: dict[str, Any] = {"devices": 1}
    if mode != "one process":
        import lightning_madpipe

        settings = {"num_micro_batches": 4, "bandwidth": 1e9, "latency_seconds": 0.0, "memory": "1GB"}
        strategy = lightning_madpipe.strategy_class(namespace)(**settings)
        arguments = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    loggers = importlib.import_module(f"{namespace}.loggers.logger")
    trainer = host.Trainer(
        accelerator="cpu", max_epochs=NUM_EPOCHS, logger=loggers.DummyLogger(), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Losses(), *script.callbacks(names)],
        **arguments,
    )  # fmt: skip
    said = _Said()
    logging.getLogger("deepspeed_partition").addHandler(said)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            loader = DataLoader(script.data(), batch_size=BATCH_SIZE)
            trainer.fit(module, loader, loader if hasattr(module, "validation_step") else None)
        except Exception as flaw:
            return {"refused": f"{type(flaw).__name__}: {flaw}"}
        finally:
            logging.getLogger("deepspeed_partition").removeHandler(said)
    said.lines += [str(one.message) for one in warned if "madpipe" in str(one.message)]
    weights = {key: value.double().flatten().tolist() for key, value in module.state_dict().items()}
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"losses": losses, "weights": weights, "metrics": metrics, "said": said.lines}


class _Said(logging.Handler):
    """Warnings of MadPipe's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "with a spread of" not in record.getMessage():  # a busy machine
            self.lines.append(record.getMessage())


# All of them


def run(folder: Path, names: Sequence[str], mode: str) -> dict[str, dict[str, Any]]:
    """What came of each script, in one job; where a job ends early, another one goes on behind the script."""
    found: dict[str, dict[str, Any]] = {}
    while rest := [name for name in names if name not in found]:
        new, end = _job(folder, rest, mode)
        found |= new
        if not new.keys() >= set(rest):
            found[next(name for name in rest if name not in new)] = {"refused": end}
    return found


def _job(folder: Path, names: Sequence[str], mode: str) -> tuple[dict[str, dict[str, Any]], str]:
    """What every rank wrote about scripts, and how the job ended."""
    with tempfile.TemporaryDirectory() as scratch:
        command, num_ranks = [sys.executable], 1 if mode == "one process" else 2
        if num_ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
        command += [str(Path(__file__).resolve()), str(folder.resolve()), "--rank-of", mode, "--only", *names]
        paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PEERS_OUT": scratch}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with Path(scratch, "log").open("w+") as log:
            job = subprocess.Popen(command, env=environment, cwd=scratch, stdout=log, stderr=log)
            try:
                end = f"the job ended with {job.wait(timeout=LIMIT_SECONDS + SECONDS_EACH * len(names))}"
            except subprocess.TimeoutExpired:
                job.terminate()
                job.wait()
                end = "did not end in time"
            log.seek(0)
            said = [line for line in log.read().splitlines() if "Error" in line or "rank " in line]
        files = [Path(scratch, f"rank-{rank}.json") for rank in range(num_ranks)]
        ranks = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        shared = [name for name in names if all(name in rank for rank in ranks)]
        return {name: _of_all([rank[name] for rank in ranks]) for name in shared}, " / ".join([end, *said[-3:]])


def _of_all(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if any(rank.get("weights") != ranks[0].get("weights") for rank in ranks):
        return {"refused": "RANKS HAVE OTHER WEIGHTS after fit, or only some ended"}
    return {**ranks[0], "said": [line for rank in ranks for line in rank.get("said", [])]}


def outcome(found: dict[str, Any], alone: dict[str, Any]) -> str:
    """One line for the table."""
    if "refused" in found:
        return " ".join(found["refused"].split())
    told = "; said: " + " / ".join(dict.fromkeys(found["said"])) if found["said"] else ""
    if found["weights"].keys() != alone["weights"].keys():
        return f"OTHER NAMES after fit{told}"
    loss = _largest(found["losses"], alone["losses"])
    weight = max((_largest(found["weights"][key], alone["weights"][key]) for key in alone["weights"]), default=0.0)
    metric = _largest(
        *([each["metrics"].get(key, math.nan) for key in alone["metrics"]] for each in (found, alone))
    )
    same = "equal" if max(loss, metric) < 1e-5 and weight < 1e-3 else "DIFFERENT"
    return f"{same}: losses {loss:.1e}, logged {metric:.1e}, weights {weight:.1e}{told}"


def _largest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference, relative to what is expected but for small numbers."""
    if len(found) != len(expected):
        return math.inf
    return max((abs(a - b) / max(abs(b), 0.1) for a, b in zip(found, expected, strict=True)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=list(SCRIPTS), help="names of scripts, or parts of names")
    parser.add_argument("--out", type=Path, help="where the table is written, too")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        _be_rank(arguments.folder, arguments.only, arguments.rank_of)
        return
    names = [name for name in SCRIPTS if any(part in name for part in arguments.only)]
    absent = [
        name for name in names if not all((arguments.folder / file).is_file() for file in SCRIPTS[name].files)
    ]
    names = [name for name in names if name not in absent]
    alone = run(arguments.folder, names, "one process")
    trained = [name for name in names if "refused" not in alone[name]]
    unchanged = run(arguments.folder, trained, "unchanged")
    declared = run(arguments.folder, [name for name in trained if SCRIPTS[name].layers is not None], "with layers")
    rows = [f"| {name} | not in {arguments.folder} | |" for name in absent]
    for name in names:
        if name not in trained:
            rows.append(f"| {name} | on one process: {outcome(alone[name], alone[name])} | |")
            continue
        with_layers = outcome(declared[name], alone[name]) if name in declared else ""
        rows.append(f"| {name} | {outcome(unchanged[name], alone[name])} | {with_layers} |")
    table = "\n".join(["| script | unchanged | with `pipeline_layers()` |", "|---|---|---|", *rows])
    print(table)
    if arguments.out is not None:
        arguments.out.write_text(table + "\n")


def _be_rank(folder: Path, names: Sequence[str], mode: str) -> None:
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = train(folder, name, mode)
        except Exception as flaw:  # of the script, before it trains
            results[name] = {"refused": f"{type(flaw).__name__}: {flaw}"}
        file = Path(os.environ["PEERS_OUT"], f"rank-{os.environ.get('RANK', '0')}.json")
        file.with_suffix(".new").write_text(json.dumps(results))
        file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    main()
