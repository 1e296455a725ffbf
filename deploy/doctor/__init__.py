# SPDX-License-Identifier: Apache-2.0
"""`kvferry doctor`: what this machine has for serving, and which peers it can reach."""
