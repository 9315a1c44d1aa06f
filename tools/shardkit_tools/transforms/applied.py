"""Transforms of samples: a user's function, to none, one or several; a tokenizer, from text to tokens.

Functions are named, not sent: every process of a build imports the function and checks that its code is that
of the recipe; the same holds for the file of a tokenizer (of the `tokenizers` library). The tokenizer's
truncation and padding are disabled: a dataset holds every token once. Special tokens are added by its
post-processor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import (
    ConfigurationError,
    MissingDependency,
    NotFoundError,
    RunError,
    SampleError,
    ShardkitError,
)
from shardkit.extras import install_command
from shardkit.formats import Schema
from shardkit.function_names import error_text, importable_name, load_named

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class AppliedFunction:
    """A function of the user, by name."""

    name: str  # `package.module:function`
    digest: str  # SHA-256 (hex) of the source file that defines it, without the files that this imports

    @classmethod
    def find(cls, function: str | Callable[..., Any]) -> AppliedFunction:
        """Return the function with a name, or a given function.

        Raises:
            ConfigurationError: It cannot be imported by name, or has no Python source.
        """
        name = function if isinstance(function, str) else importable_name("apply", function)
        _, source = _load(name)
        return cls(name, hashlib.sha256(source).hexdigest())

    def describe(self) -> dict[str, object]:
        """Return the function's entry in the recipe."""
        return {"function": self.name, "sha256": self.digest}

    def __call__(self, sample: Mapping[str, object], where: object) -> Iterator[Mapping[str, object]]:
        """Call the function with a sample and yield the samples that it returns; its output goes to standard error.

        Raises:
            SampleError: The function fails or returns something other than samples.
        """
        function = _load_function(self.name, self.digest)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is the report, or its JSON
                result = function(dict(sample))
                if result is None:
                    return
                samples = [result] if isinstance(result, Mapping) else list(_several(result))
        except ShardkitError as error:
            raise SampleError(f"{where}: {self.name} failed: {error}") from None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (theirs may be anything, SystemExit too)
            raise SampleError(f"{where}: {self.name} failed: {error_text(error)}; {_ADVICE}") from None
        for one in samples:
            if not isinstance(one, Mapping) or not all(isinstance(key, str) for key in one):
                raise SampleError(
                    f"{where}: {self.name} returned {_of(one)}; expected a sample (a dict of fields), a list of "
                    "samples, or None"
                )
        yield from samples


_ADVICE = "fix the function, or leave such rows out with --on-error skip"


def _several(result: object) -> Iterator[Any]:
    if isinstance(result, (str, bytes)) or not hasattr(result, "__iter__"):
        return iter((result,))
    return iter(result)


def _of(value: object) -> str:
    return f"a {type(value).__name__}"


@functools.lru_cache(maxsize=8)
def _load_function(name: str, digest: str) -> Callable[..., Any]:
    function, source = _load(name)
    if hashlib.sha256(source).hexdigest() != digest:
        raise RunError(
            f"the code of {name} changed while the build ran; run the same command again to build with it as it is"
        )
    return function


def _load(name: str) -> tuple[Callable[..., Any], bytes]:
    """Return the function, and the bytes of the file that defines it."""
    found = load_named("--apply", name, "function")
    if not callable(found):
        raise ConfigurationError(
            f"--apply {name}: that is {_of(found)}; name a function that takes a sample and returns a sample, "
            "a list of samples, or None"
        )
    return found, _source(found, sys.modules[name.partition(":")[0]], name)


def _source(function: Any, module: ModuleType, name: str) -> bytes:
    try:
        own = inspect.getmodule(inspect.unwrap(function)) or module
        file = inspect.getsourcefile(own)
    except (TypeError, ValueError):
        file = inspect.getsourcefile(module) if getattr(module, "__file__", None) else None
    if file is None:
        raise ConfigurationError(
            f"--apply {name}: it has no Python source, so the version could not say what was applied; wrap it in "
            "a function of a .py file"
        )
    return Path(file).read_bytes()


TOKENS = "tokens"
NO_EOS = "none"
"""Value of ``--eos`` that adds no end-of-document token."""

_MAX_FILE_BYTES = 512 * 2**20
_MAX_CONFIG_BYTES = 16 * 2**20
_EOS_TOKENS = (
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
)


