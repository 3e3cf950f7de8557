"""Plans: what is given, what is decided and what is answered. Imports neither torch nor a host.

The modules of this folder are values and their terms: ``problem`` (a chain, a platform), ``allocation``,
``schedule``, ``memory``, ``plan``. ``planning`` calls a solver, and ``assembly`` makes a plan of its answer. The
folders are ``io`` (files), ``graphs`` (profiles of other programs), ``simulate`` (the replay, which judges each
plan), ``solvers`` and ``report``. Open first: ``planning``.
"""
