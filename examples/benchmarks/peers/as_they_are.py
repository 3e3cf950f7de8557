"""Lightning scripts that run with nothing but the strategy: language models, Hugging Face, U-Nets, diffusion.

None of them names layers. What stands for a download here is a tiny model of the same class with random weights,
and what a library no longer has is what it has instead today.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import torch
from script import BATCH_SIZE, NUM_BATCHES, Samples, Script, images, numbers, tokens
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

EXAMPLES = "Lightning-AI+pytorch-lightning/examples/pytorch"
DEMOS = "Lightning-AI+pytorch-lightning/src/lightning/pytorch/demos"
UVA = "Lightning-AI+tutorials/course_UvA-DL"
TRANSFORMERS = "Lightning-Universe+lightning-transformers/lightning_transformers"
WORDS = 20


# Data


class Sentences(Dataset):
    """Sentences of different lengths, whose last batch is a short one."""

    def __init__(self, kind: str, *, shorter: int = 0) -> None:
        generator = torch.Generator().manual_seed(3)
        self._kind, self._samples = kind, []
        for place in range(NUM_BATCHES * BATCH_SIZE - 6):
            length = 4 + (5 * place + place // BATCH_SIZE) % (7 - shorter)
            self._samples.append(torch.randint(2, WORDS, (length,), generator=generator))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self._samples[index]
        labels = {
            "causal": words,
            "class": words.sum() % 2,
            "tokens": words % 3,
            "sequence": words.flip(0)[: len(words) - 1],
        }
        return {"input_ids": words, "labels": labels[self._kind]}


def padded(name: str = "labels", *, ignored: int = -100, types: bool = False) -> Any:
    """Collates sentences to the longest one of a batch, padded on the right, as a data collator does."""

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        def together(tensors: list[Tensor], value: int) -> Tensor:
            return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

        words, labels = ([sample[key] for sample in samples] for key in ("input_ids", "labels"))
        batch = {
            "input_ids": together(words, 0),
            "attention_mask": together([torch.ones_like(each) for each in words], 0),
            name: together(labels, ignored) if labels[0].ndim else torch.stack(labels),
        }
        if types:
            batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        return batch

    return collate


def alone(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Words, all sentences cut to the same length, without labels."""
    return {"input_ids": torch.stack([sample["input_ids"][:4] for sample in samples])}


# What stands for downloads


class Pretrained:
    """A class whose ``from_pretrained()`` makes a tiny model with random weights."""

    def __init__(self, make: Any) -> None:
        self.from_pretrained = lambda *_, **__: make()


def bert(kind: str = "BertModel", **settings: Any) -> Any:
    import transformers

    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def distilbert() -> Any:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    return DistilBertForSequenceClassification(DistilBertConfig(
        vocab_size=WORDS, dim=16, n_layers=3, n_heads=2, hidden_dim=24, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0,
    ))  # fmt: skip


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    ))  # fmt: skip


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=WORDS - 4, n_positions=32, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    ))  # fmt: skip


def llama(*, checkpointing: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    ))  # fmt: skip
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


class AccuracyOfGlue:
    """In the place of a metric that ``datasets`` downloads."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float((predictions == references).mean())}


class Dice(nn.Module):
    """The loss of ``segmentation_models_pytorch``: one number for all pixels of a batch together."""

    def __init__(self, mode: str) -> None:
        super().__init__()

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        found, targets = logits.sigmoid().flatten(), targets.flatten().float()
        return 1 - 2 * (found * targets).sum() / (found.sum() + targets.sum()).clamp_min(1e-7)


class Smaller:
    """A module of names whose convolutions have a sixteenth of the channels."""

    def __init__(self, names: Any) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._names, name)
        if not name.startswith("Conv"):
            return found

        def make(in_channels: int, out_channels: int, kernel_size: int, **settings: Any) -> nn.Module:
            sizes = (size // 16 if size >= 64 else size for size in (in_channels, out_channels))
            return found(*sizes, kernel_size, **settings)

        return make


class NoNoise:
    """torch, with what a step draws made of what it draws for: one process and a pipeline draw other numbers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def randn_like(like: Tensor, **_: Any) -> Tensor:
        return torch.sin(7 * like.detach())

    @staticmethod
    def randint(*bounds: Any, **settings: Any) -> Tensor:
        return torch.full(bounds[-1], 7, **settings)


