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
import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import json
import logging
import math
import os
import random
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy
import torch
from script import BATCH_SIZE, NUM_EPOCHS, Samples, Script, images, numbers, tokens
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

try:
    import pytorch_lightning as pl
    from lightning.pytorch.callbacks import EarlyStopping
except ImportError as missing:
    raise SystemExit("some scripts import lightning, others pytorch_lightning: install both") from missing

from as_they_are import AS_THEY_ARE
from domains_and_flows import DOMAINS_AND_FLOWS
from more_fields import MORE_FIELDS
from newcomers import NEWCOMERS
from other_kinds import OTHER_KINDS
from passers_by import PASSERS_BY
from single_modules import SINGLE_MODULES

LIMIT_SECONDS, SECONDS_EACH = 240, 30
"""The seconds for the start of a job, and for each script in it, when the machine is busy."""

UVA, EXAMPLES = "Lightning-AI+tutorials/course_UvA-DL", "Lightning-AI+pytorch-lightning/examples/pytorch"
BASICS, BOLTS = (
    "Lightning-AI+dl-fundamentals/unit05-lightning",
    "Lightning-Universe+lightning-bolts/src/pl_bolts/models",
)
MINGPT, INFORMER = "williamFalcon+minGPT/mingpt", "martinwhl+Informer-PyTorch-Lightning"
HYDRA = "ashleve+lightning-hydra-template/src/models"
SPELLS = "veritable-tech+pytorch-lightning-spells/pytorch_lightning_spells"
INFORMER_FILES = ("masking", "attention", "embedding", "encoder", "decoder", "model")


# What the scripts are, and what a user would write for each


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
    """A small network in the place of torchvision's, which is not installed."""

    def __init__(self, num_classes: int = 10, **_: Any) -> None:
        super().__init__()
        self.conv1, self.bn1, self.maxpool = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.MaxPool2d(2)
        self.relu, self.fc = nn.ReLU(), nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(_pooled(self.maxpool(self.relu(self.bn1(self.conv1(x))))))


class WithPositions(nn.Module):
    """The first layer of minGPT, around its parts."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb, self.drop = gpt.tok_emb, gpt.pos_emb, gpt.drop

    def forward(self, index: Tensor) -> Tensor:
        return self.drop(self.tok_emb(index) + self.pos_emb[:, : index.shape[1]])


class FirstOfImageGPT(nn.Module):
    def __init__(self, module: Any, names: Any) -> None:
        super().__init__()
        gpt = module.gpt
        self.token_embeddings, self.position_embeddings, self.sos = (
            gpt.token_embeddings, gpt.position_embeddings, gpt.sos,
        )  # fmt: skip
        self._shape_input, self._most = names._shape_input, module.hparams.vocab_size - 1

    def forward(self, images: Tensor) -> Tensor:
        x = torch.round(self._shape_input(images) * self._most).long()
        h = self.token_embeddings(x)
        sos = torch.ones(1, x.shape[1], h.shape[2]) * self.sos
        h = torch.cat([sos, h[:-1]], dim=0)
        return h + self.position_embeddings(torch.arange(len(x)).unsqueeze(-1)).expand_as(h)


class InformerInputs(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.encoder, self.decoder = module.model.enc_embedding, module.model.dec_embedding
        self._label_len, self._pred_len = module.hparams.label_len, module.hparams.pred_len

    def forward(self, x: Tensor, y: Tensor, x_mark: Tensor, y_mark: Tensor) -> tuple[Tensor, Tensor]:
        known = torch.cat([y[:, : self._label_len], torch.zeros_like(y[:, : self._pred_len])], dim=1)
        return self.encoder(x, x_mark), self.decoder(known, y_mark)


class OnFirst(nn.Module):
    """A layer of the encoder, past which the decoder's input goes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, encoded: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layer(encoded)
        return found[0] if isinstance(found, tuple) else found, decoded


