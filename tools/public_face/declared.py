"""Collect the declared names: commands, signatures, settings, errors, exit codes, metrics, extras."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

from public_face.comparing import Names

SETTINGS: Final = (
    # dataclasses whose fields are settings: package, and name in any module of the package
    ("shardkit", "LoaderConfig"), ("shardkit", "Rebalancing"), ("shardkit", "ReadSettings"),
    ("shardkit", "TelemetrySettings"), ("shardkit", "Policy"), ("shardkit", "Critical"), ("shardkit", "Parity"),
    ("shardkit", "LayoutSettings"), ("shardkit.plan", "Settings"), ("shardkit_tools", "BuildSettings"),
    ("shardkit_tools", "PackSettings"), ("shardkit_tools", "ImportOptions"), ("shardkit_tools", "Cluster"),
)  # fmt: skip
PROTOCOLS: Final = ("__call__", "__contains__", "__enter__", "__getitem__", "__iter__", "__len__", "__next__")
LAYERS: Final = ("shardkit.formats", "shardkit.manifest")
"""Lower packages: their exports are frozen, but not the methods of the exported classes."""
Found: TypeAlias = Iterator[tuple[str, tuple[str, str]]]
"""Pairs of a name and its (meaning, words)."""
OTHERS: Final = ("shardkit_tools", "shardkit_tools.importers", "shardkit_trainer")


def commands() -> tuple[Names, Names]:
    """Return the meanings and words of all commands, arguments and options."""
    import typer.main

    from shardkit_tools.main import make_app

    meanings: Names = {}
    words: Names = {}
    _walk_command(typer.main.get_command(make_app()), "", meanings, words)
    return meanings, words


def _walk_command(command: Any, path: str, meanings: Names, words: Names) -> None:
    children = getattr(command, "commands", {})
    if path:
        meanings[path], words[path] = "commands" if children else "command", head(command.help)
    function = inspect.unwrap(command.callback) if command.callback else None
    place = 0
    for param in command.params if function else ():
        # typer adds options that the function lacks, such as --install-completion
        value = _value(function, param.name) if param.name in get_type_hints(function) else "flag"
        if param.param_type_name == "argument":
            place += 1
            name = f"{path} {param.name.upper()}"
            meanings[name], words[name] = f"argument {place}, {value}", head(param.help)
            continue
        longest = max(param.opts, key=len)
        for option in (*param.opts, *param.secondary_opts):
            name = f"{path} {option}".strip()
            other = option in param.secondary_opts
            meanings[name] = f"not {longest}" if other else value
            words[name] = "" if other else head(param.help)
    for name, child in children.items():
        _walk_command(child, f"{path} {name}".strip(), meanings, words)


def _value(function: Any, name: str) -> str:
    """Return the type, bounds and default of an argument or option.

    They are read from the command's function, because releases of typer store them in different places.
    """
    hint, info = get_args(get_type_hints(function, include_extras=True)[name])
    default = inspect.signature(function).parameters[name].default
    kinds = (
        [one for one in get_args(hint) if one is not type(None)] if type(None) in get_args(hint) else [hint]
    )
    kind = kinds[0]
    repeated = get_origin(kind) in (list, tuple)
    kind = get_args(kind)[0] if repeated else kind
    parts = [_type_text(kind)]
    parts += [f"from {info.min}"] * (info.min is not None) + [f"to {info.max}"] * (info.max is not None)
    parts += ["repeated"] * repeated
    parts += (
        ["required"] if default in (inspect.Parameter.empty, ...) else [f"default {default_text(default)}"]
    )
    return ", ".join(parts)


def python_names() -> tuple[Names, Names]:
    """Return the exports of all packages: functions, methods and their parameters, properties, constants."""
    import shardkit

    inner = [f"shardkit.{one.name}" for one in pkgutil.iter_modules(shardkit.__path__) if one.ispkg]
    homes: dict[int, str] = {}
    meanings: Names = {}
    words: Names = {}
    for package in ["shardkit", *inner, *OTHERS]:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            thing, path = getattr(module, name), f"{package}.{name}"
            if callable(thing) and id(thing) in homes:
                meanings[path] = f"is {homes[id(thing)]}"
                continue
            homes[id(thing)] = path
            for key, (meaning, said) in _thing(thing, path):
                meanings[key], words[key] = meaning, said
    meanings.pop("shardkit.__version__", None)  # changes with every release
    return meanings, words


def _thing(thing: Any, path: str) -> Found:
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        yield path, ("values", head(thing.__doc__))
        for one in thing:
            yield f"{path}.{one.name}", (f"value {one.value!r}", "")
    elif inspect.isclass(thing):
        yield path, ("class", head(thing.__doc__))
        yield from _parameters(thing, path, ordered=not dataclasses.is_dataclass(thing))
        if not path.startswith(LAYERS):
            yield from _members(thing, path)
    elif inspect.isroutine(thing):
        yield path, ("function", head(thing.__doc__))
        yield from _parameters(thing, path)
    elif isinstance(thing, (str, int, float, tuple)):
        yield path, (f"value {default_text(thing)}", "")
    else:
        yield path, ("name", "")


def _members(kind: type, path: str) -> Found:
    found: dict[str, Any] = {}
    for parent in reversed([one for one in kind.__mro__ if one.__module__.startswith("shardkit")]):
        found |= vars(parent)
    for name, member in sorted(found.items()):
        if name.startswith("_") and name not in PROTOCOLS:
            continue
        if isinstance(member, (property, functools.cached_property)):
            yield f"{path}.{name}", ("property", head(member.__doc__))
        elif isinstance(member, (classmethod, staticmethod)) or inspect.isfunction(member):
            yield f"{path}.{name}", ("method", head(member.__doc__))
            yield from _parameters(getattr(kind, name), f"{path}.{name}")


def _parameters(function: Callable[..., Any], path: str, *, ordered: bool = True) -> Found:
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # builtins without a signature
        return
    place = 0
    for name, one in parameters.items():
        if name == "self" or name.startswith("_"):
            continue
        place += 1
        how = {"KEYWORD_ONLY": "keyword", "VAR_POSITIONAL": "any more", "VAR_KEYWORD": "any keyword"}
        meaning = how.get(one.kind.name, f"position {place}" if ordered else "field")
        if not meaning.startswith("any"):
            meaning += "".join(f", {words}" for words in re.findall(r"Literal\[(.*?)\]", str(one.annotation)))
            meaning += ", required" if one.default is one.empty else f", default {default_text(one.default)}"
        yield f"{path}({name}=)", (meaning, "")


def settings() -> Names:
    """Return the fields of the settings classes."""
    found: Names = {}
    for package, name in SETTINGS:
        _walk_fields(find_dataclass(package, name), "plan" if package == "shardkit.plan" else name, found)
    return found


def _walk_fields(kind: Any, path: str, found: Names) -> None:
    try:
        hints = get_type_hints(kind)
    except NameError:  # types imported for the type checker only
        hints = {}
    choices = {name: [_type_text(hint)] for name, hint in hints.items() if get_origin(hint) is Literal}
    for one in dataclasses.fields(kind):
        default = one.default
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        if dataclasses.is_dataclass(default) and type(default).__module__ == kind.__module__:
            _walk_fields(default, f"{path}.{one.name}", found)
        else:
            meaning = "required" if default is dataclasses.MISSING else f"default {default_text(default)}"
            found[f"{path}.{one.name}"] = ", ".join([*choices.get(one.name, ()), meaning])


def trainer_settings() -> Names:
    """Return the keys of a run's configuration with their allowed values and defaults."""
    from shardkit_trainer.configuration import Configuration

    found: Names = {}
    _walk_keys(Configuration, "", found)
    return found


