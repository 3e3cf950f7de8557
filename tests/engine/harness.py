"""The body of a worker: runs many cases in one start of several processes, and writes what came out."""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.choice import is_chosen

Case = Callable[[Path], None]
LONGEST_CASE_SECONDS = 400
WAITING = "some ranks wait for others"
"""What has become of a case while it runs, and where its job has ended in it."""


def run_cases(cases: dict[str, Case]) -> None:
    """The body of a worker: run every case on all ranks, and write the outcomes.

    A case that fails on some ranks may leave others in the middle of a transfer: the worker then ends, with
    a traceback of where each rank waits, and the remaining cases are not run.
    """
    import deepspeed
    import torch
    import torch.distributed as dist

    import deepspeed_partition.engine  # noqa: F401  prepares the CPU

    torch.set_num_threads(1)
    deepspeed.init_distributed()
    share_groups()
    gc.freeze()  # what the cases import
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
    outcomes: dict[str, str] = {}
    for name, case in cases.items():
        if not is_chosen(name):
            continue
        if dist.get_rank() == 0:
            print(f"case {name}", file=sys.stderr, flush=True)
            out.write_text(json.dumps({**outcomes, name: WAITING}))
        faulthandler.dump_traceback_later(LONGEST_CASE_SECONDS, exit=True)
        failure = ""
        try:
            scratch = folder / name
            scratch.mkdir(exist_ok=True)
            case(scratch)
        except Exception:
            failure = f"rank {dist.get_rank()}: {traceback.format_exc()}"
            print(failure, file=sys.stderr, flush=True)
        failures: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        faulthandler.cancel_dump_traceback_later()
        forget_engines()
        gc.freeze()  # what the case has left, mostly of libraries, through which each collection would go
        outcomes[name] = "\n".join(filter(None, failures))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


_shared: dict[tuple[object, ...], Any] = {}
"""The process groups that engines have together, by where DeepSpeed makes them; see :func:`share_groups`."""


def share_groups() -> None:
    """Let all engines of a process have the groups together that DeepSpeed makes for each of them.

    Those groups carry collectives alone. One engine trains after the other, so that each takes the place of the
    one before. The engine's own groups, which carry messages from rank to rank, stay its own.
    """
    import deepspeed.comm
    import torch.distributed as dist

    new_group = deepspeed.comm.new_group

    def shared(ranks: Iterable[int]) -> Any:
        ranks, caller = tuple(ranks), sys._getframe(1)
        if Path(caller.f_code.co_filename).parent.name != "pipe" or caller.f_code.co_name != "__init__":
            return new_group(ranks)
        place = (dist.group.WORLD, caller.f_code, caller.f_lineno, ranks)
        if place not in _shared:
            _shared[place] = new_group(ranks)
        return _shared[place]

    deepspeed.comm.new_group = shared


def forget_engines() -> None:
    """End the engines of a case, and their process groups.

    DeepSpeed's hooks keep engines alive. Each group of gloo has three threads, one of which wakes up a hundred
    times a second: after a hundred engines nothing else gets to run.
    """
    import deepspeed.utils.groups
    import torch.distributed as dist
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from deepspeed_partition.engine.runtime import collectives

    gc.collect()
    # Not isinstance(), at which some deprecated objects of torch warn; and not those that are forgotten already.
    for engine in [thing for thing in gc.get_objects() if issubclass(type(thing), PipelineEngine) and vars(thing)]:
        engine.destroy()
        vars(engine).clear()
    values = [*vars(deepspeed.utils.groups).values()]
    values += [group for value in values if isinstance(value, dict) for group in value.values()]  # of experts
    of_deepspeed = filter(_is_group, values)
    kept = {
        dist.group.WORLD,
        *_shared.values(),
        *of_deepspeed,
        *collectives._groups_beside.get(dist.group.WORLD, ()),
    }
    for group in set(dist.distributed_c10d._world.pg_map) - kept:
        dist.destroy_process_group(group)
    gc.collect()


def _is_group(value: object) -> bool:
    import torch.distributed as dist

    return isinstance(value, dist.ProcessGroup)
