"""The synchronous step, which fills and drains the pipeline: allocation and orders, searched together.

``step_simulator`` is the inner loop of the search; ``orders`` has the rules by which devices take turns. Imports
all other solvers. Open first: ``step_search.py``.
"""
