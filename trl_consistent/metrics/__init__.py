# SPDX-License-Identifier: Apache-2.0
"""What is measured: the catalogue, the statistics of a batch, and the alerts."""
