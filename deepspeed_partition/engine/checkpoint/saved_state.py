"""What the optimizer files of a DeepSpeed checkpoint hold, by parameters, so that any other cut can load them.

DeepSpeed saves what a rank's optimizer trains, flat tensors or parameters, by their place and not by name: they
fit the ranks and the cut that wrote them alone. A small file beside them, ``madpipe-state.json``, says which
elements of which parameter lie where. With it a rank reads what it trains now out of all files that have something
of it. The numbers themselves are in DeepSpeed's files only.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from deepspeed_partition.engine.checkpoint.unpickling import Reader
from deepspeed_partition.engine.pipeline.parts import loss_part_of
from deepspeed_partition.engine.repartition.counted_steps import count_in_states_of_others
from deepspeed_partition.engine.repartition.optimizer_state import (
    FLAT,
    MASTER,
    Key,
    ParameterState,
    Share,
    Trained,
    has_dimensions,
    marks_of,
    tell_what_differs,
    trained_by,
)
from deepspeed_partition.engine.repartition.parameter_groups import OF_PARAMETERS
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.planner.errors import PlanFormatError
from deepspeed_partition.planner.io import files
from deepspeed_partition.planner.units import shown
from deepspeed_partition.tensor_values import has_memory

FILE_NAME = "madpipe-state.json"
FORMAT = "madpipe-state/1"
PLAIN = "torch"
"""The kind of an optimizer that DeepSpeed does not wrap."""
KEYS = {
    "DeepSpeedZeroOptimizer": ("single_partition_of_fp32_groups", "base_optimizer_state"),
    "BF16_Optimizer": ("single_partition_of_fp32_groups", "base_optimizer_state"),
    "FP16_Optimizer": ("fp32_groups_flat", "optimizer_state_dict"),
    "FP16_UnfusedOptimizer": ("fp32_groups", "optimizer_state_dict"),
}
"""The entries of a wrapping optimizer's state with the master weights, and with the wrapped optimizer's state."""
HAS_MORE = "has_state_of_no_parameter"
"""The entry that says whether the optimizer of some rank keeps anything in ``state`` for no parameter."""
NOT_OF_THE_CUT = ("num_forwards", HAS_MORE)
"""The entries that are others in each step."""
OF_TORCH = {"state", "param_groups"}
"""The entries of the state that torch's optimizers save."""
SHARED_AMONG_REPLICAS = ("DeepSpeedZeroOptimizer", "BF16_Optimizer")
"""Each replica trains, and saves, its own share."""


def kind_of(optimizer: Any) -> str:
    return type(optimizer).__name__ if type(optimizer).__name__ in KEYS else PLAIN


def describe(engine: Any) -> dict[str, Any] | None:
    """Describe where the next checkpoint of ``engine`` will have what; None where that cannot be said. Collective.

    It cannot with ``elastic_checkpoint``, with layers that are sliced over ranks, with an optimizer unknown here,
    or one that trains other parameters, too.
    """
    optimizer, module = engine.optimizer, engine.module
    replica = engine.grid.get_data_parallel_rank()
    mine: dict[str, Any] | None = None
    is_unknown = getattr(optimizer, "elastic_checkpoint", False) or engine.grid.model_parallel_size > 1
    if optimizer is not None and not is_unknown:
        try:
            trained = trained_by(optimizer, module)
        except RuntimeError:
            trained, is_unknown = [], True
        in_groups = sum(len(group["params"]) for group in engine.basic_optimizer.param_groups)
        is_unknown = is_unknown or in_groups != len(trained)
        mine = {
            "pipe_rank": engine.grid.get_stage_id(),
            "replica": replica,
            "file": _file_name(engine),
            "trained": [_described(one, but=_not_trained_here(module)) for one in trained],
        }
    has_more = not all(map(torch.is_tensor, getattr(engine.basic_optimizer, "state", ())))
    gathered = gather_objects((mine, is_unknown, has_more))
    if any(unknown for _, unknown, _ in gathered):
        return None
    writers = [
        entry
        for entry, *_ in gathered
        if entry and (entry["replica"] == 0 or kind_of(optimizer) in SHARED_AMONG_REPLICAS)
    ]
    return {
        "format": FORMAT,
        "num_ranks": engine.num_stages,
        "num_replicas": engine.grid.get_data_parallel_world_size(),
        "optimizer": None if optimizer is None else kind_of(optimizer),
        HAS_MORE: any(more for *_, more in gathered),
        "files": sorted(writers, key=lambda entry: (entry["pipe_rank"], entry["replica"])),
    }


