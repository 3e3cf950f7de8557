"""Checkpoints that were damaged, edited by somebody else, or could not be written; see ``test_checkpoints.py``."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
import torch.distributed as dist

from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.checkpoint import atomic_folders
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.planner.errors import PlanFormatError
from tests.engine.pipelines import mlp
from tests.engine.running import all_tensors, raised, start, train
from tests.engine.saved_layouts import KINDS, LAYOUTS, STEPS, begin, config_of, data_of, losses_after
from tests.engine.training_state_multiproc import OPTIMIZERS, warm_up
from tests.engine.warm_up_cases import heard

KIND = "AdamW, ZeRO 1"
TAG = f"global_step{STEPS}"


def copied(folder: Path, name: str, saved: str = "two stages") -> Path:
    """A checkpoint that a case may damage."""
    to = folder / name
    from_rank_0(functools.partial(shutil.copytree, folder / KIND / saved, to))
    return to


def begun(more: dict[str, Any] | None = None, **options: Any) -> MadPipeEngine:
    """An engine on as many stages as there are ranks, with these madpipe options, and more of DeepSpeed's."""
    kind, layout = KINDS[KIND], LAYOUTS["two stages" if dist.get_world_size() == 2 else "one stage"]
    config = {**config_of(kind), "pipeline": {"madpipe": options}, **(more or {})}
    return start(kind.specs(), layout.cut, config, optimizer=OPTIMIZERS[kind.optimizer], lr_scheduler=warm_up)[0]


def flip(path: Path, byte: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[byte % len(data)] ^= 1 << bit
    path.write_bytes(data)


def a_flipped_bit_in_every_file(folder: Path) -> None:
    """Told on every rank, by the name of the file, before anything has changed."""
    where = copied(folder, "flipped")
    engine = begun()
    before = all_tensors(engine)
    names = from_rank_0(lambda: sorted(path.name for path in (where / TAG).iterdir()))
    assert len(names) == 14, names
    for name in names:
        file = where / TAG / name
        for part in (0, 1 / 3, 0.5, 0.9):
            place = int(file.stat().st_size * part)
            dist.barrier()
            from_rank_0(functools.partial(flip, file, place))
            words = [name] if name != atomic_folders.FILES_NAME else ["madpipe-files.json"]
            with raised(PlanFormatError, *words):
                engine.load_checkpoint(str(where))
            from_rank_0(functools.partial(flip, file, place))
    assert engine.global_steps == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in all_tensors(engine).items())
    engine.load_checkpoint(str(where))
    assert train(engine, data_of(KINDS[KIND])[STEPS:]) == losses_after(where)


def every_file_is_verified_once(folder: Path) -> None:
    """By one rank, also where another number of ranks loads; none where that is not wanted."""
    where = folder / KIND / "four stages"
    expected = sorted(path.name for path in (where / TAG).iterdir() if path.name != atomic_folders.FILES_NAME)
    taken: list[str] = []
    checksum = atomic_folders.checksum

    def noted(path: Path) -> str:
        taken.append(path.name)
        return checksum(path)

    with patch.object(atomic_folders, "checksum", noted):
        begun().load_checkpoint(str(where))
        of_all = gather_objects(list(taken))
        assert sorted(name for names in of_all for name in names) == expected
        assert all(of_all)
        taken.clear()
        begun().load_checkpoint(str(where), load_module_only=True)
        of_all = gather_objects(list(taken))
        assert sorted(name for names in of_all for name in names) == [
            name for name in expected if "zero_pp_rank" not in name
        ]
        taken.clear()
        begun(checkpoint_checksums=False).load_checkpoint(str(where))
        assert not any(gather_objects(list(taken)))


