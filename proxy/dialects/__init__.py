# SPDX-License-Identifier: Apache-2.0
"""One module per engine protocol: pure functions from (body, nodes, responses) to requests and events.

The native dialect has first tokens, drops and resumed streams, which no other has: `NativeAttempt` calls its
functions (`native`). All the others are driven through one interface (`base.Dialect`).
"""
