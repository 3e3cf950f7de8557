"""Lightning modules of nine more repositories, with ordinary nets, autoencoders, flows and a teacher.

Nothing changes but the strategy, sizes, what Lightning 2 no longer takes, and where a name says so.
"""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from script import Samples, Script, images
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

PICTURES = "huyvnphan+PyTorch_CIFAR10"
NEWS = "arunashamil+ag-news/ag_news/modules"
REVIEWS = "adirizq+indonesian-review-rating-prediction/models"
POSES, DIGITS = "MarkZakelj+openpose-extrapolation/src", "korintia+Variational-Autoencoder"
MAPS = "mingshauliu+DMLatent"
PROSTATE, STABILITY = "lucyannasxi+Prostate-Cancer-Segmenter-MICCAI2019", "georgeadam+stability"
NUM_SAMPLES = 48


def _texts(length: int, classes: int) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(30, (NUM_SAMPLES, length), generator=generator)
    return TensorDataset(words, torch.randint(classes, (NUM_SAMPLES,), generator=generator))


def _table() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(NUM_SAMPLES, 4, generator=generator), torch.arange(NUM_SAMPLES) % 3)


def _poses() -> Dataset:
    """Joints, of which a fifth is not seen, and all of them."""
    generator = torch.Generator().manual_seed(3)
    joints = torch.randn(NUM_SAMPLES, 36, generator=generator)
    return TensorDataset(joints.masked_fill(torch.rand(joints.shape, generator=generator) < 0.2, -10.0), joints)


def _segments() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    pictures = torch.randn(NUM_SAMPLES, 3, 32, 32, generator=generator)
    return TensorDataset(pictures, torch.randint(7, (NUM_SAMPLES, 1, 32, 32), generator=generator))


def _maps() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(*torch.randn(2, NUM_SAMPLES, 1, 16, 16, generator=generator))


def _numbered() -> Dataset:
    """Digits, their labels, their numbers, and where they are from."""
    generator = torch.Generator().manual_seed(3)
    digits = torch.randn(NUM_SAMPLES, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (NUM_SAMPLES,), generator=generator)
    return TensorDataset(digits, labels, torch.arange(NUM_SAMPLES), torch.zeros(NUM_SAMPLES))


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


def _segmentation(num_micro_batches: int) -> Script:
    return Script(
        [f"{PROSTATE}/utils.py", f"{PROSTATE}/model.py"], lambda names: names.Unet(3, 7), _segments,
        today=SMALLER_UNET, num_micro_batches=num_micro_batches,
    )  # fmt: skip


def _flow(architecture: str, changes: dict[str, str], **more: Any) -> Script:
    return Script(
        [f"{MAPS}/flow/models.py", f"{MAPS}/flow/module.py"],
        lambda names: names.FlowMatchingModel(architecture), _maps,
        today=SMALLER_MAPS | changes, **more,
    )  # fmt: skip


def _pairs() -> Dataset:
    return Samples(lambda: tuple(torch.randn(2, 1, 8, 8)))


def _pairs_of_classes() -> Dataset:
    return Samples(lambda: (*torch.randn(2, 1, 8, 8), *torch.randint(2, (2,))))


def _contrast(pairs: str, data: Any, changes: dict[str, str]) -> Script:
    config = {
        "model_type": "tiny", "pretrained_path": None, "loss_type": "nxtent", "pair_type": pairs, "lr": 1e-3,
        "weight_decay": 0.0, "epochs": 2,
    }  # fmt: skip
    return Script(
        [f"{MAPS}/contrast/models.py", f"{MAPS}/contrast/contrastive_module.py"],
        lambda names: names.ContrastiveModel(config), data,
        today={"self.out_features = 64": "self.out_features = 128"} | changes,
    )  # fmt: skip


def _distilled(names: Any) -> Any:
    teacher = names.LeNet(10, 1, 28, 1)
    return names.Distill(
        names.LeNet(10, 1, 28, 1), teacher, SimpleNamespace(name="adam", params={"lr": 1e-3}),
        SimpleNamespace(name="cosine", params={"T_max": 2}), 0.5,
    )  # fmt: skip


def _distilling(changes: dict[str, str]) -> Script:
    files = "base/factory", "models/lenet", "lightning_modules/creation", "lightning_modules/distill"
    return Script(
        [f"{STABILITY}/src/{file}.py" for file in files], _distilled, _numbered,
        today=STABILITY_TODAY | changes, paths=[STABILITY],
    )  # fmt: skip


