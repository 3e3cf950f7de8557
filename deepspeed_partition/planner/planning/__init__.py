"""Planning: arguments become a problem, a solver answers it, and the answer becomes a plan that has been replayed.

May be imported by everything behind the solvers: comparisons, the command line and the hosts. Open first:
``make_plan.py``.
"""