def _file_name(engine: Any) -> str:
    own = kind_of(engine.optimizer) in SHARED_AMONG_REPLICAS
    return Path(engine._get_zero_ckpt_name("", "") if own else engine._get_ckpt_name("", "")).name


def _not_trained_here(module: PipelineModule) -> str | None:
    """The beginnings of the names of parameters that this rank has, and another one trains."""
    loss = loss_part_of(module)
    return None if loss is None or module.stage_owner(loss.layers[0]) == module.stage_id else f"{loss.name}."


def _described(trained: Trained, *, but: str | None) -> dict[str, Any]:
    shares = {
        share.name: [share.first, share.num_elements, share.place]
        for share in trained.shares
        if but is None or not share.name.startswith(but)
    }
    return {"num_elements": trained.tensor.numel(), "shares": shares}


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one parameter in one file."""

    file: str
    place: int
    """The place of the trained tensor that the elements lie in, among the trained tensors of the file."""
    num_elements: int
    """The number of elements of that trained tensor."""
    share: Share


@dataclass(frozen=True, slots=True)
class Content:
    """The optimizer's part of one file: entry by entry for each trained tensor."""

    entries: list[dict[Key, Any]]
    settings: list[dict[str, Any]]
    """The settings of the group that each trained tensor belongs to."""
    of_no_parameter: Mapping[Any, Any]
    """What the optimizer keeps in its ``state`` under other keys than parameters."""
    of_the_wrapper: Mapping[str, Any]


