"""Hugging Face models from their configurations: their layers do what they do, whatever the batch's sizes."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is loaded
transformers = pytest.importorskip("transformers")

from deepspeed_partition.capture import CaptureError, capture, layers_from  # noqa: E402
from deepspeed_partition.capture.model_layers import TiedLayer  # noqa: E402
from tests.capture.comparing import assert_same, captured_layers, run_in_order  # noqa: E402

WORDS = 40
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "pad_token_id": 0}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 1}
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
MODELS = {
    "GPT2": ("CausalLM", GPT2),
    "Llama": ("CausalLM", GROUPED),
    "Qwen2": ("CausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "Mistral": ("CausalLM", {**GROUPED, "sliding_window": 4}),
    "Mixtral": ("CausalLM", {**GROUPED, "num_local_experts": 4, "output_router_logits": True}),
    "GPTNeoX": ("CausalLM", SIZES),
    "Bert": ("MaskedLM", SIZES),
    "DistilBert": ("SequenceClassification", {"vocab_size": WORDS, "dim": 16, "hidden_dim": 32, "n_layers": 2,
                                              "n_heads": 2, "num_labels": 3}),
    "Albert": ("MaskedLM", {**SIZES, "embedding_size": 8, "num_hidden_layers": 3}),
    "T5": ("Seq2SeqLM", {"vocab_size": WORDS, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2,
                         "num_heads": 2, "decoder_start_token_id": 0}),
    "Bart": ("Seq2SeqLM", {"vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
                           "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2,
                           "decoder_attention_heads": 2, "pad_token_id": 0, "decoder_start_token_id": 2}),
    "ViT": ("ImageClassification", {**{name: size for name, size in SIZES.items() if "_id" not in name},
                                    "image_size": 16, "patch_size": 8, "num_labels": 3}),
}  # fmt: skip
"""The head and the sizes of each model, by the first part of its name."""


def make(name: str, **more: object) -> torch.nn.Module:
    head, sizes = MODELS[name]
    torch.manual_seed(0)
    configuration = getattr(transformers, f"{name}Config")(**sizes, **more)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(configuration)
    return model.train()


def batch(name: str, size: int, length: int) -> tuple[tuple[()], dict[str, torch.Tensor]]:
    """A right-padded batch with labels."""
    head, _ = MODELS[name]
    if head == "ImageClassification":
        return (), {"pixel_values": torch.randn(size, 3, 16, 16), "labels": torch.randint(0, 3, (size,))}
    mask = torch.ones(size, length, dtype=torch.long)
    mask[0, length - 2 :] = 0
    words = torch.randint(3, WORDS, (size, length)) * mask
    labels = words.masked_fill(mask == 0, -100)
    if head == "SequenceClassification":
        labels = torch.randint(0, 3, (size,))
    if head == "Seq2SeqLM":
        labels = torch.randint(3, WORDS, (size, length - 2))
    return (), {"input_ids": words, "attention_mask": mask, "labels": labels}


def without_cache(
    name: str, arguments: tuple[tuple[()], dict[str, object]]
) -> tuple[tuple[()], dict[str, object]]:
    return arguments[0], {**arguments[1], **({} if MODELS[name][0] in NO_CACHE else {"use_cache": False})}


NO_CACHE = ("ImageClassification", "MaskedLM", "SequenceClassification")


@pytest.mark.parametrize("name", MODELS)
def test_layers_do_what_the_model_does(name):
    model = make(name)
    layers = captured_layers(model, *batch(name, 3, 7)[0], **batch(name, 3, 7)[1])
    assert len(layers) >= 4
    assert_same(model, layers, [without_cache(name, batch(name, *sizes)) for sizes in ((3, 7), (2, 5))])


def test_the_output_is_the_models_own():
    model = make("Llama").eval()
    _, arguments = batch("Llama", 3, 7)
    captured = capture(model, (), arguments)
    assert captured.notes == [
        "LlamaForCausalLM runs with use_cache=False: a pipeline has no cache of keys and values"
    ]
    layers = layers_from(captured)
    assert layers.input_names == list(arguments) and layers.output_names == ["loss", "logits"]
    output, expected = run_in_order(layers, **arguments), model(**arguments)
    assert type(output) is type(expected)
    torch.testing.assert_close(output.loss, expected.loss)


def test_rotary_tables_and_masks_are_made_where_they_are_needed():
    """Boundaries carry the activations, the padding and the labels, and nothing else."""
    layers = captured_layers(make("Llama"), **batch("Llama", 3, 7)[1])
    shapes = {shape for shapes in layers.boundary_shapes for shape in shapes}
    assert shapes <= {(3, 7), (3, 7, 16), (3, 7, 32), (3, 7, WORDS)}


def test_without_padding_no_mask_is_made():
    """Attention is told to be causal, as in the model; each block made a mask for sequences that are packed."""
    words = batch("Llama", 3, 7)[1]["input_ids"]
    layers = captured_layers(make("Llama"), input_ids=words, labels=words)
    shapes = {value.shape for value in layers.captured.graph.values}
    assert (3, 7, 16) in shapes and (3, 1, 7, 7) not in shapes


def test_a_cache_that_is_asked_for_is_refused():
    """It is an object that every block fills, and no tensor."""
    with pytest.raises(CaptureError, match=r"holds tensors.*use_cache=False"):
        capture(make("GPT2"), (), {**batch("GPT2", 3, 7)[1], "use_cache": True})


def test_what_is_tied_by_the_configuration_is_tied():
    layers = captured_layers(make("GPT2"), **batch("GPT2", 3, 7)[1])
    tied = [place for place, layer in enumerate(layers) if isinstance(layer, TiedLayer)]
    assert tied[0] == 0 and tied[-1] == len(layers) - 1
    assert sorted(layers[0].shared.state_dict()) == ["lm_head.weight", "transformer.wte.weight"]


def test_blocks_that_recompute_stay_whole_and_recompute():
    model = make("Llama")
    model.gradient_checkpointing_enable()
    layers = captured_layers(model, **batch("Llama", 3, 7)[1])
    names = [
        name
        for layer in layers
        for name, module in layer.named_modules()
        if name and "DecoderLayer" in str(type(module))
    ]
    assert names == ["model.layers.0", "model.layers.1"]
    assert_same(model, layers, [without_cache("Llama", batch("Llama", 2, 5))], modes=(True,))


def test_weights_that_the_layers_trained_load_as_the_models_own(tmp_path):
    model = make("Bert")
    layers = captured_layers(model, **batch("Bert", 3, 7)[1])
    pipeline = {}
    for place, layer in enumerate(layers):
        tied = isinstance(layer, TiedLayer)
        own = layer.shared if tied else layer
        for name, tensor in own.state_dict().items():
            prefix = f"tied_modules.{layer.key}" if tied else f"{place}"
            pipeline[f"{prefix}.{name}"] = tensor + 1 if tensor.is_floating_point() else tensor
    state = layers.model_state_dict(pipeline)
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(loaded.state_dict()), state)
