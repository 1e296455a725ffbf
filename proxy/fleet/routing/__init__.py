# SPDX-License-Identifier: Apache-2.0
"""Which pair of agents takes a request."""