def _walk_keys(kind: Any, prefix: str, found: Names) -> None:
    hints = get_type_hints(kind, include_extras=True)
    for one in dataclasses.fields(kind):
        hint, key = hints[one.name], prefix + one.name
        if dataclasses.is_dataclass(hint):
            _walk_keys(hint, f"{key}.", found)
            continue
        default = one.default
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        found[key] = f"{_type_text(hint)}, default {default_text(default)}"
        for allowed in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            found[f"{key} range"] = allowed.text(get_args(hint)[0])
        inner = get_args(hint)
        if get_origin(hint) is list and dataclasses.is_dataclass(inner[0]):
            _walk_keys(inner[0], f"{key}[].", found)


def _type_text(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(map(str, inner))
    if origin is Annotated:
        return _type_text(inner[0])
    name: str = (origin or hint).__name__
    return f"{name} of {_type_text(inner[-1])}" if origin in (dict, list) and inner[-1] is not Any else name


def errors() -> tuple[Names, Names]:
    """Return each error's `kind`, which programs match on, and its base classes."""
    from shardkit import errors as module

    classes = {name: getattr(module, name) for name in module.__all__}
    bases = {name: ", ".join(base.__name__ for base in kind.__mro__[1:-3]) for name, kind in classes.items()}
    return (
        {name: f"kind {kind.kind!r}, is {bases[name] or 'Exception'}" for name, kind in classes.items()},
        {name: head(kind.__doc__) for name, kind in classes.items()},
    )


def exit_codes() -> Names:
    """Return the exit codes as number → name."""
    from shardkit.exit_codes import ExitCode

    return {str(int(one)): one.name for one in ExitCode}


def metrics() -> Names:
    """Return the Prometheus metrics and the kinds of reported anomalies."""
    from shardkit.telemetry import diagnosis, serving

    found = dict.fromkeys(serving.metric_names(), "gauge")
    for one in serving.METRICS:
        found[one.exposed] = "gauge" if one.gauge else "counter"
        found |= {f"{one.exposed} {one.label}={value}": "label" for value, _ in one.values if one.label}
    return found | {f"shardkit_anomalies kind={kind}": "label" for kind in diagnosis.KINDS}


def extras() -> Names:
    """Return the extras that `pip install shardkit[…]` accepts."""
    import shardkit

    project = tomllib.loads((Path(shardkit.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    return dict.fromkeys(project["optional-dependencies"], "extra")


# ---- source files, and the form of values and docstrings in the face


def sources(*packages: str) -> list[Path]:
    """Return the files of all modules of the packages."""
    folders = [Path(importlib.import_module(one).__path__[0]) for one in packages]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@functools.cache
def text_of(path: Path) -> str:
    """Return the text of a source file."""
    return path.read_text(encoding="utf-8")


def _definitions(package: str, pattern: str) -> Iterator[str]:
    """Yield the modules that define a name: names are public, but their files are not."""
    folder = Path(importlib.import_module(package).__path__[0])
    for path in sources(package):
        if re.search(pattern, text_of(path), re.MULTILINE):
            yield ".".join([package, *path.relative_to(folder).with_suffix("").parts])


def find_dataclass(package: str, name: str) -> Any:
    """Find a settings class in any module of the package."""
    found = (
        getattr(importlib.import_module(one), name) for one in _definitions(package, rf"^class {name}\b")
    )
    return next(filter(dataclasses.is_dataclass, found))


def find_function(name: str) -> list[Any]:
    """Find the functions of this name in any module of `shardkit`."""
    return [
        getattr(importlib.import_module(one), name) for one in _definitions("shardkit", rf"^def {name}\(")
    ]


def head(text: str | None) -> str:
    """Return the first paragraph of a text as one line."""
    lines = inspect.cleandoc(text or "").split("\n\n")[0].splitlines()
    return " ".join(lines) if lines else ""


def default_text(value: object) -> str:
    """Return a default as text that is the same in every process."""
    if isinstance(value, enum.Enum):
        return default_text(value.value)
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__qualname__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
