"""Lightning modules of more kinds: recommendations, diffusion, series, sounds, speech, masked pictures, graphs.

Nothing but the strategy changes. A draw for each sample is made of its input instead, for a pipeline draws others.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from script import BATCH_SIZE, NUM_BATCHES, Samples, Script, images
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

MASKED = "vishnu-dev+icdar-self-supervised-learning"
SERIES = "sktime+pytorch-forecasting"
SPEECH = "sooftware+lightning-asr"
DIFFUSION = "weiss25r+DiffLightning/src"
GRAPHS = "Lightning-AI+tutorials/course_UvA-DL/06-graph-neural-networks"


def _ratings() -> TensorDataset:
    random, number = torch.Generator().manual_seed(3), (NUM_BATCHES * BATCH_SIZE,)
    return TensorDataset(*(torch.randint(most, number, generator=random) for most in (20, 20, 2)))


class _Patches(nn.Module):
    """In the place of timm's, which needs torchvision."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.patch_size, self.num_patches = (patch_size, patch_size), (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


def _masked(names: Any) -> Any:
    names.PatchEmbed = _Patches
    names.Block = lambda width, heads, ratio, **_: nn.TransformerEncoderLayer(
        width, heads, int(width * ratio), dropout=0.0, batch_first=True, norm_first=True
    )
    return names.MAE(
        img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2, decoder_embed_dim=16, decoder_depth=2,
        decoder_num_heads=2, mask_ratio=0.5, learning_rate=1e-3, warmup_epochs=1, max_epochs=4,
        min_learning_rate=1e-5,
    )  # fmt: skip


