"""The project's documents lead somewhere: every link to a file has one at its end."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?://|#)([^)\s#]+)")


def documents():
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    found = tracked.stdout.split() or [str(p.relative_to(ROOT)) for p in ROOT.glob("[!.]*/*.md")]
    return sorted({"README.md", *found})


@pytest.mark.parametrize("name", documents())
def test_its_links_lead_to_files(name):
    document = ROOT / name

    missing = [
        to for to in LINK.findall(document.read_text()) if not (document.parent / to).exists()
    ]

    assert not missing
