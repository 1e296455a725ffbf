# SPDX-License-Identifier: Apache-2.0
"""How an agent, or a server of another engine, is announced to proxies: pings, and what they report."""
