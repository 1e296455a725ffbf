# SPDX-License-Identifier: Apache-2.0
"""Child processes of an agent, and the private directory they meet in."""
