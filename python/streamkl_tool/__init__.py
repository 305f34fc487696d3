"""The `streamkl` command of the Python package: runs the tool inside it.

A separate module, because importing streamkl imports PyTorch, which the tool does not need.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Replaces this process by the tool."""
    package = find_spec("streamkl")
    assert package is not None and package.origin is not None  # one wheel installs the package and this module
    tool = Path(package.origin).with_name("bin") / "streamkl"
    if not tool.exists():
        sys.exit("streamkl: this build has no command-line tool, because Jansson or libpng was missing; see docs/design/packaging.md")
    os.execv(tool, [str(tool), *sys.argv[1:]])
