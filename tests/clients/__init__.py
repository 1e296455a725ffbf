# SPDX-License-Identifier: Apache-2.0
"""Clients of others, unchanged, against real processes: `make test-clients`."""
