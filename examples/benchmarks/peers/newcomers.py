"""Lightning modules of more public repositories: policies, autoencoders, two views, forecasts, triplets, segments.

Nothing but the strategy changes, but for draws, which a pipeline makes others of: they are made of the input.
"""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from script import BATCH_SIZE, NUM_BATCHES, Samples, Script, images
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

BOLTS = "Lightning-Universe+lightning-bolts/src/pl_bolts"
PPO = "sidhantls+ppo_lightning"
SPECTER = "allenai+specter/scripts/pytorch_lightning_training_script"
TABULAR = "manujosephv+pytorch_tabular/src"
FORECASTS = "Nixtla+neuralforecast/neuralforecast"
WORDS, LENGTH = 40, 7


# Proximal policies, on a buffer that was filled before


class _Discrete:
    n = 3


class _Box:
    shape = (4,)


def _policy(names: Any) -> Any:
    environment = SimpleNamespace(observation_space=_Box, action_space=_Discrete(), reset=lambda: [0.0] * 4)
    spaces = SimpleNamespace(box=SimpleNamespace(Box=_Box), discrete=SimpleNamespace(Discrete=_Discrete))
    names.gym, names._GYM_AVAILABLE = SimpleNamespace(make=lambda _: environment, spaces=spaces), True
    return names.PPO("CartPole-v0")


def _played() -> Dataset:
    def sample() -> tuple[Tensor, ...]:
        return torch.randn(4), torch.randint(3, ()), -torch.rand(()), torch.randn(()), torch.randn(())

    return Samples(sample)


ONE_OPTIMIZER = {
    "torch.Tensor], batch_idx, optimizer_idx)": "torch.Tensor], batch_idx)",
    "        if optimizer_idx == 0:": "        if True:",
    "            return loss_actor\n\n        elif optimizer_idx == 1:": "\n        if True:",
    "            return loss_critic\n\n    def c": "            return loss_actor + loss_critic\n\n    def c",
    "        return optimizer_actor, optimizer_critic": """
        groups = [*optimizer_actor.param_groups, *optimizer_critic.param_groups]
        return optim.Adam([{"params": group["params"], "lr": group["lr"]} for group in groups])""",
}
ONE_CALL = {
    "        pi, _ = self.actor(state)\n": "        pi = self.actor.get_pi(logits)\n",
    "def actor_loss(self, state,": "def actor_loss(self, logits,",
    "        value = self.critic(state)\n        loss_critic": "        loss_critic",
    "def critic_loss(self, state,": "def critic_loss(self, value,",
    "loss_actor = self.actor_loss(state,": "loss_actor = self.actor_loss(logits,",
    "loss_critic = self.critic_loss(state,": "loss_critic = self.critic_loss(value,",
    "        pi, action = self.actor(x)\n        value = self.critic(x)\n\n        return pi, action, value":
    "        return self.actor.actor_net(x), self.critic(x)",
    "        # normalize advantages": "        logits, value = self(state)",
    "    def get_log_prob(self, pi: Categorical,": """    def get_pi(self, logits):
        return Categorical(logits=logits)

    def get_log_prob(self, pi: Categorical,""",
}  # fmt: skip
ONE_STEP = {"for i in range(self.nb_optim_iters):": "for i in range(1):"}


# An autoencoder that draws, and two views


SMALLER = {"512": "16", "256": "8", "128": "8", "64": "4"}
OWN_DRAW = {
    "from pl_bolts import _HTTPS_AWS_HUB": "_HTTPS_AWS_HUB = ''",
    "z = q.rsample()": "z = mu + std * torch.sin(mu)",
}


def _variational(names: Any) -> Any:
    return names.VAE(32, enc_out_dim=16, latent_dim=8, lr=1e-3)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(196, 16))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.body(x)]


def _views() -> Dataset:
    return Samples(lambda: ([torch.randn(3, 16, 16) for _ in range(2)], 0))


def _siamese(kind: str) -> Any:
    def build(names: Any) -> Any:
        settings = {"warmup_epochs": 1, "max_epochs": 3, "learning_rate": 1e-3}
        return getattr(names, kind)(
            base_encoder=_Encoder(), encoder_out_dim=16, projector_hidden_dim=16, projector_out_dim=8,
            predictor_hidden_dim=16, **settings,
        )  # fmt: skip

    return build


SIAMESE_FILES = [f"{BOLTS}/optimizers/lr_scheduler.py", f"{BOLTS}/callbacks/byol_updates.py"]
SIAMESE_FILES += [f"{BOLTS}/models/self_supervised/byol/models.py"]


# Segments


