# SPDX-License-Identifier: Apache-2.0
"""What the proxy, agents and transfer plane share; imports none of them, and no torch."""
