# SPDX-License-Identifier: Apache-2.0
"""`kvferry keygen FILE`: make the key that the proxies and agents of one cluster share."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from kvferry.common.exceptions import message_of
from kvferry.common.options import CommandParser


def build_parser() -> CommandParser:
    parser = CommandParser("kvferry keygen", "Make a cluster key for --cluster-key of proxies and agents.")
    parser.add_argument("file", type=Path, metavar="FILE", help="Where to write it; must not exist yet.")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write a new key, readable by its owner alone. Returns the exit status; never overwrites a file."""
    path: Path = build_parser().read(argv).file
    _, secret = zmq.curve_keypair()
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secret + b"\n")
    except OSError as error:
        print(f"kvferry keygen: {message_of(error)}", file=sys.stderr)
        return 1
    print(f"wrote {path}; copy it to every host of the cluster, and keep it secret")
    return 0
