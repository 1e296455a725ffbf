# SPDX-License-Identifier: Apache-2.0
"""What proxies and agents must agree on; all of the proxy that `agent` may import."""
