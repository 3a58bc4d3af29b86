"""Floor 3: data, text for networks that foretell the next character. Imports: errors.

The set "shakespeare" that ships with the package: the first 200,376 characters of the excerpt of William Shakespeare's
plays (who died in 1616, in the public domain) that "tiny Shakespeare" is, https://github.com/karpathy/char-rnn.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..errors import ConfigError, DataError, type_named, whole_number
from .datasets import Batch, Dataset, Index

PATH = Path(__file__).parent / "sets" / "shakespeare.txt.gz"
_TRAIN_SHARE = 0.9


class TextDataset(Dataset):
    """Pieces of a text one behind the other, each with what follows every character.

    A sample is ``(x, y)`` of shape ``(context,)``, int64: ``y[i]`` is the character after ``x[i]``. What is left after
    the last whole piece is not used.

    Args:
        text: what is cut.
        context: characters of a piece.
        characters: those that are numbered, each once; None: the text's own, sorted.

    Raises:
        ConfigError: ``context`` is no integer >= 1, or the text no str.
        DataError: the text has a character that is not among ``characters``.
    """

    def __init__(self, text: str, context: int = 64, characters: str | None = None) -> None:
        whole_number("TextDataset", "context", context, 1)
        if not isinstance(text, str):
            raise ConfigError("TextDataset", where="text", expected="a str", got=type_named(text))
        self.characters = "".join(sorted(set(text))) if characters is None else characters
        self.context, self.num_classes = context, len(self.characters)
        self._text = self.encode(text)

    def encode(self, text: str) -> np.ndarray:
        """The numbers of characters, int64, shape ``(len(text),)``.

        Raises:
            DataError: there is one that has no number.
        """
        numbers = {character: number for number, character in enumerate(self.characters)}
        unknown = sorted(set(text) - set(numbers))
        if unknown:
            raise DataError("encode", expected=f"characters among {self.characters!r}", got=repr(unknown[0]))
        return np.array([numbers[character] for character in text], np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """The characters of numbers."""
        return "".join(self.characters[int(token)] for token in tokens)

    def __len__(self) -> int:
        return max(0, len(self._text) - 1) // self.context

    def __getitem__(self, index: Index) -> Batch:
        places = np.arange(len(self))[index]
        starts = np.asarray(places)[..., None] * self.context + np.arange(self.context)
        return self._text[starts], self._text[starts + 1]


def read_shakespeare(split: str) -> TextDataset:
    """One part of the text that ships, in pieces of 64 characters; both parts have the same 62 characters.

    Args:
        split: "train", the first nine tenths, or "test".

    Raises:
        DataError: the file is damaged.
    """
    try:
        text = gzip.decompress(PATH.read_bytes()).decode("ascii")
        if not text:
            raise EOFError("nothing in it")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError("read text", where=PATH, expected="an undamaged file", got=error) from error
    cut = round(_TRAIN_SHARE * len(text))
    return TextDataset(text[:cut] if split == "train" else text[cut:], characters="".join(sorted(set(text))))
