"""Lightning modules of other kinds: speech, graphs, detection, games, weather, recommendations, medicine.

Whole packages, which a script imports from the checkout (``Script.paths``). Nothing but the strategy changes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from script import BATCH_SIZE, NUM_BATCHES, Samples, Script, images
from torch import Tensor, nn
from torch.utils.data import Dataset

LIGHTLY = "lightly-ai+lightly"
CLIMAX = "microsoft+ClimaX/src"
DVQ = "karpathy+deep-vector-quantization/dvq"
REPLAY = "sb-ai-lab+RePlay"
THUNDER = "scart97+thunder-speech/src"
SEMI = "GKeppler+SSLightning4Med"
YOLO = "Lightning-Universe+lightning-bolts/src/pl_bolts/models/detection/yolo"
VARIABLES = ["temperature", "wind", "pressure"]


# Contrastive learning: lightly


def _views(number: int) -> Any:
    def draw() -> Dataset:
        return Samples(lambda: ([torch.randn(3, 32, 32) for _ in range(number)], 0, "name"))

    return draw


def _small_backbone(names: Any) -> None:
    """A network with the width that the heads ask for and without batch normalization."""
    body = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 512, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    names.torchvision = SimpleNamespace(
        models=SimpleNamespace(resnet18=lambda: nn.Sequential(*body, nn.Flatten()))
    )


def _lightly(kind: str) -> Any:
    def build(names: Any) -> Any:
        _small_backbone(names)
        return getattr(names, kind)()

    return build


def _masked_autoencoder(names: Any) -> Any:
    from timm.models.vision_transformer import VisionTransformer

    names.vit_base_patch32_224 = lambda: VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2
    )
    names.utils.random_token_mask = _same_mask
    return names.MAE()


def _same_mask(size: tuple[int, int], mask_ratio: float, device: Any) -> tuple[Tensor, Tensor]:
    """What is masked, without a draw."""
    places = torch.arange(size[1]).expand(size)
    kept = int(size[1] * (1 - mask_ratio))
    return places[:, :kept], places[:, kept:]


# Codes: deep-vector-quantization


def _quantized(flavor: str) -> Any:
    def build(names: Any) -> Any:
        torch.nn.functional.gumbel_softmax = (  # without the draw, which is another one in each process
            lambda logits, tau, dim, hard: (logits / tau).softmax(dim)
        )
        settings = {"vq_flavor": flavor, "enc_dec_flavor": "deepmind", "loss_flavor": "l2"}
        return names.VQVAE(SimpleNamespace(**settings, num_embeddings=8, embedding_dim=6, n_hid=8))

    return build


# Weather: ClimaX


def _climax(names: Any) -> Any:
    import numpy

    numpy.float = float  # type: ignore[attr-defined]  # a name of earlier versions
    from climax.arch import ClimaX  # type: ignore[import-not-found]

    net = ClimaX(
        VARIABLES, img_size=[4, 8], patch_size=2, embed_dim=16, depth=3, decoder_depth=1, num_heads=2,
        drop_path=0.0, drop_rate=0.0,
    )  # fmt: skip
    module = names.GlobalForecastModule(net, warmup_epochs=2, max_epochs=10)
    identity = names.transforms.Normalize([0.0] * 3, [1.0] * 3)
    module.set_denormalization(identity.mean, identity.std)
    module.denormalization = identity
    module.set_lat_lon(torch.linspace(-60, 60, 4).numpy(), torch.arange(8).numpy())
    module.set_pred_range(6)
    module.set_val_clim(torch.zeros(3, 4, 8))
    return module


def _weather() -> Dataset:
    return Samples(lambda: (torch.randn(3, 4, 8), torch.randn(3, 4, 8), torch.tensor(0.06)))


def _with_names(samples: list[Any]) -> Any:
    x, y, times = (torch.stack(part) for part in zip(*samples, strict=True))
    return x, y, times, list(VARIABLES), list(VARIABLES)


# Recommendations: RePlay


def _sasrec(names: Any) -> Any:
    from replay.data import FeatureHint, FeatureType  # type: ignore[import-not-found]
    from replay.data.nn import TensorFeatureInfo, TensorSchema  # type: ignore[import-not-found]

    item = TensorFeatureInfo(
        "item_id", FeatureType.CATEGORICAL, is_seq=True, feature_hint=FeatureHint.ITEM_ID, cardinality=20,
        padding_value=20, embedding_dim=16,
    )  # fmt: skip
    return names.SasRec(
        TensorSchema([item]), block_count=3, head_count=2, hidden_size=16, max_seq_len=8, dropout_rate=0.0
    )


class Purchases(Dataset):
    """What users bought one after another, padded on the left."""

    def __len__(self) -> int:
        return NUM_BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        items = torch.randint(20, (9,), generator=generator)
        is_there = torch.arange(8) >= index % 5
        return {
            "query_id": torch.tensor([index]),
            "feature_tensor": {"item_id": items[:-1].where(is_there, torch.tensor(20))},
            "padding_mask": is_there,
            "positive_labels": items[1:].where(is_there, torch.tensor(20)),
            "target_padding_mask": is_there,
        }


# Speech: thunder


def _thunder(names: Any) -> Any:
    from thunder.blocks import MultiSequential  # type: ignore[import-not-found]
    from thunder.quartznet.blocks import QuartznetBlock  # type: ignore[import-not-found]
    from thunder.text_processing.transform import BatchTextTransformer  # type: ignore[import-not-found]

    class Frames(nn.Module):
        """Frames of the sound, in the place of a spectrogram."""

        def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            return x.unflatten(1, (-1, 8)).transpose(1, 2), lengths // 8

    encoder = MultiSequential(*(QuartznetBlock(8, 8, repeat=2, kernel_size=(5,)) for _ in range(3)))
    text = BatchTextTransformer(list("abcdefg"))
    module = names.BaseCTCModule(
        encoder, nn.Conv1d(8, len(text.vocab.itos), 1), Frames(), text, optimizer_kwargs={"lr": 1e-2}
    )
    return module.train()


class Sounds(Dataset):
    """Sounds and what is said in them, of different lengths."""

    def __len__(self) -> int:
        return NUM_BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        generator = torch.Generator().manual_seed(index)
        length = 160 + 16 * (index % 5)
        return torch.randn(length, generator=generator), length, "abcdefg"[: 2 + index % 5]


def _padded_sounds(samples: list[tuple[Tensor, int, str]]) -> Any:
    sounds, lengths, texts = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(sounds), batch_first=True), torch.tensor(lengths), list(texts)


# Graphs: PyTorch Geometric


def _graphs() -> Dataset:
    from torch_geometric.data import Data

    def graph() -> Any:
        nodes = 4 + int(torch.randint(3, ()))
        edges = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        return Data(x=torch.randn(nodes, 5), edge_index=edges, y=torch.randint(2, (1,)))

    return Samples(graph)


def _batch_of_graphs(samples: list[Any]) -> Any:
    from torch_geometric.data import Batch

    return Batch.from_data_list(samples)


# Medicine: MONAI, and halves with labels


def _spleen() -> Dataset:
    return Samples(
        lambda: {"image": torch.rand(1, 16, 16, 16), "label": torch.randint(2, (1, 16, 16, 16)).float()}
    )


def _fix_match(names: Any) -> Any:
    names.net_zoo = {"smallUnet": (names.small_UNet, None)}
    settings = {
        "lr": 1e-3, "epochs": 4, "n_class": 3, "use_wandb": False, "method": "FixMatch", "net": "smallUnet",
        "n_channel": 1, "loss": "CE", "dataset": "brats", "optimizer": "Adam",
    }  # fmt: skip
    module = names.FixmatchModule(SimpleNamespace(**settings))
    module.threshold = 0.34  # so that an untrained network finds labels
    return module


def _one_labeled() -> tuple[Tensor, Tensor, str]:
    return torch.randn(1, 16, 16), torch.randint(3, (16, 16)), "name"


def _labeled() -> Dataset:
    return Samples(_one_labeled)


def _labeled_and_not() -> Dataset:
    return Samples(lambda: {name: _one_labeled() for name in ("labeled", "unlabeled_wa", "unlabeled_sa")})


# Detection: YOLO of lightning-bolts


def _yolo(names: Any) -> Any:
    import torchvision

    names._MEAN_AVERAGE_PRECISION_AVAILABLE = False
    for name in ("box_iou", "box_convert", "batched_nms"):
        setattr(names, name, getattr(torchvision.ops, name))
    of_boxes = (torchvision.ops.generalized_box_iou, torchvision.ops.generalized_box_iou_loss)
    names._iou_and_loss_functions = dict.fromkeys(("giou", "ciou"), of_boxes)
    names.meshgrid = lambda x, y: torch.meshgrid(x, y, indexing="ij")
    network = names.YOLOV4TinyNetwork(num_classes=2, width=2, normalization=None)
    return names.YOLO(
        network,
        optimizer_params={"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4},
        lr_scheduler=torch.optim.lr_scheduler.StepLR,
        lr_scheduler_params={"step_size": 1},
    )


def _boxes() -> Dataset:
    def sample() -> tuple[Tensor, dict[str, Tensor]]:
        corner = torch.randint(0, 30, (2, 2)).float()
        return torch.rand(3, 64, 64), {
            "boxes": torch.cat([corner, corner + torch.randint(8, 30, (2, 2))], 1),
            "labels": torch.randint(2, (2,)),
        }

    return Samples(sample)


def _lists(samples: list[Any]) -> Any:
    return tuple(map(list, zip(*samples, strict=True)))


# Reinforcement learning: the tutorial's DQN


class _Pole:
    """An environment in the place of gym's."""

    observation_space = SimpleNamespace(shape=(4,))
    action_space = SimpleNamespace(n=2, sample=lambda: 1)

    def __init__(self) -> None:
        self._place = 0

    def _seen(self) -> Any:
        return torch.sin(torch.arange(4.0) + self._place).numpy()

    def reset(self) -> Any:
        self._place = 0
        return self._seen()

    def step(self, action: int) -> tuple[Any, float, bool, dict[str, Any]]:
        self._place += 1 + action
        return self._seen(), 1.0, self._place > 20, {}


