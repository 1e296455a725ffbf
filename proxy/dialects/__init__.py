# SPDX-License-Identifier: Apache-2.0
"""One module per engine protocol: pure functions from (body, nodes, answers) to requests and answers."""
