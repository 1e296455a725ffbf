# SPDX-License-Identifier: Apache-2.0
"""A proxy that takes agents for lost or stalled later, in place of `kvferry.proxy`.

An emulated machine may stand still for longer than three pings take. A proxy in a hurry would then cancel
every request and send it again, which keeps the machine from ever catching up.
"""

from __future__ import annotations

import sys

from tests.helpers.waiting import patient


def main() -> int:
    """Run the proxy. Its limits are changed before the modules that copy them are imported."""
    from kvferry.proxy.wire import registration as messages

    messages.NODE_EXPIRY_S = patient(messages.NODE_EXPIRY_S)
    from kvferry.proxy.fleet import registry

    registry.STALL_S = patient(registry.STALL_S)
    from kvferry.proxy.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
