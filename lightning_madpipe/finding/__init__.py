"""The layers of a module that does not name them: an example batch, the call that its step makes, its capture.

Open ``captured_call.py`` first; ``coarse_call.py`` is for code that decides by data. ``step_call.py`` finds what a
step calls, on a batch from ``example_batch.py``.
"""
