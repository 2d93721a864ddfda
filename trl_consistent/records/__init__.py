# SPDX-License-Identifier: Apache-2.0
"""Records of rollout batches: what the trainer writes and everything else reads."""
