"""Layers that change their ranks in a running engine, with their weights, gradients and optimizer states.

Imports ``pipeline`` and ``runtime``. Open first: ``movable_engine.py``.
"""