# Their modules


def _glue(names: Any) -> Any:
    model = functools.partial(bert, "BertForSequenceClassification", num_labels=2)
    names.AutoConfig, names.AutoModelForSequenceClassification = Pretrained(lambda: None), Pretrained(model)
    names.datasets = SimpleNamespace(load_metric=lambda *_, **__: AccuracyOfGlue())
    names.AdamW = torch.optim.AdamW
    return names.GLUETransformer("bert", 2, "mrpc", learning_rate=1e-3)


def _frozen_bert(names: Any) -> Any:
    model = functools.partial(bert, "BertForSequenceClassification", num_labels=2)
    names.AutoConfig, names.AutoModelForSequenceClassification = Pretrained(lambda: None), Pretrained(model)
    return names.BERT("bert", 2, "boolq", None, learning_rate=1e-3)


def _demo_lstm(names: Any) -> Any:
    names.SimpleLSTM = functools.partial(names.SimpleLSTM, ninp=8, nhid=8, nlayers=2)
    return names.LightningLSTM(vocab_size=WORDS)


def _imagenet(names: Any) -> Any:
    names.get_torchvision_model = lambda *_, **__: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(),
        nn.Linear(32, 1000),
    )  # fmt: skip
    return names.ImageNetLightningModel(data_path="")


def _nano_gpt(names: Any) -> Any:
    settings = {
        "vocab_size": WORDS, "block_size": 8, "n_layer": 3, "n_head": 2, "n_embd": 16, "dropout": 0.0,
        "bias": True, "weight_decay": 0.1, "learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95,
        "device_type": "cpu", "max_iters": 12, "warmup_iters": 3, "min_lr": 3e-4,
    }  # fmt: skip
    return names.GPTLightning(SimpleNamespace(**settings, to_dict=lambda: settings))


def _lightning_gpt(names: Any) -> Any:
    return names.GPT(
        8, 16, 2, 0.0, 3, WORDS, functools.partial(torch.optim.AdamW, lr=3e-3),
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
    )  # fmt: skip


def _bert_classifier(names: Any) -> Any:
    import torchmetrics

    names.AutoModel, names.AdamW = Pretrained(bert), torch.optim.AdamW
    names.Accuracy = functools.partial(torchmetrics.Accuracy, task="multiclass")
    names.F1 = functools.partial(torchmetrics.F1Score, task="multiclass")
    return names.BertTextClassifier("bert", 2, lr=1e-3, n_training_steps=20, n_warmup_steps=2)


def _japanese_bert(names: Any) -> Any:
    names.AutoModel = Pretrained(functools.partial(bert, add_pooling_layer=False))
    names.AutoModel = Pretrained(lambda: _without_pooler(bert()))
    module = names.BERTClassifier(SimpleNamespace(model_name="bert", learning_rate=1e-3))
    module.linear = nn.Linear(16, 2)
    return module


def _without_pooler(model: Any) -> Any:
    model.pooler = None
    return model


def _open_thai(names: Any) -> Any:
    names.load_model_and_tokenizer = lambda _: (None, llama(checkpointing=True))
    names.compute_perplexity = lambda loss: torch.exp(loss).item()
    names.HF_TOKENIZER_INPUT_IDS_NAME, names.LR_STEP_INTERVAL = "input_ids", "step"
    names.TRAIN_LOSS_MONITOR, names.VAL_LOSS_MONITOR = "train/loss", "val/loss"
    names.TRAIN_PERPLEXITY_MONITOR, names.VAL_PERPLEXITY_MONITOR = "train/perplexity", "val/perplexity"
    names.get_optimizer = lambda parameters, optimizer_config: torch.optim.AdamW(parameters, lr=1e-3)
    return names.CausalModelPL()


