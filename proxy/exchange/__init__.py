# SPDX-License-Identifier: Apache-2.0
"""One request through a pair of agents, with its retries."""
