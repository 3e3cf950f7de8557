"""The replay that judges every plan, of a pattern and of a step.

It shares no code with the solvers, so that no error of theirs is repeated here. May be imported by ``assembly``,
which has every plan judged, by the command line and the tests, and by no solver. Open first: ``replay.py``.
"""
