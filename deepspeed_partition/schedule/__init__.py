"""From a plan to the lists of instructions that each device runs. Imports neither torch nor DeepSpeed.

plan --timetable--> times --emit--> lists --postponing--> lists --dry_run--> a Program that cannot deadlock

May be imported by the engine; imports ``planner``. Open first: ``lowering.py``, then ``instructions.py``.
"""
