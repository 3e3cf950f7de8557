"""Models as their authors wrote them, scaled down, each with a micro-batch: what the table is made of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

WORDS = 97
Made = tuple[nn.Module, dict[str, Any]]


def language(name: str, head: str, dropout: tuple[str, ...], **sizes: Any) -> Callable[[bool], Made]:
    """A Hugging Face model from its configuration, with a right-padded batch and labels."""

    def make(with_dropout: bool) -> Made:
        import transformers

        off = {} if with_dropout else dict.fromkeys(dropout, 0.0)
        configuration = getattr(transformers, f"{name}Config")(**sizes, **off)
        model = getattr(transformers, f"AutoModelFor{head}").from_config(configuration).train()
        mask = torch.ones(4, 24, dtype=torch.long)
        mask[0, 17:] = mask[2, 20:] = 0
        words = torch.randint(3, WORDS, mask.shape) * mask
        labels = words.masked_fill(mask == 0, -100)
        if head == "SequenceClassification":
            labels = torch.randint(0, 2, (4,))
        if head == "Seq2SeqLM":
            labels = torch.randint(3, WORDS, (4, 15))
        more = {} if head in ("MaskedLM", "SequenceClassification") else {"use_cache": False}
        return model, {"input_ids": words, "attention_mask": mask, "labels": labels, **more}

    return make


def vision_transformer(with_dropout: bool) -> Made:
    import transformers

    rate = 0.1 if with_dropout else 0.0
    configuration = transformers.ViTConfig(
        **{**ENCODER, "hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate},
        image_size=32, patch_size=8, num_labels=10,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(configuration).train()
    return model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))}


ENCODER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
DECODER = {**ENCODER, "vocab_size": WORDS, "num_key_value_heads": 2, "pad_token_id": 0}
HIDDEN = ("hidden_dropout_prob", "attention_probs_dropout_prob")
GPT2 = {"vocab_size": WORDS, "n_embd": 64, "n_layer": 6, "n_head": 4, "pad_token_id": 0}
T5 = {"vocab_size": WORDS, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 4, "num_heads": 4}
BART = {"vocab_size": WORDS, "d_model": 64, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0,
        "decoder_start_token_id": 2}  # fmt: skip
HUGGING_FACE = {
    "GPT-2": language("GPT2", "CausalLM", ("resid_pdrop", "embd_pdrop", "attn_pdrop"), **GPT2),
    "GPT-2, classification": language(
        "GPT2", "SequenceClassification", ("resid_pdrop", "embd_pdrop", "attn_pdrop"), **GPT2
    ),
    "Llama": language("Llama", "CausalLM", ("attention_dropout",), **DECODER),
    "Llama, tied": language("Llama", "CausalLM", ("attention_dropout",), **DECODER, tie_word_embeddings=True),
    "Qwen2": language("Qwen2", "CausalLM", ("attention_dropout",), **DECODER),
    "Mistral, window of 8": language("Mistral", "CausalLM", ("attention_dropout",), **DECODER, sliding_window=8),
    "Mixtral, auxiliary loss": language(
        "Mixtral", "CausalLM", ("attention_dropout",), **DECODER, num_local_experts=4, output_router_logits=True
    ),
    "GPT-NeoX": language(
        "GPTNeoX", "CausalLM", ("hidden_dropout", "attention_dropout"), **ENCODER, vocab_size=WORDS, pad_token_id=0
    ),
    "BERT": language("Bert", "MaskedLM", HIDDEN, **ENCODER, vocab_size=WORDS, pad_token_id=0),
    "RoBERTa": language("Roberta", "MaskedLM", HIDDEN, **ENCODER, vocab_size=WORDS),
    "ALBERT, one shared block": language(
        "Albert", "MaskedLM", HIDDEN, **ENCODER, vocab_size=WORDS, embedding_size=32, pad_token_id=0
    ),
    "DistilBERT, classification": language(
        "DistilBert", "SequenceClassification", ("dropout", "attention_dropout", "seq_classif_dropout"),
        vocab_size=WORDS, dim=64, hidden_dim=128, n_layers=6, n_heads=4,
    ),
    "T5": language("T5", "Seq2SeqLM", ("dropout_rate",), **T5, decoder_start_token_id=0),
    "BART": language("Bart", "Seq2SeqLM", ("dropout", "attention_dropout", "activation_dropout"), **BART),
    "ViT": vision_transformer,
}  # fmt: skip
TORCHVISION = {
    "resnet50": (64, {}), "densenet121": (64, {}), "inception_v3": (299, {"init_weights": False}),
    "googlenet": (64, {"init_weights": False}), "vit_b_16": (32, {"image_size": 32}), "swin_t": (64, {}),
    "convnext_tiny": (64, {}), "efficientnet_b0": (64, {}), "maxvit_t": (224, {}), "regnet_y_400mf": (64, {}),
    "mobilenet_v3_small": (64, {}), "shufflenet_v2_x0_5": (64, {}),
    "fcn_resnet50": (64, {"weights_backbone": None}),
}  # fmt: skip
"""The pixels and the options of each model."""


def torchvision_model(name: str) -> Callable[[bool], Made]:
    def make(with_dropout: bool) -> Made:
        pixels, options = TORCHVISION[name]
        model = import_torchvision().models.get_model(name, weights=None, **options).train()
        if not with_dropout:
            for module in model.modules():
                if isinstance(
                    module, nn.Dropout | nn.MultiheadAttention | import_torchvision().ops.StochasticDepth
                ):
                    setattr(module, "dropout" if isinstance(module, nn.MultiheadAttention) else "p", 0.0)
        key = "input" if name == "maxvit_t" or "swin" in name else "x"
        parameters = model.forward.__code__.co_varnames
        key = key if key in parameters else parameters[1]
        return model, {key: torch.randn(2, 3, pixels, pixels)}

    return make


def import_torchvision() -> Any:
    """torchvision's model code, also without its compiled operators, which these models do not use."""
    try:
        import torchvision
    except RuntimeError:
        names = (
            "nms", "qnms", "roi_align", "qroi_align", "roi_pool", "qroi_pool", "ps_roi_align", "ps_roi_pool",
            "deform_conv2d", "_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward",
            "_ps_roi_pool_backward", "_deform_conv2d_backward",
        )  # fmt: skip
        for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in names:
            library.define(f"{name}(Tensor input) -> Tensor")
        OPERATORS.append(library)  # they go with it
        import torchvision
    return torchvision