def _t5_model(names: Any) -> Any:
    names.T5ForConditionalGeneration, names.AdamW = Pretrained(t5), torch.optim.AdamW
    return names.T5Model("t5")


def _chinese_bert(names: Any) -> Any:
    names.BertConfig = Pretrained(lambda: bert().config)
    names.BertModel = Pretrained(lambda: bert(output_attentions=True, attn_implementation="eager"))
    names.BertTokenizer = Pretrained(lambda: None)
    names.AdamW, names.get_cosine_schedule_with_warmup = torch.optim.AdamW, _constant
    settings = {
        "bert_path": "", "train_filepath": "", "model": "bert", "mode": "test", "lr": 1e-3, "weight_decay": 0.01,
    }  # fmt: skip
    return names.BertTextClassificationTask(settings)


def _constant(optimizer: Any, **_: Any) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)


def _lit_unet(names: Any) -> Any:
    names.nn = Smaller(nn)
    names.BCELoss, names.DiceLoss = nn.BCEWithLogitsLoss(), Dice("binary")
    return names.LitUnet()


def _distilbert(names: Any) -> Any:
    return names.LightningModel(distilbert(), learning_rate=1e-3)


def _diffusion(names: Any) -> Any:
    import diffusers

    unet = functools.partial(
        diffusers.UNet2DModel, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    names.diffusers = SimpleNamespace(models=SimpleNamespace(UNet2DModel=unet), schedulers=diffusers.schedulers)
    names.torch = NoNoise()
    return names.DiffusionModel()


def _stable_diffusion(names: Any) -> Any:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    unet = functools.partial(
        UNet2DConditionModel, sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=4, cross_attention_dim=12,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    names.UNet2DConditionModel, names.DDPMScheduler = Pretrained(unet), Pretrained(DDPMScheduler)
    names.torch = NoNoise()
    return names.StableDiffusionModulePrecompute(train_mode="unet_all")


def _language_modeling(names: Any) -> Any:
    return names.LanguageModelingTransformer(
        "gpt2", tokenizer=[None] * WORDS, downstream_model_type=Pretrained(gpt2)
    )


def _token_classification(names: Any) -> Any:
    import torchmetrics

    for name in ("Accuracy", "Precision", "Recall", "F1Score"):
        kind = getattr(torchmetrics, name)
        settings = {"task": "multiclass", "num_classes": 3}
        setattr(names, name, lambda kind=kind, settings=settings, **_: kind(**settings))
    model = functools.partial(bert, "BertForTokenClassification", num_labels=3)
    return names.TokenClassificationTransformer("bert", labels=3, downstream_model_type=Pretrained(model))


def _summarization(names: Any) -> Any:
    return names.Seq2SeqTransformer(Pretrained(t5), "t5", compute_generate_metrics=False, tokenizer=[None] * WORDS)


def _translation(names: Any) -> Any:
    tokenizer = SimpleNamespace(batch_decode=lambda rows, **_: [" ".join(map(str, row.tolist())) for row in rows])
    return names.TranslationTransformer(
        "t5", val_target_max_length=6, tokenizer=tokenizer, downstream_model_type=Pretrained(t5)
    )


def _pixel_cnn(names: Any) -> Any:
    names.np = SimpleNamespace(log2=math.log2, exp=math.exp)
    names.train_set = [(torch.zeros(1, 8, 8, dtype=torch.long),)]
    return names.PixelCNN(1, 4)


def _bolts_ae(names: Any) -> Any:
    names._HTTPS_AWS_HUB = ""
    return names.AE(input_height=32, enc_out_dim=512, latent_dim=8)


def _pixels() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(256, (NUM_BATCHES * BATCH_SIZE, 1, 8, 8), generator=generator))


def _masks(size: int) -> Any:
    def draw() -> Dataset:
        x = images(3, size, size)().tensors[0]
        return TensorDataset(x, (x[:, 0] > 0.5).float())

    return draw


def _weighted() -> TensorDataset:
    x, y, w = numbers([8], [], [])().tensors
    return TensorDataset(x, (y > 0).long(), w.abs())


PERRIN = "perrindelort+lightning-GPT/src/lightning_gpt"
LIAN = "lianyongxing+text-classification-bert-lightning"
THAI = "OpenThaiGPT+openthaigpt-pretraining/src/model/openthaigpt_pretraining_model/pl_trainer/pl_trainer.py"

AS_THEY_ARE: dict[str, Script] = {
    "GLUE: tutorial's BERT, state between validation steps": Script(
        ["Lightning-AI+tutorials/lightning_examples/text-transformers/notebook.py"], _glue,
        lambda: Sentences("class"), collate=padded(), validation=lambda: Sentences("class", shorter=2),
    ),
    "demos: LSTM, state between training steps": Script(
        [f"{DEMOS}/lstm.py"], _demo_lstm, tokens(5, WORDS)
    ),
    "demos: transformer": Script(
        [f"{DEMOS}/transformer.py"], lambda names: names.LightningTransformer(WORDS), tokens(7, WORDS),
        trainer={"gradient_clip_val": 0.25},
    ),
    "ImageNet example, num_micro_batches=1": Script(
        [f"{EXAMPLES}/domain_templates/imagenet.py"], _imagenet, images(3, 8, 8, classes=1000),
        num_micro_batches=1,
    ),
    "UvA 10: PixelCNN": Script([f"{UVA}/10-autoregressive-image-modeling/notebook.py"], _pixel_cnn, _pixels),
    "nanoGPT port: tied weights, rates by step": Script(
        ["chatsci+nanoGPT-lightning/model.py"], _nano_gpt, tokens(7, WORDS)
    ),
    "minGPT port: positions from the batch": Script(
        ["adamcasson+minGPT-lightning/mingpt_lightning/model.py"],
        lambda names: names.GPT(3, 2, 16, WORDS, 8, learning_rate=3e-3),
        lambda: (lambda x, y: TensorDataset(x, torch.arange(7).expand_as(x), y))(*tokens(7, WORDS)().tensors),
    ),
    "lightning-GPT: heads in a list": Script(
        [f"{PERRIN}/layers/{name}.py" for name in ("feed_forward", "head", "multi_head", "block")]
        + [f"{PERRIN}/modules/gpt.py"],
        _lightning_gpt, tokens(7, WORDS), logs="train_loss",
        collate=lambda samples: tuple(map(torch.stack, zip(*samples, strict=True))),
    ),
    "BERT classifier: loss in forward, metrics": Script(
        ["samirsalman+PytorchLightning-BERT/src/pl_modules/BERTClassifier.py"], _bert_classifier,
        lambda: Sentences("class"), collate=padded(), validation=lambda: Sentences("class", shorter=2),
    ),
    "Japanese BERT classifier: first token": Script(
        ["tanidaiz+pytorch-lightning-bert-classifier/bert_classifier.py"], _japanese_bert,
        lambda: Sentences("class"),
        collate=lambda samples: {
            "src": padded()(samples)["input_ids"], "tgt": torch.stack([each["labels"] for each in samples]),
        },
        today={"nn.CrossEntropyLoss().cuda()": "nn.CrossEntropyLoss()"},
    ),
    "OpenThaiGPT: Llama, gradient checkpointing, labels inside": Script(
        [THAI], _open_thai, lambda: Sentences("causal"), collate=alone
    ),
    "T5 with a target": Script(
        ["ReviBa+NLP-project/t5/model.py"], _t5_model, lambda: Sentences("sequence"), collate=padded("target"),
        validation=lambda: Sentences("sequence", shorter=2),
    ),
    "T5 whose decoder's input is made in forward": Script(
        ["yuto3o+pytorch-lightning-t5/lightningt5.py"],
        lambda names: names.LightningT5Module(t5(), None, learning_rate=1e-3, num_warmup_steps=2),
        lambda: Sentences("sequence"), collate=padded(),
        today={
            "len(self.trainer.datamodule.train_dataloader())": "3",
            "self.trainer.num_devices if self.trainer.gpus else 0": "1",
        },
    ),
    "Chinese BERT: a LightningModule in another one, scikit-learn in validation": Script(
        [f"{LIAN}/models/bert.py", f"{LIAN}/task/text_classification_train_task.py"], _chinese_bert,
        lambda: Sentences("class"), collate=padded("label", types=True),
        today={
            "from models.bert import Bert": "pass", "num_warmup_steps=len(self.train_dl)": "num_warmup_steps=3",
            "self.args.epochs*len(self.train_dl)": "6",
        },
    ),
    "super_glue BERT: only the last block is trained": Script(
        ["lopeve+colearnt-prompting/src/models/BERT.py"], _frozen_bert, lambda: Sentences("class"),
        collate=padded(), today={"def validation_epoch_end": "def _validation_end"},
    ),
    "U-Net: Dice loss of the batch": Script(
        [
            f"haidhiSkuy+pytorch-lightning-unet/model/{name}.py"
            for name in ("torch_model", "losses_metrics", "lightning_module")
        ],
        _lit_unet, _masks(16), validation=_masks(32),
    ),
    "DistilBERT finetuned": Script(
        ["Lightning-AI+dl-fundamentals/unit09-performance/9.3-multi-gpu/finetune-multigpu.py"], _distilbert,
        lambda: Sentences("class"), collate=padded("label"),
    ),
    "diffusion: U-Net of diffusers": Script(
        ["alexkrz+diffusion-lightning/src/pl_module.py"], _diffusion,
        lambda: Samples(lambda: {"images": torch.randn(3, 8, 8)}),
    ),
    "Stable Diffusion: U-Net with text": Script(
        ["hirune924+lightning-diffusion/src/lightning_diffusion/model/text_to_image/stable_diffusion.py"],
        _stable_diffusion, lambda: Samples(lambda: (torch.randn(5, 12), torch.randn(4, 8, 8))),
    ),
    "lightning-transformers: GPT-2, embeddings resized when fit starts": Script(
        [f"{TRANSFORMERS}/core/model.py", f"{TRANSFORMERS}/task/nlp/language_modeling/model.py"],
        _language_modeling, lambda: Sentences("causal"), collate=padded(),
    ),
    "lightning-transformers: tokens classified, metrics of those that count": Script(
        [f"{TRANSFORMERS}/core/model.py", f"{TRANSFORMERS}/task/nlp/token_classification/model.py"],
        _token_classification, lambda: Sentences("tokens"), collate=padded(), keeps=["setup"],
        validation=lambda: Sentences("tokens", shorter=2),
    ),
    "lightning-transformers: T5": Script(
        [f"{TRANSFORMERS}/core/model.py", f"{TRANSFORMERS}/core/seq2seq/model.py"],
        _summarization, lambda: Sentences("sequence"), collate=padded(),
    ),
    "lightning-transformers: T5 that generates in validation": Script(
        [
            f"{TRANSFORMERS}/{name}.py"
            for name in ("core/model", "core/seq2seq/utils", "core/seq2seq/model", "task/nlp/translation/model")
        ],
        _translation, lambda: Sentences("sequence"), collate=padded(ignored=0), keeps=["setup"],
    ),
    "ttbb: a weight of each sample": Script(
        ["mmarchegiani+ttbb-DCTR/ttbb_dctr/models/binary_classifier.py"],
        lambda names: names.BinaryClassifier(8, 16, 1, 3, learning_rate=0.1), _weighted, num_micro_batches=1,
    ),
}  # fmt: skip
