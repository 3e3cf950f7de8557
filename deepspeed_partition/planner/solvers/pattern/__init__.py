"""The periodic schedule of an allocation that is fixed (MadPipe paper, sections 4.1 and 4.3).

1F1B* for contiguous ones, an integer linear program and a branch and bound for others. Imports ``interface``.
Open first: ``one_f_one_b.py``, then ``periodic_pattern.py``.
"""
