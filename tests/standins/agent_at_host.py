# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.standins.agent_at_host …`: an agent at a host of a `Network`."""

from __future__ import annotations

import os
import sys

HOST_VARIABLE = "KVFERRY_TEST_HOST"
"""The environment variable that names the host."""

if __name__ == "__main__":
    words = [f"--net=/run/netns/{os.environ[HOST_VARIABLE]}", sys.executable, "-m", "kvferry.agent"]
    os.execvp("nsenter", ["nsenter", *words, *sys.argv[1:]])
