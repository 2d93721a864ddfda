# SPDX-License-Identifier: Apache-2.0
"""The trainer, and what it is made of."""