class OnSecond(nn.Module):
    """A layer of the decoder, past which the encoder's output goes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, encoded: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
        return encoded, self.layer(decoded, encoded)


class Mixed(pl.LightningModule):
    """What a user of the callbacks writes around them."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 10)
        )
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


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
        edits={"self.model(imgs)": "self(imgs)", "        return self(imgs)": "        return self.model(imgs)"},
    ),
    "UvA 4: ResNet, num_micro_batches=1": Script(
        [f"{UVA}/04-inception-resnet-densenet/notebook.py"],
        lambda names: _uva_resnet(names),
        images(3, 16, 16),
        lambda module, names: [*module.model.input_net, *module.model.blocks, *module.model.output_net],
        edits={"self.model(imgs)": "self(imgs)", "        return self(imgs)": "        return self.model(imgs)"},
        num_micro_batches=1,
    ),
    "UvA 5: transformer predictor": Script(
        [f"{UVA}/05-transformers-and-MH-attention/MHAttention.py"],
        lambda names: names.ReversePredictor(**PREDICTOR),
        lambda: TensorDataset(*(lambda x: (x, x.flip(1)))(tokens(6, 10)().tensors[0])),
        lambda module, names: [
            *module.input_net, module.positional_encoding, *module.transformer.layers, *module.output_net,
        ],
        edits={"self.forward(inp_data, add_positional_encoding=True)": "self.forward(inp_data)"},
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
        edits={"preds = self.model(imgs)": "preds = self(imgs)"},
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
        lambda module, names: [*module.convnet.body, *module.convnet.fc],
        edits={
            "self.convnet(imgs)": "self(imgs)",
            "    def info_nce_loss":
                "    def forward(self, x):\n        return self.convnet(x)\n\n    def info_nce_loss",
        },
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
        trainer={"gradient_clip_val": 0.25},
    ),
    "Lightning: transformer language model, without its clipping": Script(
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
    "minGPT: groups, and a callback that sets the rate": Script(
        [f"{MINGPT}/lr_decay.py", f"{MINGPT}/model.py"],
        lambda names: names.GPT(20, n_embd=16, block_size=8, n_layer=3, n_head=2, learning_rate=3e-3),
        tokens(7, 20),
        lambda module, names: [WithPositions(module), *module.blocks, module.ln_f, module.head],
        lambda names: [names.LearningRateDecayCallback(3e-3, warmup_tokens=200, final_tokens=2000)],
        trainer={"gradient_clip_val": 1.0},
        today={
            "result = pl.TrainResult(minimize=loss, checkpoint_on=loss)": "",
            "result.log('train_loss', loss)": "self.log('train_loss', loss)",
            "return result": "return loss",
            "pl_module, batch, batch_idx, dataloader_idx": "pl_module, outputs, batch, batch_idx",
        },
    ),
    "hydra template: metrics, plateau schedule, early stopping": Script(
        [f"{HYDRA}/components/simple_dense_net.py", f"{HYDRA}/mnist_module.py"],
        lambda names: _hydra(names),
        images(1, 28, 28),
        lambda module, names: [nn.Flatten(), *module.net.model],
        lambda names: [EarlyStopping("val/acc", mode="max", patience=5)],
    ),
    "hydra template, num_micro_batches=1": Script(
        [f"{HYDRA}/components/simple_dense_net.py", f"{HYDRA}/mnist_module.py"],
        lambda names: _hydra(names),
        images(1, 28, 28),
        lambda module, names: [nn.Flatten(), *module.net.model],
        lambda names: [EarlyStopping("val/acc", mode="max", patience=5)],
        num_micro_batches=1,
    ),
    "spells: a callback that cuts and mixes batches": Script(
        [f"{SPELLS}/cutmix_utils.py", f"{SPELLS}/callbacks.py", f"{SPELLS}/losses.py"],
        lambda names: Mixed(names.MixupSoftmaxLoss()),
        images(3, 8, 8),
        callbacks=lambda names: [names.CutMixCallback(softmax_target=True)],
    ),
    "spells: mix-up, accumulated": Script(
        [f"{SPELLS}/cutmix_utils.py", f"{SPELLS}/callbacks.py", f"{SPELLS}/losses.py"],
        lambda names: Mixed(names.MixupSoftmaxLoss(label_smooth_eps=0.1)),
        images(3, 8, 8),
        callbacks=lambda names: [names.MixUpCallback(softmax_target=True)],
        trainer={"accumulate_grad_batches": 2},
    ),
    "bolts: image GPT, samples in dimension 1": Script(
        [f"{BOLTS}/vision/image_gpt/gpt2.py", f"{BOLTS}/vision/image_gpt/igpt_module.py"],
        lambda names: _image_gpt(names),
        lambda: (lambda found: TensorDataset((found.tensors[0] > 0).float(), found.tensors[1]))(images(1, 4, 4)()),
        lambda module, names: [FirstOfImageGPT(module, names), *module.gpt.layers, module.gpt.head],
        today={"def validation_epoch_end": "def _validation_end", "def test_epoch_end": "def _test_end"},
    ),
    "UvA 12: prototypes": Script(
        [f"{UVA}/12-meta-learning/notebook.py"],
        lambda names: _proto_net(names),
        lambda: (lambda found: TensorDataset(found.tensors[0], torch.arange(48) % 4))(images(3, 8, 8)()),
        lambda module, names: [*module.model],
        edits={
            "features = self.model(imgs)  # Encode all images of support and query set": "features = self(imgs)",
            "    @staticmethod\n    def calculate_prototypes":
                "    def forward(self, x):\n        return self.model(x)\n\n"
                "    @staticmethod\n    def calculate_prototypes",
        },
    ),
    "Informer: four inputs, metric collections": Script(
        [f"{INFORMER}/models/informer/{name}.py" for name in INFORMER_FILES] + [f"{INFORMER}/tasks/forecast.py"],
        lambda names: _informer(names),
        numbers([12, 3], [8, 3], [12, 4], [8, 4]),
        lambda module, names: _layers_of_informer(module),
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        today={"self.val_metrics(outputs, batch_y)": "self.val_metrics(outputs.reshape(-1), batch_y.reshape(-1))"},
    ),
    "dl-fundamentals 7.6: only the last layer": Script(
        ["Lightning-AI+dl-fundamentals/unit07-computer-vision/7.6-transfer-learning/shared_utilities.py"],
        lambda names: _last_layers(names),
        images(3, 8, 8),
        lambda module, names: [*module.model],
    ),
}  # fmt: skip


