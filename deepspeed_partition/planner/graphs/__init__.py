"""Chains from what other programs measured: a graph of layers, and PipeDream's ``graph.txt``.

May be imported by the command line and by ``Chain.load``; imports ``problem``. Open first: ``layer_graph.py``.
"""
