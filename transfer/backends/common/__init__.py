# SPDX-License-Identifier: Apache-2.0
"""What several backends share; knows none of them."""
