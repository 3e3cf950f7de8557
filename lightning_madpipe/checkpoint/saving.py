"""The strategy's checkpoints as Lightning asks for them: what is written when, what is read, what is refused."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.pipe import TiedLayerSpec

from deepspeed_partition.engine.checkpoint import atomic_folders
from deepspeed_partition.engine.checkpoint.checkpoint_engine import say_what_was_unpickled
from deepspeed_partition.engine.checkpoint.unpickling import Reader
from deepspeed_partition.engine.runtime.all_come import wait_until_all_come
from deepspeed_partition.engine.runtime.collectives import from_rank_0, refused_together
from deepspeed_partition.engine.runtime.environment import announce, warn_once
from deepspeed_partition.tensor_values import num_bytes_of
from lightning_madpipe.checkpoint import checkpoint_folders, hooks_on_state
from lightning_madpipe.checkpoint.own_state_dicts import is_overridden, loaded_by_its_class, state_by_its_class
from lightning_madpipe.checkpoint.weight_copies import COPIES
from lightning_madpipe.compat.names_of_files import tell_of_other_path
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.compat.remote_paths import NOT_ELSEWHERE, is_elsewhere
from lightning_madpipe.compat.state_dict_names import OneDeviceNames

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DeepSpeedStrategy

    from lightning_madpipe.spread_model import SpreadModel
else:
    DeepSpeedStrategy = object

SAVED_BY_ALL = (
    "each rank has a part of the model, so call trainer.save_checkpoint(path) on every rank, and not under a "
    "condition such as `if trainer.is_global_zero` or in a function with @rank_zero_only: each file comes once"
)
GATHERED_FROM_ALL = (
    "each rank has a part of the model, so call it on every rank, and use what it returns on rank 0; the others "
    "get nothing"
)
GATHERED_BY_ALL = "each rank has a part of the model, so call it on every rank"
LOADED_BY_ALL = "each rank reads its layers, so call it on every rank"
IS_A_FOLDER = (
    "{path} is a folder, into which each process writes its part: ckpt_path reads it, and load_from_checkpoint() "
    "does where lightning_madpipe is imported; torch.load() does not. lightning_madpipe.consolidate(folder, file) "
    "makes one ordinary Lightning file of its weights"
)
MEETING_SECONDS = 20.0
"""How long a rank with an exception waits for the others before it gives up the checkpoint of it."""


def _save_file(io: Any, checkpoint: Mapping[str, Any], path: str, storage_options: Any) -> None:
    """Write one file, whole or not at all where it is Lightning's own plugin that writes it to this machine.

    That plugin writes elsewhere and copies: on a full disk an empty file is left, also of the one before.
    """
    if type(io).__name__ != "TorchCheckpointIO" or is_elsewhere(path):
        io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    weights = checkpoint.get("state_dict", {}).values()
    needed = sum(num_bytes_of(value) for value in weights if isinstance(value, torch.Tensor))
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))  # which nobody else can write
    try:
        with atomic_folders.room_told(folder, needed):
            io.save_checkpoint(checkpoint, str(folder / target.name), storage_options=storage_options)
            os.replace(folder / target.name, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


OF_DEEPSPEED = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
))  # fmt: skip
"""What DeepSpeed (0.19) calls its own entries, beside which a LightningModule's stand in a folder."""


def _refuse_names_of_deepspeed(state: Mapping[str, Any]) -> None:
    """Refuse entries that would take the place of the engine's own, or that DeepSpeed would not give back.

    Raises:
        ValueError: there is one.
    """
    taken = sorted(state.keys() & OF_DEEPSPEED)
    if taken:
        raise ValueError(
            f"on_save_checkpoint sets checkpoint[{taken[0]!r}], which is the name of an entry of DeepSpeed's in a "
            "checkpoint's folder, and one would be lost: give it another name"
        )


