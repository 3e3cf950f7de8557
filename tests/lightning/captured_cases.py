"""Cases: modules that name no layers, as others write them; what their steps call is captured."""

from __future__ import annotations

import copy
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset, random_split
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from tests.choice import is_chosen
from tests.engine import plans
from tests.lightning import after_fit_cases
from tests.lightning import lightning_cases as cases

WORDS = 17
NUM_SAMPLES = 14  # a batch of eight and one of six, in two, two, one and one


class Sgd(pl.LightningModule):
    """What all of them have in common."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def padded(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of sentences as Hugging Face collates them: as long as the longest one, padded on the right."""
    tokens = nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(s["tokens"]) for s in samples], batch_first=True)
    batch = {"input_ids": tokens, "attention_mask": mask}
    if "label" in samples[0]:
        return {**batch, "labels": torch.stack([sample["label"] for sample in samples])}
    return {**batch, "labels": tokens.masked_fill(mask == 0, -100)}


def sentences(*, labelled: bool = False) -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    samples = []
    for place in range(NUM_SAMPLES):
        length = 3 + (5 * place) % 7 - (place > 7)
        sample = {"tokens": torch.randint(1, WORDS, (length,), generator=generator)}
        samples.append({**sample, "label": sample["tokens"].sum() % 3} if labelled else sample)
    return DataLoader(samples, batch_size=8, collate_fn=padded)  # type: ignore[arg-type]


class CausalLanguageModel(Sgd):
    """Calls a Hugging Face model with its labels: each micro-batch has another number of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=3, n_head=2, resid_pdrop=dropout,
            embd_pdrop=dropout, attn_pdrop=dropout,
        ))  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.model(**batch)
        self.log("train_loss", outputs.loss)
        return outputs.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.model(**batch)
        self.log("val_loss", outputs.loss, batch_size=len(batch["labels"]))
        self.log("squares", outputs.logits.square().mean(), batch_size=len(batch["labels"]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


class OtherSignatures(CausalLanguageModel):
    """Trains with labels, by the model's own loss, and validates without them, through its own ``forward``."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, attention_mask=mask).logits

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens = torch.cat([batch["input_ids"], batch["input_ids"]], dim=1)  # longer than any that is trained
        logits = self(tokens, torch.cat([batch["attention_mask"]] * 2, dim=1))
        self.log("val_loss", F.cross_entropy(logits.transpose(1, 2), tokens), batch_size=len(tokens))


class Llama(CausalLanguageModel):
    """Asks whether there is one sample, and recomputes its blocks in the backward."""

    def __init__(self) -> None:
        Sgd.__init__(self)
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32,
        ))  # fmt: skip
        self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=len(batch["labels"]))


class Experts(CausalLanguageModel):
    """Its library hangs hooks on blocks at the first call, and adds an auxiliary loss to its loss in place."""

    def __init__(self) -> None:
        Sgd.__init__(self)
        from transformers import MixtralConfig, MixtralForCausalLM

        self.model = MixtralForCausalLM(MixtralConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
            router_aux_loss_coef=0.1, max_position_embeddings=32,
        ))  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=len(batch["labels"]))


class SentenceClassifier(Sgd):
    """Hands its batch to ``forward`` by keywords, and that to the model, whose output is read by its place."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.bert = BertForSequenceClassification(BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ))  # fmt: skip

    def forward(self, **inputs: Any) -> Any:
        return self.bert(**inputs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(**batch)
        self.log("right", (outputs[1].argmax(-1) == batch["labels"]).float().mean())
        return outputs[0]


class Choices(Sgd):
    """Scores the choices of a question, which stand in the rows of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        self.model = T5ForConditionalGeneration(T5Config(
            vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0,
        ))  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        question, choices, label = batch
        size, number = choices.shape[:2]
        rows, mask = choices.flatten(0, 1), (question != 0).float()
        hidden = self.model.encoder(input_ids=question, attention_mask=mask)[0]
        hidden, mask = (
            each.unsqueeze(1).repeat(1, number, *[1] * (each.ndim - 1)).flatten(0, 1) for each in (hidden, mask)
        )
        before = torch.cat([torch.zeros_like(rows[:, :1]), rows[:, :-1]], dim=1)
        logits = self.model(
            attention_mask=mask, encoder_outputs=[hidden], decoder_input_ids=before,
            decoder_attention_mask=(before == before).float(),
        ).logits  # fmt: skip
        losses = F.cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="none")
        return F.cross_entropy(-losses.view(size, number, -1).sum(-1), label)


def questions() -> DataLoader:
    draws = torch.Generator().manual_seed(3)
    data = [
        tuple(torch.randint(low, WORDS if low else 3, shape, generator=draws) for low, shape in SHAPES_OF_CHOICES)
        for _ in range(NUM_SAMPLES)
    ]
    return DataLoader(data, batch_size=8)


SHAPES_OF_CHOICES = ((1, (9,)), (1, (3, 5)), (0, ()))


class UNet(Sgd):
    """The first layers' outputs are read again by the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)])
        self.register_buffer("weights", torch.tensor([0.25, 1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch["image"]), batch["segments"], weight=self.weights)


class Featured(UNet):
    """Its head reads what hooks on two layers keep, as that of DPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(1 if place == 0 else 4, 4, 3, padding=1), nn.Tanh()) for place in range(5)
        )
        self.head, self.features = nn.Conv2d(8, 2, 1), {}
        del self.down, self.middle, self.up
        for name, layer in {"first": self.blocks[0], "fourth": self.blocks[3]}.items():
            layer.register_forward_hook(self.keep(name))

    def keep(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, arguments: Any, output: torch.Tensor) -> None:
            self.features[name] = output

        return hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat([self.features["first"], self.features["fourth"]], dim=1)) + x[:, :2]


class FeaturedDeciding(Featured):
    """Cannot be written down, and its code around the blocks reads what hooks in them keep."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.nan_to_num() if x.isnan().any() else x)


def images() -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    samples = [
        {"image": image, "segments": (image[0] > 0).long()}
        for image in torch.randn(NUM_SAMPLES, 1, 8, 8, generator=generator)
    ]
    return DataLoader(samples, batch_size=8)  # type: ignore[arg-type]


class Translator(Sgd):
    """An encoder and a decoder with masks, one of which is of the length alone; an argument that is a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor, *, padding: Any = None, scale: Any = 1.0) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        x = self.transformer(
            self.embed(source) * scale, self.embed(target), tgt_mask=mask, src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )  # fmt: skip
        return {"logits": self.head(x)}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, padding = batch["input_ids"], batch["attention_mask"] == 0
        logits = self(tokens, tokens[:, :-1], padding=padding, scale=0.5)["logits"]
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100)


