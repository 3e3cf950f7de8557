"""Checkpoints of a pipeline: DeepSpeed's folders, and ordinary Lightning files with the whole model.

A folder ``NAME.ckpt`` is what DeepSpeed writes under the tag ``checkpoint``, with the cut and one file more,
``madpipe-model.json``, written last: what the weights are called on one device, and the size of every
file. It comes into being under another name and is renamed when it is whole.
"""

from __future__ import annotations

import fnmatch
import itertools
import logging
import os
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

from deepspeed_partition.engine.checkpoint import atomic_folders
from deepspeed_partition.engine.checkpoint.unpickling import Reader
from deepspeed_partition.engine.runtime.collectives import gather_objects, receive_bytes, send_bytes
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.planner.errors import PlanFormatError
from deepspeed_partition.planner.io import files
from deepspeed_partition.planner.units import shown
from lightning_madpipe.checkpoint.hooks_on_state import WeightsBefore, some
from lightning_madpipe.compat.state_dict_names import OneDeviceNames, expanded
from lightning_madpipe.module import PIPELINE

TAG = "checkpoint"
"""The tag of DeepSpeed's folders, as Lightning's own DeepSpeed strategy has it."""

MODEL_FILE = "madpipe-model.json"
MODEL_FORMAT = "madpipe-model/1"

MOST_STAGES = 2**20
"""The most stages that a checkpoint may name when it is read."""

NOTE = "README.txt"
NOTE_TEXT = """\
This folder is a checkpoint of the madpipe strategy for PyTorch Lightning: each process wrote a part of it.

    import lightning_madpipe                                     # then this reads it
    model = MyModule.load_from_checkpoint("{name}")

    trainer.fit(model, ckpt_path="{name}")                       # goes on with training, under strategy="madpipe"

    lightning_madpipe.consolidate("{name}", "model.ckpt")        # makes one ordinary Lightning file of it,
                                                                 # which is read without this package
"""
"""What somebody finds who opens the folder, for Lightning alone only says that it is one."""

BESIDE_TAG = ("latest", "zero_to_*.py", NOTE)
"""What stands beside the folder of the tag; of DeepSpeed with ZeRO so many scripts as its version has."""

OUTSIDE_STATE = "madpipe_state_dict"
"""The key under which DeepSpeed's folder keeps the state of what it does not save itself."""

DRAWS = "madpipe_draws"
"""The key under which DeepSpeed's folder keeps what the random numbers of the next batches are drawn with."""

GIVEN = "madpipe_given"
"""The key under which DeepSpeed's folder keeps what hooks have put into the state: see ``LeftByHooks.own``."""

OF_TRAINING = ("callbacks", "optimizer_states", "lr_schedulers", OUTSIDE_STATE, DRAWS)
"""What a checkpoint holds only to go on with training."""


OPTIMIZER_STATES = "optimizer_states"
IN_THE_ENGINE = {"state_dict": "weights", OPTIMIZER_STATES: "states of an optimizer"}
"""What a checkpoint of one device has beside that, by its key, with words."""

