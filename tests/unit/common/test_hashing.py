# SPDX-License-Identifier: Apache-2.0
"""No two purposes, and no two inputs of one, are hashes of the same bytes; and nobody hashes elsewhere."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from itertools import product
from pathlib import Path

from kvferry.common.hashing import Purpose, chain, digest

ROOT = Path(__file__).parents[3]
HOMES = {ROOT / "common" / "hashing.py", ROOT / "common" / "curve.py"}
"""And the cluster key: the HTTP token of agents of every version is an HMAC of the words `kvferry http`."""
ROOMS = ("agent", "common", "deploy", "proxy", "transfer")
SOURCES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
LENGTH_OF_1 = (1).to_bytes(8, "little").decode()
AWKWARD = ("", "a", "b", "ab", "\0", "a\0b", "a:b", "|", LENGTH_OF_1, f"a{LENGTH_OF_1}b", "\N{GRINNING FACE}")
SURROGATES = ("\ud83d\ude00", "\ud83d", "\udcff", "\ufffd", "?")


def test_no_two_lists_of_fields_have_one_digest() -> None:
    texts = AWKWARD + SURROGATES
    fields: list[tuple[str, ...]] = [*product(texts, repeat=1), *product(texts, repeat=2), ()]
    fields += product(AWKWARD, repeat=3)
    assert len({digest(Purpose.PROMPT, *each, size=16) for each in fields}) == len(fields)


def test_a_digest_is_of_its_purpose_its_size_and_its_key() -> None:
    fields = ("a", b"b")
    made = [digest(purpose, *fields, size=16) for purpose in Purpose]
    made += [digest(Purpose.PROMPT, *fields, size=32)[:16]]
    made += [digest(Purpose.PROMPT, *fields, size=16, key=key) for key in (b"\0", b"k", b"a", b"k" * 64)]
    made += [hashlib.blake2b(b"ab", digest_size=16).digest()]
    assert len(set(made)) == len(made)


def test_a_chain_is_of_its_root_and_of_all_links_so_far() -> None:
    roots = [bytes(16), b"r" * 16, b"r" * 15 + b"s"]
    links = [b"a" * 8, b"b" * 8]
    whole = {
        (root, path[: index + 1]): each
        for root, path in product(roots, product(links, repeat=3))
        for index, each in enumerate(chain(Purpose.PREFIX_BLOCK, root, path))
    }
    assert len(set(whole.values())) == len(whole) == 3 * (2 + 4 + 8)
    first = whole[roots[0], tuple(links[:1])]
    assert [*chain(Purpose.PREFIX_BLOCK, first, links[1:])] == [whole[roots[0], tuple(links)]]


def test_a_digest_stays_what_it_is_from_version_to_version() -> None:
    """Agents of several versions compare them, and keys keep their prefixes over an upgrade of the proxy."""
    assert digest(Purpose.LAYOUT, "a", b"b", size=8).hex() == "a67517efdca33451"
    assert digest(Purpose.CACHE_SALT, "a", size=8, key=b"k" * 32).hex() == "113773732f41e9b3"
    assert next(chain(Purpose.PREFIX_BLOCK, bytes(8), [b"a"])).hex() == "aa0100079241270d"


def test_nobody_hashes_by_another_function() -> None:
    """`hmac` compares in constant time, and does nothing else. Checksums (`zlib`) stand for no content."""
    wrong = set()
    for path in set(SOURCES) - HOMES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names) if "hashlib" in {alias.name for alias in names}:
                    wrong.add(path)
                case ast.ImportFrom(module="hashlib" | "hmac"):
                    wrong.add(path)
                case ast.Attribute(value=ast.Name(id="hmac"), attr=attr) if attr != "compare_digest":
                    wrong.add(path)
    assert not wrong


def test_every_purpose_is_of_one_module() -> None:
    used: Counter[str] = Counter()
    for path in SOURCES:
        named = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "Purpose"
        }
        used.update(named)
    assert used == Counter(purpose.name for purpose in Purpose)
    assert all(0 < len(purpose.value) <= hashlib.blake2b.PERSON_SIZE for purpose in Purpose)