class Recurrent(Sgd):
    """Calls one part with all weights, which returns a tensor and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.net = RecurrentNet()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits, (hidden, _) = self.net(batch["input_ids"][:, :-1])
        self.log("hidden", hidden.square().mean())
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


class RecurrentNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.lstm = nn.LSTM(12, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, WORDS)

    def forward(self, tokens: torch.Tensor) -> Any:
        x, (hidden, cell) = self.lstm(self.embed(tokens))
        return self.head(x), (hidden.transpose(0, 1), cell.transpose(0, 1))


class Stateful(Sgd):
    """Carries what its layers returned into the next step, and begins with zeros like its first weight."""

    state: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.net = RecurrentNet()

    def forward(self, tokens: torch.Tensor, state: Any) -> Any:
        x, state = self.net.lstm(self.net.embed(tokens), state)
        return self.net.head(x), state

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = batch["input_ids"]
        if self.state is None:
            self.state = (next(self.net.parameters()).new_zeros(2, len(tokens), 12),) * 2
        self.state = tuple(each.detach() for each in self.state)
        logits, self.state = self(tokens[:, :-1], self.state)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


class SeveralCalls(Sgd):
    """Calls one module after the other, with something in between that is no module; and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 8))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        hidden = self.encoder(x)
        loss = F.mse_loss(self.decoder(2.0 * hidden), x)
        again = self.encoder(-x)
        self.log("size", hidden.square().mean())
        return loss + 0.1 * F.mse_loss(hidden, again)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.encoder(batch[0])
        self.log("val_loss", F.mse_loss(self.decoder(2.0 * hidden), batch[0]))


class SeveralCallsKept(SeveralCalls):
    """Keeps its losses for the end of the epoch, and the last one, which it reads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        self.last = loss.detach()
        self.log("last", self.last)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("kept", torch.stack(self.losses).mean())
        self.losses.clear()


class SeveralCallsOneSets(SeveralCalls):
    """Reads what one of the modules that it calls has set."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = SetsItsSize(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.encoder.size


class Adds(nn.Module):
    """Adds to a tensor that it is given, in place, as the layers of normalizing flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.linear(x))
        total += x.sum(1)
        return x, total


class AddsIfFinite(nn.Module):
    """Adds, too, without weights, and decides by its data, so that the recording runs it alone."""

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not x.isfinite().all():
            raise ValueError("no numbers")
        total += x.square().sum(1)
        return x, total


class SeveralCallsAdding(Sgd):
    """Hands one tensor to all that it calls, of which each changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = Adds(), AddsIfFinite(), Adds()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        total = torch.zeros(len(x))
        for part in (self.first, self.between, self.last):
            x, total = part(x, total)
        return (total - 1.0).square().mean() + x.square().mean()


class SetsItsSize(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.size = x.square().mean()
        return x


class Thrice(Sgd):
    """Runs one block three times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.embed(x))
        for _ in range(3):
            x = torch.relu(self.block(x)) + x
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self(batch[0]), batch[0])


class PartsAlone(SeveralCalls):
    """Trains through one call; its validation calls one part alone, and its test another call."""

    def forward(self, x: torch.Tensor, noise: Any = None) -> torch.Tensor:
        x = self.decoder(self.encoder(x))
        return x if noise is None else x + noise

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self(batch[0]), batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("size", self.encoder(batch[0]).square().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("noisy", self(batch[0], noise=torch.ones_like(batch[0])).square().mean())


class Tripled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


class Unnamed(cases.SequentialClassifier):
    """Has a Sequential whose children alone would be another model, and weights that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tripled(*self.net)
        self.spare = nn.Sequential(nn.Linear(4, 4))


def trained(
    host: cases.Host,
    build: Callable[[], pl.LightningModule],
    data: DataLoader,
    strategy: Any = None,
    num_epochs: int = 2,
) -> dict[str, Any]:
    """Losses, logs and what the module is after a fit."""
    pl.seed_everything(0, verbose=False)
    module, recorder = build(), cases.Recorder()
    strategy = {"time_limit_seconds": 1, **(strategy or {})}
    trainer = host.trainer(recorder, max_epochs=num_epochs, strategy=strategy)
    trainer.fit(module, data, data if "validation_step" in vars(type(module)) else None)
    return {
        **cases.fit_record(trainer, module, recorder.rows),
        "weights": {name: float(value.double().sum()) for name, value in module.state_dict().items()},
    }


def several_calls(host: cases.Host) -> dict[str, Any]:
    return trained(host, SeveralCalls, cases.loader(NUM_SAMPLES))


def several_calls_adding(host: cases.Host) -> dict[str, Any]:
    """What the part without weights added was added twice, and refused as another argument of the next call."""
    return trained(host, SeveralCallsAdding, cases.loader(48))


def changing_number(host: cases.Host) -> dict[str, Any]:
    return trained(host, ChangingNumber, cases.loader(48))


def sampled_before(host: cases.Host) -> dict[str, Any]:
    """What the refusal of ``Sampling`` says."""
    return trained(host, SampledBefore, cases.loader(48))


def drawing_behind(host: cases.Host) -> dict[str, Any]:
    """It was refused as one that draws between its layers."""
    return trained(host, DrawingBehind, cases.loader(48))


def several_calls_kept(host: cases.Host) -> dict[str, Any]:
    """The step was refused for reading "what self.forward() or a layer sets", which it had set itself."""
    return trained(host, SeveralCallsKept, cases.loader(48))


def one_block_thrice(host: cases.Host) -> dict[str, Any]:
    """A rank that gave its copies away was told that their weights had another shape than when it began."""
    return trained(host, Thrice, cases.loader(NUM_SAMPLES), {"algorithm": [0, 4, 5]}, num_epochs=4)


def other_signatures(host: cases.Host) -> dict[str, Any]:
    """A validation that left out the labels, or called another part, was refused."""
    return trained(host, OtherSignatures, sentences(), num_epochs=1)


def single_samples(host: cases.Host) -> dict[str, Any]:
    """A short last batch, whose micro-batches have one sample each, or some of them, was refused."""
    samples = list(sentences().dataset)  # type: ignore[call-overload]
    batches = [samples[:8], samples[8:13], samples[10:]]  # in two each, in two and three, in one each
    data = DataLoader([padded(batch) for batch in batches], batch_size=None)  # type: ignore[arg-type]
    return trained(host, Llama, data, num_epochs=1)


def parts_alone(host: cases.Host) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module, recorder, data = PartsAlone(), cases.Recorder(), cases.loader(NUM_SAMPLES)
    trainer = host.trainer(recorder, max_epochs=2, strategy={"time_limit_seconds": 1})
    trainer.fit(module, data, data)
    record = cases.fit_record(trainer, module, recorder.rows)
    return {**record, "tested": trainer.test(module, data, verbose=False)}


def stateful(host: cases.Host) -> dict[str, Any]:
    """``next(self.parameters())`` ended the fit without a word, before its first step."""
    return trained(host, Stateful, DataLoader(stateful_samples(), batch_size=8, collate_fn=padded))  # type: ignore[arg-type]


def stateful_samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [{"tokens": torch.randint(1, WORDS, (5,), generator=generator)} for _ in range(24)]


def one_sample_each(host: cases.Host) -> dict[str, Any]:
    """Each micro-batch has one sample, and a batch that is tried was cut into others, which layers did not run.

    What the loss of a batch is was not found out then, and the mean over micro-batches was trained.
    """
    strategy, samples = {"num_micro_batches": 8}, stateful_samples()
    return {
        "padded": trained(host, CausalLanguageModel, sentences(), strategy, num_epochs=1),
        "stateful": trained(host, Stateful, DataLoader(samples, batch_size=8, collate_fn=padded), strategy),  # type: ignore[arg-type]
    }


def experts(host: cases.Host) -> dict[str, Any]:
    """Hooks of transformers itself counted as the user's; an auxiliary loss was that of each micro-batch.

    The comparison left them out, and a line said that ``forward`` raises an IndexError.
    """
    with warnings.catch_warnings(record=True) as said, after_fit_cases.Said() as log:
        warnings.simplefilter("always")
        result = trained(host, Experts, sentences(), num_epochs=1)
    lines = [str(each.message) for each in said] + log.lines
    return {**result, "not compared": [line for line in lines if "could not be compared" in line]}


class Graphs:
    """Several graphs as one, as graph libraries batch them: no dimension is that of samples in all tensors."""

    def __init__(self, graphs: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        begins = itertools.accumulate((len(x) for x, _, _ in graphs), initial=0)
        self.x = torch.cat([x for x, _, _ in graphs])
        self.edge_index = torch.cat([e + begin for (_, e, _), begin in zip(graphs, begins, strict=False)], dim=1)
        self.batch = torch.cat([torch.full((len(x),), place) for place, (x, _, _) in enumerate(graphs)])
        self.y = torch.tensor([label for _, _, label in graphs])

    def to(self, *_: Any, **__: Any) -> Graphs:
        return self


class Isomorphism(nn.Module):
    """A layer that adds up neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x.index_add(0, edge_index[1], x[edge_index[0]])))


class GraphNetwork(Sgd):
    """Sets an attribute of its batch, and changes a tensor of it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Isomorphism(3), Isomorphism(8)]), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor, num: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.head(x.new_zeros(num, 8).index_add(0, batch, x))

    def training_step(self, data: Graphs, batch_idx: int) -> torch.Tensor:
        data.x = data.x * 2
        data.x -= 0.5
        return F.cross_entropy(self(data.x, data.edge_index, data.batch, len(data.y)), data.y)