def _dqn(names: Any) -> Any:
    names.gym = SimpleNamespace(make=lambda _: _Pole(), Env=object)
    return names.DQNLightning(warm_start_steps=100, episode_length=NUM_BATCHES * BATCH_SIZE)


OTHER_KINDS: dict[str, Script] = {
    "lightly: SimCLR": Script(
        [f"{LIGHTLY}/examples/pytorch_lightning/simclr.py"], _lightly("SimCLR"), _views(2), paths=[LIGHTLY],
        num_micro_batches=1,
    ),
    "lightly: VICReg": Script(
        [f"{LIGHTLY}/examples/pytorch_lightning/vicreg.py"], _lightly("VICReg"), _views(2), paths=[LIGHTLY],
        num_micro_batches=1,
    ),
    "lightly: MoCo": Script(
        [f"{LIGHTLY}/examples/pytorch_lightning/moco.py"], _lightly("MoCo"), _views(2), paths=[LIGHTLY],
    ),
    "lightly: masked autoencoder": Script(
        [f"{LIGHTLY}/examples/pytorch_lightning/mae.py"], _masked_autoencoder, _views(1), paths=[LIGHTLY],
    ),
    "deep-vector-quantization: Gumbel, callbacks that set temperatures and rates": Script(
        [f"{DVQ}/vqvae.py"], _quantized("gumbel"), images(3, 16, 16), paths=[DVQ],
        callbacks=lambda names: [names.DecayLR(), names.DecayTemperature(), names.RampBeta()],
        today={
            ", batch_idx, dataloader_idx)": ", batch_idx)",
            "cos_anneal(0, 150000,": "cos_anneal(0, 6,", "cos_anneal(0, 5000,": "cos_anneal(0, 6,",
        },
    ),
    "deep-vector-quantization: codes from k-means of the first batch": Script(
        [f"{DVQ}/vqvae.py"], _quantized("vqvae"), images(3, 16, 16), paths=[DVQ],
    ),
    "ClimaX: loss by variables, names in the batch": Script(
        [f"{CLIMAX}/climax/global_forecast/module.py"], _climax, _weather, paths=[CLIMAX], collate=_with_names,
    ),
    "RePlay: SASRec, the model's forward() and predict()": Script(
        [f"{REPLAY}/replay/models/nn/sequential/sasrec/lightning.py"], _sasrec, Purchases, paths=[REPLAY],
        today={
            "from .dataset import": "from replay.models.nn.sequential.sasrec.dataset import",
            "from .model import": "from replay.models.nn.sequential.sasrec.model import",
        },
    ),
    "thunder: QuartzNet, CTC of texts": Script(
        [f"{THUNDER}/thunder/module.py"], _thunder, Sounds, paths=[THUNDER], collate=_padded_sounds,
        num_micro_batches=1,
    ),
    "PyG: GIN": Script(
        ["pyg-team+pytorch_geometric/examples/pytorch_lightning/gin.py"],
        lambda names: names.Model(5, 2, 16, 3, 0.0), _graphs, collate=_batch_of_graphs, num_micro_batches=1,
    ),
    "MONAI: U-Net in 3D, windows in validation": Script(
        ["Project-MONAI+tutorials/3d_segmentation/spleen_segmentation_3d_lightning.ipynb"],
        lambda names: names.Net(), _spleen, num_micro_batches=1,
        today={
            "(160, 160, 160)": "(16, 16, 16)", "(16, 32, 64, 128, 256)": "(4, 8, 16)", "(2, 2, 2, 2)": "(2, 2)",
        },
    ),
    "SSLightning4Med: FixMatch": Script(
        [
            f"{SEMI}/SSLightning4Med/{name}.py"
            for name in ("utils/utils", "utils/losses", "nets/unet", "models/base_module", "models/train_fixmatch")
        ],
        _fix_match, _labeled_and_not, paths=[SEMI], num_micro_batches=1, validation=_labeled,
        today={"JaccardIndex(": "JaccardIndex(task='multiclass', "},
    ),
    "bolts: YOLO, lists of images and of boxes": Script(
        [f"{YOLO}/{name}.py" for name in
         ("types", "utils", "loss", "target_matching", "layers", "torch_networks", "yolo_module")],
        _yolo, _boxes, collate=_lists,
        today={"if not _TORCHVISION_AVAILABLE:": "if False:"},
    ),
    "tutorials: DQN": Script(
        ["Lightning-AI+tutorials/lightning_examples/reinforce-learning-DQN/dqn.py"], _dqn, None,
        keeps=["train_dataloader"], today={"self.on_gpu": "False"},
    ),
}  # fmt: skip
