# SPDX-License-Identifier: Apache-2.0
"""Which agents there are, which fit each other, and which one takes a request."""
