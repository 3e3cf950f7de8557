"""Contiguous partitions: the best one under memory, and those of PipeDream, mCAP and DeepSpeed.

Imports ``pattern``. Open first: ``optimal.py``.
"""
