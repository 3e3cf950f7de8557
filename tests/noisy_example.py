"""The main example on a machine on which all times vary: ``noisy_example.py EXAMPLE [ARGUMENT ...]``."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from typing import Any

from deepspeed_partition.profiling import layers, readings


def noisy(chain: Any, *arguments: Any, **settings: Any) -> list[str]:
    vary = [replace(each, backward_spread_seconds=2 * each.backward_seconds) for each in chain.layers]
    return readings.suspicious(replace(chain, layers=tuple(vary)), *arguments, **settings)


layers.suspicious = noisy
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
