"""Lightning modules of four more repositories, with ordinary nets: pictures, news, reviews, a table of flowers.

Nothing but the strategy changes, and what Lightning 2 no longer takes.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from script import Script, images
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

PICTURES = "huyvnphan+PyTorch_CIFAR10"
NEWS = "arunashamil+ag-news/ag_news/modules"
REVIEWS = "adirizq+indonesian-review-rating-prediction/models"
NUM_SAMPLES = 48


def _texts(length: int, classes: int) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(30, (NUM_SAMPLES, length), generator=generator)
    return TensorDataset(words, torch.randint(classes, (NUM_SAMPLES,), generator=generator))


def _table() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(NUM_SAMPLES, 4, generator=generator), torch.arange(NUM_SAMPLES) % 3)


def _vectors() -> Tensor:
    return torch.randn(30, 12, generator=torch.Generator().manual_seed(5))


def _pictures(classifier: str, smaller: dict[str, str], **more: Any) -> Script:
    def build(names: Any) -> Any:
        names.all_classifiers = {classifier: getattr(names, classifier)()}  # theirs makes all thirteen
        return names.CIFAR10Module(
            Namespace(classifier=classifier, learning_rate=0.01, weight_decay=0.01, max_epochs=2)
        )

    file = classifier.rstrip("0123456789_bn")
    return Script(
        [f"{PICTURES}/cifar10_models/{file}.py", f"{PICTURES}/module.py"], build, images(3, 32, 32),
        today=PICTURES_TODAY | smaller, paths=[PICTURES], **more,
    )  # fmt: skip


PICTURES_TODAY = {
    "from pytorch_lightning.metrics import Accuracy": "from torchmetrics.classification import MulticlassAccuracy",
    "Accuracy()": "MulticlassAccuracy(10, average='micro')",
    "self.hparams = hparams": "self.save_hyperparameters(hparams)",
    "len(self.train_dataloader())": "3",  # whose loader is given to fit() here
}
SMALLER_VGG = {
    '"A": [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]':
        '"A": [8, "M", 8, "M", 16, 16, "M", 16, 16, "M", 16, 16, "M"]',
    "512 * 1 * 1": "16",
    "4096": "32",
}  # fmt: skip
SMALLER_RESNET = {
    "self.inplanes = 64": "self.inplanes = 8", "(block, 64,": "(block, 8,", "block, 128,": "block, 16,",
    "block, 256,": "block, 16,", "block, 512,": "block, 32,", "nn.Linear(512 ": "nn.Linear(32 ",
}  # fmt: skip


def _news(kind: str) -> Script:
    return Script(
        [f"{NEWS}/{kind.lower()}_model.py", f"{NEWS}/trainer.py"],
        lambda names: names.TextClassifier(
            getattr(names, f"{kind}Classifier")(30, 12, 16, 2, 4, 0.0), 1e-3, 30, 0.0
        ),
        lambda: _texts(9, 4),
    )


PASSERS_BY: dict[str, Script] = {
    "PyTorch_CIFAR10: VGG, loss in forward, num_micro_batches=1": _pictures(
        "vgg11_bn", SMALLER_VGG, num_micro_batches=1
    ),
    "PyTorch_CIFAR10: ResNet, loss in forward": _pictures("resnet18", SMALLER_RESNET),
    "ag-news: LSTM": _news("LSTM"),
    "ag-news: RNN": _news("RNN"),
    "indonesian reviews: LSTM on frozen vectors, metrics by class": Script(
        [f"{REVIEWS}/lstm.py"], lambda names: names.LSTM(_vectors(), 12, 16, num_layers=2, dropout=0.0),
        lambda: _texts(9, 5),
    ),
    "indonesian reviews: convolutions of words": Script(
        [f"{REVIEWS}/cnn_1d.py"], lambda names: names.CNN1D(_vectors(), 12, dropout=0.0), lambda: _texts(20, 5)
    ),
    "tz_kaggle: iris": Script(
        ["tztechno+tz_kaggle/lightning_tabular.py"], lambda names: names.IrisClassifier(), _table
    ),
}  # fmt: skip
