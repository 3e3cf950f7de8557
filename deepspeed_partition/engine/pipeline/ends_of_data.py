"""What an iterator of data may not do where a plan puts both ends of the pipeline on one rank.

Some iterators send the labels from the rank of the first stage to that of the last one within ``next()``. Where
one rank has both stages, no other rank of the pipeline reads data, and nobody would take what is sent.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from deepspeed_partition.engine.pipeline.replaced_instructions import shown_as

NOBODY_ELSE = (
    "the data iterator calls torch.distributed.{call}() for rank {peer}, and rank {rank} has the first and the "
    "last stage of this plan: no other rank of the pipeline reads data, so that this would wait for ever. Set "
    '"algorithm": "contiguous" in pipeline.madpipe, which keeps the two stages on two ranks'
)
_PEERS = {"send": "dst", "recv": "src"}
"""The functions that send to a rank or receive from one, and the name of its argument, which is the second one.

Those that a ``P2POp`` may hold are left as they are, which torch compares with its own."""


@contextmanager
def transfers_refused(rank: int, others: Collection[int]) -> Iterator[None]:
    """Refuse transfers between ranks of a pipeline meanwhile.

    Args:
        rank: This one.
        others: The ranks of the pipeline, by their numbers in the job.
    """

    reader = threading.get_ident()  # threads of the engine's own send meanwhile

    def refusing(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def refused(*args: Any, **kwargs: Any) -> Any:
            peer = kwargs.get(_PEERS[call], args[1] if len(args) > 1 else None)
            if peer in others and threading.get_ident() == reader:
                raise RuntimeError(NOBODY_ELSE.format(call=call, peer=peer, rank=rank))
            return function(*args, **kwargs)

        return refused

    with ExitStack() as stack:
        for call in _PEERS:
            stack.enter_context(shown_as(dist, call, refusing(call, getattr(dist, call))))
        yield
