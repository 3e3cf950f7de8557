"""Plans for people: tables and timelines as text, algorithms side by side, time against memory, runs beside plans.

May be imported by the command line and the hosts; imports everything in ``planner`` but no host.
Open first: ``draw.py``; its timelines are in ``draw_timelines.py``.
"""
