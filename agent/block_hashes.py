# SPDX-License-Identifier: Apache-2.0
"""What names the KV of a block: all that it depends on but for the weights."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvferry.common.hashing import Purpose, chain, digest

BlockHash = bytes

_DIGEST_BYTES = 16
_ID_BYTES = 8


def hash_blocks(
    token_ids: Sequence[int], block_size: int, known: Sequence[BlockHash] = (), salt: str = ""
) -> list[BlockHash]:
    """Hash every full block of `token_ids`, each together with all tokens before it, and with the salt.

    Args:
        token_ids: Tokens from position 0 on.
        block_size: Tokens per block.
        known: Hashes of the first blocks, computed earlier with the same salt; they are taken over.
        salt: Keeps the prefixes of those who have another one apart; "" for none.

    Returns:
        One hash per full block, the known ones included.
    """
    parent = known[-1] if known else digest(Purpose.PREFIX_ROOT, salt, size=_DIGEST_BYTES)
    end = len(token_ids) // block_size * block_size
    new = array("q", token_ids[len(known) * block_size : end]).tobytes()
    step = block_size * _ID_BYTES
    blocks = (new[start : start + step] for start in range(0, len(new), step))
    return [*known, *chain(Purpose.PREFIX_BLOCK, parent, blocks)]


def hash_prompt(token_ids: Sequence[int]) -> str:
    """Hash a whole prompt; producer and consumer compare it to see that they mean the same one."""
    return digest(Purpose.PROMPT, array("q", token_ids).tobytes(), size=_DIGEST_BYTES).hex()
