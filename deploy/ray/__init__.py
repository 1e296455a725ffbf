# SPDX-License-Identifier: Apache-2.0
"""`kvferry up --on ray`: agents that Ray places on the nodes of its cluster, each under an actor."""
