# SPDX-License-Identifier: Apache-2.0
"""The `cuda_ipc` backend."""
