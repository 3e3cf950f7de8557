"""Checkpoints saved under every layout and loaded under every other go on as the run that was not interrupted."""

import contextlib
import itertools

import pytest

pytest.importorskip("torch")

from deepspeed_partition.engine.checkpoint import atomic_folders
from tests.engine.loading_cases import CASES
from tests.engine.saved_layouts import KINDS, LAYOUTS
from tests.exhaustive import is_exhaustive


@pytest.fixture(scope="module")
def outcomes(outcomes_of):
    return outcomes_of("checkpoints_multiproc.py", timeout_seconds=1200)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_is_loaded_under_others(outcomes, kind):
    found = {case: outcome for case, outcome in outcomes.items() if case.startswith(f"{kind}: ")}
    assert len(found) == sum(len(KINDS[kind].loaded_under(saved)) for saved in KINDS[kind].layouts)
    assert not any(found.values()), "\n".join(f"{case}: {outcome}" for case, outcome in found.items() if outcome)


@pytest.mark.parametrize("case", [case.__name__ for cases in CASES.values() for case in cases])
def test_case(outcomes, case):
    assert outcomes[case] == "", outcomes[case]


@pytest.mark.parametrize("kind", ["AdamW, ZeRO 1", "SGD, ZeRO 0"])
def test_every_pair_of_layouts_was_tried(outcomes, kind):
    tried = {tuple(case.split(": ")[1].split(" -> ")) for case in outcomes if case.startswith(f"{kind}: ")}
    pairs = set(itertools.permutations(LAYOUTS, 2))
    assert tried == pairs if is_exhaustive() else tried <= pairs and len(tried) == len(LAYOUTS)


# Folders


def written(path, text):
    atomic_folders.make_room(path)
    (atomic_folders.unfinished(path) / "file").write_text(text)


def test_a_folder_takes_the_place_of_another(tmp_path):
    path = tmp_path / "step"
    for text in ("first", "second"):
        written(path, text)
        assert text == "first" or (path / "file").read_text() == "first"
        atomic_folders.publish(path)
        assert (path / "file").read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


@pytest.fixture(params=["names are swapped", "names are given one by one"])
def swaps(request, tmp_path, monkeypatch):
    """Whether a folder swaps names with the one whose place it takes; not every system and disk can."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    can = atomic_folders._swap(tmp_path / "one", tmp_path / "other")
    for name in ("one", "other"):
        (tmp_path / name).rmdir()
    if request.param == "names are swapped" and not can:
        pytest.skip("they cannot be, on this disk")
    if request.param != "names are swapped":
        monkeypatch.setattr(atomic_folders, "_swap", lambda *_: False)
    return request.param == "names are swapped"


@pytest.mark.parametrize("num_operations", range(5))
def test_a_kill_while_a_folder_takes_its_place(tmp_path, monkeypatch, swaps, num_operations):
    """Whichever operation on the disk is the last one, a complete folder is found; and the next save works."""
    path = tmp_path / "step"
    written(path, "first")
    atomic_folders.publish(path)
    written(path, "second")
    left = num_operations

    def killing(operation):
        def run(*arguments, **keywords):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return operation(*arguments, **keywords)

        return run

    with monkeypatch.context() as patched:
        patched.setattr(atomic_folders, "_swap", killing(atomic_folders._swap) if swaps else atomic_folders._swap)
        patched.setattr(atomic_folders.os, "replace", killing(atomic_folders.os.replace))
        patched.setattr(atomic_folders.shutil, "rmtree", killing(atomic_folders.shutil.rmtree))
        with contextlib.suppress(KeyboardInterrupt):
            atomic_folders.publish(path)
    assert path.exists() or not swaps, "the name was always somebody's"
    atomic_folders.restore(path)
    assert (path / "file").read_text() == ("first" if num_operations == 0 else "second")
    written(path, "third")
    atomic_folders.publish(path)
    assert (path / "file").read_text() == "third"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


@pytest.mark.parametrize("num_operations", range(4))
def test_a_reader_comes_while_a_folder_takes_its_place(tmp_path, monkeypatch, num_operations):
    """It finds a complete folder, whatever the writer has done so far, and the writer notices nothing."""
    monkeypatch.setattr(atomic_folders, "_swap", lambda *_: False)
    path, found = tmp_path / "step", []
    written(path, "first")
    atomic_folders.publish(path)
    written(path, "second")
    replace, left = atomic_folders.os.replace, num_operations

    def after_a_reader(*arguments):
        nonlocal left
        left -= 1
        if left == -1:
            atomic_folders.restore(path)
            found.append((path / "file").read_text())
        replace(*arguments)

    monkeypatch.setattr(atomic_folders.os, "replace", after_a_reader)
    atomic_folders.publish(path)
    assert (path / "file").read_text() == "second"
    assert found == (["first"], ["second"], ["second"], [])[num_operations]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


@pytest.mark.parametrize("writes_again", [False, True])
def test_a_writer_comes_while_a_reader_restores(tmp_path, monkeypatch, writes_again):
    """What the reader was about to rename has its name already, or is no longer there."""
    path = tmp_path / "step"
    written(path, "first")
    atomic_folders.publish(path)
    written(path, "second")
    replace = atomic_folders.os.replace
    replace(path, atomic_folders._discarded(path))

    def after_the_writer(*arguments):
        monkeypatch.undo()
        replace(atomic_folders.unfinished(path), path)
        if writes_again:
            atomic_folders.remove(atomic_folders._discarded(path))
        replace(*arguments)

    monkeypatch.setattr(atomic_folders.os, "replace", after_the_writer)
    atomic_folders.restore(path)
    assert (path / "file").read_text() == "second"


def test_a_folder_that_was_half_removed_does_not_come_back(tmp_path, monkeypatch, swaps):
    """A kill while the old one went, and the new one was deleted since, as old checkpoints are."""
    path = tmp_path / "step"
    written(path, "first")
    (atomic_folders.unfinished(path) / "other").touch()
    atomic_folders.publish(path)
    written(path, "second")

    def killed(folder):
        (folder / "other").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(atomic_folders.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            atomic_folders.publish(path)
    atomic_folders.remove(path)
    atomic_folders.restore(path)
    assert not path.exists()
    written(path, "third")
    atomic_folders.publish(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]
