"""The synchronous step, which fills and drains the pipeline: allocation and orders, searched together.

Imports all other solvers. Open first: ``step_search.py``.
"""
