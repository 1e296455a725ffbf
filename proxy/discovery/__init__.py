# SPDX-License-Identifier: Apache-2.0
"""How agents are found and kept in view."""
