"""mCAP's incremental profiling: the memory statistics of each layer, from short training runs on the engine.

Source: H. Dreuning et al., mCAP, Euro-Par 2022, section 3.1. Read ``profiler.py`` first: it starts ranks
(``rank.py``) that train chosen cuts (``runs.py``), on layers as they are or on stand-ins for those that a run is
not about (``stand_ins.py``). The planner reads the result (``planner/mcap_profile.py``).
"""

from __future__ import annotations

from deepspeed_partition.engine.incremental.profiler import profile_incrementally

__all__ = ["profile_incrementally"]
