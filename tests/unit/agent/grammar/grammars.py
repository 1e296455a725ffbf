# SPDX-License-Identifier: Apache-2.0
"""Grammars in llguidance's JSON form: cheap ones, and some whose masks are costly."""

from __future__ import annotations

import json


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def regex(pattern: str) -> str:
    return lark(f"start: /{pattern}/")


def costly(count: int, first: str = "") -> str:
    """Many terminals that the same letters may belong to: each mask works on all of them."""
    terms = "\n".join(
        f"T{number}: /[a-z]*{chr(97 + number % 26)}[a-z]{{{number % 60 + 20}}}{number}/"
        for number in range(count)
    )
    any_term = " | ".join(f"T{number}" for number in range(count))
    return lark(f"start: {first} ({any_term})+\n{terms}")


DIGITS = [ord(digit) for digit in "0123456789" * 4]
COSTLY = costly(900)
COSTLY_AFTER_DIGITS = costly(900, "/[0-9]{40}/")
"""Its first masks are cheap; those after `DIGITS` are not."""
