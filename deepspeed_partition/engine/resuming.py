"""An engine whose checkpoints are whole or absent, and load on any cut, number of stages and of replicas."""

from __future__ import annotations

import fnmatch
import inspect
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.pipe import PipelineModule

from deepspeed_partition.engine import checkpoints, folders, saved_state
from deepspeed_partition.engine.checkpoints import SavedCut
from deepspeed_partition.engine.collectives import from_rank_0, gather_objects, portable
from deepspeed_partition.engine.environment import announce
from deepspeed_partition.engine.moving import MovingEngine
from deepspeed_partition.engine.saved_state import SavedState
from deepspeed_partition.engine.stages import StagesModule, allocation_of
from deepspeed_partition.engine.ties import load_ties, save_ties
from deepspeed_partition.engine.training_state import ParameterState, lay_states
from deepspeed_partition.planner import files
from deepspeed_partition.planner.plan import Plan

OF_A_CHECKPOINT = ("layer_*", "mp_rank_*", "*zero_pp_rank_*", "expp_rank_*", "madpipe-*")
"""The files that a checkpoint consists of. A script may keep others in its folder."""
OF_OPTIMIZERS = ("*zero_pp_rank_*",)
"""Those of them that DeepSpeed does not read where only weights are loaded."""
SAVED_OF_THE_LOSS_SCALE = (
    "dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window",
)  # fmt: skip
"""What DeepSpeed's fp16 optimizers without ZeRO save of it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is to be loaded."""

    folder: Path
    cut: SavedCut | None
    """None where DeepSpeed alone wrote it."""
    layout: dict[str, Any] | None
    """Where the optimizer's states lie; None where nothing says so."""

    def is_at_cut_of(self, module: PipelineModule) -> bool:
        return self.cut is not None and self.cut.allocation == allocation_of(module)


