"""Lightning's checkpoints in DeepSpeed's folders, and the whole module after a run.

Imports ``compat`` and ``module``. Open first: ``saving.py``.
"""
