"""Choice of a scheme for a model on machines: data parallel, ZeRO, pipelines and hybrids, side by side.

May be imported by ``report`` and the command line; imports the planner and ``schemes``. Open first:
``scheme_choice.py``.
"""
