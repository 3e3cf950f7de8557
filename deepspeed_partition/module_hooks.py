"""Where torch keeps the hooks of a module."""

from __future__ import annotations

MODULE_HOOKS = {
    "_forward_pre_hooks": "forward pre",
    "_forward_hooks": "forward",
    "_backward_pre_hooks": "backward pre",
    "_backward_hooks": "backward",
}
"""The attributes in which torch (2.4 to 2.13) keeps the hooks of a module, with their kinds in words."""