class ResumingEngine(MovingEngine):
    """Writes checkpoints that a kill cannot tear, and reads those of other cuts, numbers of stages and replicas.

    They are DeepSpeed's. Where this run has the layout that they were written in, DeepSpeed loads them; else it
    loads the layers, the counts and the scheduler, and what the optimizer kept is found by parameters.
    """

    plan: Plan | None = None
    """The plan of the current cut; None for a trial cut, and for one that was given as boundaries."""

    # Saving

    def save_checkpoint(self, save_dir, tag=None, *args: Any, **kwargs: Any):
        """DeepSpeed's ``save_checkpoint``, with the cut and the optimizer's layout beside its files.

        The folder has another name until it is complete, and ``latest`` names it then: wherever a process is
        killed, the last complete checkpoint can be loaded, also if it has the same tag. Other files in a folder
        whose place it takes stay in it. DeepSpeed's writers in the background (``is_decoupled``) write in place.

        Raises:
            OSError: rank 0 cannot write; on every rank.
        """
        if not self.owns_cut or not save_dir:
            return super().save_checkpoint(save_dir, tag, *args, **kwargs)
        bound = inspect.signature(super().save_checkpoint).bind(save_dir, tag, *args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        path, in_place = Path(save_dir) / tag, self.checkpoint_engine.is_decoupled()
        written = path if in_place else folders.unfinished(path)
        if not in_place:
            self._on_every_disk(lambda: folders.make_room(path))
        layout = saved_state.describe(self)

        def write_own() -> None:
            written.mkdir(parents=True, exist_ok=True)
            checkpoints.save_cut(written, self.module.parts, self.plan)
            if layout is not None:
                saved_state.write_layout(written, layout, self.module.micro_offset)

        from_rank_0(write_own)
        save_ties(written, self.module)
        options["tag"] = str(written.relative_to(save_dir))
        save_latest, options["save_latest"] = options["save_latest"], options["save_latest"] and in_place
        saved = super().save_checkpoint(*bound.args, **bound.kwargs)
        if not in_place:
            self._on_every_disk(lambda: _take_place(path))
            if save_latest:
                from_rank_0(lambda: files.write_text(Path(save_dir) / "latest", tag))
        return saved

    def _on_every_disk(self, change: Any) -> None:
        """Rank 0's, and those of other nodes where each has its own."""
        from_rank_0(change)
        if self.use_node_local_storage() and self.local_rank == 0 and self.global_rank != 0:
            change()

    # Loading

    def load_checkpoint(self, load_dir, tag=None, *args: Any, **kwargs: Any):
        """DeepSpeed's ``load_checkpoint``, for checkpoints of any cut, number of stages and of replicas.

        A run that waits for its plan takes the cut of the checkpoint, whose layers move there before it is loaded,
        if that has as many stages. One that has its cut, be it given or planned, keeps it.

        Raises:
            PlanMismatchError: a checkpoint of another number of layers; or it is of another cut and does not say
                where the optimizer's states lie. On every rank, like the following.
            PlanFormatError: a file is missing, has another size, or cannot be read. No weight has changed, unless
                it was DeepSpeed that could not read it: then other ranks may have loaded theirs.
            RuntimeError: the optimizer's state cannot be told apart by parameters; no weight has changed.
        """
        bound = inspect.signature(super().load_checkpoint).bind(load_dir, tag, *args, **kwargs)
        bound.apply_defaults()
        return self._load_found(self._find(bound.arguments), bound)

    def _load_found(self, found: Found | None, bound: inspect.BoundArguments) -> tuple[Any, Any]:
        """Load what was found; as DeepSpeed does where nothing was."""
        if found is None:
            return super().load_checkpoint(*bound.args, **bound.kwargs)
        options, layout = bound.arguments, found.layout
        states: dict[str, ParameterState] | None = None
        if layout is not None and self.optimizer is not None and _is_whole(options) and not self._fits(found):
            saved = SavedState(found.folder, layout)
            states = self._agreed(saved)
            options["load_optimizer_states"] = False
        loaded: tuple[Any, Any] = None, None
        flaw: Exception | None = None
        with self._files_named(), _ties_follow(self.module):
            try:
                loaded = super().load_checkpoint(*bound.args, **bound.kwargs)
                if found.cut is not None:
                    same_cut, strict = found.is_at_cut_of(self.module), options["load_module_strict"]
                    load_ties(found.folder, self.module, same_cut=same_cut, strict=strict)
            except Exception as error:  # of a file that perhaps one rank reads: the others would go on
                flaw = portable(error)
            _raise_first(flaw)
        if not _is_whole(options) and hasattr(self.optimizer, "refresh_fp32_params"):
            self.optimizer.refresh_fp32_params()  # DeepSpeed does without ties, if at all
        if states is not None:
            _, client_state = loaded
            client_state.pop("optimizer", None)  # that of rank 0
            self._lay_in(states, saved)
        if layout is not None and not options["load_module_only"] and isinstance(self.module, StagesModule):
            self.module.count_forwards_from(layout["num_forwards"])
        return loaded

    @contextmanager
    def _files_named(self) -> Iterator[None]:
        """A file that DeepSpeed cannot read is told by its name."""
        load = self.checkpoint_engine.load

        def named(path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return load(path, *args, **kwargs)
            except Exception as flaw:  # whatever comes of unpickling something else
                raise saved_state.unreadable(path, flaw) from None

        self.checkpoint_engine.load = named
        try:
            yield
        finally:
            del self.checkpoint_engine.load

    def _find(self, options: Mapping[str, Any]) -> Found | None:
        """What DeepSpeed's ``load_checkpoint`` would load with ``options``; None where all of it is DeepSpeed's.

        Its folder has its name again if a run ended while it was replaced. Collective.

        Raises:
            PlanFormatError: a file that will be read is missing or damaged; on every rank.
        """
        if not self.owns_cut or self.load_universal_checkpoint():
            return None

        def find() -> Found | None:
            folder = checkpoints.folder_to_load(options["load_dir"], options["tag"], universal=False)
            if folder is None:
                return None
            folders.restore(folder)
            folders.check_files(folder, but=() if _is_whole(options) else OF_OPTIMIZERS)
            return Found(folder, checkpoints.read_cut(folder), saved_state.read_layout(folder))

        return from_rank_0(find)

    def _fits(self, found: Found) -> bool:
        """Whether DeepSpeed can load the optimizer's state: the ranks train the same tensors. Collective.

        As of 0.19.8 it cannot read what its own ``BF16_Optimizer`` saves.
        """
        assert found.layout is not None
        there = {key: value for key, value in found.layout.items() if key != "num_forwards"}
        here = saved_state.describe(self)
        same = found.is_at_cut_of(self.module) if here is None else here == there
        return same and there["optimizer"] != "BF16_Optimizer"

    def _agreed(self, saved: SavedState) -> dict[str, ParameterState]:
        """What this rank's optimizer needs, or the first rank's error on all of them."""
        states: dict[str, ParameterState] = {}
        flaw: Exception | None = None
        try:
            states = saved.states_for(self.optimizer, self.module)
        except Exception as error:
            flaw = portable(error)
        _raise_first(flaw)
        announce(
            "the checkpoint has no state of an optimizer: this run's begins anew"
            if saved.optimizer is None
            else f"the checkpoint has the optimizer's state of {saved.layout['num_ranks']} stages on "
            f"{saved.layout['num_replicas']} pipelines, for other tensors than are trained here: it is loaded by "
            "parameters"
        )
        return states

    def _lay_in(self, states: dict[str, ParameterState], saved: SavedState) -> None:
        assert self._groups is not None and self._every_group is not None
        optimizer = self.optimizer
        pipe_group = self.grid.get_pipe_parallel_group()
        self._groups.take_settings(self._every_group, saved.settings_of, pipe_group)
        lay_states(states, optimizer, self.module)
        if saved.optimizer == saved_state.kind_of(optimizer):
            wrapper = saved.of_the_wrapper()
            if hasattr(optimizer, "_load_global_state"):
                optimizer._load_global_state(wrapper)
            elif hasattr(optimizer, "loss_scale_config"):
                known = {key: wrapper[key] for key in SAVED_OF_THE_LOSS_SCALE if key in wrapper}
                vars(optimizer.loss_scale_config).update(known)


def _is_whole(options: Mapping[str, Any]) -> bool:
    """Whether the optimizer's states are to be loaded, too."""
    return options["load_optimizer_states"] and not options["load_module_only"]


def _raise_first(flaw: Exception | None) -> None:
    """Raise the first rank's flaw on all of them, if one has any. Collective."""
    flaws = list(filter(None, gather_objects(flaw)))
    if flaws:
        raise flaws[0]


@contextmanager
def _ties_follow(module: Any) -> Iterator[None]:
    """Copies of tied weights are brought together when the ranks have agreed that all of them have loaded."""
    module._synchronize_tied_weights = lambda: None
    try:
        yield
    finally:
        del module._synchronize_tied_weights
    module._synchronize_tied_weights()


def _take_place(path: Path) -> None:
    """Publish a complete checkpoint, with what a script keeps in the folder that it replaces."""
    new = folders.unfinished(path)
    folders.list_files(new)
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        ours = any(fnmatch.fnmatch(entry.name, pattern) for pattern in OF_A_CHECKPOINT)
        if not ours and not (new / entry.name).exists():
            if entry.is_dir():
                shutil.copytree(entry, new / entry.name, symlinks=True)
            else:
                shutil.copy2(entry, new / entry.name, follow_symlinks=False)
    folders.publish(path)
