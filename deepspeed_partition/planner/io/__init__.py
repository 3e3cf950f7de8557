"""JSON files and their schemas: read with every error named, written whole or not at all.

May be imported by all of the planner and by the hosts; imports ``errors`` and ``units`` alone.
Open first: ``files.py``.
"""
