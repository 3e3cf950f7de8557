"""Simulations: the replay that judges every plan, and the step that the engine will run.

``replay`` and ``replay_step`` share no code with the solvers, so that no error of theirs is repeated here;
``step_simulator`` is what the step search calls in its inner loop. May be imported by ``solvers`` (the simulator
alone), ``planning`` and the tests. Open first: ``replay.py``.
"""