def graphs_as_they_are(host: cases.Host) -> dict[str, Any]:
    """They were refused also where nothing is cut; runs that look at a step may not change the batch."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for place in range(12):
        num = 3 + place % 3
        edges = torch.randint(0, num, (2, 2 * num), generator=generator)
        samples.append((torch.randn(num, 3, generator=generator), edges, place % 3))
    data = DataLoader(samples, batch_size=4, collate_fn=Graphs)  # type: ignore[arg-type]
    return trained(host, GraphNetwork, data, {"num_micro_batches": 1})


def unnamed(host: cases.Host) -> dict[str, Any]:
    return trained(host, Unnamed, cases.loader(NUM_SAMPLES))


def runs(host: cases.Host) -> dict[str, Any]:
    """What one module goes through: fits, checkpoints, evaluation, predictions, copies."""
    pl.seed_everything(0, verbose=False)
    module, recorder, data = CausalLanguageModel(), cases.Recorder(), sentences()
    trainer = host.trainer(recorder, max_epochs=1, strategy={"warmup_epochs": 0, "time_limit_seconds": 1})
    trainer.fit(module, data)
    path = host.folder / "captured.ckpt"
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(host.folder / "weights.ckpt", weights_only=True)
    copied = copy.deepcopy(module)
    [tested] = trainer.validate(module, data, verbose=False)
    later = host.trainer(recorder, max_epochs=3, strategy={"time_limit_seconds": 1})
    later.fit(CausalLanguageModel(), data, ckpt_path=str(path))
    predicted = host.trainer().predict(copied, data)
    loaded = CausalLanguageModel.load_from_checkpoint(host.folder / "weights.ckpt", map_location="cpu")
    return {
        "rows": recorder.rows,
        "tested": tested,
        "predicted": [float(each.double().sum()) for each in predicted],
        "names": list(copied.state_dict()),
        "loaded": {name: float(value.double().sum()) for name, value in loaded.state_dict().items()},
        "alone": float(loaded.model(**next(iter(data))).loss),
    }


def causal_language_model(host: cases.Host) -> dict[str, Any]:
    return trained(host, CausalLanguageModel, sentences())


def sentence_classifier(host: cases.Host) -> dict[str, Any]:
    return trained(host, SentenceClassifier, sentences(labelled=True))


def choices(host: cases.Host) -> dict[str, Any]:
    """Code of the decoder that goes by a size of the encoder's output stood before it where sizes were others."""
    return trained(host, Choices, questions(), {"num_micro_batches": 8})


def u_net(host: cases.Host) -> dict[str, Any]:
    return trained(host, UNet, images())


def featured(host: cases.Host) -> dict[str, Any]:
    return trained(host, Featured, images())


def translator(host: cases.Host) -> dict[str, Any]:
    return trained(host, Translator, sentences())


def recurrent(host: cases.Host) -> dict[str, Any]:
    return trained(host, Recurrent, sentences())


class Repeating(Sgd):
    """Runs one module three times, whose weights then lie in several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.embed(x))
        for _ in range(3):
            x = torch.relu(self.block(x)) + x
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


def copies_that_leave(host: cases.Host) -> dict[str, Any]:
    """When layers moved a rank lost its copy, and the run was refused for a weight of the shape (0,)."""
    data = cases.loader(NUM_SAMPLES)
    return {str(cut): trained(host, Repeating, data, {"algorithm": [0, cut, 5]}) for cut in (1, 4)}


class Routed(nn.Module):
    """Each sample goes to the expert that a router chooses for it; an expert that nobody chooses does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        chosen, changed = shares.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            samples = (chosen == number).nonzero().flatten()
            if len(samples):
                changed[samples] = expert(x[samples]) * shares[samples, number, None]
        return x + changed