FOR_A_NEW_OPTIMIZER = (
    "; to begin with a new optimizer, load the weights alone, MyModule.load_from_checkpoint(path), and fit "
    "without ckpt_path"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """What ``madpipe-model.json`` says about the folder that it stands in."""

    model: str
    """The class of the LightningModule."""
    global_step: int
    num_stages: int
    order: list[str]
    """All names on one device, in the order of its state dict; see ``OneDeviceNames``."""
    names: dict[str, list[str]]
    """The name of each weight in the pipeline, with those that it has on one device."""
    shapes: dict[str, list[int]]
    ties: dict[str, str]
    """The key of each layer that runs a tied module, whose files name the layer only."""
    keys: list[str]
    """What Lightning and its hooks put into the checkpoint."""
    files: dict[str, int]
    """The bytes of every other file in the folder."""
    has_optimizer: bool = True
    """Whether an optimizer's states are there, which a Trainer has until it validates, tests or predicts."""
    dropped: list[str] = field(default_factory=list)
    """The names on one device that hooks have left out of the state."""
    given: dict[str, int] = field(default_factory=dict)
    """The names of what hooks have replaced or added there, with the stage that has written it."""

    def one_device_names(self) -> OneDeviceNames:
        return OneDeviceNames(
            order=tuple(self.order), of_layers={name: tuple(aliases) for name, aliases in self.names.items()}
        )


class AbsentError(KeyError):
    """A hook reads of a checkpoint what no rank has of it as a whole."""

    def __str__(self) -> str:
        return str(self.args[0])


class LoadedFolder(dict[str, Any]):
    """What Lightning and its hooks put into a checkpoint, which hooks get of a folder that is loaded.

    The weights and the optimizer's states are in the engine by then, on each rank those of its layers. Where a
    hook has changed the state when it was saved, the state is there as the hook left it.

    To ask whether they are there, in whatever way, raises: code would go on as if the checkpoint had none.
    """

    before: WeightsBefore | None = None
    """Set where the state is there."""

    is_fitting = True
    """Whether the optimizer's states are gone on with. Otherwise a hook that asks for them changes nothing."""

    def __missing__(self, key: str) -> Any:
        if key in IN_THE_ENGINE:
            raise self._absent(key, "reads")
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if key == "state_dict" or (key == OPTIMIZER_STATES and self.is_fitting):
            raise self._absent(str(key), "asks for")
        return False

    def get(self, key: str, default: Any = None) -> Any:
        _ = key in self  # which raises
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        _ = key in self  # which raises
        return super().pop(key, *default)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == OPTIMIZER_STATES and self.is_fitting:
            raise self._absent(key, "sets")
        super().__setitem__(key, value)

    def _absent(self, key: str, does: str) -> AbsentError:
        return AbsentError(
            f"a hook (on_load_checkpoint) {does} checkpoint[{key!r}], and a checkpoint of a pipeline has no "
            f"{IN_THE_ENGINE[key]} there: each rank has loaded those of its layers already. Change these, and "
            "settings of the optimizer such as the learning rate, in on_train_start, "
            '`for group in self.optimizers().param_groups: group["lr"] = 2e-3`, on every rank'
            f"{FOR_A_NEW_OPTIMIZER if key == OPTIMIZER_STATES else ''}"
        )


# Folders


def folder_of(path: Path) -> Path:
    """Return the folder that a checkpoint's files stand in."""
    return path / TAG


def write_model_file(path: Path, model: Mapping[str, Any], name: str) -> None:
    """Write ``madpipe-model.json`` into a folder whose other files are complete, and into their list.

    Args:
        name: Of the folder when it is whole, which a note in it says.
        model: The fields of ``SavedModel`` but ``files``.
    """
    folder = folder_of(path)
    sizes = {
        file.name: file.stat().st_size
        for file in sorted(folder.iterdir())
        if file.name != atomic_folders.FILES_NAME
    }
    files.write_text(path / NOTE, NOTE_TEXT.format(name=name), through_link=False)
    saved = SavedModel(**model, files=sizes)
    files.write_json(folder / MODEL_FILE, {"format": MODEL_FORMAT, **asdict(saved)}, through_link=False)
    atomic_folders.list_again(folder)


def check_replaceable(path: Path) -> None:
    """Refuse to put a checkpoint in the place of a folder with anything else in it.

    Raises:
        ValueError: there is such a folder at ``path``.
    """
    if not path.is_dir() or path.is_symlink():
        return
    names = {child.name for child in path.iterdir()}
    ours = (folder_of(path) / MODEL_FILE).is_file()
    known = (TAG, *BESIDE_TAG) if ours else ()
    strange = sorted(name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in known))
    if strange:
        raise ValueError(
            f"it is a folder with other things in it ({some(strange)}), and a checkpoint would take their place: "
            f"give a new name, such as {path / 'model.ckpt'}"
        )


