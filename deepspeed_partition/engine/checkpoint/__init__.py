"""Checkpoints that are whole or absent, and load on any cut, number of stages and of replicas.

Imports ``repartition``, ``pipeline`` and ``runtime``. Open first: ``checkpoint_engine.py``.
"""
