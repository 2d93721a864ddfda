# SPDX-License-Identifier: Apache-2.0
"""Compares corrections on recorded batches, or two runs with each other, without training."""
