# SPDX-License-Identifier: Apache-2.0
"""Every private or version-dependent name of other packages that we rely on, by package, with the versions it holds for."""