def read_folder(path: Path, *, verify: bool = True) -> SavedModel:
    """What is in the folder ``path``, after a look at every file's size.

    Args:
        verify: Compare the checksum of ``madpipe-model.json``, too.

    Raises:
        ValueError: nothing there, not a folder of this strategy, or a damaged one.
    """
    folder = folder_of(path)
    if not path.exists():
        raise ValueError(f"there is no checkpoint at {path}: check the path")
    if not (folder / MODEL_FILE).is_file():
        for parent in path.parents[:2]:
            if (folder_of(parent) / MODEL_FILE).is_file():
                raise ValueError(f"{path} is a part of a checkpoint: give the checkpoint itself, {parent}")
        raise ValueError(
            f"{path} is not a complete checkpoint of the madpipe strategy, because it has no {TAG}/{MODEL_FILE}: "
            "give one that it wrote, or an ordinary Lightning file, from which weights are loaded"
        )
    listed = atomic_folders.read_list(folder)
    if listed is not None and verify and MODEL_FILE in listed.sizes:
        atomic_folders.check_contents(folder, listed, [MODEL_FILE])
    saved = _saved_model(folder / MODEL_FILE)
    atomic_folders.check_sizes(folder, atomic_folders.Listed(saved.files, None))
    return saved


def _saved_model(path: Path) -> SavedModel:
    """What ``madpipe-model.json`` says.

    Raises:
        ValueError: it is damaged, of another version, or names a file that is not in its folder.
    """
    data = files.read_json(path, error=PlanFormatError)
    try:
        if data.pop("format") != MODEL_FORMAT:
            raise KeyError
        saved = SavedModel(**data)
        counts = [saved.global_step, saved.num_stages, *saved.files.values(), *saved.given.values()]
        names = [saved.model, *saved.order, *saved.names, *saved.shapes, *saved.ties.values(), *saved.keys]
        names += [*saved.dropped, *saved.given]
        names += [name for aliases in saved.names.values() for name in aliases]
        counts += [size for shape in saved.shapes.values() for size in shape]
        counts += [int(layer) for layer in saved.ties]
        if not all(type(count) is int and 0 <= count < 2**62 for count in counts):
            raise TypeError
        if not all(isinstance(name, str) for name in names) or saved.names.keys() != saved.shapes.keys():
            raise TypeError
        if not all(saved.names.values()) or not 1 <= saved.num_stages <= MOST_STAGES:
            raise ValueError
        if any(stage >= saved.num_stages for stage in saved.given.values()):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged, or not of a version known here ({MODEL_FORMAT})") from None
    for name in saved.files:
        if not files.is_plain(name):
            raise ValueError(f"{path}: {shown(name)} is not the name of a file in this folder")
    return saved


