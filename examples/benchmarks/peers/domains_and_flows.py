"""Lightning modules of more kinds: two domains, margins, energies, flows, talk and summaries.

Nothing but the strategy changes, but for draws, which a pipeline makes others of: they are made of the input.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from script import BATCH_SIZE, NUM_BATCHES, Samples, Script, images, tokens
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

DOMAINS = "lorenzo-park+domain-adaptation-pytorch-lightning"
DOMADAPTER = "abhinavkashyap+domadapter/domadapter/models"
UVA = "Lightning-AI+tutorials/course_UvA-DL"
WORDS, LENGTH = 40, 7


# Two domains


def _two_domains() -> Dataset:
    def domain() -> tuple[Tensor, Tensor]:
        return torch.randn(3, 28, 28), torch.randint(10, ())

    return Samples(lambda: (domain(), domain()))


def _dann(names: Any) -> Any:
    names.get_backbone = lambda _: names.LeNet()
    names.get_train_dataset = lambda *_: (None, None)
    names.get_test_dataset = lambda *_: None
    training = SimpleNamespace(
        backbone="lenet", use_tgt_val=False, batch_size=BATCH_SIZE, iterations=0, lr_schedule=True,
        optimizer="sgd", lr=0.01, weight_decay=1e-3, alpha=10, beta=0.75, gamma=10,
    )  # fmt: skip
    data = SimpleNamespace(src="", tgt="", img_size=28, root="")
    module = names.DANN(SimpleNamespace(training=training, dataset=data, epoch=2))
    module.len_dataloader = NUM_BATCHES
    return module


DANN_TODAY = {
    "import numpy as np": "import numpy as np\nimport torchmetrics",
    "pl.metrics.Accuracy()": "torchmetrics.Accuracy(task='multiclass', num_classes=10)",
    "def training_epoch_end(self, outs)": "def on_train_epoch_end(self)",
    "def validation_epoch_end(self, outs)": "def on_validation_epoch_end(self)",
    "def test_epoch_end(self, outs)": "def on_test_epoch_end(self)",
}


def _small_bert() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def _domadapter(names: Any) -> Any:
    from transformers import BertModel

    names.AutoConfig = SimpleNamespace(from_pretrained=lambda _: _small_bert())
    names.AutoModel = SimpleNamespace(from_pretrained=lambda _, config: BertModel(config))
    return names.DANN(
        {"pretrained_model_name": "", "hidden_size": 16, "num_classes": 2, "learning_rate": 1e-3, "epochs": 2,
         "is_dynamic_dann_alpha": True}
    )  # fmt: skip


def _two_texts() -> Dataset:
    def text() -> tuple[Tensor, Tensor]:
        words = torch.randint(1, WORDS, (LENGTH,))
        length = int(torch.randint(3, LENGTH + 1, ()))
        return words, (torch.arange(LENGTH) < length).long()

    def sample() -> dict[str, Tensor]:
        found = {"label_source": torch.randint(2, ()), "label_target": torch.randint(2, ())}
        for name in ("source", "target"):
            found[f"{name}_input_ids"], found[f"{name}_attention_mask"] = text()
        return found

    return Samples(sample)


# Energies and flows


def _pictures() -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.rand(NUM_BATCHES * BATCH_SIZE, 1, 28, 28, generator=random) * 2 - 1,
        torch.zeros(NUM_BATCHES * BATCH_SIZE),
    )


def _numbers_of_pictures() -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randint(256, (NUM_BATCHES * BATCH_SIZE, 1, 28, 28), generator=random),
        torch.zeros(NUM_BATCHES * BATCH_SIZE),
    )


def _flow(varied: bool) -> Any:
    def build(names: Any) -> Any:
        names.train_set, names.device = [(torch.zeros(1, 28, 28), 0)], torch.device("cpu")
        return names.create_simple_flow(use_vardeq=varied)

    return build


def _multiscale(names: Any) -> Any:
    names.train_set, names.device = [(torch.zeros(1, 28, 28), 0)], torch.device("cpu")
    return names.create_multiscale_flow()


def _energy(names: Any) -> Any:
    names.device = torch.device("cpu")
    return names.DeepEnergyModel((1, 28, 28), BATCH_SIZE, hidden_features=8)


FLOW_TODAY = {"torch.rand_like(z).detach()": "(torch.sin(100 * z) ** 2 * 0.98 + 0.01).detach()"}


# Talk and summaries


def _talk(names: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=3, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    names.GPT2LMHeadModel = SimpleNamespace(from_pretrained=lambda _: GPT2LMHeadModel(config))
    names.AdamW = lambda groups, lr, correct_bias: torch.optim.AdamW(groups, lr=lr)
    module = names.KoGPT2Chat(SimpleNamespace(lr=1e-3, max_epochs=2, warmup_ratio=0.2))
    module.train_dataloader = lambda: range(NUM_BATCHES)
    return module


def _answers() -> Dataset:
    def sample() -> tuple[Tensor, Tensor, Tensor]:
        words = torch.randint(1, WORDS, (LENGTH,))
        begin = int(torch.randint(1, 4, ()))
        end = int(torch.randint(begin + 1, LENGTH + 1, ()))
        places = torch.arange(LENGTH)
        return words, ((places >= begin) & (places < end)).long(), words.roll(-1)

    return Samples(sample)


def _summaries(names: Any) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0,
    )  # fmt: skip
    names.BartForConditionalGeneration = SimpleNamespace(
        from_pretrained=lambda _: BartForConditionalGeneration(config)
    )
    names.PreTrainedTokenizerFast = SimpleNamespace(from_pretrained=lambda _: SimpleNamespace(pad_token_id=0))
    names.AdamW = lambda groups, lr, correct_bias: torch.optim.AdamW(groups, lr=lr)
    return names.KoBARTConditionalGeneration(SimpleNamespace(lr=1e-3, num_workers=0))


def _padded(words: Tensor, padding: int) -> Tensor:
    return words.masked_fill(torch.arange(LENGTH) >= int(torch.randint(3, LENGTH + 1, ())), padding)


def _texts_with_summaries() -> Dataset:
    def sample() -> dict[str, Tensor]:
        words = torch.randint(1, WORDS, (LENGTH,))
        labels = _padded(words.flip(0), -100)
        return {
            "input_ids": _padded(words, 0), "decoder_input_ids": labels.roll(1).masked_fill(labels.roll(1) < 0, 0),
            "labels": labels,
        }  # fmt: skip

    return Samples(sample)


def _simple_t5(names: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return names.LightningModel(None, T5ForConditionalGeneration(config))


def _texts_to_texts() -> Dataset:
    def sample() -> dict[str, Tensor]:
        words = torch.randint(1, WORDS, (LENGTH,))
        given, labels = _padded(words, 0), _padded(words.flip(0), -100)
        return {
            "source_text_input_ids": given, "source_text_attention_mask": (given > 0).long(),
            "labels": labels, "labels_attention_mask": (labels > 0).long(),
        }  # fmt: skip

    return Samples(sample)


def _image_gpt(names: Any) -> Any:
    import io

    import numpy

    file = io.BytesIO()
    numpy.save(file, numpy.linspace(-1, 1, 8, dtype=numpy.float32)[:, None])
    file.seek(0)
    module = names.ImageGPT(file, num_layers=3, num_pixels=4, num_vocab=8, steps=20, warmup_steps=2)
    return module


DOMAINS_AND_FLOWS: dict[str, Script] = {
    "DANN: two domains through one extractor": Script(
        [f"{DOMAINS}/{name}.py" for name in ("backbone/component", "backbone/lenet", "dann/grl", "dann/model")],
        _dann, _two_domains, validation=images(3, 28, 28), today=DANN_TODAY,
    ),
    "domadapter: DANN, BERT": Script(
        [f"{DOMADAPTER}/modules/gradient_reversal.py", f"{DOMADAPTER}/uda/dann.py"], _domadapter, _two_texts,
        today={
            "torchmetrics.Accuracy()": "torchmetrics.Accuracy(task='multiclass', num_classes=2)",
            "torchmetrics.F1(": "torchmetrics.F1Score(task='multiclass', ",
            "def training_epoch_end": "def _training_end", "def validation_epoch_end": "def _validation_end",
            "def test_epoch_end": "def _test_end",
        },
    ),
    "UvA 7: deep energy": Script(
        [f"{UVA}/07-deep-energy-based-generative-models/notebook.py"], _energy, _pictures,
        trainer={"gradient_clip_val": 0.1},
    ),
    "UvA 9: flow": Script(
        [f"{UVA}/09-normalizing-flows/NF.py"], _flow(False), _numbers_of_pictures, today=FLOW_TODAY,
        trainer={"gradient_clip_val": 1.0},
    ),
    "UvA 9: flow, variational dequantization": Script(
        [f"{UVA}/09-normalizing-flows/NF.py"], _flow(True), _numbers_of_pictures, today=FLOW_TODAY,
        trainer={"gradient_clip_val": 1.0},
    ),
    "UvA 9: flow of several scales": Script(
        [f"{UVA}/09-normalizing-flows/NF.py"], _multiscale, _numbers_of_pictures, today=FLOW_TODAY,
        trainer={"gradient_clip_val": 1.0},
    ),
    "SeanNaren/minGPT: a callback that sets the rate": Script(
        ["SeanNaren+minGPT/mingpt/lr_decay.py", "SeanNaren+minGPT/mingpt/model.py"],
        lambda names: names.GPT(20, n_embd=16, block_size=8, n_layer=3, n_head=2, learning_rate=3e-3),
        tokens(7, 20), callbacks=lambda names: [names.LearningRateDecayCallback(3e-3, 200, 2000)],
        trainer={"gradient_clip_val": 1.0}, today={"batch_idx, dataloader_idx)": "batch_idx)"},
    ),
    "KoGPT2-chatbot: a loss over the words that count": Script(
        ["haven-jeon+KoGPT2-chatbot/train_torch.py"], _talk, _answers,
        today={
            "from pytorch_lightning.core.lightning import": "from pytorch_lightning import",
            "args = parser.parse_args()": "",
            "self.hparams = hparams": "self.save_hyperparameters(vars(hparams))",
        },
    ),
    "KoBART-summarization": Script(
        ["seujung+KoBART-summarization/model.py"], _summaries, _texts_with_summaries,
        today={"self.save_hyperparameters(hparams)": "self.save_hyperparameters(vars(hparams))"},
    ),
    "simpleT5": Script(
        ["Shivanandroy+simpleT5/simplet5/simplet5.py"], _simple_t5, _texts_to_texts,
        today={"def training_epoch_end": "def _training_end", "def validation_epoch_end": "def _validation_end"},
    ),
    "teddykoker/image-gpt": Script(
        [f"teddykoker+image-gpt/src/{name}.py" for name in ("utils", "gpt2", "image_gpt")], _image_gpt,
        images(1, 4, 4),
        today={"def validation_epoch_end": "def _validation_end", "def test_epoch_end": "def _test_end"},
    ),
}  # fmt: skip
