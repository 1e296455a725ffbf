# SPDX-License-Identifier: Apache-2.0
"""Several processes behind one port."""