def check_archive(path: Path) -> None:
    """Refuse a file of ``torch.save`` in which a bit has flipped since: it has a CRC-32 of each tensor.

    Files of other kinds are left to their readers.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged and cannot be read ({error}): take another checkpoint") from None
    if damaged is not None:
        raise ValueError(
            f"{path} is damaged: the checksum of {shown(damaged)} in it is another one; take another checkpoint "
            "(checkpoint_checksums=False loads it as it is)"
        )


def check_same_model(
    path: Path, saved: SavedModel, model: str, shapes: Mapping[str, Sequence[int]], names: OneDeviceNames
) -> None:
    """Refuse a checkpoint of another model.

    Args:
        model: The class of this LightningModule.
        shapes: Those of its pipeline.
        names: What they are called on one device.

    Raises:
        ValueError: a layer of one is missing in the other, or has another shape.
    """
    for name in sorted(shapes.keys() | saved.shapes.keys()):
        here, there = shapes.get(name), saved.shapes.get(name)
        if here is None or there is None or list(here) != list(there):
            called = saved.names.get(name, names.of(name))[0]
            raise ValueError(
                f"the checkpoint {path} is of another model, a {saved.model}: {called} is {_described(there)} "
                f"there and {_described(here)} in this {model}"
            )


def _described(shape: Sequence[int] | None) -> str:
    return "missing" if shape is None else f"of shape {tuple(shape)}"


# The state of a pipeline


def shapes_of_all(pipeline: PipelineModule) -> dict[str, list[int]]:
    """The shape of each tensor in the state of the whole pipeline, by its name there. Collective."""
    mine = {name: list(value.shape) for name, value in _tensors(pipeline).items()}
    return _union(gather_objects(mine, pipeline.mpu().get_pipe_parallel_group()))


def outside_state(module: nn.Module, pipeline: PipelineModule, names: OneDeviceNames) -> dict[str, Any]:
    """What DeepSpeed's files leave out: the module's own buffers, and ties that always run in a function."""
    specs = [spec for spec in pipeline._layer_specs if isinstance(spec, TiedLayerSpec)]
    saved = {spec.key for spec in specs if spec.forward_fn is None}
    skipped = tuple(f"tied_modules.{spec.key}." for spec in specs if spec.key not in saved)
    ties = {
        f"{PIPELINE}.{name}": value for name, value in pipeline.state_dict().items() if name.startswith(skipped)
    }
    return {**_outside_pipeline(module, names), **(ties if skipped else {})}


def load_outside_state(module: nn.Module, pipeline: PipelineModule, state: Mapping[str, Any]) -> None:
    """Load what :func:`outside_state` was."""
    prefix = f"{PIPELINE}."
    ties = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    pipeline.load_state_dict(ties, strict=False)
    rest = {name: value for name, value in state.items() if not name.startswith(prefix)}
    with pipeline.elsewhere.lifted():  # a normalization looks at its own, too, which another rank may have
        nn.Module.load_state_dict(module, rest, strict=False)


def local_state(module: nn.Module, pipeline: PipelineModule, names: OneDeviceNames) -> dict[str, Any]:
    """This rank's part of the state, by the names of one device, without a copy."""
    return names.in_order({**_outside_pipeline(module, names), **expanded(names, pipeline.state_dict().items())})


def consolidated_state(module: nn.Module, pipeline: PipelineModule, names: OneDeviceNames) -> dict[str, Any]:
    """The state of the whole model on the CPU of rank 0, as one device has it; empty elsewhere. Collective.

    Where the optimizer keeps master weights in fp32, these. One tensor at a time leaves its device.
    """
    grid = pipeline.mpu()
    stage, rank = grid.get_stage_id(), dist.get_rank()
    tensors = _tensors(pipeline)
    masters = {name: hasattr(value, "_hp_mapping") for name, value in tensors.items()}
    users = pipeline.layers_of_user
    mine = {
        name: (value.shape, torch.float32 if masters[name] else users.type_of(value))
        for name, value in tensors.items()
    }
    described = gather_objects(mine, grid.get_pipe_parallel_group())
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    found: dict[str, Tensor] = {}
    for sender, tensors_there in enumerate(described):
        for name, (shape, dtype) in tensors_there.items():
            if stage == sender:
                # Collective among the replicas of this stage: each has a part of the masters.
                tensor = tensors[name]
                value = safe_get_full_fp32_param(tensor) if masters[name] else users.in_users_form(tensor)
                if rank == 0:
                    found[name] = _on_cpu(value)
                elif grid.get_data_parallel_rank() == 0:
                    send_bytes(value, 0)
            elif rank == 0:
                received = _on_cpu(receive_bytes(shape, dtype, device, grid.stage_to_global(stage_id=sender)))
                found.setdefault(name, received)  # of a tie, the first stage's
    if rank != 0:
        return {}
    return names.in_order({**_outside_pipeline(module, names), **expanded(names, found.items())})


def load_consolidated(
    module: nn.Module,
    pipeline: PipelineModule,
    names: OneDeviceNames,
    state: Mapping[str, Any],
    *,
    strict: bool,
) -> None:
    """Load this rank's part of ``state``, the whole model as one device has it. Collective.

    Raises:
        ValueError: a name is missing or too much (if ``strict``), or a shape is another one; on every rank.
    """
    shapes = shapes_of_all(pipeline)
    outside = {
        name: list(value.shape) for name, value in _outside_pipeline(module, names).items() if _is_tensor(value)
    }
    expected = {**outside, **expanded(names, shapes.items())}
    missing, unexpected = [name for name in expected if name not in state], [*(state.keys() - expected.keys())]
    if strict and (missing or unexpected):
        raise ValueError(
            f"the checkpoint is of another model than this {type(module).__name__}: it lacks "
            f"{some(missing)} and has {some(sorted(unexpected))}, which this model does not have"
        )
    for name, shape in expected.items():
        if name in state and list(state[name].shape) != shape:
            raise ValueError(
                f"the checkpoint is of another model than this {type(module).__name__}: {name} is of shape "
                f"{tuple(state[name].shape)} there and {tuple(shape)} here"
            )
    local = {name: state[names.of(name)[0]] for name in pipeline.state_dict() if names.of(name)[0] in state}
    pipeline.load_state_dict(local, strict=False)
    own = {name: state[name] for name in outside if name in state}
    nn.Module.load_state_dict(module, own, strict=False)