def without_checksums(folder: Path) -> None:
    """Neither taken nor verified where that is not wanted; where there are none, that is said."""
    where = folder / "without checksums"
    engine = begun(checkpoint_checksums=False)
    engine.save_checkpoint(str(where))
    listed = atomic_folders.read_list(where / "global_step0")
    assert listed is not None and listed.checksums is None and listed.sizes
    with heard() as sentences:
        begun().load_checkpoint(str(where))
    assert sum("has no checksums" in sentence for sentence in sentences) == 1, sentences
    damaged = copied(folder, "unnoticed")
    from_rank_0(
        lambda: flip(damaged / TAG / "mp_rank_00_model_states.pt", -1)
    )  # in the archive's comment's length
    with raised(PlanFormatError, "mp_rank_00_model_states.pt", "checkpoint_checksums=False"):
        begun().load_checkpoint(str(damaged))
    with contextlib.suppress(PlanFormatError):  # of torch, where it notices
        begun(checkpoint_checksums=False).load_checkpoint(str(damaged))


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def names_that_lead_outside(folder: Path) -> None:
    """An edit of a JSON file alone lets nothing outside be read, measured or renamed."""
    where, trace = copied(folder, "edited", "two others"), folder / "trace"
    outside = folder / "outside.pt"
    if dist.get_rank() == 0:
        torch.save({"optimizer_state_dict": Bomb(trace)}, outside)
        (folder / ".elsewhere.discarded").mkdir()
    dist.barrier()
    state, listed = where / TAG / "madpipe-state.json", where / TAG / atomic_folders.FILES_NAME
    original = {path: path.read_text() for path in (state, listed)}
    engine = begun()
    for name in ("../../outside.pt", str(outside), "..", "", "layers/../x", "a\0b", 3, None):
        layout = json.loads(original[state])
        layout["files"][0]["file"] = name
        from_rank_0(functools.partial(state.write_text, json.dumps(layout)))
        from_rank_0(lambda: listed.unlink(missing_ok=True))  # as an earlier version wrote it
        with raised(PlanFormatError, "madpipe-state.json"):
            engine.load_checkpoint(str(where))
    from_rank_0(functools.partial(state.write_text, original[state]))
    for name in ("../../outside.pt", str(outside), "../.."):
        files = {"format": atomic_folders.FILES_FORMAT, "bytes": {name: 1}}
        from_rank_0(functools.partial(listed.write_text, json.dumps(files)))
        with raised(PlanFormatError, "not the name of a file in this folder"):
            engine.load_checkpoint(str(where))
    from_rank_0(functools.partial(listed.write_text, original[listed]))
    for tag in ("../elsewhere", str(folder / "elsewhere"), f"x/../../{KIND}", "..", "/", "a\nb", "\x1b[31m"):
        from_rank_0(functools.partial((where / "latest").write_text, tag))
        with raised(PlanFormatError, "latest", "give load_checkpoint a tag", TAG):
            engine.load_checkpoint(str(where))
    assert (folder / ".elsewhere.discarded").exists() and not (folder / "elsewhere").exists()
    link = where / "latest"
    if dist.get_rank() == 0:
        (folder / "secret").write_text("../the-secret")
        link.unlink()
        link.symlink_to(folder / "secret")
    dist.barrier()
    try:
        engine.load_checkpoint(str(where))
    except PlanFormatError as error:
        assert "the-secret" not in str(error) and "what a link leads to" in str(error), error
    else:
        raise AssertionError("it was followed")
    if dist.get_rank() == 0:
        link.unlink()
        large, layer = folder / "large", where / TAG / "layer_03-model_states.pt"
        large.write_bytes(bytes(12345))
        layer.unlink()
        layer.symlink_to(large)
    dist.barrier()
    try:
        engine.load_checkpoint(str(where), tag=TAG)
    except PlanFormatError as error:
        assert "12345" not in str(error) and "is a link to another file, outside" in str(error), error
    else:
        raise AssertionError("it was read")
    assert not trace.exists()
    dist.barrier()


