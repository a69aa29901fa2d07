"""A huge document is cut into parts: rows of the dataset that are shuffled like any others.

Otherwise one lane would get all of it, and hold it in memory several times. All parts but the last
are marked as going on, so that packing does not take the end of a part for the end of a document.
"""

import numpy as np

from gptddp.data.tokenizer import Tokenizer

# 192 parts, four for each of 48 lanes, are 48 MiB: from there on lanes are alike, whatever the
# documents. At every cut the model loses the context of one training row, of some sixty or more.
PART_BYTES = 256 << 10
PART_IDS = 64 << 10  # of about as much text


def cut(document: bytes, made_by: Tokenizer | None = None) -> list[bytes]:
    """The document in parts, in the order of the text; only itself where it is not too long.

    Text (UTF-8) is cut behind a line end, else in front of a space, else between two characters;
    the bytes of ids, where `made_by` is their tokenizer, between two ids.
    """
    if made_by is not None:
        size = PART_IDS * np.dtype(made_by.dtype).itemsize
        return [document[at : at + size] for at in range(0, len(document), size)]
    parts, at = [], 0
    while len(document) - at > PART_BYTES:
        end = _end(document, at)
        parts.append(document[at:end])
        at = end
    return [*parts, document[at:]]


def _end(text: bytes, begin: int) -> int:
    """Where a part that begins here ends: no part but the last is shorter than half the limit."""
    limit, half = begin + PART_BYTES, begin + PART_BYTES // 2
    if line_end := text.rfind(b"\n", half, limit) + 1:
        return line_end
    if (space := text.rfind(b" ", half, limit)) >= 0:
        return space  # most tokenizers have it in one token with the word behind it
    while text[limit] & 0xC0 == 0x80:  # within a character
        limit -= 1
    return limit
