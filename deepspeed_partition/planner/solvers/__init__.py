"""Solvers: one file for each method, whose first line names it, and whose docstring names its paper.

``interface`` says what a solver is given and returns, ``bounds`` what no plan can beat. The folders are in the
order in which they import each other: ``pattern`` (the schedule of a fixed allocation), ``contiguous``,
``non_contiguous`` (several stages per device) and ``step`` (a step that drains). Only ``planning`` and ``report``
import solvers. Open first: ``interface.py``, then ``contiguous/optimal.py``.
"""
