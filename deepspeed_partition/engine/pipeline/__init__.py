"""DeepSpeed's pipeline module and engine for any plan: several stages per rank, planned order, overlapping
transfers.

Imports ``runtime``. Open first: ``plan_engine.py``; for how layers become stages ``module.py`` and ``stages.py``.
"""