class Checkpointing(DeepSpeedStrategy):
    """The part of the strategy that writes and reads checkpoints."""

    _lightning: Lightning
    _module: Any
    pipeline: Any
    _start_engine: Callable[[Any], None]
    _start_runner: Callable[[Any], None]
    _batches: Any
    _checkpoint_io: Any
    _lost_optimizer = False
    """Whether the states of the optimizer that fit had are gone, because the Trainer has evaluated since."""
    _tells_of_folder = True
    """Whether no checkpoint of this process was told to be a folder."""
    _dumps_weights = True
    """Whether state dicts have the whole model's weights: False while Lightning collects a full checkpoint, whose
    weights DeepSpeed writes."""

    _collects = False
    """Whether Lightning collects a checkpoint, which hooks may change on every rank."""

    _shown: Mapping[str, Any] | None = None
    """The state as hooks have seen it in the checkpoint that is being saved."""

    @property
    def _spread(self) -> SpreadModel:
        raise NotImplementedError("the strategy has it")

    def _rest_before_checkpoint(self) -> None:
        raise NotImplementedError("the strategy has it")

    @property
    def _names(self) -> OneDeviceNames:
        return self.pipeline.one_device_names

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the whole model on rank 0, as one device has it, on the CPU; empty on other ranks.

        Collective. Where the optimizer keeps fp32 master weights, these. While Lightning collects a full
        checkpoint, whose weights DeepSpeed writes, it is this rank's part, by the same names, with stand-ins for
        tensors of other ranks.

        Raises:
            MisconfigurationException: the ranks were forked from this process, and have ended; or some rank did
                not come.
        """
        if self.pipeline is None:
            raise self._lightning.refusal(
                "no pipeline is here: the ranks that were forked from this process end with each run, and with "
                "them the optimizer; torch.save(model.state_dict(), path) saves the trained weights, and a "
                "ModelCheckpoint in fit, or trainer.save_checkpoint in a hook, all of it"
            )
        collect = checkpoint_folders.consolidated_state if self._dumps_weights else checkpoint_folders.local_state
        if self._dumps_weights and self.pipeline.num_stages > 1:
            self._wait_for_all("trainer.strategy.lightning_module_state_dict()", GATHERED_FROM_ALL)
            self._spread.hand_back()
        # Who looks at what a hook makes of its rank's weights is not to take the whole for a part.
        with self.pipeline.layers_of_user.lent(), torch._C.DisableTorchFunction():
            state = collect(self._module, self.pipeline, self._names)
            # Rank 0 writes the file, and hooks run on all.
            shown = self._shown_state() if self._dumps_weights and self._collects else None
        if self._dumps_weights:
            return self._by_its_class(state, shown)
        self._shown = hooks_on_state.shown_state(state, self.pipeline, self._names)
        return dict(self._shown)

    def _by_its_class(self, state: dict[str, Any], shown: dict[str, Any] | None) -> dict[str, Any]:
        """What the module's own ``state_dict()`` makes of the whole state, on rank 0.

        Collective where ranks have parts of the model, or hooks run on all.

        Args:
            state: The whole on rank 0; else empty.
            shown: The state as hooks see it on other ranks; None where they see nothing.

        Raises:
            MisconfigurationException: it makes it of something else.
        """
        module = self._module
        if not is_overridden(module, "state_dict"):
            return state if shown is None or self.is_global_zero else shown

        def made() -> dict[str, Any]:
            if not self.is_global_zero:
                return {}
            with self.pipeline.elsewhere.listed():
                return dict(state_by_its_class(module, state))

        try:
            if shown is None and self.pipeline.num_stages == 1:
                return made()
            self.pipeline.elsewhere.share_trained()  # by which a class may choose
            by_class = refused_together(made)
        except ValueError as error:
            raise self._lightning.refusal(str(error)) from None
        if shown is None:
            return by_class
        forms = self.broadcast(hooks_on_state.forms_of(by_class))
        return by_class if self.is_global_zero else hooks_on_state.shown_by_forms(shown, forms)

    @property
    def checkpoint_io_plugin(self) -> Any:
        """The CheckpointIO of ``Trainer(plugins=...)``; None for Lightning's own."""
        io = self._checkpoint_io
        return None if io is None or type(io).__name__ == "TorchCheckpointIO" else io

    def _watch_dumps(self, trainer: Any) -> None:
        # Lightning (2.5 to 2.6) asks for the state dict without saying whether the checkpoint has weights
        # only. To bring the whole model to rank 0 for every full checkpoint would be waste.
        connector = trainer._checkpoint_connector
        connector.dump_checkpoint = partial(self._dump_checkpoint, type(connector).dump_checkpoint, connector)

    def _dump_checkpoint(self, dump: Callable[..., Any], connector: Any, weights_only: bool | None = None) -> Any:
        if connector.trainer.interrupted:
            self._meet()
        self._wait_for_all("trainer.save_checkpoint()", SAVED_BY_ALL)
        self._rest_before_checkpoint()
        self._spread.hand_back()
        self._dumps_weights, self._collects = bool(weights_only), True
        try:
            with self.pipeline.layers_of_user.lent():
                state = dump(connector, bool(weights_only))
                if not weights_only and len(state.get("optimizer_states", ())) != len(
                    connector.trainer.optimizers
                ):
                    raise self._lightning.refusal(hooks_on_state.NO_OPTIMIZER)
                state = self._spread.copies.saved(state, self.pipeline.mpu().get_pipe_parallel_group())
            if weights_only:
                state.pop(COPIES, None)  # rank 0 writes the one file, in which they are whole
            return state
        finally:
            self._dumps_weights, self._collects = True, False

    def _wait_for_all(self, call: str, what_to_do: str) -> None:
        """Wait for the ranks that have a part of the model to come to the same call.

        Raises:
            MisconfigurationException: some rank did not come.
        """
        if self.world_size == 1:
            return
        engine = self.deepspeed_engine
        wants_to_stop = getattr(engine, "wants_to_stop", None) or (lambda: False)
        try:
            wait_until_all_come(call, what_to_do, is_asked_to_end=wants_to_stop)
        except RuntimeError as error:
            raise self._lightning.refusal(str(error)) from None

    def _meet(self) -> None:
        """Meet the other ranks after an exception: a checkpoint needs them all, so every rank must have met one.

        Raises:
            MisconfigurationException: some rank did not come.
        """
        # Not a barrier, which would wait for ever on NCCL; the store has no public getter (torch 2.4 to 2.13).
        store = dist.distributed_c10d._get_default_store()
        self._num_meetings = getattr(self, "_num_meetings", 0) + 1
        key = f"madpipe_after_exception_{self._num_meetings}"
        arrived, deadline = store.add(key, 1), time.monotonic() + MEETING_SECONDS
        while arrived < self.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            arrived = store.add(key, 0)
        if arrived < self.world_size:
            raise self._lightning.refusal(
                f"no checkpoint is written after this exception, because only {arrived} of {self.world_size} "
                "processes met one, and each of them has a part of the model: resume from the last checkpoint"
            )

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write DeepSpeed's folder, or, for a checkpoint of weights only, one file with the whole model.

        Raises:
            MisconfigurationException: it cannot be written; on every rank.
        """
        path = self.broadcast(os.fspath(filepath))
        tell_of_other_path(filepath, path, self.global_rank)
        try:
            if "optimizer_states" not in checkpoint:
                io = self.checkpoint_io
                from_rank_0(lambda: _save_file(io, checkpoint, path, storage_options))
            elif is_elsewhere(path):
                raise ValueError(NOT_ELSEWHERE)
            elif storage_options is not None:
                raise ValueError(
                    "storage_options are for a checkpoint of weights only: DeepSpeed writes the full one itself"
                )
            elif self.deepspeed_engine.is_destroyed:
                raise ValueError(
                    "another Trainer has run this module since, and the states of this one's optimizer went then: "
                    "save before that, or give weights_only=True, because the weights are here"
                )
            else:
                if self._lost_optimizer:
                    self._lightning.warn(
                        f"{path} has no states of the optimizer, which went when "
                        f"{self._module.trainer.state.fn.value} began: a fit that goes on from it begins with new "
                        "ones. Save before validate, test and predict to keep them"
                    )
                with self.pipeline.layers_of_user.lent():
                    self._save_folder(checkpoint, Path(path))
                self._tell_of_folder(Path(path))
        except (OSError, ValueError) as error:
            raise self._lightning.refusal(f"the checkpoint {path} cannot be written: {error}") from error

    def _save_folder(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        from_rank_0(lambda: _make_room(path))
        try:
            self._fill_folder(checkpoint, path)
        except Exception:
            self.deepspeed_engine.give_up_folder(path)
            raise

    def _tell_of_folder(self, path: Path) -> None:
        if self._tells_of_folder:
            Checkpointing._tells_of_folder = False
            announce(IS_A_FOLDER.format(path=path))

    def _fill_folder(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        unfinished = atomic_folders.unfinished(path)
        state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        refused_together(lambda: _refuse_names_of_deepspeed(state))
        outside = checkpoint_folders.outside_state(self._module, self.pipeline, self._names)
        left = hooks_on_state.LeftByHooks([], {}, {})
        if self._shown is not None:
            group, shown, self._shown = self.pipeline.mpu().get_pipe_parallel_group(), self._shown, None
            left = hooks_on_state.left_by_hooks(shown, checkpoint.get("state_dict"), group)
        shapes = checkpoint_folders.shapes_of_all(self.pipeline)
        self.deepspeed_engine.tells_of_client_state = False  # a rank finds its own
        self.deepspeed_engine.save_checkpoint(
            str(unfinished),
            tag=checkpoint_folders.TAG,
            client_state={
                **state,
                checkpoint_folders.OUTSIDE_STATE: outside,
                checkpoint_folders.DRAWS: self._batches.draws,
                checkpoint_folders.GIVEN: left.own,
            },
        )
        self.barrier()
        specs = enumerate(self.pipeline._layer_specs)
        model = {
            "model": type(self._module).__name__,
            "global_step": self.deepspeed_engine.global_steps,
            "num_stages": self.pipeline.num_stages,
            "order": list(self._names.order),
            "names": {name: list(self._names.of(name)) for name in shapes},
            "shapes": shapes,
            "ties": {str(layer): spec.key for layer, spec in specs if isinstance(spec, TiedLayerSpec)},
            "keys": sorted(state.keys() - {COPIES}),
            "has_optimizer": bool(self.optimizers),
            "dropped": left.dropped,
            "given": left.given,
        }
        from_rank_0(lambda: _finish(path, model))
        if self.local_rank == 0 and unfinished.exists():  # a node with a disk of its own
            _finish(path, model)
        if left.dropped:
            names = hooks_on_state.some(left.dropped)
            warn_once("state that hooks leave out", hooks_on_state.LEFT_OUT.format(names=names, path=path))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load DeepSpeed's folder into the engine, or read an ordinary file, whose weights come later.

        Raises:
            MisconfigurationException: nothing there, a damaged folder, another model, or a file to resume from;
                on every rank.
        """
        self._wait_for_all("trainer.strategy.load_checkpoint()", LOADED_BY_ALL)
        path, fitting = os.fspath(checkpoint_path), self._module.trainer.state.fn == "fit"
        try:
            if from_rank_0(lambda: _found_folder(path)):
                return self._load_folder(Path(path), fitting)
            if fitting and is_elsewhere(path):
                raise ValueError(
                    "fit resumes from a folder on a disk of this machine, in which each process reads its part: "
                    "copy it there, and give that path"
                )
            if fitting:
                raise ValueError(
                    "a file holds no states of a pipeline's optimizer: load its weights with "
                    "load_from_checkpoint() and fit without ckpt_path, or resume from a checkpoint folder"
                )
            if self.deepspeed_engine.options.checkpoint_checksums and not is_elsewhere(path):
                from_rank_0(lambda: checkpoint_folders.check_archive(Path(path)))
            keywords = {} if weights_only is None else {"weights_only": weights_only}  # new in Lightning 2.6
            return refused_together(lambda: _read_file(self.checkpoint_io, path, keywords))
        except ValueError as error:
            raise self._lightning.refusal(f"ckpt_path={path!r} cannot be loaded: {error}") from None

    def _load_folder(self, path: Path, fitting: bool) -> dict[str, Any]:
        engine = self.deepspeed_engine
        shapes = checkpoint_folders.shapes_of_all(self.pipeline)
        options, folder = engine.options, checkpoint_folders.folder_of(path)
        reader = Reader(options.unpickle)

        def check() -> checkpoint_folders.SavedModel:
            saved = checkpoint_folders.read_folder(path, verify=options.checkpoint_checksums)
            checkpoint_folders.check_same_model(path, saved, type(self._module).__name__, shapes, self._names)
            return saved

        saved = from_rank_0(check)
        before = None
        if saved.dropped or saved.given:
            before = hooks_on_state.WeightsBefore(self._module, self.pipeline, self._names)
        if fitting and not saved.has_optimizer:
            self._lightning.warn(
                f"{path} has no states of an optimizer, because it was saved after validate, test or predict: "
                "this fit begins with new ones, and continues differently than in one process"
            )
        if fitting and (saved.global_step or not engine.global_steps):
            self._spread.copies.early.before_loading(self.pipeline.parameters())
            _, checkpoint = engine.load_checkpoint(
                str(path),
                tag=checkpoint_folders.TAG,
                load_lr_scheduler_states=False,
                load_module_strict=self._module.strict_loading,
            )
            if saved.num_stages != self.pipeline.num_stages:  # DeepSpeed has read what the first of them had
                outside = refused_together(lambda: checkpoint_folders.outside_of_all(path, saved, reader))
                checkpoint[checkpoint_folders.OUTSIDE_STATE] = outside
            self._batches.draws = checkpoint.get(checkpoint_folders.DRAWS, self._batches.draws)
        else:
            engine.verify_files(folder)
            if fitting:
                # Back to the beginning, as the learning-rate finder goes: there are no states yet to load, and
                # the plan that was made meanwhile holds.
                self._start_engine(self._module.trainer)
                self._start_runner(self._module.trainer)
            load = partial(checkpoint_folders.load_weights, path, saved, self.pipeline, reader)
            checkpoint = refused_together(load)
            say_what_was_unpickled(reader)
        self._spread.copies.loaded(checkpoint, self.pipeline.mpu().get_pipe_parallel_group())
        checkpoint_folders.load_outside_state(
            self._module, self.pipeline, checkpoint.get(checkpoint_folders.OUTSIDE_STATE, {})
        )
        loaded = checkpoint_folders.LoadedFolder(checkpoint)
        loaded.is_fitting = fitting
        if before is not None:
            given = refused_together(lambda: checkpoint_folders.given_by_hooks(path, saved, reader))
            loaded["state_dict"] = before.state(self._shown_state(), saved.dropped, given)
            loaded.before = before
            before.load(loaded["state_dict"], strict=False)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of an ordinary file; the engine has those of a folder, but for what hooks change."""
        if "state_dict" not in checkpoint.keys():  # noqa: SIM118 - to ask a folder itself raises
            return
        try:
            before = getattr(checkpoint, "before", None)
            if before is not None:
                before.load(checkpoint["state_dict"], strict=strict)
                return
            with self.pipeline.elsewhere.listed():
                state, strict = loaded_by_its_class(
                    self._module, checkpoint["state_dict"], strict=strict, present=self._shown_state
                )
            checkpoint_folders.load_consolidated(self._module, self.pipeline, self._names, state, strict=strict)
        except ValueError as error:
            raise self._lightning.refusal(str(error)) from None

    def _shown_state(self) -> dict[str, Any]:
        """The state of the whole model with stand-ins for tensors of other ranks. Collective."""
        own = checkpoint_folders.local_state(self._module, self.pipeline, self._names)
        return hooks_on_state.shown_state(own, self.pipeline, self._names)


def _found_folder(path: str) -> bool:
    """Whether to look for a folder at ``path``, with its name again if a run ended while it was replaced.

    Lightning's reader knows files, and what is remote.
    """
    atomic_folders.restore(Path(path))
    return not (Path(path).is_file() or is_elsewhere(path))


def _read_file(io: Any, path: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    try:
        checkpoint = io.load_checkpoint(path, **keywords)
    except Exception as error:  # of a reader that the user may have written, of any format
        raise ValueError(f"the file is damaged, or no checkpoint ({type(error).__name__}: {error})") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError("the file is no Lightning checkpoint, because it holds no state_dict")
    return checkpoint


def _make_room(path: Path) -> None:
    checkpoint_folders.check_replaceable(path)
    atomic_folders.make_room(path)


def _finish(path: Path, model: Mapping[str, Any]) -> None:
    checkpoint_folders.write_model_file(atomic_folders.unfinished(path), model, path.name)
    atomic_folders.publish(path)