class Guarded(nn.Module):
    """Asks for its numbers before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        return x / 2 if x.abs().max() > 1e3 else x


class DecidingBlocks(Sgd):
    """Blocks decide by data, each for itself; the step calls them one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Routed(), Guarded(), Routed(), Guarded()])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), batch[0])


class Bounded(nn.Module):
    """Its own code decides by data before its blocks and after them; what is around them shares a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList([Routed(), nn.Linear(8, 8), Guarded(), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, weight: Any = None) -> dict[str, Any]:
        x = self.norm(self.embed(x))
        far = x.abs() > 2.0
        if far.any():
            x = x.masked_fill(far, 2.0)
        for block in self.blocks:
            x = block(x)
        if x.isnan().any():
            x = x.nan_to_num()
        return {"x": self.head(x) if weight is None else self.head(x) * weight, "bound": 2.0}


class DecidingModel(Sgd):
    """Calls such a model within its ``forward``, otherwise in its validation, with a factor of its own."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = Bounded(), nn.Linear(8, 8)

    def on_train_epoch_start(self) -> None:
        self.factor = 1.0 + 0.5 * self.current_epoch

    def forward(self, x: torch.Tensor, weight: Any = None) -> torch.Tensor:
        found = self.net(x * self.factor, weight)
        return self.last(found["x"]) * found["bound"]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self(batch[0], torch.full_like(batch[0], 0.5)), batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[0]))


class OwnGenerators(Sgd):
    """Its step draws from a generator and an iterator of its own, for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rng, self.factors = random.Random(0), itertools.cycle([1.0, 2.0, 0.5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        factor = next(self.factors) * (3.0 if self.rng.random() < 0.5 else 1.0)
        return F.mse_loss(self(batch[0] * factor), batch[0])


def own_generators(host: cases.Host) -> dict[str, Any]:
    """The step that was run to find the layers drew the numbers and the item of the first batch."""
    return trained(host, OwnGenerators, cases.loader(NUM_SAMPLES))


class ScaledSamples(Dataset):
    """Its samples are scaled by numbers of its own."""

    def __init__(self) -> None:
        self.samples, self.draws, self.rng = cases.samples(NUM_SAMPLES, 2), 0, np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.draws += 1
        return (self.samples[index][0] * float(self.rng.uniform(0.5, 1.5)) * (1 + self.draws % 3),)


class InAnotherOrder(Sampler):
    """Batches in the order of the number of its epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return NUM_SAMPLES // 16

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        order = list(range(NUM_SAMPLES))
        random.Random(self.epoch).shuffle(order)
        return (order[first : first + 16] for first in range(0, NUM_SAMPLES, 16))


class ScaledBatches:
    """A loader of another class, which counts its epochs and draws."""

    def __init__(self, own: random.Random) -> None:
        self.epoch, self.rng = 0, own

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for batch, _ in cases.loader(NUM_SAMPLES, 16, self.epoch):
            yield (batch * self.rng.uniform(0.5, 1.5),)


class CountingData(pl.LightningDataModule):
    """Everything of it counts, or draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.generator, self.factors = 0, torch.Generator().manual_seed(1), random.Random(4)

    def train_dataloader(self) -> DataLoader:
        self.calls += 1
        ranks = self.trainer.distributed_sampler_kwargs  # type: ignore[union-attr]  # before there is a pipeline
        assert ranks in (None, {"num_replicas": 1, "rank": 0}), ranks
        part, _ = random_split(Subset(ScaledSamples(), range(NUM_SAMPLES)), [NUM_SAMPLES, 0], self.generator)

        def collate(rows: list[Any]) -> Any:
            return (torch.stack([row[0] for row in rows]) * self.factors.uniform(0.5, 1.5) * self.calls,)

        return DataLoader(part, batch_sampler=InAnotherOrder(), collate_fn=collate)


class FourBlocks(OwnGenerators):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self(batch[0]), batch[0])


def data_that_counts(host: cases.Host) -> dict[str, Any]:
    """The example, from which layers are found, drew from data sets, samplers, loaders and what makes them."""
    kept, order, own = ScaledSamples(), InAnotherOrder(), ScaledBatches(random.Random(5))
    loader = DataLoader(ConcatDataset([kept]), batch_sampler=order)
    found: dict[str, Any] = {}
    for name, data in (("module", CountingData()), ("loader", loader), ("own", own)):
        found |= {f"{name} {key}": value for key, value in trained(host, FourBlocks, data).items()}  # type: ignore[arg-type]
    return found | {"counts": [kept.draws, order.epoch, own.epoch]}


class OneIterator(IterableDataset):
    """Hands out one iterator, whoever asks."""

    def __init__(self) -> None:
        self.stream = iter(cases.loader(NUM_SAMPLES))

    def __iter__(self) -> Iterator[Any]:
        return self.stream


class CountingBlock(nn.Module):
    """Counts and averages in buffers, and goes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.runs += 1
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.linear(x - self.mean).tanh() * (1 - 0.5 ** self.runs.float())


class CountingBlocks(FourBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(4))


def counting_blocks(host: cases.Host) -> dict[str, Any]:
    """The last rank told the others of buffers of its layers, which they have not, and the run ended."""
    return trained(host, CountingBlocks, cases.loader(NUM_SAMPLES), {"num_micro_batches": 1})


class DrawingBlock(nn.Module):
    """Draws from two generators of its own; the tensor stands among the calls that are written down."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.numbers, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=self.generator)
        return x + self.linear(x).tanh() * (self.numbers.random() if self.numbers else 1.0) + 0.1 * noise


class DrawingBlocks(FourBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DrawingBlock(seed) for seed in range(4))
        for block in self.blocks[1:]:
            block.numbers = None  # so that its calls are layers


def drawing_blocks(host: cases.Host) -> dict[str, Any]:
    """A capture drew a number that no step saw, and generators stayed behind where their layer moved."""
    strategy = {"num_micro_batches": 1, "algorithm": [0, 3, 4]}
    return trained(host, DrawingBlocks, cases.loader(NUM_SAMPLES), strategy)


class FrozenBackbone(Sgd):
    """Trains a head behind a backbone whose normalization a hook puts into ``eval()`` when layers were found."""

    def __init__(self) -> None:
        super().__init__()
        by_samples = nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4), nn.Flatten()
        self.backbone = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), *by_samples
        )
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.backbone[1].eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean()


def frozen_backbone(host: cases.Host) -> dict[str, Any]:
    """It was refused: layers were compared in the mode in which they were found, which was blamed on counters.

    Its instance normalization was called batch normalization.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = trained(host, FrozenBackbone, cases.loader(NUM_SAMPLES))
    return {**found, "said": [str(each.message) for each in said if "batch normalization" in str(each.message)]}


