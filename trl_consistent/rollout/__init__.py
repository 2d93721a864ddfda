# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: how completions and their sampling log-probs come about."""
