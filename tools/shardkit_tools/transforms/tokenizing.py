"""Text → tokens, by a file of the `tokenizers` library.

Truncation and padding that the file asks for are switched off: a dataset holds every token once. Special tokens are
added as the file's post-processor says.
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError, MissingDependency, NotFoundError, RunError, SampleError
from shardkit.formats import Schema

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS = "tokens"

_MAX_FILE_BYTES = 512 * 2**20


def find_text_field(schema: Schema, named: str | None = None) -> str:
    """The field to tokenise: the one named, else ``text``, else the only one of type str.

    Raises:
        ConfigurationError: there is none, or more than one; or ``tokens`` is taken.
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
    """A tokenizer file.

    Attributes:
        path: of the file on this machine.
        digest: its SHA-256 (hex).
        dtype: of the tokens: uint16 where the vocabulary fits, else int32.
    """

    path: str
    digest: str
    dtype: str

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TextTokenizer:
        """Read a ``tokenizer.json``.

        Raises:
            NotFoundError, ConfigurationError: there is no such file, or it is not one of `tokenizers`.
            MissingDependency: `tokenizers` is not installed.
        """
        path = os.path.abspath(path)
        digest = hashlib.sha256(_read(path)).hexdigest()
        tokenizer = _load(path, digest)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        return cls(path, digest, "uint16" if largest < 2**16 else "int32")

    def describe(self, field: str) -> dict[str, object]:
        """What the recipe says of it."""
        return {"sha256": self.digest, "field": field}

    def encode(self, text: object, where: object) -> NDArray[np.integer]:
        """The tokens of a text, in the dtype of the tokenizer.

        Raises:
            SampleError: not a text, or the tokenizer refuses it; names ``where``.
            RunError: the file is not the one of the recipe any more.
        """
        if not isinstance(text, str):
            raise SampleError(f"{where}: {type(text).__name__} is no text to tokenise; give a str")
        try:
            ids = _load(self.path, self.digest).encode(text).ids
        except (ValueError, TypeError, UnicodeError) as error:
            raise SampleError(f"{where}: the tokenizer refuses this text: {error}; mend it") from None
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


@functools.lru_cache(maxsize=4)
def _load(path: str, digest: str) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependency(
            "--tokenizer needs the tokenizers library; run: pip install 'shardkit[tokenizers]'"
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