class AuxiliaryHead(Sgd):
    """Returns what two heads give in training, and what one gives in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.head, self.auxiliary = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        found = self.head(torch.tanh(self.second(hidden)))
        return (found, self.auxiliary(hidden)) if self.training else found

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found, auxiliary = self(batch[0])
        return found.square().mean() + 0.4 * (auxiliary - 1).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())


def auxiliary_head(host: cases.Host) -> dict[str, Any]:
    """Its loss was tried on what it returns in evaluation, and the run was refused."""
    return trained(host, AuxiliaryHead, cases.loader(NUM_SAMPLES))


class AsksForRank(AuxiliaryHead):
    """Does otherwise on rank 0, between its layers."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        if self.trainer.is_global_zero:
            hidden = 1.5 * hidden
        found = torch.tanh(self.second(hidden))
        if self.trainer.is_global_zero:  # which is behind the cut
            found = 1.5 * found
        found = self.head(found)
        return (found, self.auxiliary(hidden)) if self.training else found


def rank_in_forward(host: cases.Host) -> dict[str, Any]:
    """Each rank found the layers of its own rank: losses were 1.4 % off, and nothing was said."""
    return trained(host, AsksForRank, cases.loader(NUM_SAMPLES))


class Lazy(Sgd):
    """Has weights without shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean()


def lazy_after_a_batch(host: cases.Host) -> dict[str, Any]:
    """The way out of the refusal of weights without shapes."""

    def build() -> Lazy:
        module = Lazy()
        with torch.no_grad():
            module(next(iter(cases.loader(NUM_SAMPLES)))[0])
        return module

    return trained(host, build, cases.loader(NUM_SAMPLES))


class NeedsAHook(OwnGenerators):
    """Reads what a hook of a batch sets."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.of_batch = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch[0] * self.of_batch,), batch_idx)


class ReadsOptimizer(OwnGenerators):
    """Logs the rate of the optimizer that ``configure_optimizers()`` keeps."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("rate", self.optimizer.param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = super().configure_optimizers()
        return self.optimizer


def deciding_blocks(host: cases.Host) -> dict[str, Any]:
    """Where a step itself called a module that decides by data, its layers computed something else."""
    return trained(host, DecidingBlocks, cases.loader(NUM_SAMPLES))


def deciding_model(host: cases.Host) -> dict[str, Any]:
    """A model whose own code decides by data was refused, or was a single layer within another module."""
    return trained(host, DecidingModel, cases.loader(NUM_SAMPLES))


class WithLoss(nn.Module):
    """Another author's model, which has class weights in the loss that it returns."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head, self.criterion = nn.Linear(8, 4), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.5]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.net(x))
        return {"loss": self.criterion(logits, y), "logits": logits}


class Accumulating(Sgd):
    """Trains such a model, with a metric."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.model, self.accuracy = WithLoss(dropout), MulticlassAccuracy(num_classes=4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.model(*batch)
        self.accuracy(outputs["logits"], batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return outputs["loss"]


def accumulated(host: cases.Host) -> dict[str, Any]:
    """Batches of nine in four micro-batches, the last one of a single sample, two of them in each step."""
    pl.seed_everything(0, verbose=False)
    module, samples = Accumulating(), list(cases.loader(28).dataset)  # type: ignore[call-overload]
    strategy = {"num_micro_batches": 4, "time_limit_seconds": 1}
    trainer = host.trainer(max_epochs=2, accumulate_grad_batches=2, strategy=strategy)
    trainer.fit(module, DataLoader(samples, batch_size=9))  # type: ignore[arg-type]
    return {
        "weights": {name: float(value.double().sum()) for name, value in module.state_dict().items()},
        "accuracy": float(trainer.callback_metrics["accuracy"]),
    }


def dropout_repeats(host: cases.Host) -> dict[str, Any]:
    """The losses of a fit with dropout, twice from one seed and once from another."""
    found = []
    for seed in (0, 0, 1):
        pl.seed_everything(0, verbose=False)
        module, recorder = Accumulating(dropout=0.5), cases.Recorder()
        pl.seed_everything(seed, verbose=False)
        trainer = host.trainer(recorder, max_epochs=1, strategy={"warmup_epochs": 0, "time_limit_seconds": 1})
        trainer.fit(module, cases.loader(NUM_SAMPLES))
        found.append(recorder.rows)
    return {"found": found}


class MixedWindow(Llama):
    """One step has a batch whose micro-batches have four samples, and one whose micro-batches have one."""


class Noisy(SeveralCalls):
    """Draws random numbers between two calls, and those of the step are not those of the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.encoder(batch[0])
        return F.mse_loss(self.decoder(hidden + torch.randn_like(hidden)), batch[0])


class Sampling(SeveralCalls):
    """Draws from a generator of its own what one of its calls is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        chosen = torch.randint(0, 9, (4,), generator=torch.Generator().manual_seed(batch_idx))
        return (self.encoder(batch[0]).sum(1, keepdim=True) * self.table(chosen).sum()).square().mean()


class Dropping(SeveralCalls):
    """Drops between two calls, by a module that has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.decoder(self.drop(self.encoder(batch[0]))), batch[0])


class SampledBefore(Sampling):
    """Does what the refusal says."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.decoder(self.encoder(x)).sum(1, keepdim=True), self.table(chosen)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        chosen = torch.randint(0, 9, (4,), generator=torch.Generator().manual_seed(batch_idx))
        x, rows = self(batch[0], chosen)
        return torch.tanh(x * rows.mean()).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0], torch.arange(4))[0].square().mean())


class DrawingBetween(SeveralCalls):
    """Draws a factor of its loss between its calls."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden, factor = self.encoder(batch[0]), random.random()
        return F.mse_loss(self.decoder(hidden), batch[0]) * factor


class MaskedByDraws(SeveralCalls):
    """Draws where its mask is between its calls, as PARSeq does, so that one call is found without data."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden, mask = self.encoder(batch[0]), torch.zeros(8, dtype=torch.bool)
        for place in torch.randperm(8)[:3]:
            mask[place] = True
        return F.mse_loss(self.decoder(hidden * mask[: hidden.shape[1]].any()), batch[0])


class DrawingBehind(SeveralCalls):
    """Draws a factor of its loss from a generator of its own, behind its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        decoded = self.decoder(self.encoder(batch[0]))
        return F.mse_loss(decoded, batch[0]) * self.rng.random()