class SavedState:
    """The optimizer's state in the checkpoint in ``folder``, read as it is asked for.

    Args:
        layout: What ``madpipe-state.json`` says, as :func:`describe` made it.
        reader: Reads the files.

    Raises:
        PlanFormatError: it does not, or it names a file that is not one of this folder.
    """

    def __init__(self, folder: Path, layout: Mapping[str, Any], reader: Reader) -> None:
        self._folder, self.layout, self._reader = folder, layout, reader
        self._contents: dict[str, Content] = {}
        self._pieces: dict[str, list[Piece]] = {}
        holders: dict[str, int] = {}
        try:
            self.optimizer: str | None = _known_optimizer(layout["optimizer"])
            for file in layout["files"]:
                name_of_file, holder = _plain(file["file"]), _count(file["pipe_rank"])
                for place, trained in enumerate(file["trained"]):
                    num_trained = _count(trained["num_elements"])
                    for name, numbers in trained["shares"].items():
                        share = Share(name, *map(_count, numbers))
                        # Tied weights are on several ranks of a pipeline, alike.
                        if holders.setdefault(name, holder) == holder:
                            piece = Piece(name_of_file, place, num_trained, share)
                            self._pieces.setdefault(name, []).append(piece)
        except _NotPlainError as error:
            raise PlanFormatError(
                f"{folder / FILE_NAME} names {error}, which is not a file of this folder: take another checkpoint"
            ) from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise PlanFormatError(f"{folder / FILE_NAME}: not the layout of an optimizer's state") from None

    def states_for(self, optimizer: Any, module: PipelineModule) -> dict[str, ParameterState]:
        """Return what ``optimizer`` needs of the saved state on this rank, by parameters.

        Raises:
            PlanFormatError: a file is missing or damaged.
            RuntimeError: an entry cannot be brought into the shape that this optimizer trains.
        """
        found: dict[str, ParameterState] = {}
        for trained in trained_by(optimizer, module):
            of_group: dict[Key, Any] = {}
            for parameter, share in zip(trained.parameters, trained.shares, strict=True):
                if share.name in self._pieces:
                    state = found[share.name] = self._state(share, parameter, trained.is_flat)
                    _check_alike(of_group, share.name, state, trained.is_flat)
                    for key, value in state.values.items():
                        state.values[key] = _where_used(key, value, trained.tensor, self.settings_of(share.name))
        return found

    def settings_of(self, name: str) -> dict[str, Any] | None:
        """The settings of the group of a parameter; None if the checkpoint has no state for it."""
        pieces = self._pieces.get(name)
        if pieces is None:
            return None
        self._entries(pieces[0])
        return self._read(pieces[0].file).settings[pieces[0].place]

    def of_the_wrapper(self) -> Mapping[str, Any]:
        """What DeepSpeed's wrapping optimizer saved beside the states, such as its loss scale."""
        return self._read(_plain(self.layout["files"][0]["file"])).of_the_wrapper if self.layout["files"] else {}

    def of_no_parameter(self, kind: str, pipe_rank: int) -> dict[Any, Any]:
        """What the optimizer kept in its ``state`` under other keys than parameters.

        Where ranks had it otherwise, this one goes on with that of the same place in the pipeline, which is said.

        Args:
            kind: The class of the optimizer, to tell it by.
            pipe_rank: The place of this rank.

        Raises:
            PlanFormatError: a file is missing or damaged.
            RuntimeError: a state has a form of its own.
        """
        files = {file["pipe_rank"]: _plain(file["file"]) for file in reversed(self.layout["files"])}
        if not files or not self.layout.get(HAS_MORE, True):
            return {}
        by_rank = {rank: self._read(name).of_no_parameter for rank, name in files.items()}
        tell_what_differs(kind, list(map(marks_of, by_rank.values())))
        own = by_rank.get(pipe_rank, by_rank[max(by_rank)])
        return {key: copy.deepcopy(value) for key, value in own.items()}

    def _state(self, share: Share, parameter: nn.Parameter, is_flat: bool) -> ParameterState:
        """The elements of ``share``, or the whole of it where the optimizer trains no flat tensors."""
        pieces = sorted(self._pieces[share.name], key=lambda piece: piece.share.first)
        state = ParameterState(share)
        for key, value in self._entries(pieces[0]).items():
            if not has_dimensions(value):
                state.values[key] = value
            elif self.optimizer in _FLAT_NAMES:
                elements = self._joined(pieces, key, share)
                state.tensors[key] = elements if is_flat else _owned(elements.view(parameter.shape), parameter)
            elif not is_flat:
                state.tensors[key] = _owned(value, parameter)
            elif value.shape == parameter.shape:
                state.tensors[key] = value.reshape(-1).narrow(0, share.first, share.num_elements)
            else:
                raise RuntimeError(
                    f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {share.name!r} of shape "
                    f"{tuple(parameter.shape)}, and DeepSpeed would flatten it: load it without ZeRO"
                )
        return state

    def _joined(self, pieces: list[Piece], key: Key, share: Share) -> torch.Tensor:
        """The elements of ``share`` out of the flat tensors that have some of them."""
        parts, stop = [], share.first + share.num_elements
        for piece in pieces:
            there = piece.share
            flat: Any = self._entries(piece).get(key)
            if not torch.is_tensor(flat):
                raise self._of_other_files(piece)
            # DeepSpeed cuts the padding off master weights.
            if flat.ndim != 1 or (key is not MASTER and flat.numel() != piece.num_elements):
                raise RuntimeError(
                    f"the optimizer keeps {key!r} of shape {tuple(flat.shape)} for parameters that DeepSpeed has "
                    f"flattened into {piece.num_elements} elements: no layer can take its part along, so the "
                    "checkpoint loads only under the cut and the ranks that wrote it"
                )
            first, end = max(share.first, there.first), min(stop, there.first + there.num_elements)
            if first < end:
                if there.place + end - there.first > flat.numel():
                    raise self._of_other_files(piece)
                parts.append(flat.narrow(0, there.place + first - there.first, end - first))
        if sum(part.numel() for part in parts) != share.num_elements:
            raise PlanFormatError(f"the checkpoint {self._folder} lacks a part of {share.name}: take another one")
        return parts[0] if len(parts) == 1 else torch.cat([flat.new_empty(0), *parts])

    def _entries(self, piece: Piece) -> dict[Key, Any]:
        entries = self._read(piece.file).entries
        if piece.place >= len(entries):
            raise self._of_other_files(piece)
        return entries[piece.place]

    def _of_other_files(self, piece: Piece) -> PlanFormatError:
        return PlanFormatError(
            f"{self._folder / FILE_NAME} does not go with {piece.file}, where it looks for {piece.share.name}: "
            "take another checkpoint"
        )

    def _read(self, file: str) -> Content:
        if file not in self._contents:
            path = self._folder / file
            try:
                saved = self._reader.load(path, map_location="cpu", mmap=True)
                self._contents[file] = _content(saved, self.optimizer)
            except (PlanFormatError, _OwnFormError):
                raise
            except Exception as error:  # whatever comes of a file that is not what its name says
                raise unreadable(path, error) from None
        return self._contents[file]


class _OwnFormError(RuntimeError):
    """An optimizer saved something else than torch's do."""


class _NotPlainError(ValueError):
    """A name that leads out of the folder."""


def _plain(name: object) -> str:
    if not files.is_plain(name) or Path(name).name != name:
        raise _NotPlainError(shown(name))
    return name


def _count(number: object) -> int:
    if type(number) is not int or not 0 <= number < 2**62:
        raise ValueError
    return number


