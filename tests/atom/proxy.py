# SPDX-License-Identifier: Apache-2.0
"""ATOM's own proxy (0c982ea92), on loopback: `python -m tests.atom.proxy ROOT HTTP_PORT DISCOVERY_PORT`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from tests.atom import stubs


def main(root: Path, http_port: int, discovery_port: int) -> None:
    """Serve until killed."""
    stubs.install(root)
    proxy = importlib.import_module("atom.kv_transfer.disaggregation.proxy")
    proxy.start_service_discovery("127.0.0.1", discovery_port)
    proxy.app.run(host="127.0.0.1", port=http_port)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
