# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of proxies and agents, and its bounds."""
