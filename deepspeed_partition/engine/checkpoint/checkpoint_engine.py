"""An engine whose checkpoints are whole or absent, and load on any cut, number of stages and of replicas."""

from __future__ import annotations

import fnmatch
import functools
import glob
import inspect
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor
from torch.optim import Optimizer

from deepspeed_partition.engine.checkpoint import atomic_folders, saved_cut, saved_state
from deepspeed_partition.engine.checkpoint.client_states import unlike_keys
from deepspeed_partition.engine.checkpoint.loaded_schedule import ListsOfGroups
from deepspeed_partition.engine.checkpoint.saved_cut import SavedCut
from deepspeed_partition.engine.checkpoint.saved_state import SavedState
from deepspeed_partition.engine.checkpoint.tied_modules import load_ties, save_ties
from deepspeed_partition.engine.checkpoint.universal import refuse_other_groups, refuse_pickles
from deepspeed_partition.engine.checkpoint.unpickling import Reader
from deepspeed_partition.engine.pipeline.parts import in_words, parts_here
from deepspeed_partition.engine.pipeline.stages import StagesModule, allocation_in_words, allocation_of
from deepspeed_partition.engine.repartition.counted_steps import (
    count_in_every_parameter,
    go_on_from_other_optimizer,
    settings_that_lack,
)
from deepspeed_partition.engine.repartition.movable_engine import MovingEngine
from deepspeed_partition.engine.repartition.optimizer_copies import without_marks
from deepspeed_partition.engine.repartition.optimizer_state import ParameterState, base_of, lay_states
from deepspeed_partition.engine.runtime.all_come import wait_until_all_come
from deepspeed_partition.engine.runtime.collectives import (
    from_rank_0,
    gather_objects,
    portable,
    raise_first,
    raised_together,
    reduced,
)
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.options import Options
from deepspeed_partition.planner.errors import PlanFormatError, PlanMismatchError
from deepspeed_partition.planner.io import files
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.units import counted, shown
from deepspeed_partition.tensor_values import num_bytes_of

LOADED_BY_ALL = (
    "each rank reads its layers, so call load_checkpoint on every rank, and not under a condition such as "
    "`if rank == 0`"
)
OF_A_CHECKPOINT = ("layer_*", "mp_rank_*", "*zero_pp_rank_*", "expp_rank_*", "madpipe-*")
"""The files that a checkpoint consists of. A script may keep others in its folder."""
OF_OPTIMIZERS = ("*zero_pp_rank_*",)
"""Patterns of the checkpoint's files that DeepSpeed does not read where only weights are loaded."""
OWN_FILES = (saved_cut.FILE_NAME, saved_state.FILE_NAME)
"""The files of a checkpoint that are read before the others."""
SAVED_OF_THE_LOSS_SCALE = (
    "dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window",
)  # fmt: skip
"""What DeepSpeed's fp16 optimizers without ZeRO save of the loss scale."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is to be loaded."""

    folder: Path
    cut: SavedCut | None
    """The cut that the checkpoint was written on; None where DeepSpeed alone wrote it."""
    layout: dict[str, Any] | None
    """The places of the optimizer's states; None where nothing says so."""

    def is_at_cut_of(self, module: PipelineModule) -> bool:
        return self.cut is not None and self.cut.allocation == allocation_of(module)