def _segments() -> TensorDataset:
    random, count = torch.Generator().manual_seed(3), NUM_BATCHES * BATCH_SIZE
    masks = torch.randint(5, (count, 16, 16), generator=random)
    # As many pixels count as the picture has sky: another number in each.
    masks[torch.rand(count, 16, 16, generator=random) < torch.rand(count, 1, 1, generator=random)] = 250
    return TensorDataset(torch.randn(count, 3, 16, 16, generator=random), masks)


NO_OTHER_BATCH = {"nn.BatchNorm2d(": "nn.GroupNorm(1, "}


# Triplets of papers


def _papers(names: Any) -> Any:
    from transformers import BertConfig, BertModel

    settings = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    names.AutoModel = SimpleNamespace(from_pretrained=lambda _: BertModel(settings))
    names.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: SimpleNamespace())
    names.training_size, names.AdamW = NUM_BATCHES * BATCH_SIZE, torch.optim.AdamW
    return names.Specter(Namespace(
        checkpoint_path="", total_gpus=1, batch_size=BATCH_SIZE, grad_accum=1, num_epochs=2, warmup_steps=1,
        lr_scheduler="linear", weight_decay=0.01, adafactor=False, lr=1e-3, adam_epsilon=1e-8,
    ))  # fmt: skip


def _triplets() -> Dataset:
    def paper() -> dict[str, Tensor]:
        length = int(torch.randint(3, LENGTH + 1, ()))
        return {
            "input_ids": torch.randint(1, WORDS, (LENGTH,)),
            "token_type_ids": torch.zeros(LENGTH, dtype=torch.long),
            "attention_mask": (torch.arange(LENGTH) < length).long(),
        }

    return Samples(lambda: [paper() for _ in range(3)])


PAPERS_TODAY = {
    "self.hparams = init_args": "self.save_hyperparameters(init_args)",
    'self.trainer.lr_schedulers[0]["scheduler"]': "self.lr_schedulers()",
    "def validation_epoch_end(self, outputs: list)": "def _validation_epoch_end(self, outputs: list)",
    "def test_epoch_end(self, outputs: list)": "def _test_epoch_end(self, outputs: list)",
}
THREE_CALLS = """        source_embedding = self.model(**batch[0])[1]
        pos_embedding = self.model(**batch[1])[1]
        neg_embedding = self.model(**batch[2])[1]
"""
JOINED = {
    THREE_CALLS: """        joined = {key: torch.cat([each[key] for each in batch]) for key in batch[0]}
        source_embedding, pos_embedding, neg_embedding = self(**joined).chunk(3)
"""
}


# Forecasts of many windows of a few series


def _windows(kind: str, **settings: Any) -> Any:
    def build(names: Any) -> Any:
        return getattr(names, kind)(
            h=4, input_size=8, max_steps=6, windows_batch_size=None, loss=names.MAE(), learning_rate=1e-3,
            val_check_steps=3, **settings,
        )  # fmt: skip

    return build


def _series_of_windows() -> Dataset:
    return Samples(lambda: torch.stack([torch.randn(20).cumsum(0), torch.ones(20)]))


def _as_batch(samples: list[Tensor]) -> dict[str, Any]:
    import pandas

    return {"temporal": torch.stack(samples), "temporal_cols": pandas.Index(["y", "available_mask"]), "y_idx": 0}


FORECAST_FILES = [
    f"{FORECASTS}/{name}.py" for name in ("utils", "losses/pytorch", "common/_scalers", "common/_base_model")
]
FORECASTS_TODAY = {
    "import neuralforecast.losses.pytorch as losses": "losses = __import__('types').SimpleNamespace(**globals())",
}


# Tables: the package imports itself, so that its file is there for the table alone


def _tabular(kind: str, **settings: Any) -> Any:
    def build(names: Any) -> Any:
        import pytorch_tabular.models as models  # type: ignore[import-not-found]
        from omegaconf import OmegaConf  # type: ignore[import-not-found]

        chosen = OmegaConf.structured(getattr(models, f"{kind}Config")(task="regression", **settings))
        config = OmegaConf.create(OmegaConf.to_container(chosen))
        config.update({"optimizer": "Adam", "optimizer_params": {}, "lr_scheduler": None})
        found = {"continuous_dim": 4, "categorical_dim": 2, "categorical_cardinality": [5, 6], "output_dim": 2}
        found |= {"output_cardinality": [1, 1], "embedding_dims": [[5, 3], [6, 3]], "embedded_cat_dim": 6}
        return getattr(models, f"{kind}Model")(config, inferred_config=OmegaConf.create(found))

    return build


def _rows() -> Dataset:
    def sample() -> dict[str, Tensor]:
        codes = torch.stack([torch.randint(1, 5, ()), torch.randint(1, 6, ())])
        return {"continuous": torch.randn(4), "categorical": codes, "target": torch.randn(2)}

    return Samples(sample)


