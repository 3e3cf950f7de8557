"""What a rank does while it runs: transfers, threads, clocks, agreement with other ranks, faults.

Knows tensors and process groups, and no pipeline: imports ``planner`` and ``schedule`` alone.
Open first: ``transfers.py``; for agreement between ranks ``collectives.py``.
"""
