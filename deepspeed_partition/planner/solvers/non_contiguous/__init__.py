"""Allocations in which a device has several stages: MadPipe, exact and as its paper prints it.

Imports ``pattern`` and ``contiguous``. Open first: ``madpipe.py``.
"""
