# SPDX-License-Identifier: Apache-2.0
"""Private and undocumented names of other packages that we rely on: a file for each package.

Each file has three things:

- `VERSIONS`: the versions of the distributions for which its names were checked, as a version specifier.
- `NAMES`: owner (`module` or `module:class`) → name → what we rely on. `tests/contract/test_upstream.py` looks each
  name up, and fails when the package touches a private name that no file lists.
- Functions that read, call or replace such names, so that the rest of the package does not. Methods that our
  subclasses override, and attributes that they read on `self`, need no function: they stand in the tables only.

When a contract test fails after an upgrade, the file of that package is the place to change.
"""
