# SPDX-License-Identifier: Apache-2.0
"""The report of a run, from its logs and records: an HTML page, a picture, data, or a summary to paste into an issue."""

from .html import render_html as render_html
from .run import Run as Run
from .run import load_run as load_run
from .write import FORMATS as FORMATS
from .write import write_report as write_report
