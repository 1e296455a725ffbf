# SPDX-License-Identifier: Apache-2.0
"""Logs and traces."""