def _known_optimizer(name: str | None) -> str | None:
    if name is not None and name != PLAIN and name not in KEYS:
        raise ValueError
    return name


def unreadable(path: object, error: Exception) -> PlanFormatError:
    return PlanFormatError(
        f"{path} is damaged or missing ({type(error).__name__}: {error}): take another checkpoint"
    )


_FLAT_NAMES = {optimizer.__name__ for optimizer in FLAT}


def _content(saved: Mapping[str, Any], optimizer: str | None) -> Content:
    wrapper = saved["optimizer_state_dict" if optimizer in SHARED_AMONG_REPLICAS else "optimizer"]
    masters_key, base_key = KEYS.get(optimizer or "", (None, None))
    base = wrapper if base_key is None else wrapper[base_key]
    odd = base.keys() - OF_TORCH if base.keys() >= OF_TORCH else base.keys()
    if odd:
        raise _OwnFormError(
            f"the state of the optimizer in the checkpoint has {min(odd, key=str)!r} beside what torch's "
            "optimizers save ('state', 'param_groups'), which nothing tells apart by parameters: the checkpoint "
            "loads only under the cut and the ranks that wrote it, or with load_optimizer_states=False"
        )
    groups = base["param_groups"]
    of_groups = [[dict(base["state"].get(index, {})) for index in group["params"]] for group in groups]
    for states in of_groups:
        count_in_states_of_others(states)
    entries = list(itertools.chain.from_iterable(of_groups))
    if masters_key is not None:
        for entry, master in zip(entries, _flattened(wrapper[masters_key]), strict=True):
            entry[MASTER] = master
    settings = [
        {key: value for key, value in group.items() if key not in OF_PARAMETERS}
        for group in groups
        for _ in group["params"]
    ]
    places = {index for group in groups for index in group["params"]}
    of_none = {key: value for key, value in base["state"].items() if key not in places}
    return Content(entries, settings, of_none, {} if base_key is None else wrapper)


def _flattened(masters: Any) -> Iterator[torch.Tensor]:
    for master in masters:
        if isinstance(master, torch.Tensor):
            yield master
        else:
            yield from master


def _owned(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a copy on the device of ``parameter``: it is no part of the file, whose pages a part would keep.

    One of the shape of ``parameter`` lies in memory as that does: fused optimizers take the elements of both in
    the order of memory.
    """
    if value.shape == parameter.shape and has_memory(value) and has_memory(parameter):
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value.detach())
    return value.to(parameter.device, copy=True)


def _check_alike(of_group: dict[Key, Any], name: str, state: ParameterState, is_flat: bool) -> None:
    """Refuse parameters whose single numbers differ, and that DeepSpeed flattens together, with one for all."""
    for key, value in state.values.items() if is_flat else ():
        first, agreed = of_group.setdefault(key, (name, value))
        same = torch.equal(value, agreed) if torch.is_tensor(value) else value == agreed
        if not same:
            raise RuntimeError(
                f"the optimizer's {key!r} is {agreed} for {first!r} and {value} for {name!r}, which are in one "
                "group: DeepSpeed keeps one for a group, so these cannot come together on a rank"
            )


def _where_used(key: Key, value: Any, trained: torch.Tensor, settings: Mapping[str, Any] | None) -> Any:
    """A single number on the device that the optimizer reads it on, as torch's ``load_state_dict`` has it."""
    on_cpu = key == "step" and settings and not (settings.get("capturable") or settings.get("fused"))
    if not torch.is_tensor(value):
        return value
    return value.to("cpu" if on_cpu else trained.device, copy=True)


def write_layout(folder: Path, layout: Mapping[str, Any], num_forwards: int) -> None:
    """Write what :func:`describe` found beside the checkpoint's other files.

    Args:
        num_forwards: That each stage has run, by which layers with seeds go on.

    Raises:
        OSError: the folder cannot be written.
    """
    files.write_json(folder / FILE_NAME, {**layout, "num_forwards": num_forwards}, through_link=False)


def read_layout(folder: Path) -> dict[str, Any] | None:
    """What :func:`write_layout` wrote; None where there is no such file.

    Raises:
        PlanFormatError: the file is damaged, or of another version.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    layout = files.read_json(path, error=PlanFormatError)
    known = isinstance(layout, dict) and layout.get("format") == FORMAT
    counts = [layout.get(key) for key in ("num_forwards", "num_ranks", "num_replicas")] if known else []
    if not known or not all(type(count) is int and count >= 0 for count in counts) or "optimizer" not in layout:
        raise PlanFormatError(f"{path}: damaged, or not of a version known here ({FORMAT})")
    return layout
