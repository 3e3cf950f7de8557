"""A Hugging Face classifier, fine-tuned as a pipeline of two CPU processes, in the usual LightningModule.

    pip install transformers
    python examples/finetune_huggingface.py                          a tiny BERT of its own, nothing is downloaded
    python examples/finetune_huggingface.py --model bert-base-uncased

The model stays as it is: MadPipe finds its layers by what ``self.model(**batch)`` runs. The task is made up: a
text is of class 1 if the word that it begins with comes again.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification
from transformers.utils import logging as hugging_face

import lightning_madpipe

LENGTH, VOCABULARY, MICRO_BATCHES = 16, 40, 4


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random words, half of the texts with the first word once more."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, VOCABULARY, (number, LENGTH), generator=generator)
        self.labels = (self.words[:, 1:] == self.words[:, :1]).any(1).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": self.labels[index]}


class Classifier(pl.LightningModule):
    """As one would write it for one device."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).train()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tiny_model() -> str:
    """Save a small BERT with random weights, as if it had been trained before, and return its folder."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    folder = tempfile.mkdtemp(prefix="madpipe-bert-")
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="a folder or a name of Hugging Face's hub; left out: a tiny one of its own"
    )
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    hugging_face.set_verbosity_error()
    hugging_face.disable_progress_bar()
    torch.set_num_threads(1)  # two processes, each with one core
    pl.seed_everything(0, verbose=False)
    model = Classifier(given.model or tiny_model())
    strategy = lightning_madpipe.MadPipeStrategy(num_micro_batches=MICRO_BATCHES, warmup_steps=5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=given.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Texts(640, 0), batch_size=32, shuffle=True, drop_last=True))
    if trainer.is_global_zero and strategy.plan is not None:
        print(f"loss {float(trainer.callback_metrics['loss']):.3f} after {given.epochs} epochs")
        print(strategy.plan.headline())


if __name__ == "__main__":
    main()
