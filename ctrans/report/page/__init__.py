"""Results as pages: one HTML file without a network, built from a command's JSON and nothing else."""

from ctrans.report.page.contents import CONTENTS, page_of
from ctrans.report.page.html import render

__all__ = ["CONTENTS", "page_of", "render"]