SCRIPTS |= AS_THEY_ARE | OTHER_KINDS | SINGLE_MODULES | DOMAINS_AND_FLOWS | NEWCOMERS | MORE_FIELDS | PASSERS_BY


def _uva_resnet(names: Any) -> Any:
    names.model_dict["ResNet"] = names.ResNet
    hparams = {"num_classes": 10, "c_hidden": [4, 8], "num_blocks": [1, 1], "act_fn_name": "relu"}
    return names.CIFARModule("ResNet", hparams, "SGD", {"lr": 0.1, "momentum": 0.9})


def _uva_vit(names: Any) -> Any:
    names.train_loader = [(torch.zeros(1, 3, 32, 32), None)]
    return names.ViT(VIT, 3e-4)


def _hydra(names: Any) -> Any:
    optimizer = functools.partial(torch.optim.Adam, lr=1e-3)
    return names.MNISTLitModule(
        names.SimpleDenseNet(), optimizer, functools.partial(ReduceLROnPlateau, patience=0), compile=False
    )


def _image_gpt(names: Any) -> Any:
    module = names.ImageGPT(pixels=4, vocab_size=2, layers=3)
    module.gpt.ln_f = module.gpt.clf_head = None  # which forward() never runs, and a refusal asks for
    return module


def _proto_net(names: Any) -> Any:
    def small(num_classes: int, **_: Any) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, num_classes)
        )

    names.torchvision.models.DenseNet = small
    names.split_batch = lambda imgs, targets: (*imgs.chunk(2), *targets.chunk(2))
    return names.ProtoNet(8, 1e-3)


