# SPDX-License-Identifier: Apache-2.0
"""Runs the model, serves it over HTTP, and announces itself to proxies."""