def load_weights(path: Path, saved: SavedModel, pipeline: PipelineModule, reader: Reader) -> dict[str, Any]:
    """Load this rank's layers from a folder, whatever the cut and the number of stages that wrote it.

    Returns:
        The rest of the checkpoint, without states of an optimizer.
    """
    layers = dict(_layers(folder_of(path), saved, reader, wanted=_tensors(pipeline).keys()))
    pipeline.load_state_dict(layers, strict=False)
    for parameter in pipeline.parameters():
        safe_set_full_fp32_param(parameter, parameter.float())
    ranks = _ranks(path, saved, reader)
    return {**{key: ranks[0][key] for key in saved.keys if key in ranks[0]}, OUTSIDE_STATE: _outside(ranks)}


def outside_of_all(path: Path, saved: SavedModel, reader: Reader) -> dict[str, Any]:
    """What :func:`outside_state` was on all stages that wrote a folder."""
    return _outside(_ranks(path, saved, reader))


def given_by_hooks(path: Path, saved: SavedModel, reader: Reader) -> dict[str, Any]:
    """What hooks put into the state of a folder when it was saved."""
    return _given(saved, _ranks(path, saved, reader)) if saved.given else {}


def _given(saved: SavedModel, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: ranks[stage][GIVEN][name] for name, stage in saved.given.items()}


def _tensors(pipeline: PipelineModule) -> dict[str, Any]:
    """The state's tensors; parameters as themselves, because they know their masters."""
    state = pipeline.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if _is_tensor(value)}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _outside_pipeline(module: nn.Module, names: OneDeviceNames) -> dict[str, Any]:
    whole = nn.Module.state_dict(module)  # also where the user's class leaves some out of its own
    return {name: value for name, value in whole.items() if names.is_outside(name)}


