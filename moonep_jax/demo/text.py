"""The demo's data: the English help texts that ship with Python, as symbols and batches. NumPy only."""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt

SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))


def corpus() -> npt.NDArray[np.int32]:
    """All help texts, sorted by name, as one index into SYMBOLS per character; other characters are left out."""
    text = "\n".join(topics[name] for name in sorted(topics))
    index = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    return np.array([index[c] for c in text if c in index], np.int32)


def batch(text: npt.NDArray[np.int32], sequences: int, length: int, seed: int, step: int) -> npt.NDArray[np.int32]:
    """[sequences, length + 1] pieces of the text, starting at random places; equal for equal seed and step."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - length, sequences)
    return text[starts[:, None] + np.arange(length + 1)]