class _Distance(nn.Module):
    """In the place of a metric with a network of its own, which would be downloaded."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def update(self, *_: Any, **__: Any) -> None:
        pass


def _diffusion(names: Any) -> Any:
    names.FrechetInceptionDistance = _Distance
    network = {"in_channels": 3, "base_channels": 32, "multipliers": (1, 1, 1), "attention_res": (16,)}
    return names.DiffusionModel(names.Backbone, network, names.NoiseScheduler, T=50)


@functools.cache
def _series() -> Any:
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet  # type: ignore[import-not-found]

    times = numpy.arange(NUM_BATCHES * BATCH_SIZE + 10)
    noise = numpy.random.default_rng(1).standard_normal(len(times))
    frame = pandas.DataFrame({"time": times, "group": "a", "value": numpy.sin(times / 3) + noise / 10})
    lengths = {"max_encoder_length": 8, "min_encoder_length": 8, "max_prediction_length": 4}
    return TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["group"], min_prediction_length=4,
        time_varying_unknown_reals=["value"], **lengths,
    )  # fmt: skip


def _forecast(kind: str, **settings: Any) -> Script:
    folder = f"{SERIES}/pytorch_forecasting/models/{kind.lower()}"

    def build(names: Any) -> Any:
        told = {"learning_rate": 1e-3, "log_interval": -1, "log_val_interval": -1}
        return getattr(names, kind).from_dataset(_series(), **told, **settings)

    return Script(
        [f"{folder}/_{kind.lower()}.py"], build, _series, paths=[SERIES], logs="train_loss_step",
        collate=lambda samples: _series()._collate_fn(samples),
    )  # fmt: skip


class _Vocabulary:
    pad_id, sos_id, eos_id, blank_id = 0, 1, 2, 3

    def label_to_string(self, labels: Tensor) -> str:
        return " ".join(str(int(label)) for label in labels)


def _conformer(names: Any) -> Any:
    dropouts = ("input", "feed_forward", "attention", "conv", "decoder")
    settings: dict[str, Any] = {f"{each}_dropout_p": 0.0 for each in dropouts} | {
        "gradient_clip_val": 5.0, "teacher_forcing_ratio": 1.0, "ctc_weight": 0.3, "cross_entropy_weight": 0.7,
        "num_mels": 16, "encoder_dim": 16, "num_encoder_layers": 2, "num_attention_heads": 2,
        "feed_forward_expansion_factor": 2, "conv_expansion_factor": 2, "conv_kernel_size": 3,
        "half_step_residual": True, "joint_ctc_attention": True, "max_length": 7, "num_decoder_layers": 1,
        "rnn_type": "lstm", "use_tpu": False, "optimizer": "adam", "lr": 1e-3, "lr_factor": 0.5, "lr_patience": 1,
        "scheduler": "reduce_lr_on_plateau",
    }  # fmt: skip
    words = _Vocabulary()
    rates = names.WordErrorRate(words), names.CharacterErrorRate(words)
    return names.ConformerLSTMModel(SimpleNamespace(**settings), 12, words, *rates)


def _spoken() -> Dataset:
    def sample() -> tuple[Tensor, ...]:
        text = torch.cat([torch.tensor([1]), torch.randint(4, 12, (6,)), torch.tensor([2])])
        return torch.randn(64, 16), text, torch.tensor(64), torch.tensor(7)

    return Samples(sample)


def _nodes() -> Dataset:
    from torch_geometric.data import Data

    def sample() -> Any:
        trains = torch.arange(12) < 8
        return Data(
            x=torch.randn(12, 5), edge_index=torch.randint(12, (2, 40)), y=torch.randint(3, (12,)),
            train_mask=trains, val_mask=~trains, test_mask=~trains,
        )  # fmt: skip

    return Samples(sample)


def _joined(graphs: list[Any]) -> Any:
    from torch_geometric.data import Batch

    return Batch.from_data_list(graphs)


SINGLE_MODULES: dict[str, Script] = {
    "sys-rek: recommendations": Script(
        ["Ceglowa+sys-rek-l1/ncf/ncf.py"], lambda names: names.NCF(8, 16, 8, 0.0, 20, 20), _ratings,
    ),
    "DiffLightning: diffusion": Script(
        [f"{DIFFUSION}/{name}.py" for name in ("backbone", "noise_scheduler", "model")], _diffusion,
        images(3, 32, 32),
        today={
            "t = torch.randint(0, self.hparams.T, (current_batch_size,), device=self.device).long()":
            "t = (25 + 20 * torch.sin(images.sum((1, 2, 3)))).long()",
            "noise = torch.randn_like(x_0)": "noise = x_0.flip(2)",
        },
    ),
    "pytorch-forecasting: N-BEATS": _forecast(
        "NBeats", widths=[8, 8], stack_types=["generic", "generic"], num_blocks=[1, 1], num_block_layers=[2, 2],
        expansion_coefficient_lengths=[3, 3], backcast_loss_ratio=0.1,
    ),
    "pytorch-forecasting: DeepAR": _forecast("DeepAR", hidden_size=8, rnn_layers=2, dropout=0.0),
    "environmental-sound-classification: CNN": Script(
        ["eyenpi+environmental-sound-classification/classifier/model/cnnmodel.py"],
        lambda names: names.CNNModel(), images(1, 48, 48), num_micro_batches=1,
    ),
    "lightning-asr: conformer, LSTM decoder": Script(
        [f"{SPEECH}/lightning_asr/model/model.py"], _conformer, _spoken, paths=[SPEECH],
        today={"batch_idx: int, dataset_idx: int)": "batch_idx: int)"},
    ),
    "icdar: masked autoencoder": Script(
        [f"{MASKED}/src/models/mae/{name}.py" for name in ("pos_embed", "lr_sched", "model")], _masked,
        images(3, 16, 16), paths=[MASKED],
        today={"noise = torch.rand(N, L, device=x.device)": "noise = torch.sin(100 * x.sum(-1))"},
    ),
    "UvA 6: graphs of nodes": Script(
        [f"{GRAPHS}/overview.py"],
        lambda names: names.NodeLevelGNN(
            "GNN", c_in=5, c_hidden=8, c_out=3, num_layers=3, layer_name="GCN", dp_rate=0.0
        ),
        _nodes, collate=_joined,
    ),
}  # fmt: skip
