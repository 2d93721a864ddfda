# SPDX-License-Identifier: Apache-2.0
"""How a policy gradient is corrected for the mismatch: rules, presets, weights, and what the loss does with them."""
