"""Buffers that layers of several stages have through one module, such as running statistics.

In one process each of these layers goes on with what the others have made of them. On several ranks each has a
copy, which only its own layers change. The first forward of each stage tells it, of buffers that do change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed.pipe import TiedLayerSpec
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.engine.pipeline.beside_layers import are_same, leaves, modules_of
from deepspeed_partition.engine.pipeline.shared_weights import listed, modules_before_building, modules_used_by
from deepspeed_partition.engine.pipeline.tied_copies import forms_of
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.hidden_modules import hidden_modules
from deepspeed_partition.layer_calls import original_of


class SharedBuffers:
    """Modules with buffers that layers of several stages have.

    Args:
        specs: All layers of the model, as the program has listed them.
        built: The layers of this rank's stages, as they run, by their places.
        stage_of: The stage of each layer.
        device_of_stage: The device of each stage.
    """

    def __init__(
        self, specs: Sequence[Any], built: dict[int, Any], stage_of: Sequence[int], device_of_stage: Sequence[int]
    ) -> None:
        self._stage_of, self._device_of_stage = stage_of, device_of_stage
        places: dict[int, set[int]] = {}
        parts: dict[int, nn.Module] = {}

        def note(modules: Iterable[nn.Module], layers: Iterable[int]) -> None:
            note_parts((part for module in modules for part in module.modules()), layers)

        def note_parts(found: Iterable[nn.Module], layers: Iterable[int]) -> None:
            for part in found:
                if part._buffers:
                    parts[id(part)] = part
                    places.setdefault(id(part), set()).update(layers)

        layers = [
            [*modules_of(original_of(built.get(place))), *modules_before_building(spec)]
            for place, spec in enumerate(specs)
        ]
        roots = WeakIdKeyDictionary({module: None for each in layers for module in each})
        own = WeakIdKeyDictionary({part: None for module in roots for part in module.modules()})
        # Where torch does not look: in a list, a dict or an object, which may hold a whole model with the layers.
        hidden = WeakIdKeyDictionary(
            {
                module: [each for each in hidden_modules(module, apart=own).values() if each not in own]
                for module in roots
            }
        )
        for place, modules in enumerate(layers):
            note(modules, [place])
            note_parts((part for module in modules for part in hidden[module]), [place])
        for form in forms_of(specs):
            note((m for place in form.layers for m in modules_of(original_of(built.get(place)))), form.layers)
        owners = {id(part): min(places[id(part)]) for part in parts.values()}
        for place, spec in enumerate(specs):
            if not isinstance(spec, TiedLayerSpec):
                note(modules_used_by(spec, owners), [place])
        self._shared = [
            (parts[key], sorted(layers))
            for key, layers in places.items()
            if len({stage_of[l] for l in layers}) > 1
        ]

    @contextmanager
    def told(self, stage: int) -> Iterator[None]:
        """Say once what the layers of a stage change meanwhile of which layers of other stages have a copy."""
        here = [each for each in self._shared if any(self._stage_of[place] == stage for place in each[1])]
        before = [{name: list(leaves(buffer)) for name, buffer in part._buffers.items()} for part, _ in here]
        yield
        for (part, layers), values in zip(here, before, strict=True):
            changed = [
                name for name, b in part._buffers.items() if not are_same(list(leaves(b)), values.get(name))
            ]
            if changed:
                self._tell(part, layers, changed)

    def _tell(self, part: nn.Module, layers: Sequence[int], changed: Sequence[str]) -> None:
        stages = sorted({self._stage_of[place] for place in layers})
        if len({self._device_of_stage[stage] for stage in stages}) > 1:
            what = (
                "each rank has a copy, which counts what its own layers run, not the others, and a layer that "
                "moves brings that of its rank"
            )
        else:
            what = "a stage runs several micro-batches before the next one runs the first, which changes the order"
        kind, names = type(part).__name__, ", ".join(changed[:3])
        warn_once(
            f"shared buffers/{kind}/{listed(layers)}",
            f"layers {listed(layers)} share one {kind}, which changes its {names} while they run. "
            f"They are in the stages {listed(stages)}: {what}. Give each layer a module of its own, or make one "
            "layer of all of them, such as an nn.Sequential",
        )
