# SPDX-License-Identifier: Apache-2.0
"""Words with which Python starts our programs on free ports. They print which they chose."""

from __future__ import annotations

PROXY = ("-m", "kvferry.proxy", "--port", "0", "--discovery-port", "0")
AGENT = ("-m", "kvferry.agent", "--port", "0", "--control-port", "0")