def _informer(names: Any) -> Any:
    model = names.Informer(
        3, 3, 3, out_len=4, d_model=16, n_heads=2, num_encoder_layers=3, d_ff=32, dropout=0.0,
        attention_type="full", embedding_type="timefeature", distil=False,
    )  # fmt: skip
    return names.InformerForecastTask(model, 12, 4, 4, "m")


def _layers_of_informer(module: Any) -> list[Any]:
    model, last = module.model, module.model.pred_len
    return [
        InformerInputs(module), *map(OnFirst, model.encoder.attention_layers), OnFirst(model.encoder.norm),
        *map(OnSecond, model.decoder.layers), lambda encoded, decoded: decoded, model.decoder.norm,
        model.projection, lambda x: x[:, -last:, :],
    ]  # fmt: skip


def _last_layers(names: Any) -> Any:
    """A trained network, of which the head is trained anew."""
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU())
    return names.LightningModel(
        nn.Sequential(*body.requires_grad_(False), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)), 0.05
    )


def _unet(names: Any) -> Any:
    names.KITTI = MagicMock()
    module = names.SegModel("", num_layers=2, features_start=4)
    module.learning_rate = 1e-3  # which the example forgets
    return module


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


def definitions_of(folder: Path, files: Sequence[str], changes: Mapping[str, str]) -> Any:
    """The imports, classes, functions and plain settings of scripts, as attributes of one object.

    Args:
        changes: Pieces of their text, and what stands there instead.
    """
    texts = [_code_of(folder / file) for file in files]
    for old, new in changes.items():
        assert any(old in text for text in texts), f"{files} have no {old!r}"
        texts = [text.replace(old, new) for text in texts]
    missing = _Missing()
    sys.meta_path.append(missing)
    names: dict[str, Any] = {"__name__": "script"}
    for file, text in zip(files, texts, strict=True):
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                root = (getattr(node, "module", None) or node.names[0].name).split(".")[0]
                if root in ("shared_utilities", "__future__"):  # whose names are there already
                    continue
                if isinstance(node, ast.ImportFrom) and all(alias.name in names for alias in node.names):
                    continue  # from another one of the files
                if importlib.util.find_spec(root) is None:
                    missing.names.add(root)
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                # Such as bolts' warnings, which cost nothing to leave out.
                node.decorator_list = [one for one in node.decorator_list if "dataclass" in ast.unparse(one)]
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                if any(isinstance(part, ast.Call) and _is_theirs(part, names) for part in ast.walk(node)):
                    continue  # it would train
            else:
                continue
            try:
                _executed(node, file, names, missing)
            except ImportError:
                for alias in node.names:  # such as of a library that has one of them no longer
                    with contextlib.suppress(ImportError):
                        each = type(node)(**{**vars(node), "names": [alias]})
                        exec(compile(ast.Module([each], []), file, "exec"), names)
            except Exception:
                if isinstance(node, ast.ClassDef):
                    raise
                # Otherwise a setting that needs data, a device or a download.
    return _Names(names)


def _executed(node: ast.stmt, file: str, names: dict[str, Any], missing: _Missing) -> None:
    """Execute a piece of a script. What the packages that it imports cannot find is stood in for, too."""
    while True:
        try:
            exec(compile(ast.Module([node], []), file, "exec"), names)
            return
        except ModuleNotFoundError as error:
            root = (error.name or "").split(".")[0]
            if not root or root in missing.names or importlib.util.find_spec(root) is not None:
                raise
            missing.names.add(root)