OPERATORS: list[Any] = []


def written_here(make_model: Callable[[], nn.Module], arguments: Callable[[], dict[str, Any]]) -> Any:
    def make(with_dropout: bool) -> Made:
        model = make_model()
        for module in model.modules():
            for name in ("p", "dropout"):
                if not with_dropout and isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        return model.train(), arguments()

    return make


def _networks() -> dict[str, Callable[[bool], Made]]:
    from tests.capture import networks

    def tokens() -> torch.Tensor:
        return torch.randint(0, 20, (4, 12))

    return {
        "U-Net": written_here(networks.UNet, lambda: {"image": torch.randn(2, 3, 32, 32)}),
        "LSTM language model, tied": written_here(networks.RecurrentLanguageModel, lambda: {"tokens": tokens()}),
        "GPT in the manner of minGPT": written_here(
            networks.MinimalGPT, lambda: {"tokens": tokens(), "targets": tokens()}
        ),
        "nn.Transformer": written_here(
            lambda: nn.Transformer(32, 4, 3, 3, 64, batch_first=True),
            lambda: {"src": torch.randn(2, 9, 32), "tgt": torch.randn(2, 7, 32),
                     "tgt_mask": nn.Transformer.generate_square_subsequent_mask(7)},
        ),
        "data-dependent code around blocks": written_here(networks.DataDependent, lambda: {"tokens": tokens()}),
    }  # fmt: skip


def models() -> Iterator[tuple[str, Callable[[bool], Made]]]:
    """The name of each model, and what makes it, with or without dropout."""
    with suppress(ImportError):
        import_torchvision()  # Hugging Face's code imports it where it is there
    yield from HUGGING_FACE.items()
    for name in TORCHVISION:
        yield name, torchvision_model(name)
    yield from _networks().items()