class ResumingEngine(MovingEngine):
    """Writes checkpoints that a kill cannot tear, and reads those of other cuts, numbers of stages and replicas.

    They are DeepSpeed's. Where this run has the layout that they were written in, DeepSpeed loads them; else it
    loads the layers, the counts and the scheduler, and what the optimizer kept is found by parameters.
    """

    plan: Plan | None = None
    """The plan of the current cut; None for a trial cut, and for one that was given as boundaries."""

    options: Options
    """The options of planning, of which some are for checkpoints."""
    tells_of_client_state = True
    """Whether it is still to be said that the ranks save different values in ``client_state``."""
    _reader: Reader
    """The reader of the checkpoint that is being loaded."""
    _copy_recovery_script: Any

    # Saving

    def save_checkpoint(self, save_dir, tag=None, *args: Any, **kwargs: Any):
        """DeepSpeed's ``save_checkpoint``, with the cut, the optimizer's layout and checksums beside its files.

        The folder has another name until it is complete, and ``latest`` names it then: wherever a process is
        killed, the last complete checkpoint can be loaded, also if it has the same tag. Other files in a folder
        whose place it takes stay in it. DeepSpeed's writers in the background (``is_decoupled``) write in place,
        without checksums.

        Raises:
            OSError: a rank cannot write; on every rank, and what was there before stays.
            ValueError: the ranks have different tags, or the tag is an absolute path.
        """
        with without_marks(self):
            return self._save_whole(save_dir, tag, *args, **kwargs)

    def _save_whole(self, save_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.owns_cut or not save_dir:
            return super().save_checkpoint(save_dir, tag, *args, **kwargs)
        bound = inspect.signature(super().save_checkpoint).bind(save_dir, tag, *args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._check_tag(tag)
        self._tell_of_client_state(options["client_state"])
        count_in_every_parameter(self.basic_optimizer)
        path, in_place = Path(save_dir) / tag, self.checkpoint_engine.is_decoupled()
        if in_place:
            self._write_beside(path)
            return super().save_checkpoint(*bound.args, **bound.kwargs)
        written = atomic_folders.unfinished(path)
        self._on_every_disk(lambda: atomic_folders.make_room(path))
        options["tag"] = os.path.relpath(written, save_dir)
        [needed] = reduced([self._bytes_to_save()], dist.ReduceOp.SUM)
        save_latest, options["save_latest"] = options["save_latest"], False
        try:
            with self._writes_watched(needed) as writes:
                self._write_beside(written, writes)
                saved = super().save_checkpoint(*bound.args, **bound.kwargs)
            raise_first(writes.error)
            checksums = self._checksums_of(written, writes)
            self._on_every_disk(lambda: _take_place(path, checksums, needed))
        except Exception:
            self.give_up_folder(path)
            raise
        if save_latest:
            from_rank_0(lambda: files.write_text(Path(save_dir) / "latest", tag, through_link=False))
        return saved

    def _tell_of_client_state(self, client_state: Any) -> None:
        """Say once which values of it are each stage's own. Collective."""
        if not self.tells_of_client_state:
            return
        keys = unlike_keys(client_state, is_saved=self.grid.data_parallel_id == 0)
        if keys:
            self.tells_of_client_state = False
            announce(
                f"client_state differs between the ranks of the pipeline in {', '.join(map(shown, keys))}: a run "
                "with as many stages gives each rank its own, one with another number of stages gives all ranks "
                "that of rank 0. Save the same on all ranks, such as a list that "
                "torch.distributed.all_gather_object makes of all values",
                logging.WARNING,
            )

    def give_up_folder(self, path: Path) -> None:
        """Remove what was written for a checkpoint that failed; no other rank is asked, for one may fail alone."""
        if self.global_rank == 0 or (self.use_node_local_storage() and self.local_rank == 0):
            with suppress(OSError):  # which the failure that is being told may be about
                atomic_folders.give_up(path)

    def _check_tag(self, tag: str) -> None:
        """Refuse a tag that cannot become one folder. Collective."""
        self._checkpoint_tag_validation(tag)  # by the name that the user gave
        tags = gather_objects(tag)
        other = next((rank for rank, theirs in enumerate(tags) if theirs != tags[0]), None)
        if other is not None:
            raise ValueError(
                f"rank 0 saves a checkpoint with the tag {shown(tags[0])} and rank {other} with "
                f"{shown(tags[other])}: each has a part of it, so give the same tag on every rank"
            )
        if Path(tag).is_absolute() or Path(tag).name in ("", ".."):
            raise ValueError(f"the tag {shown(tag)} is not the name of a folder in save_dir")

    def _write_beside(self, folder: Path, writes: _Writes | None = None) -> None:
        """Write what DeepSpeed does not. Collective."""
        layout = saved_state.describe(self)

        def write_own() -> None:
            with nullcontext() if writes is None else atomic_folders.room_told(folder, writes.needed):
                folder.mkdir(parents=True, exist_ok=True)
                saved_cut.save_cut(folder, self.module.parts, self.plan)
                if layout is not None:
                    saved_state.write_layout(folder, layout, self.module.micro_offset)

        from_rank_0(write_own)
        if writes is None:
            save_ties(folder, self.module)
        else:
            writes.attempt(folder, lambda: save_ties(folder, self.module))

    def _bytes_to_save(self) -> int:
        """Bytes of what this rank writes: weights, what the optimizer trains in their place, and its states."""
        wraps = self.optimizer is not self.basic_optimizer
        is_first = self.grid.data_parallel_id == 0
        tensors = [*self.module.parameters(), *self.module.buffers()] if is_first else []
        if (wraps or is_first) and isinstance(self.basic_optimizer, Optimizer):
            states = [state for state in self.basic_optimizer.state.values() if isinstance(state, Mapping)]
            tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
            groups = self.basic_optimizer.param_groups if wraps else ()
            tensors += [weight for group in groups for weight in group["params"]]
        return sum(map(num_bytes_of, tensors))

    @contextmanager
    def _writes_watched(self, needed: int) -> Iterator[_Writes]:
        """Let DeepSpeed go through its barriers on every rank, also where one cannot write."""
        writes, engine = _Writes(needed), self.checkpoint_engine
        save, copy_scripts = engine.save, self._copy_recovery_script

        def watched(state_dict: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            return writes.attempt(Path(path), lambda: save(state_dict, path, *args, **kwargs))

        def scripts_watched(save_path: Any) -> Any:
            return writes.attempt(Path(save_path), lambda: copy_scripts(save_path))

        with _replaced(engine, "save", watched), _replaced(self, "_copy_recovery_script", scripts_watched):
            yield writes

    def _checksums_of(self, folder: Path, writes: _Writes) -> dict[str, str] | None:
        """The checksums of what the ranks wrote, each taken by the rank that did. Collective."""
        if not self.options.checkpoint_checksums:
            return None
        mine: dict[str, str] = {}
        failed: OSError | None = None
        try:
            mine = {
                path.relative_to(folder).as_posix(): atomic_folders.checksum(path)
                for path in writes.paths
                if path.is_file() and path.is_relative_to(folder)
            }
        except OSError as error:
            failed = error
        raise_first(failed)
        return {name: value for theirs in gather_objects(mine) for name, value in theirs.items()}

    def _on_every_disk(self, change: Callable[[], None]) -> None:
        """Run ``change`` on rank 0, and on one rank of each other node that has its own storage. Collective."""
        is_first_here = self.global_rank == 0 or (self.use_node_local_storage() and self.local_rank == 0)
        raised_together(change if is_first_here else lambda: None)

    # Loading

    def load_checkpoint(self, load_dir, tag=None, *args: Any, **kwargs: Any):
        """DeepSpeed's ``load_checkpoint``, for checkpoints of any cut, number of stages and of replicas.

        A run that waits for its plan takes the cut of the checkpoint, whose layers move there before it is loaded,
        if that has as many stages. One that has its cut, be it given or planned, keeps it.

        Raises:
            PlanMismatchError: a checkpoint of another number of layers; or it is of another cut and does not say
                where the optimizer's states lie, as those of plain DeepSpeed. On every rank, like the following.
            PlanFormatError: there is no such checkpoint; a file is missing, has another size or checksum, cannot
                be read, or would have to be unpickled where that is not allowed. No weight has changed, unless it
                was DeepSpeed that could not read it: then other ranks may have loaded theirs.
            RuntimeError: the optimizer's state cannot be told apart by parameters, or a rank does not come to this
                call; no weight has changed.
        """
        wait_until_all_come("engine.load_checkpoint()", LOADED_BY_ALL)
        bound = inspect.signature(super().load_checkpoint).bind(load_dir, tag, *args, **kwargs)
        bound.apply_defaults()
        with without_marks(self):
            return self._load_found(self._find(bound.arguments), bound)

    def _get_all_ckpt_names(self, checkpoints_path: Any, tag: Any) -> list[str]:
        """Find files also in a folder with a bracket in its name, which DeepSpeed takes for a pattern."""
        return list(super()._get_all_ckpt_names(glob.escape(str(checkpoints_path)), glob.escape(str(tag))))

    def _load_found(self, found: Found | None, bound: inspect.BoundArguments) -> tuple[Any, Any]:
        """Load what was found; as DeepSpeed does where nothing was."""
        options = bound.arguments
        if found is None:
            if self.load_universal_checkpoint() and self.zero_optimization():
                folder = saved_cut.folder_to_load(options["load_dir"], options["tag"], universal=True)
                if folder is not None:
                    refuse_other_groups(folder, self.optimizer)
            return super().load_checkpoint(*bound.args, **bound.kwargs)
        layout = found.layout
        states: dict[str, ParameterState] | None = None
        lists = ListsOfGroups(self.lr_scheduler)
        by_places = layout is None and found.cut is None and not self.has_experts
        if by_places and self.optimizer is not None and is_whole(options):
            raised_together(lambda: self._check_that_places_agree(found.folder))
        if layout is not None and self.optimizer is not None and is_whole(options) and not self._fits(found):
            saved = SavedState(found.folder, layout, self._reader)
            states, of_no_parameter = self._agreed(saved)
            options["load_optimizer_states"] = False
        loaded: tuple[Any, Any] = None, None
        failed: Exception | None = None
        with self._files_named(), _ties_follow(self.module):
            try:
                loaded = super().load_checkpoint(*bound.args, **bound.kwargs)
                if found.cut is not None:
                    same_cut, strict = found.is_at_cut_of(self.module), options["load_module_strict"]
                    read = functools.partial(self.checkpoint_engine.load, map_location="cpu")
                    load_ties(found.folder, self.module, same_cut=same_cut, strict=strict, read=read)
            except Exception as error:  # of a file that perhaps one rank reads: the others would go on
                failed = portable(error)
            raise_first(failed)
        say_what_was_unpickled(self._reader)
        if not is_whole(options) and hasattr(self.optimizer, "refresh_fp32_params"):
            self.optimizer.refresh_fp32_params()  # DeepSpeed does without ties, if at all
        if states is not None:
            _, client_state = loaded
            client_state.pop("optimizer", None)  # that of rank 0
            self._lay_in(states, of_no_parameter, saved)
            if options["load_lr_scheduler_states"]:
                lists.belong_to_groups(self.grid.get_pipe_parallel_group())
        elif not options["load_optimizer_states"] and options["load_lr_scheduler_states"]:
            lists.stay_as_made(is_other_cut=found.cut is not None and not found.is_at_cut_of(self.module))
        go_on_from_other_optimizer(self.basic_optimizer)
        if layout is not None and not options["load_module_only"] and isinstance(self.module, StagesModule):
            self.module.count_forwards_from(layout["num_forwards"])
        return loaded

    def _check_that_places_agree(self, folder: Path) -> None:
        """Refuse a checkpoint of plain DeepSpeed's from another cut, whose states it loads by their places.

        Raises:
            PlanFormatError: a file cannot be read.
            PlanMismatchError: this rank has other parameters at these places.
        """
        number = len(list(folder.glob("mp_rank_*_model_states.pt")))
        num_here = self.mpu.get_model_parallel_world_size()
        differs = f"{number} ranks of a pipeline and this run {num_here}"
        if number == num_here:
            path = folder / Path(self._get_ckpt_name("", "")).name
            try:
                saved = self._reader.load(path, map_location="cpu", mmap=True)
                are_alike = self._has_places_of(saved)
            except PlanFormatError:
                raise
            except Exception as error:  # whatever comes of a file that is not what its name says
                raise saved_state.unreadable(path, error) from None
            differs = f"other parameters on this rank, which has {in_words(list(parts_here(self.module)))}"
            if are_alike and allocation_of(self.module).is_contiguous:
                return
        raise PlanMismatchError(
            f"the checkpoint in {folder} was written by plain DeepSpeed, which finds the optimizer's states by "
            f"their places, and it has {differs}: load it on the cut that wrote it, as boundaries in "
            "pipeline.partition_method, and save it again, which then loads on any cut; or load the weights alone "
            "with load_optimizer_states=False"
        )

    def _has_places_of(self, saved: Mapping[str, Any]) -> bool:
        """Whether this rank trains parameters of the same names, or as many, as the one that saved.

        Where all ranks of two contiguous cuts have as many, in the order of the layers, they have the same ones.
        """
        shapes = saved.get("param_shapes")
        if shapes is not None:
            return [dict(group) for group in shapes] == [dict(group) for group in self._get_zero_param_shapes()]
        there = saved["optimizer"]
        numbers = [
            [len(group["params"]) for group in groups if group["params"]]
            for groups in (there["param_groups"], self.basic_optimizer.param_groups)
        ]
        return numbers[0] == numbers[1]

    def refuse_experts_of_other_ranks(self, found: Found, *, whole: bool) -> None:
        """Refuse a checkpoint of a model with experts that other ranks have saved. Collective; nothing is loaded.

        DeepSpeed saves such a model by ranks, not by layers, and numbers its experts by their places on a rank.

        Args:
            whole: Whether the optimizer's states are to be loaded.

        Raises:
            PlanFormatError: a file cannot be read.
            PlanMismatchError: it is of another cut; or the optimizer's states are of other ranks, or those of
                DeepSpeed's ``BF16_Optimizer``, which it cannot load itself.
        """
        if found.cut is None:
            raised_together(lambda: self._check_names_of_rank(found.folder))
        elif not found.is_at_cut_of(self.module):
            way_out = f"partition_method={found.cut.boundaries}"
            if not found.cut.allocation.is_contiguous:
                way_out = f"plan={str(found.folder / saved_cut.FILE_NAME)!r}"
            raise PlanMismatchError(
                f"the checkpoint in {found.folder} has MoE layers and the cut "
                f"{allocation_in_words(found.cut.allocation)}, and this run "
                f"{allocation_in_words(allocation_of(self.module))}: DeepSpeed saves such a model by ranks, so "
                f"load it at its own cut, with PipelineModule(..., {way_out})"
            )
        if whole and found.layout is not None and self.optimizer is not None and not self._fits(found):
            raise PlanMismatchError(
                f"the checkpoint in {found.folder} has MoE layers, and its optimizer's states are those of "
                f"{found.layout['optimizer']} on {counted(found.layout['num_replicas'], 'pipeline')}: with MoE "
                "layers they load on as many, with the same settings of ZeRO and bf16, and those of bf16 without "
                "ZeRO (BF16_Optimizer) not at all. Start it with these settings, or load the weights alone with "
                "load_optimizer_states=False"
            )

    def _check_names_of_rank(self, folder: Path) -> None:
        """Refuse a file of plain DeepSpeed's that was saved by a rank with other layers.

        Raises:
            PlanFormatError: it cannot be read.
            PlanMismatchError: it was.
        """
        path = folder / Path(self._get_ckpt_name("", "")).name
        names: Any = None
        if path.is_file():
            try:
                names = self._reader.load(path, map_location="cpu", mmap=True)["module"].keys()
            except PlanFormatError:
                raise
            except Exception as error:  # whatever comes of a file that is not what its name says
                raise saved_state.unreadable(path, error) from None
        own = set(self._get_non_moe_state_dict(dict(self.module.state_dict())))
        frozen = {name for name, weight in self.module.named_parameters() if not weight.requires_grad}
        # DeepSpeed's exclude_frozen_parameters=True leaves those out.
        if names is None or set(names) - frozen != own - frozen:
            raise PlanMismatchError(
                f"the checkpoint in {folder} was written by plain DeepSpeed, which saves a model with MoE layers "
                f"by ranks, and has others in {path.name} than this rank, which has "
                f"{in_words(list(parts_here(self.module)))}: load it on the cut that wrote it, as boundaries in "
                "PipelineModule(..., partition_method=[...])"
            )

    @contextmanager
    def _files_named(self) -> Iterator[None]:
        """A file that DeepSpeed cannot read is told by its name, and what can be read as data is not unpickled."""
        engine = self.checkpoint_engine
        load = engine.load
        if getattr(load, "__func__", None) is TorchCheckpointEngine.load:
            load = self._reader.load_at

        def named(path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return load(path, *args, **kwargs)
            except PlanFormatError:
                raise
            except Exception as error:  # whatever comes of a file that is not what its name says
                raise saved_state.unreadable(path, error) from None

        with _replaced(engine, "load", named):
            yield

    def _find(self, options: Mapping[str, Any]) -> Found | None:
        """What DeepSpeed's ``load_checkpoint`` would load with ``options``; None where all is DeepSpeed's.

        Its folder has its name again if a run ended while it was replaced. Every file that will be read is
        verified, by one rank. Collective.

        Raises:
            PlanFormatError: there is no such checkpoint, or a file that will be read is missing or damaged, or all
                of it would be unpickled where that is not allowed; on every rank.
        """
        self._reader = Reader(self.options.unpickle)
        if self.load_universal_checkpoint():
            refuse_pickles(options["load_dir"], self.options.unpickle)
            return None
        if not self.owns_cut:
            return None
        unneeded = () if is_whole(options) else OF_OPTIMIZERS
        load_dir = options["load_dir"]

        def find() -> tuple[Found, atomic_folders.Listed | None] | None:
            folder = saved_cut.folder_to_load(load_dir, options["tag"], universal=False)
            if folder is None:
                return None
            atomic_folders.restore(folder)
            if isinstance(self.checkpoint_engine, TorchCheckpointEngine):
                saved_cut.check_exists(folder, load_dir)
            listed = _listed(folder, unneeded)
            if listed is not None and self.options.checkpoint_checksums:
                atomic_folders.check_contents(folder, listed, listed.sizes.keys() & OWN_FILES)
            return Found(folder, saved_cut.read_cut(folder), saved_state.read_layout(folder)), listed

        found = from_rank_0(find)
        if found is None:
            return None
        folder, listed = found[0].folder, found[1]
        self._verify(folder, None if listed is None else listed.but(OWN_FILES), unneeded)
        return found[0]

    def verify_files(self, folder: Path) -> None:
        """Compare sizes and checksums of a checkpoint's files, but those of optimizers. Collective.

        Raises:
            PlanFormatError: one is missing or damaged; on every rank.
        """
        self._verify(folder, from_rank_0(lambda: _listed(folder, OF_OPTIMIZERS)), OF_OPTIMIZERS)

    def _verify(self, folder: Path, listed: atomic_folders.Listed | None, unneeded: Sequence[str]) -> None:
        """Compare the checksums of a checkpoint's files, each on one rank of those that see it. Collective."""
        if not self.options.checkpoint_checksums:
            return
        if listed is None or listed.checksums is None:
            announce(
                f"the checkpoint {folder} has no checksums, so a flipped bit in its files would not be noticed"
            )
            return
        neighbours = list(range(self.world_size))
        if self.use_node_local_storage():
            hosts = gather_objects(socket.gethostname())
            neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[self.global_rank]]

        def check_share() -> None:
            here = _listed(folder, unneeded) if self.use_node_local_storage() else listed
            if here is not None:
                share = here.share(neighbours.index(self.global_rank), len(neighbours))
                atomic_folders.check_contents(folder, here, share)

        raised_together(check_share)

    def _fits(self, found: Found) -> bool:
        """Whether DeepSpeed can load the optimizer's state: the ranks train the same tensors. Collective.

        As of 0.19.8 it cannot read what its own ``BF16_Optimizer`` saves.
        """
        assert found.layout is not None
        there = {key: value for key, value in found.layout.items() if key not in saved_state.NOT_OF_THE_CUT}
        described = saved_state.describe(self) or {}
        here = {key: value for key, value in described.items() if key not in saved_state.NOT_OF_THE_CUT}
        same = found.is_at_cut_of(self.module) if not here else here == there
        return same and there["optimizer"] != "BF16_Optimizer"

    def _agreed(self, saved: SavedState) -> tuple[dict[str, ParameterState], dict[Any, Any]]:
        """What this rank's optimizer needs, by parameters and of none, or the first error on all ranks."""

        def read() -> tuple[dict[str, ParameterState], dict[Any, Any]]:
            kind = type(self.basic_optimizer).__name__
            of_no_parameter = saved.of_no_parameter(kind, self.grid.get_stage_id())
            states = saved.states_for(self.optimizer, self.module)
            every = {id(settings): settings for settings in map(saved.settings_of, states) if settings}
            for settings in every.values():
                lacking = settings_that_lack(self.basic_optimizer, settings)
                if lacking:
                    raise RuntimeError(
                        f"the checkpoint's optimizer has no {lacking[0]!r}, which {kind} needs: it is of another "
                        "class. Go on with the one that was saved, or load the weights alone, with "
                        "load_optimizer_states=False, in Lightning with load_from_checkpoint()"
                    )
            return states, of_no_parameter

        if self._groups is not None and self._every_group is not None:
            self._groups.gather_added(self._every_group, self.grid.get_pipe_parallel_group())
        found = raised_together(read)
        announce(
            "the checkpoint has no state of an optimizer: the optimizer of this run begins without one"
            if saved.optimizer is None
            else f"the checkpoint has the optimizer's state of {saved.layout['num_ranks']} stages on "
            f"{saved.layout['num_replicas']} pipelines, for other tensors than are trained here: it is loaded by "
            "parameters"
        )
        return found

    def _lay_in(
        self, states: dict[str, ParameterState], of_no_parameter: dict[Any, Any], saved: SavedState
    ) -> None:
        assert self._groups is not None and self._every_group is not None
        optimizer = self.optimizer
        pipe_group = self.grid.get_pipe_parallel_group()
        self._groups.take_settings(self._every_group, saved.settings_of, pipe_group)
        lay_states(states, optimizer, self.module)
        base = base_of(optimizer)
        base.state.update(of_no_parameter)
        # As load_state_dict() ends: torch's Adam makes a tensor there of steps that another one counts as an int.
        if isinstance(base, Optimizer):
            base.__setstate__({"state": base.state, "param_groups": base.param_groups})
        if saved.optimizer == saved_state.kind_of(optimizer):
            wrapper = saved.of_the_wrapper()
            if hasattr(optimizer, "_load_global_state"):
                optimizer._load_global_state(wrapper)
            elif hasattr(optimizer, "loss_scale_config"):
                known = {key: wrapper[key] for key in SAVED_OF_THE_LOSS_SCALE if key in wrapper}
                vars(optimizer.loss_scale_config).update(known)


def is_whole(options: Mapping[str, Any]) -> bool:
    """Whether the optimizer's states are to be loaded, too."""
    return options["load_optimizer_states"] and not options["load_module_only"]


def say_what_was_unpickled(reader: Reader) -> None:
    """Say in one line what was unpickled, also where it was on another rank than the first. Collective."""
    sentence = next(filter(None, gather_objects(reader.sentence())), "")
    if sentence:
        announce(sentence, logging.WARNING)


@contextmanager
def _ties_follow(module: Any) -> Iterator[None]:
    """Bring copies of tied weights together when the ranks have agreed that all of them have loaded."""
    module._synchronize_tied_weights = lambda: None
    try:
        yield
    finally:
        del module._synchronize_tied_weights
    module._synchronize_tied_weights()


def _listed(folder: Path, unneeded: Sequence[str]) -> atomic_folders.Listed | None:
    """The list of the files that are needed, which are all there; None where there is no list.

    Raises:
        PlanFormatError: the list is damaged, or one of them is missing or has another size.
    """
    listed = atomic_folders.read_list(folder)
    if listed is None:
        return None
    listed = listed.but(unneeded)
    atomic_folders.check_sizes(folder, listed)
    return listed


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give ``owner`` another attribute for a while."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


class _Writes:
    """What this rank writes: where a file cannot be written, the rest is left out.

    Args:
        needed: Bytes of the tensors of all ranks.
    """

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.paths: list[Path] = []
        self.error: Exception | None = None
        """Why a file could not be written."""

    def attempt(self, path: Path, write: Callable[[], Any]) -> Any:
        """Call ``write``, which writes ``path``, unless something failed before; keep what it raises."""
        if self.error is not None:
            return None
        try:
            result = write()
        except Exception as error:
            try:
                with atomic_folders.room_told(path.parent, self.needed):
                    raise _cause(path, error)
            except Exception as cause:
                self.error = portable(cause)
            return None
        self.paths.append(path)
        return result


def _cause(path: Path, error: Exception) -> Exception:
    """Why ``path`` cannot be written: torch's archives tell where they stopped, and not what the disk said."""
    if isinstance(error, OSError):
        return error
    try:
        # What the disk says to the next bytes at the end of what was written.
        with open(path, "ab") as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as reason:
        return OSError(reason.errno, f"cannot be written: {reason.strerror}", str(path))
    return OSError(f"{path} cannot be written: {error}") if "unexpected pos" in str(error) else error


def _take_place(path: Path, checksums: Mapping[str, str] | None, needed: int) -> None:
    """Publish a complete checkpoint, with what a script keeps in the folder that it replaces."""
    new = atomic_folders.unfinished(path)
    with atomic_folders.room_told(new, needed):
        atomic_folders.list_files(new, checksums)
        for entry in sorted(path.iterdir()) if path.is_dir() else ():
            ours = any(fnmatch.fnmatch(entry.name, pattern) for pattern in OF_A_CHECKPOINT)
            if not ours and not (new / entry.name).exists():
                if entry.is_dir():
                    shutil.copytree(entry, new / entry.name, symlinks=True)
                else:
                    shutil.copy2(entry, new / entry.name, follow_symlinks=False)
    atomic_folders.publish(path)