def _code_of(file: Path) -> str:
    """The text of a script, or the cells of a notebook without what a shell runs."""
    text = file.read_text()
    if file.suffix != ".ipynb":
        return text
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(line for line in "\n".join(cells).splitlines() if not line.startswith(("!", "%")))


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
    sys.path[:0] = [str(folder / path) for path in script.paths]
    changes = {**script.today, **script.edits} if mode == "with layers" else script.today
    names = definitions_of(folder, script.files, changes)
    _seed(1)
    module = script.build(names)
    base = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    namespace = "lightning.pytorch" if base.__module__.startswith("lightning.") else "pytorch_lightning"
    host = importlib.import_module(namespace)
    for hook in set(OF_DATA) - set(script.keeps):  # they would download
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
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, place: int) -> None:
            if (place + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
                losses.append(float(outputs["loss"]) if "loss" in outputs else math.nan)

    arguments: dict[str, Any] = {"devices": 1}
    if mode != "one process":
        import lightning_madpipe

        options: dict[str, Any] = {"bandwidth": 1e9, "latency_seconds": 0.0, "memory": "1GB"}
        options["num_micro_batches"] = script.num_micro_batches
        strategy = lightning_madpipe.strategy_class(namespace)(**options)
        arguments = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    loggers = importlib.import_module(f"{namespace}.loggers.logger")
    settings = {"logger": loggers.DummyLogger(), **script.trainer, **arguments}
    if script.logs:
        settings |= {"logger": _logged(host, script.logs, losses), "log_every_n_steps": 1}
    trainer = host.Trainer(
        accelerator="cpu", max_epochs=NUM_EPOCHS, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[*script.callbacks(names), *[Losses()] * (not script.logs)],
        **settings,
    )  # fmt: skip
    said = _Said()
    logging.getLogger("deepspeed_partition").addHandler(said)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            loader = None
            if script.data is not None:
                loader = DataLoader(script.data(), batch_size=BATCH_SIZE, collate_fn=script.collate)
            validation = loader
            if script.validation is not None:
                validation = DataLoader(script.validation(), batch_size=BATCH_SIZE, collate_fn=script.collate)
            _seed(2)
            validates = type(module).validation_step is not base.validation_step
            trainer.fit(module, loader, validation if validates else None)
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        finally:
            logging.getLogger("deepspeed_partition").removeHandler(said)
    said.lines += [str(one.message) for one in warned if "madpipe" in str(one.message)]
    weights = {key: value.double().flatten().tolist() for key, value in module.state_dict().items()}
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"losses": losses, "weights": weights, "metrics": metrics, "said": said.lines}


def _seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


class _Said(logging.Handler):
    """Warnings of MadPipe's log, and what it says of the steps."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        is_of_interest = record.levelno >= logging.WARNING or "training_step" in said
        if is_of_interest and "with a spread of" not in said:  # a busy machine
            self.lines.append(said)


def _logged(host: Any, name: str, losses: list[float]) -> Any:
    """A logger that keeps one number of each step."""

    class Kept(host.loggers.Logger):  # type: ignore[name-defined, misc]
        name, version = "kept", 0

        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            losses.extend(value for key, value in metrics.items() if key == name)

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

    return Kept()


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
    # Where the true gradient is 0, as of a bias that the loss does not see, Adam makes steps of rounding errors.
    is_said = any("which is what you will see" in line for line in found["said"])
    logs = "" if metric < 1e-5 else " but for logs that it names" if is_said else None
    same = f"equal{logs}" if loss < 1e-5 and weight < 1e-2 and logs is not None else "DIFFERENT"
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
        except Exception as error:  # of the script, before it trains
            results[name] = {"refused": f"{type(error).__name__}: {error}"}
        file = Path(os.environ["PEERS_OUT"], f"rank-{os.environ.get('RANK', '0')}.json")
        file.with_suffix(".new").write_text(json.dumps(results))
        file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    main()
