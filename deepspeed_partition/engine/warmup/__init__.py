"""The plan of a run: layers measured where they train, the platform that there is, and the files of the plan.

Imports all other folders of the engine. Open first: ``pending_plan.py``, then ``warm_up.py``
and ``run_plan.py``.
"""
