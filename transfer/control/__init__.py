# SPDX-License-Identifier: Apache-2.0
"""The control channel between two engine processes: messages, sockets, keys."""
