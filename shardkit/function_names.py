"""Names of a user's functions: from a function to a name that other processes can import, and back."""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from typing import Any

from shardkit.errors import ConfigurationError
from shardkit.ranges import shown

__all__ = ["error_text", "importable_name", "load_named"]

_MAX_ERROR = 500  # characters of the message of a user's exception

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


def load_named(setting: str, name: str, kind: str) -> Any:
    """Import the user's object ``package.module:name``.

    The working directory is searched first, as by ``python -m``.

    Args:
        setting: name of the setting or option, for the message.
        name: the name.
        kind: what the name stands for, such as "function", for the message.

    Raises:
        ConfigurationError: the name has another form, its module fails, or the module has no such object.
    """
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ConfigurationError(f"{setting} {shown(name)}: expected package.module:{kind}")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return pkgutil.resolve_name(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (a script may call sys.exit() while it is imported)
        why = error_text(error)
    if module in sys.modules:
        raise ConfigurationError(
            f"{setting} {name}: {module} has no {path!r} ({why}); name a {kind} of "
            f"{getattr(sys.modules[module], '__file__', module)}"
        )
    raise ConfigurationError(
        f"{setting} {name}: {module} cannot be imported: {why}; expected package.module:{kind}, of a module that "
        "`python -c 'import …'` imports in this directory"
    )


def error_text(error: BaseException) -> str:
    """Return type, message and last line of code of an exception that a user's code raised."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if len(frames) > 1 else None
    if last is not None and last.filename.startswith("<"):  # inside Python, of no use to the user
        last = None
    place = f" ({os.path.basename(last.filename)} line {last.lineno})" if last else ""
    return text[:_MAX_ERROR] + place
