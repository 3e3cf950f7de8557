"""The JSON files of a checkpoint, with anything changed anywhere: read, or refused in one sentence."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from hypothesis import given, settings

from deepspeed_partition.engine.checkpoint import atomic_folders, saved_cut, saved_state
from deepspeed_partition.engine.checkpoint.unpickling import Reader
from deepspeed_partition.planner.errors import PlanFormatError
from deepspeed_partition.planner.io.files import is_plain
from lightning_madpipe.checkpoint.checkpoint_folders import MODEL_FILE, SavedModel, _saved_model
from tests.engine import plans
from tests.exhaustive import some
from tests.planner.test_fuzz import assert_one_sentence, changed_somewhere, damaged, many

STATE = {
    "format": saved_state.FORMAT, "num_ranks": 2, "num_replicas": 1, "optimizer": "DeepSpeedZeroOptimizer",
    "files": [
        {"pipe_rank": rank, "replica": 0, "file": f"zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt",
         "trained": [{"num_elements": 20, "shares": {f"{rank}.weight": [0, 16, 0], f"{rank}.bias": [0, 4, 16]}}]}
        for rank in range(2)
    ],
    "num_forwards": 8,
}  # fmt: skip
MODEL = {
    "format": "madpipe-model/1", "model": "Net", "global_step": 3, "num_stages": 2, "order": ["net.0.weight"],
    "names": {"0.weight": ["net.0.weight"]}, "shapes": {"0.weight": [2, 3]}, "ties": {"1": "embed"},
    "keys": ["epoch"],
    "files": {"layer_00-model_states.pt": 12},
}  # fmt: skip
CUT = {"format": saved_cut.BOUNDARIES_FORMAT, "boundaries": [0, 3, 8]}


def read_state(folder: Path) -> None:
    layout = saved_state.read_layout(folder)
    assert layout is not None
    saved = saved_state.SavedState(folder, layout, Reader())
    for pieces in saved._pieces.values():
        for piece in pieces:
            assert is_plain(piece.file) and "/" not in piece.file
            share = piece.share
            assert min(piece.place, piece.num_elements, share.first, share.num_elements, share.place) >= 0


def read_list(folder: Path) -> None:
    listed = atomic_folders.read_list(folder)
    assert listed is not None and all(map(is_plain, listed.sizes))
    atomic_folders.check_sizes(folder, listed)


def read_model(folder: Path) -> None:
    saved = _saved_model(folder / MODEL_FILE)
    assert isinstance(saved, SavedModel) and all(map(is_plain, saved.files))
    saved.one_device_names().in_order({"net.0.weight": 1})


READERS = {
    saved_state.FILE_NAME: (STATE, read_state),
    saved_cut.FILE_NAME: (CUT, saved_cut.read_cut),
    MODEL_FILE: (MODEL, read_model),
    atomic_folders.FILES_NAME: ({}, read_list),
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_is_changed_is_read_or_refused(tmp_path, name):
    document, read = READERS[name]
    path = tmp_path / name
    if name == atomic_folders.FILES_NAME:
        (tmp_path / "layer_00-model_states.pt").write_bytes(b"weights")
        atomic_folders.list_files(tmp_path, {})
        document = json.loads(path.read_text())
    seen = {True: 0, False: 0}

    def check() -> None:
        try:
            read(tmp_path)
        except ValueError as refusal:  # of Lightning's reader, too
            seen[False] += 1
            assert_one_sentence(refusal)
            assert name in str(refusal) or "the checkpoint" in str(refusal)
        else:
            seen[True] += 1

    @settings(many, max_examples=some(150))
    @given(changed_somewhere(document))
    def change(data: dict) -> None:
        path.write_text(json.dumps(data))
        check()

    @settings(many, max_examples=some(150))
    @given(damaged(json.dumps(document).encode()))
    def damage(data: bytes) -> None:
        path.write_bytes(data)
        check()

    change()
    damage()
    assert seen[False] > some(150), seen  # half of both, at the least


TOO_LARGE: dict[str, dict[str, Callable[[], str]]] = {
    saved_state.FILE_NAME: {
        "a name of 10 MB": lambda: json.dumps({**STATE, "files": [{**STATE["files"][0], "file": "x" * 10**7}]})
    },
    MODEL_FILE: {
        "names": lambda: json.dumps({**MODEL, "names": {f"{number}": ["x"] for number in range(400_000)}})
    },
}
"""Documents that no checkpoint has, by the part that is so large."""
OF_ALL: dict[str, Callable[[], str]] = {
    "34 MB of objects": lambda: "[" + "{}," * 11_300_000 + "{}]",
    "15 MB of objects": lambda: "[" + "{}," * 5_000_000 + "{}]",
    "deep lists": lambda: "[" * 900_000,
}


@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name in READERS for part in (*TOO_LARGE.get(name, ()), *OF_ALL)]
)
def test_what_is_far_too_large_is_refused_soon(tmp_path, name, part):
    path = tmp_path / name
    path.write_text((TOO_LARGE.get(name, {}) | OF_ALL)[part]())
    began = time.process_time()
    with pytest.raises(ValueError) as refused:
        READERS[name][1](tmp_path)
    assert time.process_time() - began < 2
    assert_one_sentence(refused.value)
    assert name in str(refused.value) or "the checkpoint" in str(refused.value)


@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_of_the_list_goes_unnoticed(tmp_path, bit):
    (tmp_path / "layer_00-model_states.pt").write_bytes(b"weights")
    atomic_folders.list_files(tmp_path, {})
    path = tmp_path / atomic_folders.FILES_NAME
    whole, before = path.read_bytes(), atomic_folders.read_list(tmp_path)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        try:
            found = atomic_folders.read_list(tmp_path)
        except PlanFormatError:
            continue
        assert found == before, (place, chr(whole[place]))  # white space


def test_what_the_shares_of_readers_are(tmp_path):
    sizes = {f"file{number}": number**3 % 1000 for number in range(40)}
    listed = atomic_folders.Listed(sizes, None)
    for num_readers in (1, 3, 64):
        shares = [listed.share(reader, num_readers) for reader in range(num_readers)]
        assert sorted(name for share in shares for name in share) == sorted(sizes)
        if num_readers == 3:
            loads = [sum(sizes[name] for name in share) for share in shares]
            assert max(loads) - min(loads) <= max(sizes.values())


@pytest.mark.parametrize("name", ["a", "a/b", "a b.pt", ".hidden", "..a"])
def test_plain_names(name):
    assert is_plain(name)


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/../b", "/a", "/", "a\0", "x" * 300, "\ud800", 3, None])
def test_names_that_are_not_plain(name):
    assert not is_plain(name)


def test_a_plan_in_a_checkpoint_is_checked_like_any_other(tmp_path):
    plan = plans.plan_of(plans.chain_of(8), plans.platform_of(2), [0, 4, 8], [0, 1])
    saved_cut.save_cut(tmp_path, plan.boundaries, plan)
    data = json.loads((tmp_path / saved_cut.FILE_NAME).read_text())
    data["stages"][1]["layers"] = [0, 8]
    (tmp_path / saved_cut.FILE_NAME).write_text(json.dumps(data))
    with pytest.raises(PlanFormatError, match="stage 1 begins at layer 0"):
        saved_cut.read_cut(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    shutil.copytree(Path(__file__).parent / "scripts", tmp_path / "step")
    os.chmod(tmp_path, 0o500)
    try:
        atomic_folders.restore(tmp_path / "step")
        with pytest.raises(PermissionError):
            atomic_folders.make_room(tmp_path / "step")
    finally:
        os.chmod(tmp_path, 0o700)
    assert sorted(os.listdir(tmp_path)) == ["step"]


class _AsOlderPythons:
    """What Python 3.11.0 to 3.11.3 write for a member of an enumeration."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return getattr, (ZeroStageEnum, self.name)


def test_enumerations_of_older_pythons_are_read_and_no_other_getattr(tmp_path: Path) -> None:
    """A checkpoint of ZeRO could not be loaded under Python 3.11.2, "holds builtins.getattr"."""
    torch.save({"stage": _AsOlderPythons("weights")}, tmp_path / "member.pt")
    assert Reader(unpickle=False).load(tmp_path / "member.pt") == {"stage": ZeroStageEnum.weights}
    torch.save({"stage": _AsOlderPythons("__init__")}, tmp_path / "other.pt")
    with pytest.raises((pickle.UnpicklingError, PlanFormatError)):
        Reader(unpickle=False).load(tmp_path / "other.pt")
