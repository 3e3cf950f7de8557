"""For all tests: hypothesis has no deadline, for a test must not fail because its machine is busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
