"""The user's ``training_step`` on a pipeline: the layers' check, batches, losses, and what a step leaves behind.

Imports ``compat`` and ``module``. Open first: ``runner.py``, then ``user_step.py`` and ``step_runs.py``.
"""