class NoCall(SeveralCalls):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.linear(batch[0], self.encoder[0].weight).square().mean()


class OtherOrder(SeveralCalls):
    """Validates with its parts in another order, in which no pipeline can run them."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.encoder(self.decoder(batch[0][:, :3])).square().mean())


class ChangingCall(OtherOrder):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0], scale=1.0 + self.global_step).square().mean()


class NumbersInBatch(OtherOrder):
    """Its batches have a list of numbers, which is longer where it validates."""

    def forward(self, given: Any) -> torch.Tensor:  # type: ignore[override]
        return self.decoder(self.encoder(given["x"]))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self({"x": batch[0], "lengths": [3]}).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self({"x": batch[0], "lengths": [3, 5][: 1 + batch_idx]}).square().mean())


class ChangingNumber(OtherOrder):
    """Does what the refusal of the one before says: hands the number as a tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0], scale=torch.tensor(1.0 + 0.1 * self.global_step)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0], scale=torch.tensor(1.0)).square().mean())


class KeepsASize(SeveralCalls):
    """Compares what it calls first with as many targets as a whole batch has."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.encoder(batch[0])
        again = self.decoder(hidden)
        loss = F.cross_entropy(hidden, torch.zeros(NUM_SAMPLES, dtype=torch.long))
        return loss + self.encoder(again).square().mean()


class FreezesItself(SeveralCalls):
    """Freezes its weights while it asks for gradients by a picture, as samplers of energy models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.requires_grad_(False)
        picture = batch[0].clone().requires_grad_()
        with torch.enable_grad():
            self(picture).sum().backward()
        self.requires_grad_(True)
        return self(batch[0] - picture.grad).square().mean()


class UnfreezesBackbone(Sgd):
    """Freezes the first of eight blocks, or one in between, for an epoch."""

    frozen: Any = slice(5)

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(8)]
        self.backbone, self.head = nn.ModuleList(blocks), nn.Linear(8, 4)
        self.register_buffer("position", torch.ones(8))
        for block in self.backbone[self.frozen]:
            block.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.backbone:
            x = x + block(x) * self.position
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)


class UnfreezesPosition(UnfreezesBackbone):
    """Unfreezes a weight that all blocks use."""

    frozen = slice(0)

    def __init__(self) -> None:
        super().__init__()
        del self.position
        self.position = nn.Parameter(torch.ones(8), requires_grad=False)

    def on_train_epoch_start(self) -> None:
        self.position.requires_grad_(self.current_epoch == 1)


class UnfreezesBetween(UnfreezesBackbone):
    frozen = slice(3, 5)


class UnfreezesLater(UnfreezesBackbone):
    def on_train_epoch_start(self) -> None:
        pass


def unfrozen_between(host: cases.Host) -> dict[str, Any]:
    return trained(host, UnfreezesBetween, cases.loader(NUM_SAMPLES))


def unfrozen_between_two_fits(host: cases.Host) -> dict[str, Any]:
    """The layers of the first fit sent no gradients to what was unfrozen behind it."""
    pl.seed_everything(0, verbose=False)
    module, rows = UnfreezesLater(), []
    for _ in range(2):
        recorder = cases.Recorder()
        trainer = host.trainer(recorder, max_epochs=1, strategy={"time_limit_seconds": 1})
        trainer.fit(module, cases.loader(NUM_SAMPLES))
        module.backbone.requires_grad_(True)
        rows += recorder.rows
    return {
        **cases.fit_record(trainer, module, rows),
        "weights": {name: float(value.double().sum()) for name, value in module.state_dict().items()},
    }


class ByChanceFound(OtherOrder):
    """Has a scale for each of eight features in batches of eight samples, which its layers are given."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0], batch[2]).square().mean()

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return self.decoder(self.encoder(x * scale))


class ByChance(ByChanceFound):
    """Names its layers, and scales in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0] * batch[2]).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.decoder(self.encoder(x))

    def pipeline_layers(self) -> list[Any]:
        return [self.encoder, self.decoder]


class Adjacent(Sgd):
    """A graph as one batch, with its dense adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return adjacency @ self.second(torch.relu(adjacency @ self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        adjacency, x, label = batch
        return F.cross_entropy(self(adjacency, x), label)


class Joined(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, passed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        adjacency, x = passed
        return adjacency, adjacency @ self.layer(x)


class AdjacentInLayers(Adjacent):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Joined(self.first), Joined(self.second)

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first((adjacency, x)))[1]

    def pipeline_layers(self) -> list[Any]:
        return [self.first, self.second, lambda passed: passed[1]]


class AdjacentBefore(Adjacent):
    """The step multiplies by the adjacency, before layers that are found without a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.first, nn.ReLU(), self.second)
        del self.first, self.second

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        adjacency, x, label = batch
        return F.cross_entropy(self.net(adjacency @ x), label)


class SparseRows(ByChance):
    """Is given sparse samples, and names its layers: to find them a batch would be cut."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0].to_dense()).square().mean()


class Branching(Sgd):
    """Decides between its blocks, where what one of them returns goes to the next one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        for block in self.blocks:
            nn.init.constant_(block.bias, -20.0)  # type: ignore[arg-type]  # so that they are run in order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = x * 2
        return x

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean()


class BranchingInside(Sgd):
    """Its network keeps statistics around its blocks, and would count each batch twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Bounded()
        self.net.norm = nn.BatchNorm1d(8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)["x"]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class RunsAgain(Sgd):
    """Most of its weights are in a network that runs for both sides of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first, second = self(batch[0])
        return (first - second).square().mean()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x), self.net(x.flip(1))


