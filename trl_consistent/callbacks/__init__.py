# SPDX-License-Identifier: Apache-2.0
"""Callbacks that work with any trainer that logs our metrics."""