def _on_cpu(value: Tensor) -> Tensor:
    """Return a copy on the CPU: a view would be written to a file with all that it is a view of."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def _union(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


# From a folder to a file


def consolidate(
    folder: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    checkpoint_checksums: bool = True,
    unpickle: bool | None = None,
) -> None:
    """Turn a checkpoint folder of the strategy into one ordinary Lightning checkpoint file.

    The file has the weights of the whole model by the names that they have on one device, in fp32 where
    training kept fp32 master weights, and the hyper-parameters: ``MyModule.load_from_checkpoint(file)`` needs
    neither this package nor DeepSpeed. States of optimizers, schedulers and callbacks stay behind. It runs
    in one process, on the CPU.

    Args:
        folder: What ``Trainer.save_checkpoint`` or ``ModelCheckpoint`` wrote.
        file: Where the file is written.
        checkpoint_checksums: Whether the checksums of the folder's files are verified first.
        unpickle: Whether its files may be unpickled, which can run any code: see ``MadPipeStrategy``.

    Raises:
        ValueError: no folder of the strategy, a damaged one, or a file that cannot be written.
    """
    source, target = Path(folder), Path(file)
    if target.resolve() == source.resolve() or target.is_dir():
        raise ValueError(f"{target} is a folder: give the name of a file for the weights")
    checkpoint = whole_checkpoint(source, checkpoint_checksums=checkpoint_checksums, unpickle=unpickle)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(target) as opened:
            torch.save(checkpoint, opened)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror or error}") from None


def whole_checkpoint(
    source: Path, *, checkpoint_checksums: bool = True, unpickle: bool | None = None
) -> dict[str, Any]:
    """What an ordinary Lightning file with the weights of the folder ``source`` holds; see :func:`consolidate`.

    Raises:
        ValueError: no folder of the strategy, or a damaged one.
    """
    saved, reader = read_folder(source, verify=checkpoint_checksums), Reader(unpickle)
    listed = atomic_folders.read_list(folder_of(source)) if checkpoint_checksums else None
    if listed is not None:
        atomic_folders.check_sizes(folder_of(source), listed)
        atomic_folders.check_contents(folder_of(source), listed, listed.sizes)
    names = saved.one_device_names()
    ranks = _ranks(source, saved, reader)
    found = _outside(ranks)
    ties = {name: found.pop(name) for name in list(found) if name.startswith(f"{PIPELINE}.")}
    layers = {name.removeprefix(f"{PIPELINE}."): value for name, value in ties.items()}
    layers.update(_layers(folder_of(source), saved, reader, wanted=saved.shapes.keys()))
    for stage in range(saved.num_stages):
        masters = _master_weights(folder_of(source), stage, reader)
        for name in masters.keys() & layers.keys():
            layers[name] = masters[name].view(layers[name].shape)
    layers = {name: _owned(value) for name, value in layers.items()}  # before ties share it by several names
    whole = names.in_order({**found, **expanded(names, layers.items())})
    rest = {key: ranks[0][key] for key in saved.keys if key not in OF_TRAINING and key in ranks[0]}
    if sentence := reader.sentence():
        announce(sentence, logging.WARNING)
    left = {name: value for name, value in whole.items() if name not in saved.dropped}
    return {**rest, "state_dict": {**left, **_given(saved, ranks)}}


def _ranks(path: Path, saved: SavedModel, reader: Reader) -> list[dict[str, Any]]:
    """What the first replica of each stage wrote beside its layers."""
    stages = range(saved.num_stages)
    return [_read(folder_of(path) / f"mp_rank_{stage:02d}_model_states.pt", reader) for stage in stages]


def _outside(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What DeepSpeed's layer files leave out; rank 0 has the last word."""
    return _union([state[OUTSIDE_STATE] for state in reversed(ranks)])


def _layers(
    folder: Path, saved: SavedModel, reader: Reader, *, wanted: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights as the pipeline ran them, by their names there."""
    for path in sorted(folder.glob("layer_*")):
        layer = str(int(path.name.removeprefix("layer_").split("-")[0]))
        prefix = f"tied_modules.{saved.ties[layer]}." if layer in saved.ties else f"{layer}."
        if any(name.startswith(prefix) for name in wanted):
            for name, value in _read(path, reader).items():
                yield prefix + name, value


def _master_weights(folder: Path, stage: int, reader: Reader) -> dict[str, Tensor]:
    """The flat fp32 weights of a stage that DeepSpeed's ZeRO-1 and bf16 optimizers save.

    Each data-parallel rank has one flat tensor per parameter group, and says where in it which piece of
    which parameter lies (DeepSpeed 0.16 to 0.19: ``param_slice_mappings``).
    """
    pieces: dict[str, list[Tensor]] = {}
    for rank in itertools.count():
        found = list(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_{stage:02d}_optim_states.pt"))
        if not found:
            break
        optimizer = _read(found[0], reader)["optimizer_state_dict"]
        groups = zip(optimizer["single_partition_of_fp32_groups"], optimizer["param_slice_mappings"], strict=True)
        for flat, places in groups:
            for name, place in places.items():
                piece = flat[place.start : place.start + place.numel]
                pieces.setdefault(name, []).append(piece)
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def _owned(value: Any) -> Any:
    return _on_cpu(value) if _is_tensor(value) else value


def _read(path: Path, reader: Reader) -> dict[str, Any]:
    try:
        return reader.load(path, map_location="cpu", mmap=True)
    except PlanFormatError:
        raise
    except Exception as error:  # whatever comes of a file that is not what its name says
        raise ValueError(f"{path} is damaged and cannot be read ({error}): take another checkpoint") from None
