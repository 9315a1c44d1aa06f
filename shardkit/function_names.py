"""Names of a user's functions that other processes can import."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from shardkit.errors import ConfigurationError
from shardkit.ranges import shown

__all__ = ["importable_name"]

_PROGRAM = ("__main__", "__mp_main__")  # the program that Python runs, and its copy in spawned processes


def importable_name(setting: str, function: Callable[..., Any]) -> str:
    """Return ``module:function``, a name that other processes can import.

    ``__main__`` is another module in every program. A function defined there has a name only if the program was started
    with ``python -m``: the module's real name is then known.

    Args:
        setting: name of the setting, for the message.
        function: the function.

    Raises:
        ConfigurationError: there is no such name. This holds for functions of scripts and notebooks, inner functions,
            lambdas, methods and callable objects.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    if module in _PROGRAM:
        module = getattr(getattr(found, "__spec__", None), "name", None)
    try:
        is_found = functools.reduce(getattr, name.split("."), found) is function
    except AttributeError:
        is_found = False
    if not module or not is_found:
        raise ConfigurationError(
            f"{setting}={shown(function)}: other processes cannot import it by name; define it at the top level of a "
            "module, such as my_functions.py, and import it from there"
        )
    return f"{module}:{name}"