def pickles_in_the_place_of_tensors(folder: Path) -> None:
    """Files of tensors are read as data: nothing that they hold is run, whoever reads them."""
    trace = folder / "exploded"
    for name in ("layer_03-model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        where = copied(folder, f"bomb in {name}")
        if dist.get_rank() == 0:
            (where / TAG / atomic_folders.FILES_NAME).unlink()
            torch.save({"x": Bomb(trace)}, where / TAG / name)
        dist.barrier()
        engine = begun()
        with raised(PlanFormatError, name, "posix.mkdir", "unpickle=True"):
            engine.load_checkpoint(str(where))
        dist.barrier()
        assert not trace.exists()
    tied = folder / "bomb in a tie"
    from_rank_0(functools.partial(shutil.copytree, folder / "tied, ZeRO 1" / "two stages", tied))
    if dist.get_rank() == 0:
        (tied / TAG / atomic_folders.FILES_NAME).unlink()
        for path in (tied / TAG).glob("madpipe-tied-*"):
            torch.save({"x": Bomb(trace)}, path)
    dist.barrier()
    kind = KINDS["tied, ZeRO 1"]
    with raised(PlanFormatError, "madpipe-tied", "unpickle=True"):
        begin(kind, LAYOUTS["two stages" if dist.get_world_size() == 2 else "one stage"])[0].load_checkpoint(
            str(tied)
        )
    assert not trace.exists()


def universal_checkpoints(folder: Path) -> None:
    """DeepSpeed unpickles all files of them, and with ``unpickle=False`` nobody kept it from that."""
    where, trace = folder / "universal", folder / "exploded"
    if dist.get_rank() == 0:
        (where / "last" / "zero").mkdir(parents=True)
        (where / "latest_universal").write_text("last")
        torch.save({"param_groups": Bomb(trace)}, where / "last" / "zero" / "optimizer_state.pt")
    dist.barrier()
    more = {"checkpoint": {"load_universal": True}}
    for tag in (None, "last"):
        with raised(PlanFormatError, "universal checkpoint", str(where), "made of", "unpickle=True"):
            begun(more, unpickle=False).load_checkpoint(str(where), tag=tag)
        dist.barrier()
        assert not trace.exists()


class Mine:
    """Of a script, and put into its checkpoints."""


def what_ranks_save_with_it(folder: Path) -> None:
    """With other stages all ranks got what rank 0 had saved, and nothing was said."""
    numbers = {"step": 3, "args": argparse.Namespace(rate=0.1, again=[0.1]), "draws": torch.arange(5)}
    own = {"rank": torch.distributed.get_rank(), "own": torch.full((3,), torch.distributed.get_rank())}
    engine = begun()
    for number, state in enumerate([numbers, {**numbers, **own}, {**numbers, **own}, {}]):
        with heard() as sentences:
            engine.save_checkpoint(str(folder / f"saved {number}"), client_state=state)
        told = [sentence for sentence in sentences if "client_state" in sentence]
        assert len(told) == (number == 1) and all("in 'own', 'rank': a run" in line for line in told), told


def what_scripts_save_with_it(folder: Path) -> None:
    """Plain data needs no pickle; an object of a script's class does, and that is said, or refused."""
    plain = {"args": argparse.Namespace(rate=0.1), "numpy": numpy.random.get_state(), "path": Path("x")}
    engine = begun()
    engine.save_checkpoint(str(folder / "plain"), client_state=plain)
    engine.save_checkpoint(str(folder / "objects"), client_state={"mine": Mine()})
    for unpickle in (None, False):
        with heard() as sentences:
            _, found = begun(unpickle=unpickle).load_checkpoint(str(folder / "plain"))
        assert found["args"].rate == 0.1 and not any("unpickled" in sentence for sentence in sentences)
    for unpickle in (None, True):
        with heard() as sentences:
            _, found = begun(unpickle=unpickle).load_checkpoint(str(folder / "objects"))
        assert isinstance(found["mine"], Mine)
        said = [sentence for sentence in sentences if "was unpickled" in sentence]
        assert len(said) == (unpickle is None) and all("Mine" in line for line in said)
    with raised(PlanFormatError, "mp_rank_0", "Mine", "add_safe_globals"):
        begun(unpickle=False).load_checkpoint(str(folder / "objects"))
    torch.serialization.add_safe_globals([Mine])
    begun(unpickle=False).load_checkpoint(str(folder / "objects"))


@contextlib.contextmanager
def a_full_disk(rank: int, num_bytes: int) -> Iterator[None]:
    """On one rank files cannot grow any further."""
    if dist.get_rank() != rank:
        yield
        return
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def no_space_on(engine: Any, rank: int) -> Any:
    """Let a rank's first file meet a full disk."""

    def save(state: Any, path: Any, *_: Any) -> None:
        if dist.get_rank() == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        torch.save(state, path)

    return patch.object(engine.checkpoint_engine, "save", save)


def a_disk_that_is_full(folder: Path) -> None:
    """Told on every rank in the disk's words; the checkpoint before stays, and the next save works."""
    where, data = folder / "full", data_of(KINDS[KIND])
    engine = begun()
    train(engine, data[:1])
    engine.save_checkpoint(str(where), tag="same")
    before = train(engine, data[1:2])
    for rank in range(dist.get_world_size()):
        for num_bytes in (1500, 5000):
            with a_full_disk(rank, num_bytes), raised(OSError, "File too large", "cannot be written"):
                engine.save_checkpoint(str(where), tag="same")
            dist.barrier()
            assert sorted(os.listdir(where)) == ["latest", "same", "zero_to_fp32.py", "zero_to_torch.py"]
    for rank in range(dist.get_world_size()):
        with (
            no_space_on(engine, rank),
            raised(OSError, "No space left on device: its tensors take ", " for them."),
        ):
            engine.save_checkpoint(str(where), tag="same")
    engine.load_checkpoint(str(where))
    assert train(engine, data[1:2]) == before
    engine.save_checkpoint(str(where), tag="same")
    begun().load_checkpoint(str(where))


def tags(folder: Path) -> None:
    """What ``latest`` and the ranks may say."""
    engine, where = begun(), folder / "tags"
    engine.save_checkpoint(str(where), tag="runs/a")
    engine.save_checkpoint(str(where), tag="b")
    from_rank_0(functools.partial((where / "latest").write_text, "runs/a\n"))
    assert engine.load_checkpoint(str(where))[0] is not None
    for text in ("", "\n", " "):
        from_rank_0(functools.partial((where / "latest").write_text, text))
        with raised(PlanFormatError, "latest is empty", "give load_checkpoint a tag", "'b'"):
            engine.load_checkpoint(str(where))
    for tag in (None, "absent"):
        from_rank_0(functools.partial((where / "latest").write_text, "absent"))
        with raised(PlanFormatError, "there is no checkpoint at", "absent", "'b'"):
            engine.load_checkpoint(str(where), tag=tag)
    from_rank_0(functools.partial((where / "latest").write_bytes, b"\xff\xfe"))
    with raised(PlanFormatError, "does not hold the name of a folder"):
        engine.load_checkpoint(str(where))
    with raised(ValueError, "is not the name of a folder in save_dir"):
        engine.save_checkpoint(str(where), tag="/tmp/x")
    if dist.get_world_size() == 2:
        with raised(ValueError, "rank 0 saves a checkpoint with the tag 'bad0' and rank 1 with 'bad1'"):
            engine.save_checkpoint(str(where), tag=f"bad{dist.get_rank()}")
        engine, _, _ = start(mlp(), [0, 3, 8], {"checkpoint": {"tag_validation": "Fail"}})
        with raised(AssertionError, f"'bad{dist.get_rank()}' is not consistent"):
            engine.save_checkpoint(str(where), tag=f"bad{dist.get_rank()}")
    dist.barrier()
    assert sorted(os.listdir(where)) == ["b", "latest", "runs", "zero_to_fp32.py", "zero_to_torch.py"]


def copies_and_other_names(folder: Path) -> None:
    """A checkpoint that was packed, copied, renamed, and linked to is the same one."""
    where = folder / "moved here"
    if dist.get_rank() == 0:
        shutil.make_archive(str(folder / "packed"), "zip", folder / KIND / "two others")
        shutil.unpack_archive(str(folder / "packed.zip"), where)
        (where / TAG).rename(where / "by another name")
        (where / "link").symlink_to(where / "by another name")
        (where / "latest").unlink()
        (where / "latest").write_text("link")
    dist.barrier()
    for tag in (None, "by another name"):
        engine = begun()
        engine.load_checkpoint(str(where), tag=tag)
        assert train(engine, data_of(KINDS[KIND])[STEPS:]) == losses_after(where)


def fp16_without_zero(_: Path) -> None:
    """Refused with its reason: DeepSpeed would train something else."""
    config = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    cut = LAYOUTS["two stages" if dist.get_world_size() == 2 else "one stage"].cut
    for method in (cut, "madpipe"):
        with raised(ValueError, "fp16 without ZeRO", "use ZeRO stage 1, or bf16"):
            start(mlp(), method, config)


def another_process_writes_it(folder: Path) -> None:
    """A folder that another run is writing is not taken for the rest of a dead one."""
    where, engine = folder / "held", begun()
    reading, writing = os.pipe()
    child = 0
    if dist.get_rank() == 0:
        child = os.fork()
        if child == 0:
            atomic_folders.make_room(where / "same")
            os.write(writing, b"x")
            signal.pause()
        os.read(reading, 1)
    dist.barrier()
    try:
        with raised(OSError, "another process is writing this checkpoint"):
            engine.save_checkpoint(str(where), tag="same")
        dist.barrier()
        assert (where / ".same.unfinished").exists()
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    dist.barrier()
    engine.save_checkpoint(str(where), tag="same")
    begun().load_checkpoint(str(where))


def planted_links(folder: Path) -> None:
    """What somebody else puts under the names that a save will use is never written through."""
    where, engine, victim = folder / "planted", begun(), folder / "victim"
    if dist.get_rank() == 0:
        victim.mkdir()
        (folder / "file").write_text("mine")
        where.mkdir()
        (where / ".same.unfinished").symlink_to(victim)
        (where / ".same.discarded").symlink_to(victim)
        (where / "latest").symlink_to(folder / "file")
    dist.barrier()
    engine.save_checkpoint(str(where), tag="same")
    assert not os.listdir(victim) and (folder / "file").read_text() == "mine"
    assert (where / "latest").read_text() == "same" and not (where / "same").is_symlink()
    begun().load_checkpoint(str(where))


CASES: dict[int, list[Callable[[Path], None]]] = {
    1: [names_that_lead_outside, planted_links, another_process_writes_it],
    2: [
        a_flipped_bit_in_every_file, every_file_is_verified_once, without_checksums,
        pickles_in_the_place_of_tensors, universal_checkpoints, what_ranks_save_with_it,
        what_scripts_save_with_it, a_disk_that_is_full, copies_and_other_names, fp16_without_zero, tags,
    ],
}  # fmt: skip
