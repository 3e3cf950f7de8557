"""Parallel training schemes: who computes a stage of a micro-batch, and who stores the weights of the stage.

``scheme.py`` says it in two functions, ``scheme_simulator.py`` runs it, ``scheme_table.py`` holds closed forms
beside the run. Imports the clock, and no solver. Open first: ``scheme.py``.
"""