def find_text_field(schema: Schema, named: str | None = None) -> str:
    """Return the field to tokenise: the named one, otherwise ``text``, otherwise the only field of type str.

    Raises:
        ConfigurationError: There is no such field, or a field ``tokens`` exists.
    """
    texts = [name for name, kind in schema.items() if kind.kind == "str"]
    if named is not None and named not in texts:
        raise ConfigurationError(
            f"--text-field {named}: not a text field; those are {', '.join(texts) or 'none'} "
            f"(all fields: {', '.join(schema)})"
        )
    chosen = named or ("text" if "text" in texts else texts[0] if len(texts) == 1 else None)
    if chosen is None:
        raise ConfigurationError(
            "--tokenizer: "
            + (f"several text fields ({', '.join(texts)})" if texts else f"no text among {', '.join(schema)}")
            + "; name one with --text-field, or make one with --apply"
        )
    if TOKENS in schema:
        raise ConfigurationError(
            f"--tokenizer: the samples have a field {TOKENS!r} already; drop it with --apply, or do not tokenise"
        )
    return chosen


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer file."""

    path: str  # path on this machine
    digest: str  # its SHA-256 (hex)
    dtype: str  # dtype of the tokens: uint16 if the vocabulary fits, otherwise int32
    eos: str | None = None  # token that ends each document, None if there is none
    eos_id: int | None = None  # its id

    @classmethod
    def open(cls, path: str | os.PathLike[str], eos: str | None = None) -> TextTokenizer:
        """Read a ``tokenizer.json``.

        ``eos`` is the end-of-document token: None for the tokenizer's own token, `NO_EOS` for none.

        Raises:
            NotFoundError: The file cannot be read.
            ConfigurationError: It is not a tokenizer, or ``eos`` is not one of its tokens.
        """
        path = os.path.abspath(path)
        digest = hashlib.sha256(_read(path)).hexdigest()
        tokenizer = _tokenizer(path, digest)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        dtype = "uint16" if largest < 2**16 else "int32"
        token = None if eos == NO_EOS else eos or _own_eos(path, tokenizer)
        number = None if token is None else tokenizer.token_to_id(token)
        if token is not None and number is None:
            raise ConfigurationError(
                f"--eos {token!r}: not a token of {path}; name one of its vocabulary, or pass --eos {NO_EOS}"
            )
        return cls(path, digest, dtype, token, number)

    def describe(self, field: str) -> dict[str, object]:
        """Return the tokenizer's entry in the recipe."""
        eos = {} if self.eos is None else {"eos": self.eos}
        return {"sha256": self.digest, "field": field, **eos}

    @property
    def note(self) -> str:
        """Text for the build's report on how documents end."""
        if self.eos is None:
            return (
                "no token marks where a document ends: the tokenizer names none, or --eos none was given; "
                "--eos TOKEN adds one"
            )
        return f"documents end with the token {self.eos!r} (id {self.eos_id}); --eos TOKEN names another one"

    def encode(self, text: object, where: object) -> NDArray[np.integer]:
        """Return the tokens of a text, in the dtype of the tokenizer.

        Raises:
            SampleError: The value is not a text, or the tokenizer refuses it.
        """
        if not isinstance(text, str):
            raise SampleError(f"{where}: {type(text).__name__} is no text to tokenise; give a str")
        try:
            ids = _tokenizer(self.path, self.digest).encode(text).ids
        except Exception as error:  # noqa: BLE001 - the library raises plain exceptions, as for unknown words
            raise SampleError(f"{where}: the tokenizer refuses this text: {error}; fix it") from None
        if self.eos_id is not None and ids[-1:] != [self.eos_id]:  # the post-processor may have added it
            ids.append(self.eos_id)
        return np.array(ids, dtype=self.dtype)


def _read(path: str) -> bytes:
    try:
        size = os.stat(path).st_size
        if size > _MAX_FILE_BYTES:
            raise ConfigurationError(
                f"--tokenizer {path}: {size} bytes are no tokenizer; name a tokenizer.json"
            )
        return Path(path).read_bytes()
    except OSError as error:
        raise NotFoundError(f"--tokenizer {path}: {error.strerror}; name a tokenizer.json") from error


def _own_eos(path: str, tokenizer: Tokenizer) -> str | None:
    """Return the end-of-document token of ``tokenizer_config.json`` or of the special tokens, or None."""
    config = Path(path).with_name("tokenizer_config.json")
    if config.is_file():
        try:
            if config.stat().st_size > _MAX_CONFIG_BYTES:
                raise ValueError(f"more than {_MAX_CONFIG_BYTES} bytes")
            told = json.loads(config.read_bytes())["eos_token"]
            token = told["content"] if isinstance(told, dict) else told
        except (KeyError, TypeError):
            token = None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{config}: cannot be read ({error}); fix it, or name the token with --eos"
            ) from error
        if isinstance(token, str):
            return token
    special = {one.content for one in tokenizer.get_added_tokens_decoder().values() if one.special}
    found = [token for token in _EOS_TOKENS if token in special]
    if len(found) > 1:
        raise ConfigurationError(
            f"--tokenizer {path}: several of its tokens may end a document ({', '.join(found)}); name one with --eos"
        )
    return found[0] if found else None


@functools.lru_cache(maxsize=4)
def _tokenizer(path: str, digest: str) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependency(
            f"--tokenizer needs the tokenizers library; run: {install_command('tokenizers')}"
        ) from error
    data = _read(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise RunError(
            f"{path} changed while the build ran; run the same command again to build with it as it is"
        )
    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # noqa: BLE001 (the library raises a plain Exception)
        raise ConfigurationError(
            f"--tokenizer {path}: not a file of the tokenizers library ({error}); name a tokenizer.json"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