SMALLER_MAPS = {"base_channels=64": "base_channels=4", "hidden_dim=256": "hidden_dim=16"}
SMALLER_UNET = {
    ".cuda()": "", "n_channels, 64)": "n_channels, 4)", "OutConv(64,": "OutConv(4,",
    "Down(64, 128)": "Down(4, 8)", "Down(128, 256)": "Down(8, 16)", "Down(256, 512)": "Down(16, 32)",
    "Down(512, 512)": "Down(32, 32)", "Up(1024, 256)": "Up(64, 16)", "Up(512, 128)": "Up(32, 8)",
    "Up(256, 64)": "Up(16, 4)", "Up(128, 64)": "Up(8, 4)",
}  # fmt: skip
TIMES_OF_THE_MAPS = {
    "t = self.sample_time(batch_size, device)": "t = torch.sigmoid(total_mass.mean((1, 2, 3)))",
    "torch.randn_like(total_mass)": "torch.sin(7 * total_mass)",
}
JOINED = {
    "z1 = self(x1)": "z1, z2 = self(torch.cat([x1, x2])).chunk(2)",
    "            z2 = self(x2)\n": "",
    "nn.BatchNorm2d(": "nn.GroupNorm(4, ",
}
STUDENT = "        logits = self.model(x)\n\n        loss, ce"
ONCE = {
    "            old_logits = self.original_model(x)": "            old_logits = self.old",
    "            original_logits = self.original_model(x)": "            original_logits = self.old",
}
TEACHER_FIRST = ONCE | {
    STUDENT: f"        with torch.no_grad():\n            self.old = self.original_model(x)\n{STUDENT}"
}
ONE_CALL = ONCE | {
    STUDENT: "        logits, self.old = self(batch)\n        loss, ce",
    "        logits = self.model(x)\n\n        return logits":
        "        with torch.no_grad():\n            old = self.original_model(x)\n"
        "        return self.model(x), old",
}  # fmt: skip
GIVEN_DRAWS = {
    """        mean, logvar = self.encode(x)
        z = self.reparameterization(mean, logvar)
        x_hat = self.decode(z)
        loss""": "        x_hat, mean, logvar = self(x, torch.sin(7 * x[:, :4]))\n        loss",
    """    def forward(self, x):
        # inference
        mask = x != -10.0
        mean, logvar = self.encode(x)
        z = self.reparameterization(mean, logvar)
        x_hat = self.decode(z)
        x_hat[mask] = x[mask]
        return x_hat""": """    def forward(self, x, noise):
        mean, logvar = self.encode(x)
        return self.decode(mean + logvar * noise), mean, logvar""",
}
STABILITY_TODAY = {
    "accuracy(preds, y)": "accuracy(preds, y, task='multiclass', num_classes=10)",
    "def training_epoch_end": "def of_training",
    "def validation_epoch_end": "def of_validation",
}

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
    "openpose-extrapolation: FCN": Script(
        [f"{POSES}/model.py"], lambda names: names.SkeletonExtrapolator(dropout=0.0), _poses
    ),
    "openpose-extrapolation: VAE, draws of the input": Script(
        [f"{POSES}/vae.py"], lambda names: names.SkeletonVAE(), _poses,
        today={"torch.randn_like(var)": "torch.sin(7 * var)"},
    ),
    "openpose-extrapolation: VAE": Script([f"{POSES}/vae.py"], lambda names: names.SkeletonVAE(), _poses),
    "openpose-extrapolation: VAE, one call that is given the draws": Script(
        [f"{POSES}/vae.py"], lambda names: names.SkeletonVAE(), _poses, today=GIVEN_DRAWS
    ),
    "Variational-Autoencoder: AE": Script(
        [f"{DIGITS}/ae_network.py", f"{DIGITS}/auto_encoder.py"], lambda names: names.AutoEncoder(),
        lambda: Samples(lambda: torch.rand(1, 28, 28)), trainer={"accumulate_grad_batches": 2},
    ),
    "Variational-Autoencoder: VAE": Script(
        [f"{DIGITS}/vae_network.py", f"{DIGITS}/vae.py"], lambda names: names.VAE(),
        lambda: Samples(lambda: torch.rand(1, 28, 28)), trainer={"accumulate_grad_batches": 2},
        today={"featureDim=32 * 20 * 20, zDim=256": "featureDim=32 * 20 * 20, zDim=4"},
    ),
    "Prostate: U-Net": _segmentation(4),
    "Prostate: U-Net, num_micro_batches=1": _segmentation(1),
    "DMLatent: flow of a U-Net": _flow("unet", {}),
    "DMLatent: flow of a U-Net, times of the maps, num_micro_batches=1": _flow(
        "unet", TIMES_OF_THE_MAPS, num_micro_batches=1
    ),
    "DMLatent: flow, group normalization, times by the number of samples": _flow(
        "cnn",
        {
            "torch.rand(batch_size, device=device)": "torch.linspace(0, 1, batch_size)",
            "BatchNorm2d(": "GroupNorm(2, ",
        },
    ),
    "DMLatent: contrast, two classes": _contrast("CDMWDM", _pairs_of_classes, {}),
    "DMLatent: contrast, two classes, joined, group normalization": _contrast("CDMWDM", _pairs_of_classes, JOINED),
    "DMLatent: contrast, SimCLR": _contrast("SimCLR", _pairs, {}),
    "DMLatent: contrast, SimCLR, joined, group normalization": _contrast("SimCLR", _pairs, JOINED),
    "DMLatent: stars, attention pooling, num_micro_batches=1": Script(
        [f"{MAPS}/cnn_stars/models.py", f"{MAPS}/cnn_stars/LClassifier.py"],
        lambda names: names.LClassifier("AttentionPooling"),
        images(1, 16, 16, classes=2), today={"verbose=True,": ""}, num_micro_batches=1,
    ),
    "stability: distillation": _distilling({}),
    "stability: distillation, the teacher once, before the student": _distilling(TEACHER_FIRST),
    "stability: distillation, one call": _distilling(ONE_CALL),
    "tz_kaggle: iris": Script(
        ["tztechno+tz_kaggle/lightning_tabular.py"], lambda names: names.IrisClassifier(), _table
    ),
}  # fmt: skip
