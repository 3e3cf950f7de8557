"""Checkpoints saved under every layout and loaded under every other go on as the run that was not interrupted."""

import contextlib

import pytest

pytest.importorskip("torch")

from checkpoints_multiproc import CASES, KINDS, LAYOUTS, SOME

from deepspeed_partition.engine import folders


@pytest.fixture(scope="module")
def outcomes(outcomes_of):
    return outcomes_of("checkpoints_multiproc.py", timeout_seconds=1200)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_is_loaded_under_others(outcomes, kind):
    found = {case: flaw for case, flaw in outcomes.items() if case.startswith(f"{kind}: ")}
    assert len(found) == sum(len(KINDS[kind].loaded_under(saved)) for saved in KINDS[kind].layouts)
    assert not any(found.values()), "\n".join(f"{case}: {flaw}" for case, flaw in found.items() if flaw)


@pytest.mark.parametrize("case", [case.__name__ for cases in CASES.values() for case in cases])
def test_case(outcomes, case):
    assert outcomes[case] == "", outcomes[case]


def test_every_pair_of_layouts_is_tried():
    tried = {
        (saved, under) for kind in KINDS.values() for saved in kind.layouts for under in kind.loaded_under(saved)
    }
    assert tried == {(saved, under) for saved in LAYOUTS for under in LAYOUTS if saved != under}
    assert {LAYOUTS[name].num_stages for name in SOME} == {2, 4}


# Folders


def written(path, text):
    folders.make_room(path)
    (folders.unfinished(path) / "file").write_text(text)


def test_a_folder_takes_the_place_of_another(tmp_path):
    path = tmp_path / "step"
    for text in ("first", "second"):
        written(path, text)
        assert text == "first" or (path / "file").read_text() == "first"
        folders.publish(path)
        assert (path / "file").read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


@pytest.mark.parametrize("num_operations", range(5))
def test_a_kill_while_a_folder_takes_its_place(tmp_path, monkeypatch, num_operations):
    """Whichever operation on the disk is the last one, a complete folder is found; and the next save works."""
    path = tmp_path / "step"
    written(path, "first")
    folders.publish(path)
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
        patched.setattr(folders.os, "replace", killing(folders.os.replace))
        patched.setattr(folders.shutil, "rmtree", killing(folders.shutil.rmtree))
        with contextlib.suppress(KeyboardInterrupt):
            folders.publish(path)
    folders.restore(path)
    assert (path / "file").read_text() == ("first" if num_operations == 0 else "second")
    written(path, "third")
    folders.publish(path)
    assert (path / "file").read_text() == "third"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]
