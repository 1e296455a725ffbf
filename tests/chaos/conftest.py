# SPDX-License-Identifier: Apache-2.0
"""The clusters of the system tests, for the tests here that need an undisturbed one."""

from tests.system.conftest import log_dir, start_agent, start_cluster

__all__ = ["log_dir", "start_agent", "start_cluster"]
