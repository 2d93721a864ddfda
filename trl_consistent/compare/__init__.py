# SPDX-License-Identifier: Apache-2.0
"""What other corrections would have made of recorded batches, and two runs side by side."""
