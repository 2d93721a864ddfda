# SPDX-License-Identifier: Apache-2.0
"""Records of rollout batches, which the trainer writes and which diagnosis, comparison and report read."""
