# SPDX-License-Identifier: Apache-2.0
"""One module per engine protocol: pure functions from (body, nodes, answers) to requests and answers.

The native dialect hands the first token over, drops transfers and continues broken streams, so the exchange
speaks it by itself (`native`). All the others are driven through one interface (`base.Dialect`).
"""