class BranchingLoss(BranchingInside):
    """Returns a loss, which is that of a micro-batch where its code decides by data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.net.norm = nn.Identity()
        return self.net(x)["x"].square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


class Resized(CausalLanguageModel):
    """Hugging Face gives its embeddings more rows in place, when the pipeline is there."""

    def on_fit_start(self) -> None:
        self.model.resize_token_embeddings(WORDS + 3)


class Generating(CausalLanguageModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model.generate(batch["input_ids"], max_new_tokens=2)


class Unequal(OtherOrder):
    """Its layers hold what its code read when they were found."""

    def on_train_epoch_start(self) -> None:
        self.factor = 1.0 + self.current_epoch

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.factor * super().forward(x)


class SetForItself(OtherOrder):
    """Its hooks set what its code does not read, and its code reads what they do not set."""

    factor = 1.0

    def on_train_epoch_start(self) -> None:
        self.other = self.factor
        self.encoder.number = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.factor * super().forward(x)


class Anneals(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.factor *= 0.5


class ByMethod(SetForItself):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.anneal()

    def anneal(self) -> None:
        self.factor = max(self.factor, 0.5)


class InPlace(OtherOrder):
    """Annealed in a tensor that hooks change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(())

    def on_train_epoch_start(self) -> None:
        self.factor.fill_(1.0 + self.current_epoch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.factor * super().forward(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())


class RateInStep(InPlace):
    """Reads the rate before it calls its layers, which are found before there is an optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        assert rate == self.trainer.optimizers[0].param_groups[0]["lr"]
        assert [rate] == self.lr_schedulers().get_last_lr()
        self.log("rate", rate)
        return self(batch[0]).square().mean() * (1 + rate)


class RateInForward(RateInStep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]


class RateOfTrainer(RateInStep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * self.trainer.optimizers[0].param_groups[0]["lr"]


def in_place(host: cases.Host) -> dict[str, Any]:
    return trained(host, InPlace, cases.loader(NUM_SAMPLES))


class Distance(Metric):
    """A loss that computes as ``forward`` has set, as the distributions of pytorch-forecasting do."""

    def update(self) -> None:
        raise NotImplementedError

    def compute(self) -> None:
        raise NotImplementedError

    def of(self, difference: torch.Tensor) -> torch.Tensor:
        return difference.abs().mean() if self.kind == "abs" else difference.square().mean()


class SetsItsLoss(OtherOrder):
    def __init__(self) -> None:
        super().__init__()
        self.new, self.other = Distance(), Distance()
        self.other.kind = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.new.kind, self.other.kind = None, "abs" if self.training else "square"
        return super().forward(x) + x

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(batch[0])
        return self.new.of(outputs) + self.other.of(outputs)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.other.of(self(batch[0])))


def loss_set_in_forward(host: cases.Host) -> dict[str, Any]:
    """An AttributeError where ``__init__`` sets nothing, and another loss where it sets something else."""
    return trained(host, SetsItsLoss, cases.loader(NUM_SAMPLES))


def rate_in_step(host: cases.Host) -> dict[str, Any]:
    """``'list' object has no attribute 'param_groups'`` was all that was said."""
    return trained(host, RateInStep, cases.loader(NUM_SAMPLES))


def told_of_annealing(host: cases.Host) -> dict[str, Any]:
    """What is said before the first step, where a run may end in its second epoch."""
    found: dict[str, Any] = {}
    for build, callbacks in ((Unequal, ()), (Attached, ()), (SetForItself, (Anneals(),)), (ByMethod, ())):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            host.trainer(*callbacks, max_epochs=1).fit(build(), cases.loader(NUM_SAMPLES))
        found[build.__name__] = [str(each.message) for each in said if " sets self." in str(each.message)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        host.trainer(max_epochs=2).fit(SetForItself(), cases.loader(NUM_SAMPLES))
    found["nothing"] = [str(each.message) for each in said if " sets self." in str(each.message)]
    return found


class Tabled(OtherOrder):
    """Has a table of eight rows in batches of eight samples, of which the first four are alike."""

    def forward(self, x: torch.Tensor, table: Any = 1.0) -> torch.Tensor:
        return self.decoder((self.encoder(x)[:, None] * table).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0], batch[2]).square().mean()


def told_of_tables(host: cases.Host) -> list[str]:
    """What is said where layers that were found mix samples, or the rows of a table that is cut like them."""
    table = torch.tensor([1.0, 1, 1, 1, 2, 2, 2, 2])[:, None]
    data = DataLoader([(*each, table) for each in cases.loader(16, 8)], batch_size=None)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        host.trainer(max_epochs=1).fit(Tabled(), data)
    return [str(each.message) for each in said if "depends on the others" in str(each.message)]


class Asking(nn.Module):
    """A block that decides by a number, or by how many there are of them."""

    def __init__(self, by_length: bool) -> None:
        super().__init__()
        self.linear, self.by_length = nn.Linear(3, 3), by_length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_length:
            if len((x > 9).nonzero()) > 3:
                return x
        elif x.mean() > 9:
            return x
        return torch.tanh(self.linear(x))


class AskingInside(OtherOrder):
    def __init__(self) -> None:
        super().__init__()
        self.by_number, self.by_length = Asking(False), Asking(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.decoder(self.by_length(self.by_number(self.encoder(x))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean()


def told_of_decisions(host: cases.Host) -> list[str]:
    """What is said where blocks of layers that were found decide for all of their samples."""
    with warnings.catch_warnings(record=True) as said, after_fit_cases.Said() as log:
        warnings.simplefilter("always")
        host.trainer(max_epochs=1).fit(AskingInside(), cases.loader(NUM_SAMPLES))
    lines = [str(each.message) for each in said] + log.lines
    return [line for line in lines if "asks for numbers" in line or "decides by the numbers" in line]


class Attached(OtherOrder):
    """The number that its code reads belongs to a module of torch's."""

    def __init__(self) -> None:
        super().__init__()
        next(self.encoder.modules()).register_module("gain", nn.Identity())
        self.encoder.gain.alpha = 1.0

    def on_train_epoch_start(self) -> None:
        self.encoder.gain.alpha = 1.0 + self.current_epoch

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.encoder.gain.alpha * super().forward(x)


class Carrying(Sgd):
    """Gives its model a state that is None in the first step, and then what the model has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Linear(8, 12), nn.GRUCell(12, 12), nn.Linear(12, 8)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, state: torch.Tensor | None) -> Any:
        state = self.cell(torch.tanh(self.embed(x)), state)
        return self.head(state), state

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs, state = self(batch[0], self.state)
        self.state = state.detach()
        return outputs.square().mean()


class CarryingForBatches(Carrying):
    """Its state begins with the size of a batch, and not with that of what the step is given."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(16, 12)


class CarryingByLayers(CarryingForBatches):
    def pipeline_layers(self) -> list[Any]:
        return [Both(self.embed), self.cell, nn.Identity(), Twice(self.head)]


class CarryingTurned(Carrying):
    """Its layers are looked at again when its state has the size of a batch already, which ``forward`` turns."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(12, 12, batch_first=True)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        outputs, state = self.cell(torch.tanh(self.embed(x))[:, None], state.transpose(0, 1).contiguous())
        return self.head(outputs[:, 0]), state.transpose(0, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.state is None:
            self.state = torch.zeros(len(batch[0]), 1, 12)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        self.state = None


def carried_and_turned(host: cases.Host) -> dict[str, Any]:
    return trained(host, CarryingTurned, cases.loader(48, batch_size=16))


class Both(nn.Module):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        return torch.tanh(self.embed(x)), state


class Twice(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, state: torch.Tensor) -> Any:
        return self.head(state), state


class SampleBySample(Sgd):
    """Its code runs a layer once for each sample, so that each number of samples is another way."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.each, self.after = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        return self.after(torch.stack([self.each(hidden[place]).tanh() for place in range(len(hidden))]))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class SampleBySampleShort(SampleBySample):
    """Its last batch is shorter."""


class SampleBySampleWhole(SampleBySample):
    """Its batches are of one size."""


def refused_modules(host: cases.Host) -> dict[str, Any]:
    found = {}
    for build in (
        Noisy, Sampling, Dropping, DrawingBetween, NoCall, OtherOrder, ChangingCall, Branching, BranchingInside,
        RunsAgain, BranchingLoss, NumbersInBatch,
        Resized, Generating,
        Unequal, Attached, RateInForward, RateOfTrainer, Carrying, CarryingForBatches, CarryingByLayers,
        MixedWindow, ByChance, ByChanceFound, Adjacent, AdjacentInLayers, AdjacentBefore, SparseRows,
        FeaturedDeciding,
        MaskedByDraws, SampleBySample, SampleBySampleShort, SampleBySampleWhole,
        NeedsAHook, ReadsOptimizer, FourBlocks, Lazy, SeveralCallsOneSets, KeepsASize, FreezesItself,
        UnfreezesBackbone, UnfreezesPosition,
    ):  # fmt: skip
        if not is_chosen(build.__name__):
            continue
        strategy: dict[str, Any] = {}
        data = sentences() if issubclass(build, CausalLanguageModel) else cases.loader(NUM_SAMPLES)
        data = images() if build is FeaturedDeciding else data
        accumulate = 1
        if build is MixedWindow:
            samples, accumulate = list(data.dataset), 2  # type: ignore[call-overload]
            data = DataLoader([padded(samples[:8]), padded(samples[10:12])], batch_size=None)  # type: ignore[arg-type]
        if issubclass(build, ByChanceFound):
            strategy = {"num_micro_batches": 8}
            data = DataLoader(
                [(*each, torch.linspace(0.1, 2.0, 8)) for each in cases.loader(16, 8)], batch_size=None
            )  # type: ignore[arg-type]
        if issubclass(build, Adjacent):
            graph = (torch.eye(16), torch.randn(16, 8), torch.zeros(16, dtype=torch.long))
            data = DataLoader([graph], batch_size=None)  # type: ignore[arg-type]
        if issubclass(build, SampleBySample):
            data = cases.loader(24 if build is SampleBySampleShort else 32, 16)
            strategy = {} if build is SampleBySample else {"num_micro_batches": 1}
        if build is NumbersInBatch:
            data = cases.loader(16, 8)
        if build is FourBlocks:
            data = DataLoader(OneIterator(), batch_size=None)
        if build is SparseRows:
            data = DataLoader([(each[0].to_sparse(),) for each in cases.loader(16, 8)], batch_size=None)  # type: ignore[arg-type]
        validates = data if build in (OtherOrder, Generating, NumbersInBatch) else None
        try:
            host.trainer(accumulate_grad_batches=accumulate, strategy=strategy).fit(build(), data, validates)
            found[build.__name__] = "not refused"
        except MisconfigurationException as refusal:
            found[build.__name__] = str(refusal)
    if "FreezesItself" in found:  # each rank names a weight of its own layers
        found["FreezesItself"] = re.sub(
            r"requires_grad of \S+", "requires_grad of a weight", found["FreezesItself"]
        )
    return found


class TiedAndScaled(Sgd):
    """Its first and its last layer share a weight, and its forward reads a buffer that is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens) * self.scale))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        self.log("loss", loss)
        return loss


class BothEndsOnRank0(pl.Callback):
    """Lets the layers move after the first batch: the weight that was on both ranks is on one from then on."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.world_size == 1 or trainer.global_step != 1:
            return
        engine, devices = trainer.strategy.deepspeed_engine, (0, 1, 0)
        num_layers = engine.module._num_layers
        orders = plans.depth_first(devices, 4, 2)
        cuts = [0, 3, num_layers - 1, num_layers]
        engine.recut(plans.plan_of(plans.chain_of(num_layers), plans.platform_of(2), cuts, devices, orders=orders))


def tied_weight_and_own_buffer(host: cases.Host) -> dict[str, Any]:
    """On a GPU a state dict had the buffer twice, and a tied weight that left a rank ended the run."""
    pl.seed_everything(0, verbose=False)
    module, sums = TiedAndScaled(), []
    for callbacks in ([BothEndsOnRank0()], []):
        trainer = host.trainer(*callbacks, max_epochs=2, strategy={"warmup_epochs": 0})
        trainer.fit(module, sentences())
        trainer.save_checkpoint(host.folder / "tied.ckpt", weights_only=True)
        trainer.strategy.barrier()
        state = torch.load(host.folder / "tied.ckpt", weights_only=True)["state_dict"]
        sums.append({name: float(value.abs().sum()) for name, value in state.items()})
        trainer.strategy.barrier()
        module.scale.mul_(1.5)  # between two runs
    return {"sums": sums, "loss": float(trainer.callback_metrics["loss"])}


SAME_AS_SINGLE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        causal_language_model,
        tied_weight_and_own_buffer,
        sentence_classifier,
        choices,
        u_net,
        featured,
        translator,
        recurrent,
        carried_and_turned,
        several_calls,
        several_calls_adding,
        changing_number,
        several_calls_kept,
        sampled_before,
        drawing_behind,
        one_block_thrice,
        deciding_blocks,
        deciding_model,
        accumulated,
        unnamed,
        runs,
        other_signatures,
        single_samples,
        one_sample_each,
        experts,
        graphs_as_they_are,
        parts_alone,
        stateful,
        in_place,
        rate_in_step,
        loss_set_in_forward,
        copies_that_leave,
        own_generators,
        data_that_counts,
        counting_blocks,
        drawing_blocks,
        frozen_backbone,
        unfrozen_between,
        unfrozen_between_two_fits,
        auxiliary_head,
        rank_in_forward,
        lazy_after_a_batch,
    ],
    4: [],
}
ONLY_PIPELINE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [refused_modules, dropout_repeats, told_of_annealing, told_of_tables, told_of_decisions],
    4: [],
}