TABLES: dict[str, Any] = {"batch_norm_continuous_input": False}
TRANSFORMER: dict[str, Any] = {
    "num_heads": 2, "input_embed_dim": 8, "num_attn_blocks": 3, "attn_dropout": 0.0, "ff_dropout": 0.0,
    "add_norm_dropout": 0.0, "embedding_dropout": 0.0, "target_range": [(-3.0, 3.0), (-4.0, 4.0)],
}  # fmt: skip


def _tft() -> Script:
    from single_modules import SERIES, _series

    folder = f"{SERIES}/pytorch_forecasting/models/temporal_fusion_transformer"
    settings = {"learning_rate": 1e-3, "log_interval": -1, "log_val_interval": -1, "hidden_size": 8}
    return Script(
        [f"{folder}/_tft.py"],
        lambda names: names.TemporalFusionTransformer.from_dataset(
            _series(), attention_head_size=2, dropout=0.0, hidden_continuous_size=4, lstm_layers=1, **settings
        ),
        _series, paths=[SERIES], logs="train_loss_step", collate=lambda samples: _series()._collate_fn(samples),
    )  # fmt: skip


NEWCOMERS: dict[str, Script] = {
    "ppo_lightning: PPO": Script(
        [f"{PPO}/networks.py", f"{PPO}/ppo_model.py"], _policy, _played, today=ONE_OPTIMIZER
    ),
    "ppo_lightning: PPO, one call": Script(
        [f"{PPO}/networks.py", f"{PPO}/ppo_model.py"], _policy, _played, today={**ONE_OPTIMIZER, **ONE_CALL}
    ),
    "ppo_lightning: PPO, one call, one step": Script(
        [f"{PPO}/networks.py", f"{PPO}/ppo_model.py"], _policy, _played,
        today={**ONE_OPTIMIZER, **ONE_CALL, **ONE_STEP},
    ),
    "bolts: VAE, num_micro_batches=1": Script(
        [f"{BOLTS}/models/autoencoders/components.py",
         f"{BOLTS}/models/autoencoders/basic_vae/basic_vae_module.py"],
        _variational, images(3, 32, 32), today={**OWN_DRAW, **SMALLER}, num_micro_batches=1,
    ),
    "bolts: VAE, group normalization": Script(
        [f"{BOLTS}/models/autoencoders/components.py",
         f"{BOLTS}/models/autoencoders/basic_vae/basic_vae_module.py"],
        _variational, images(3, 32, 32), today={**OWN_DRAW, **SMALLER, **NO_OTHER_BATCH},
    ),
    "bolts: BYOL": Script(
        [*SIAMESE_FILES, f"{BOLTS}/models/self_supervised/byol/byol_module.py"], _siamese("BYOL"), _views,
    ),
    "bolts: SimSiam": Script(
        [*SIAMESE_FILES, f"{BOLTS}/models/self_supervised/simsiam/simsiam_module.py"], _siamese("SimSiam"), _views,
    ),
    "bolts: segments, pixels that do not count": Script(
        [f"{BOLTS}/models/vision/unet.py", f"{BOLTS}/models/vision/segmentation.py"],
        lambda names: names.SemSegment(num_classes=5, num_layers=3, features_start=4, lr=1e-3), _segments,
        today={**NO_OTHER_BATCH, "def validation_epoch_end": "def _validation_epoch_end"},
    ),
    "specter: triplets": Script([f"{SPECTER}/train.py"], _papers, _triplets, today=PAPERS_TODAY),
    "specter: triplets, joined": Script(
        [f"{SPECTER}/train.py"], _papers, _triplets, today={**PAPERS_TODAY, **JOINED}
    ),
    "neuralforecast: NHITS": Script(
        [*FORECAST_FILES, f"{FORECASTS}/models/nhits.py"],
        _windows("NHITS", mlp_units=[[16, 16]] * 3, dropout_prob_theta=0.0), _series_of_windows,
        collate=_as_batch, today=FORECASTS_TODAY,
    ),
    "pytorch-forecasting: TFT": _tft(),
    "pytorch_tabular: FT-Transformer": Script(
        [f"{TABULAR}/pytorch_tabular/models/ft_transformer/config.py"],
        _tabular("FTTransformer", **TABLES, **TRANSFORMER), _rows, paths=[TABULAR],
    ),
    "pytorch_tabular: GANDALF": Script(
        [f"{TABULAR}/pytorch_tabular/models/gandalf/config.py"],
        _tabular("GANDALF", gflu_stages=3, learnable_sparsity=True, **TABLES), _rows, paths=[TABULAR],
    ),
}  # fmt: skip
