# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.system.conftest import log_dir, start_agent, start_cluster

__all__ = ["log_dir", "start_agent", "start_cluster"]
