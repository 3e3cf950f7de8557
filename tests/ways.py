"""The functions of ours through which one value passes, in order: how many rooms a reader has to enter.

    python tests/ways.py                # the three ways
    python tests/ways.py plan           # one of them, with its functions

``time``: what was measured of a layer, from the clock to the list of instructions. ``plan``: the option, from the
argument of the strategy to that list. ``checkpoint``: a weight, from ``save_checkpoint`` to a fit that resumes on
another cut. Two ranks run, and a profiling hook notes each function whose arguments or result hold the value,
also in lists, dicts and dataclasses, four deep. A *way back* is a folder that is entered again after it was left:
the value was elsewhere, and no function of the folder that had it was running. Methods of the values themselves
(a ``Chain`` is asked for a sum) and of the lists that DeepSpeed asks for parameters are no rooms.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.ranks import run_ranks  # noqa: E402

OURS = (f"{ROOT}/deepspeed_partition/", f"{ROOT}/lightning_madpipe/")
WAYS = ("time", "plan", "checkpoint")
VALUES = ("Chain.", "LayerProfile.", "Plan.", "ChainReference.", "Problem.", "_Tells.", "EveryGroup.")
DEPTH, MOST_ENTRIES, MOST_LOOKS = 4, 64, 60
WEIGHT, PLAN = 0.12345679, "the-plan-of-this-run.json"


class Passage(NamedTuple):
    """A function that has had the value."""

    file: str
    function: str
    holding: list[str]
    """The folders of functions that have the value meanwhile, and wait for this one."""

    @property
    def folder(self) -> str:
        return folder_of(self.file)


def folder_of(file: str) -> str:
    return file.rpartition("/")[0]


class Measured(float):
    """Seconds of the clock, and what is computed of them."""

    known: ClassVar[set[float]] = set()  # also as they are after a message

    def __new__(cls, seconds: float) -> Measured:
        cls.known.add(float(seconds))
        return super().__new__(cls, seconds)

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _computed(name: str) -> Callable[..., Any]:
    def method(self: Measured, *others: Any) -> Any:
        numbers = [float(each) if isinstance(each, Measured) else each for each in others]
        result = getattr(float, name)(float(self), *numbers)
        # 0 and 1 are everywhere, and tell nothing of where they come from.
        return Measured(result) if type(result) is float and result not in (0.0, 1.0) else result

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "abs"):
    setattr(Measured, f"__{_name}__", _computed(f"__{_name}__"))


def is_time(value: Any) -> bool:
    """Whether it is a measured time, or the plan that was made of such."""
    return (isinstance(value, float) and value in Measured.known) or type(value).__name__ == "Plan"


def is_plan(value: Any) -> bool:
    return PLAN in str(value) if isinstance(value, str | Path) else type(value).__name__ == "Plan"


def is_weight(value: Any) -> bool:
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "cpu" or not value.numel():
        return False
    return value.is_floating_point() and abs(float(value.detach().reshape(-1)[0]) - WEIGHT) < 1e-8


class Hook:
    """Notes functions that have the value: through the function of one name, or before that of another one."""

    def __init__(self, is_it: Callable[[Any], bool], *, through: str = "", before: str = "") -> None:
        self._is_it, self._through, self._before = is_it, through, before
        self._found: dict[tuple[str, str], Passage] = {}
        self._looks: dict[tuple[str, str], int] = {}
        self._running: list[tuple[FrameType, tuple[str, str]]] = []
        self.is_over = False

    @property
    def passages(self) -> list[Passage]:
        return list(self._found.values())

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(OURS) or self.is_over:
            return
        key = code.co_filename[len(str(ROOT)) + 1 :], code.co_qualname.split(".<locals>")[0]
        self.is_over = key[1] == self._before
        if event == "call":
            self._running.append((frame, key))
            own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
            self._look(key, [frame.f_locals[name] for name in own if name in frame.f_locals])
            return
        self._look(key, [result])
        while self._running and self._running.pop()[0] is not frame:
            pass
        self.is_over = self.is_over or (key[1] == self._through and key in self._found)

    def _look(self, key: tuple[str, str], values: list[Any]) -> None:
        looks = self._looks[key] = self._looks.get(key, 0) + 1
        if key in self._found or looks > MOST_LOOKS or key[1].startswith(("<module>", *VALUES)):
            return
        if any(self._holds(value, DEPTH) for value in values):
            waiting = {each for _, each in self._running if each != key and each in self._found}
            self._found[key] = Passage(*key, sorted({folder_of(file) for file, _ in waiting}))

    def _holds(self, value: Any, depth: int) -> bool:
        if self._is_it(value):
            return True
        if isinstance(value, dict):
            parts = list(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            parts = list(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        else:
            return False
        return depth > 0 and any(self._holds(part, depth - 1) for part in parts[:MOST_ENTRIES])


def walk(way: str, folder: Path) -> list[Passage]:
    """Run one way on this rank."""
    import pytorch_lightning as pl
    import torch

    from tests.lightning import lightning_cases as cases

    host = cases.Host(folder, 2, True)

    class Still(cases.Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def fit(hook: Hook | None, strategy: dict[str, Any], weight: float | None = None, **arguments: Any) -> Any:
        pl.seed_everything(0, verbose=False)
        module = Still()
        if weight is not None:
            module.blocks[1].linear.weight.data.view(-1)[0] = weight
        sys.setprofile(hook)
        trainer = host.trainer(max_epochs=2 if arguments else 1, strategy=strategy)
        trainer.fit(module, cases.loader(32), **arguments)
        sys.setprofile(None)
        return trainer

    if way == "time":
        clock = time.perf_counter

        def measured() -> float:
            is_profiler = sys._getframe(1).f_code.co_filename.endswith("profiling/run.py")
            return Measured(clock()) if is_profiler else clock()

        time.perf_counter = measured
        hook = Hook(is_time, through="lower")
        fit(hook, {"algorithm": "madpipe", "warmup_epochs": 0})
        return hook.passages
    if way == "plan":
        fit(None, {"algorithm": [0, 2, 8], "save_plan": str(folder / PLAN)})
        hook = Hook(is_plan, through="lower")
        fit(hook, {"plan": str(folder / PLAN)})
        return hook.passages
    trainer = fit(None, {"algorithm": [0, 5, 8], "warmup_epochs": 0}, WEIGHT)
    saving, loading = Hook(is_weight), Hook(is_weight, before="PipelineStrategy.training_step")
    sys.setprofile(saving)
    trainer.save_checkpoint(folder / "saved.ckpt")
    sys.setprofile(None)
    cut = {"config": {"pipeline": {"partition_method": [0, 2, 8]}}}
    fit(loading, cut, ckpt_path=str(folder / "saved.ckpt"))
    # The first rank has the layer when it is saved, and the second one when it is loaded.
    return saving.passages if os.environ["RANK"] == "0" else loading.passages


def ways_back(passages: list[Passage]) -> list[Passage]:
    """The functions with which the value comes back to a folder that it had left."""
    back, seen, left = [], set[str](), set[str]()
    for each in passages:
        if each.folder in left:
            back.append(each)
        seen.add(each.folder)
        left = (left | seen) - {each.folder, *each.holding}
    return back


def show(way: str, with_functions: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ["rank", way, str(folder)]
        log = folder / "log"
        if status := run_ranks(Path(__file__), arguments, 2, log, timeout_seconds=300):
            sys.exit(f"{way} ended with {status}:\n{log.read_text()[-3000:]}")
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    passages = [Passage(*each) for rank in ranks[: 2 if way == "checkpoint" else 1] for each in rank]
    back = ways_back(passages)
    files, folders = {each.file for each in passages}, {each.folder for each in passages}
    print(f"{way}: {len(passages)} functions, {len(files)} files, {len(folders)} folders, {len(back)} ways back")
    for each in passages if with_functions else ():
        print(f"    {each.file} {each.function}{' (back)' if any(each is one for one in back) else ''}")


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        way, folder = sys.argv[2], Path(sys.argv[3])
        passages = walk(way, folder)
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(passages))
        return
    os.environ.setdefault("MADPIPE_TEST_SERVER", f"{tempfile.mkdtemp()}/server")
    for way in sys.argv[1:] or WAYS:
        show(way, with_functions=bool(sys.argv[1:]))


if __name__ == "__main__":
    main()
